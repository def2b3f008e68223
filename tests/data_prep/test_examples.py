import random
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import examples
from data_prep.corpus import Document
from data_prep.examples import ExampleMaker

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def spaced(rng: random.Random, characters: int) -> str:
    words = [
        "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) + rng.choice(["", "", "", ".", ","]) for _ in "x" * 1000
    ]
    return " ".join(rng.choices(words, k=characters // 5)).capitalize()[:characters]


LONG_TEXTS: dict[str, Callable[[random.Random, int], str]] = {
    "one line": spaced,
    "no white space": lambda rng, characters: "".join(rng.choices(SYLLABLES, k=characters // 2)),
    "one letter": lambda rng, characters: "a" * characters,
    "quotes and brackets": lambda rng, characters: "".join(rng.choices("ab'\"()“”‘’!?.", k=characters // 2)),
    "line breaks": lambda rng, characters: "ba\n" * (characters // 6) + "da\n\n" * (characters // 8),
    "han": lambda rng, characters: "".join(rng.choices("的一是不了人我在有他。", k=characters // 2)),
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
@pytest.mark.parametrize("settings", [{}, {"sentence_objective": "none", "max_length": 32}], ids=["pairs", "texts"])
def test_the_time_of_a_document_is_linear_in_its_length(vocabulary, data_config, kind, settings):
    def seconds(characters: int) -> float:
        document = Document(LONG_TEXTS[kind](random.Random(1), characters), "place")
        taken = []
        for _ in range(3):
            maker = ExampleMaker(vocabulary, data_config(**settings), seed=1)
            begin = time.process_time()
            maker.add(document)
            maker.take_rows()
            taken.append(time.process_time() - begin)
            assert maker.counts.used == 1
        return min(taken)

    seconds(10_000)
    assert seconds(200_000) < 8 * seconds(50_000) + 0.1


@pytest.mark.parametrize(("max_length", "words"), [(8, 4), (8, 20_000), (512, 4), (512, 20_000)])
def test_tokens_of_a_maker_stand_for_the_memory_its_rows_hold(vocabulary, data_config, monkeypatch, max_length, words):
    monkeypatch.setattr(examples, "ROWS_AT_ONCE", 50)
    rng = random.Random(2)
    maker = ExampleMaker(vocabulary, data_config(max_length=max_length), seed=1)
    maker.add(Document("Ba da. Be de.", "place"))
    maker.take_rows()
    texts = [" ".join(rng.choices(SYLLABLES, k=words)) for _ in range(max(1, 4000 // words))]
    tracemalloc.start()
    try:
        for text in texts:
            maker.add(Document(text, "place"))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / 2 < maker.tokens * np.dtype(vocabulary.id_dtype).itemsize < 2 * held
    rows = maker.take_rows()
    assert sum(batch.num_rows for batch in rows.values()) > 0
    assert maker.tokens == 0 and maker.take_rows() == {}


def test_rows_do_not_depend_on_how_many_are_laid_out_at_once(vocabulary, data_config, pseudo_documents, monkeypatch):
    found = []
    for at_once in (1, 7, 4096):
        monkeypatch.setattr(examples, "ROWS_AT_ONCE", at_once)
        maker = ExampleMaker(vocabulary, data_config(max_length=32), seed=1)
        for place, text in enumerate(pseudo_documents(40, 21)):
            maker.add(Document(text, str(place)))
        found.append(maker.take_rows())
    assert found[0] == found[1] == found[2]
