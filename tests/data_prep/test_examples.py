import gc
import random
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import examples
from data_prep.corpus import Document
from data_prep.examples import ExampleMaker
from data_prep.shards import shard_schema
from data_prep.vocabulary import CLS, SEP

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


def seconds_taken_by(text: str, new_maker: Callable[[], ExampleMaker]) -> float:
    """The least CPU time of three that a maker takes for a document with `text`."""
    taken = []
    for _ in range(3):
        maker = new_maker()
        begin = time.process_time()
        maker.add(Document(text, "place"))
        maker.take_rows()
        taken.append(time.process_time() - begin)
        assert maker.counts.used == 1
    return min(taken)


@pytest.mark.parametrize("kind", LONG_TEXTS)
@pytest.mark.parametrize("settings", [{}, {"sentence_objective": "none", "max_length": 32}], ids=["pairs", "texts"])
def test_the_time_of_a_document_is_linear_in_its_length(vocabulary, data_config, kind, settings):
    def seconds(characters: int) -> float:
        text = LONG_TEXTS[kind](random.Random(1), characters)
        return seconds_taken_by(text, lambda: ExampleMaker(vocabulary, data_config(**settings), seed=1))

    seconds(10_000)
    assert seconds(200_000) < 8 * seconds(50_000) + 0.1


def test_the_time_of_text_without_white_space_depends_little_on_its_sentences(vocabulary, data_config):
    def seconds(text: str) -> float:
        return seconds_taken_by(text, lambda: ExampleMaker(vocabulary, data_config(), seed=1))

    text = LONG_TEXTS["han"](random.Random(1), 100_000)
    one_sentence = text.replace("。", "的")
    seconds(text[:5000])
    assert seconds(text) < 5 * seconds(one_sentence) + 0.5


