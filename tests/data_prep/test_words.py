import numpy as np
import sentencepiece

from data_prep import words
from data_prep.vocabulary import Vocabulary
from data_prep.words import WordIds


def encode(texts: list[str]) -> list[list[int]]:
    """A word's letters, parted after every two."""
    return [[int(text[place : place + 2].encode().hex(), 16) for place in range(0, len(text), 2)] for text in texts]


def test_ids_of_words_are_those_of_each_alone_however_little_is_remembered(monkeypatch):
    rng = np.random.default_rng(1)
    texts = [["".join(rng.choice(list("abcd"), rng.integers(1, 8))) for _ in range(300)] for _ in range(20)]
    for limit in (0, 100, 10**6):
        monkeypatch.setattr(words, "MAX_CHARACTERS", limit)
        known = WordIds(encode, ["x"] * 65536, np.uint16)
        for text in texts:
            ids, counts, characters, _ = known.of(text)
            assert characters.tolist() == [len(word) for word in text]
            alone = encode(text)
            assert counts.tolist() == [len(found) for found in alone]
            assert ids.tolist() == [index for found in alone for index in found]


def test_words_whose_pieces_could_change_places_are_told():
    pieces = ["▁=", "==", "====", "ab", "abab", "ba"]
    ways = {"tie": [0, 1, 2], "same": [0, 1, 1], "other": [3, 5], "period": [3, 4]}
    known = WordIds(lambda texts: [ways[text] for text in texts], pieces, np.uint16)
    ambiguous = known.of(list(ways)).ambiguous
    assert ambiguous.tolist() == [True, False, False, True]


def test_documents_with_runs_of_marks_get_the_ids_that_the_model_alone_gives(train, data_config, pseudo_documents):
    rng = np.random.default_rng(3)

    def marked(text: str, lengths: list[int]) -> str:
        runs = [mark * length for mark in "=~*#" for length in lengths]
        return " ".join(part for word in text.split() for part in (word, *rng.choice(runs, rng.integers(0, 2))))

    documents = pseudo_documents(300, 8)
    runs = [mark * length for mark in "=~*#" for length in (2, 4, 16) for _ in range(2000)]
    vocabulary = Vocabulary(train([*documents, *runs], data_config(vocab={"size": 700})))
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    texts = [marked(text, [*range(1, 60)]) for text in documents]
    assert [found.ids.tolist() for found in vocabulary.encode_documents(texts, "en")] == processor.encode(texts)
