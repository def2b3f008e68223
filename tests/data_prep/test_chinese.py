import random

import numpy as np
import pytest

from configs.schema import DataConfig, MaskingConfig, load_config
from data_prep.corpus import Document
from data_prep.examples import ExampleMaker
from data_prep.masking import draw_masks
from data_prep.text import sentences_of
from data_prep.vocabulary import UNK, Vocabulary

CHARACTERS = (
    "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家十"
)
ENDS = ["。", "！", "？", "。”", "！」"]
MARKS = "。!?”」"


def sentence(rng: random.Random) -> str:
    words = rng.choices(
        [a + b for a, b in zip(CHARACTERS, CHARACTERS[7:], strict=False)] + list(CHARACTERS), k=rng.randint(2, 14)
    )
    if len(words) > 8:
        words.insert(4, "，")
    if rng.random() < 0.1:
        words.append(str(rng.randint(1, 2030)) + "年")
    return "".join(words) + rng.choices(ENDS, [60, 10, 10, 1, 1])[0]


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    """Documents of 2 to 150 sentences; the longest are single paragraphs of over two thousand characters."""
    rng = random.Random(1)
    return [[sentence(rng) for _ in range(rng.choice([2, 5, 20, 150]))] for _ in range(120)]


@pytest.fixture(scope="module")
def data() -> DataConfig:
    data = load_config("configs/chinese-base.yaml").data
    return data.model_copy(
        update={
            "max_length": 64,
            "masking": MaskingConfig(max_predictions=10),
            "vocab": data.vocab.model_copy(update={"size": 300}),
        }
    )


@pytest.fixture(scope="module")
def vocabulary(train, documents, data) -> Vocabulary:
    return Vocabulary(train([text for document in documents for text in document], data))


def is_han(character: str) -> bool:
    return "\u4e00" <= character <= "\u9fff"


def test_chinese_sentences_end_at_their_marks(documents):
    assert max(len("".join(document)) for document in documents) > 2000
    for document in documents:
        assert sentences_of("".join(document), "zh") == document
        lines = "\n".join(document)
        assert "".join(sentences_of(lines, "zh")) == "".join(document)


def test_chinese_text_is_encoded_as_it_stands_and_parted_at_its_marks(vocabulary, documents):
    for document in documents:
        normalized, ids, ends = vocabulary.encode_document("".join(document), "zh")
        assert UNK not in ids
        assert ids.tolist() == vocabulary.encode("".join(document))
        assert normalized == vocabulary.normalize("".join(document))
        assert len(ends) == len(document)
        assert all(set(vocabulary.pieces[index]) & set(MARKS) for index in ids[ends - 1])


def test_every_piece_with_a_han_character_starts_a_word(vocabulary):
    han = [index for index, piece in enumerate(vocabulary.pieces) if any(map(is_han, piece))]
    assert len(han) > 60 and any(len(vocabulary.pieces[index]) > 1 for index in han)
    assert (vocabulary.word_starts[han] == 1).all()
    marks = [vocabulary.pieces.index(mark) for mark in "。，" if mark in vocabulary.pieces]
    assert marks and (vocabulary.word_starts[marks] == 1).all()


def test_chinese_examples_are_cut_at_sentence_ends_and_masked_by_piece(vocabulary, documents, data):
    maker = ExampleMaker(vocabulary, data, seed=1)
    for place, document in enumerate(documents):
        maker.add(Document("".join(document), str(place)))
    assert maker.counts.used == len(documents)
    rows = [row for batch in maker.take_rows().values() for row in batch.to_pylist()]
    lengths = np.array([len(row["input_ids"]) for row in rows])
    starts = np.array([row["segment_b_start"] for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.uint16)
    for place, row in enumerate(rows):
        ids[place, : lengths[place]] = row["input_ids"]
        if lengths[place] < data.max_length:
            assert set(vocabulary.pieces[row["input_ids"][starts[place] - 2]]) & set(MARKS)
    masks = draw_masks(
        ids, lengths, starts, np.arange(len(rows), dtype=np.uint64), vocabulary.word_starts, data.masking
    )
    # Every piece is a word of one token, so that nothing keeps an example from its number.
    goals = np.rint(lengths * data.masking.probability).clip(1, data.masking.max_predictions)
    assert len(rows) > 500 and np.bincount(masks.rows).tolist() == goals.tolist()
    masked_pieces = {vocabulary.pieces[label] for label in masks.labels}
    assert set(CHARACTERS) & masked_pieces and any(len(piece.strip("\u2581")) > 1 for piece in masked_pieces)