@pytest.mark.parametrize(("max_length", "words"), [(8, 4), (8, 20_000), (512, 4), (512, 20_000)])
def test_tokens_of_a_maker_stand_for_the_memory_its_rows_hold(vocabulary, data_config, monkeypatch, max_length, words):
    monkeypatch.setattr(examples, "ROWS_AT_ONCE", 50)
    rng = random.Random(2)
    maker = ExampleMaker(vocabulary, data_config(max_length=max_length), seed=1)
    texts = [" ".join(rng.choices(SYLLABLES, k=words)) for _ in range(max(1, 4000 // words))]
    for text in texts:
        maker.add(Document(text, "place"))
    maker.take_rows()
    tracemalloc.start()
    try:
        for text in texts:
            maker.add(Document(text, "place"))
        assert maker.counts.read == 2 * len(texts)
        gc.collect()
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


def rows_of(maker: ExampleMaker) -> list[dict]:
    rows = [row for batch in maker.take_rows().values() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["document"], row["chunk"]))


@pytest.mark.parametrize("max_length", [8, 32, 128])
@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_every_token_of_a_document_is_in_its_rows_in_order_or_counted(
    vocabulary, data_config, pseudo_documents, max_length, objective
):
    for text in pseudo_documents(40, 22):
        maker = ExampleMaker(vocabulary, data_config(max_length=max_length, sentence_objective=objective), seed=1)
        maker.add(Document(text, "place"))
        tokens = vocabulary.encode_document(text, "en")[1].tolist()
        rows, kept = rows_of(maker), []
        for chunk, row in enumerate(rows):
            ids, start = row["input_ids"], row["segment_b_start"]
            assert row["chunk"] == chunk and len(ids) <= max_length
            if objective == "none":
                assert start == len(ids) and row["sentence_label"] == -1
                specials, segments = [ids[0], ids[-1]], [ids[1:-1]]
            else:
                assert row["sentence_label"] in ({0, 1} if objective == "sop" else {0})
                specials, segments = [ids[0], ids[start - 1], ids[-1]], [ids[1 : start - 1], ids[start:-1]]
                assert all(segments)
            assert specials == [CLS, *[SEP] * (len(specials) - 1)]
            kept += [
                token for segment in (segments[::-1] if row["sentence_label"] == 1 else segments) for token in segment
            ]
        rest = iter(tokens)
        assert all(token in rest for token in kept)
        assert len(kept) + sum(row["truncated_tokens"] for row in rows) == len(tokens)
        assert [row["tokens"] for row in rows] == [len(tokens)] + [0] * (len(rows) - 1)


@pytest.mark.parametrize("objective", ["sop", "none"])
def test_of_equal_texts_with_other_sentences_one_is_kept_whole(vocabulary, data_config, pseudo_documents, objective):
    data = data_config(max_length=32, shards=5, sentence_objective=objective)
    rng = np.random.default_rng(9)
    variants = []
    for text in (" ".join(pseudo_documents(4, seed)) for seed in range(30, 40)):
        words = text.split()
        breaks = [words, *([word + ("\n\n" if rng.random() < 0.1 else "") for word in words] for _ in range(4))]
        variants.append([" ".join(parts) for parts in breaks])
        assert len({vocabulary.normalize(variant) for variant in variants[-1]}) == 1

    def finished(texts: list[str]) -> list[examples.FinishedShard]:
        batches: dict[int, list] = {}
        for text in texts:
            maker = ExampleMaker(vocabulary, data, seed=1)
            maker.add(Document(text, "place"))
            for shard, batch in maker.take_rows().items():
                batches.setdefault(shard, []).append(batch)
        return [examples.finish_shard(batches.get(shard, []), vocabulary, data, 1) for shard in range(6)]

    def rows(shards: list[examples.FinishedShard]) -> list[dict]:
        return sorted((row for shard in shards for row in shard.table.to_pylist()), key=str)

    alone = [[rows(finished([text])) for text in texts] for texts in variants]
    everything = [text for texts in variants for text in texts]
    together = finished([everything[place] for place in rng.permutation(len(everything))])
    assert sum(shard.duplicate_documents for shard in together) == len(everything) - len(variants)
    found = rows(together)
    for texts, candidates in zip(variants, alone, strict=True):
        assert len({str(candidate) for candidate in candidates}) > 1
        identity = candidates[0][0]["document"]
        assert [row for row in found if row["document"] == identity] in candidates
        tokens = len(vocabulary.encode_document(texts[0], "en").ids)
        counted = [shard.text_counts for shard in finished(texts)]
        assert sum(counts["tokens"] for counts in counted) == tokens
        in_rows = sum(len(row["input_ids"]) - (3 if objective == "sop" else 2) for row in rows(finished(texts)))
        assert sum(counts["truncated_tokens"] for counts in counted) == tokens - in_rows


def test_strangers_are_found_in_linear_time_beside_a_dominant_document(vocabulary, data_config, pseudo_documents):
    data = data_config(sentence_objective="nsp", max_length=32, shards=1, validation_fraction=1e-9)
    taken = []
    for size in (100, 400):
        maker = ExampleMaker(vocabulary, data, seed=1)
        for place, text in enumerate([" ".join(pseudo_documents(size, 7)), *pseudo_documents(3, 8)]):
            maker.add(Document(text, str(place)))
        batches = list(maker.take_rows().values())
        begin = time.process_time()
        table = examples.finish_shard(batches, vocabulary, data, 1).table
        taken.append((time.process_time() - begin, len(table)))
    (short, few), (long, many) = taken
    assert many > 3 * few and long < 10 * short


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_a_shard_without_rows_is_finished(vocabulary, data_config, objective, mode):
    data = data_config(sentence_objective=objective, masking={"mode": mode})
    finished = examples.finish_shard([], vocabulary, data, 1)
    assert (len(finished.table), finished.tokens, finished.duplicate_documents) == (0, 0, 0)
    assert finished.table.schema == shard_schema(vocabulary.size, static_masks=mode == "static")
    assert not any(finished.text_counts.values())
