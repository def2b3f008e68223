import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import ConfigError, InputConfig
from data_prep.corpus import list_sources, read_documents, split_units
from data_prep.text import segments_of, sentences_of
from data_prep.vocabulary import SPECIAL_PIECES, USER_DEFINED_SYMBOLS, Vocabulary

TRAIN_ELSEWHERE = """
import sys
from pathlib import Path
from configs.schema import DataConfig
from data_prep.vocabulary import train_vocabulary
sentences = Path(sys.argv[1]).read_text().splitlines()
data = DataConfig(output="x", inputs=[{"kind": "text", "path": "x"}], vocab={"size": 1000})
sys.stdout.buffer.write(train_vocabulary(sentences, data, Path(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def prose() -> list[str]:
    """The docstrings of an installed package."""
    sources = list_sources((InputConfig(kind="docstrings", path="_pytest"),))
    return [document.text for unit in split_units(sources) for document in read_documents(unit)]


@pytest.fixture(scope="module")
def prose_vocabulary(train, prose, data_config) -> Vocabulary:
    sentences = [sentence for text in prose for sentence in sentences_of(text, "en")]
    return Vocabulary(
        train(sentences + ["東京タワー 国 ภาษาไทย ไทย é Привет мир"] * 50, data_config(vocab={"size": 2000}))
    )


def test_ids_are_alberts(vocabulary):
    assert vocabulary.size == 1000
    assert vocabulary.pieces[:5] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    assert vocabulary.pieces[5:13] == ["(", ")", '"', "-", ".", "–", "£", "€"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    assert all(processor.is_control(index) for index in (0, 2, 3, 4)) and processor.is_unknown(1)
    assert processor.bos_id() == processor.eos_id() == -1
    assert vocabulary.id_dtype == np.uint16


@pytest.mark.parametrize("written", [*SPECIAL_PIECES, "x[MASK]y", "[CLS] [SEP]", "<s> </s>", "[mask]", "\u2581[MASK]"])
def test_special_pieces_written_in_text_are_text(vocabulary, written):
    ids = vocabulary.encode(f"da {written} do")
    assert not {0, 2, 3, 4} & set(ids)
    assert set(vocabulary.encode_document(f"Da {written} do.", "en")[1].tolist()).isdisjoint({0, 2, 3, 4})


def test_user_defined_symbols_stand_alone(vocabulary):
    for symbol in USER_DEFINED_SYMBOLS:
        assert vocabulary.pieces.index(symbol) in vocabulary.encode(f"da{symbol}do")


def sentence_ends(vocabulary: Vocabulary, text: str) -> list[int]:
    """The end of each sentence in tokens, in texts whose sentences white space parts."""
    counts = [len(vocabulary.encode(sentence)) for sentence in sentences_of(text.replace("\0", ""), "en")]
    return [end for end, count in zip(accumulate(counts), counts, strict=True) if count]


def assert_encoded_as_it_stands(vocabulary: Vocabulary, text: str) -> np.ndarray:
    """Returns the sentence ends."""
    normalized, ids, ends = vocabulary.encode_document(text, "en")
    assert ids.dtype == np.uint16 and ends.dtype == np.int64
    assert ids.tolist() == vocabulary.encode(text)
    assert normalized == vocabulary.normalize(text)
    return ends


def assert_encoded_by_sentence(vocabulary: Vocabulary, text: str) -> None:
    ends = assert_encoded_as_it_stands(vocabulary, text)
    assert ends.tolist() == sentence_ends(vocabulary, text)


def test_documents_are_encoded_as_their_sentences(vocabulary, prose_vocabulary, prose, pseudo_documents):
    for text in pseudo_documents(100, 2):
        assert_encoded_by_sentence(vocabulary, text)
    for text in prose[:120]:
        if all(segment[-1].isspace() for segment in segments_of(text, "en")):
            assert_encoded_by_sentence(prose_vocabulary, text)


def test_documents_longer_than_an_encoded_group_are_encoded_as_their_sentences(vocabulary, pseudo_documents):
    text = " ".join(pseudo_documents(300, 3))
    assert len(text) > 150_000
    assert_encoded_by_sentence(vocabulary, text)


def test_long_documents_are_encoded_alike_in_parts(vocabulary, pseudo_documents, monkeypatch):
    texts = [" ".join(pseudo_documents(20, 5)), *pseudo_documents(3, 6), ""]
    whole = vocabulary.encode_documents(texts, "en")
    monkeypatch.setattr("data_prep.vocabulary.PART_CHARACTERS", 100)
    for found, expected in zip(vocabulary.encode_documents(texts, "en"), whole, strict=True):
        assert found.normalized == expected.normalized
        assert found.ids.tolist() == expected.ids.tolist() and found.ends.tolist() == expected.ends.tolist()


awkward = st.text(st.sampled_from("ab .!?\n'`\u2019\uff07\u200b\u00a0\u2581\u0301é東ﬁ(\"-\0☃\u0345ßİ"), max_size=60)


@given(awkward | st.text(st.characters(codec="utf-8"), max_size=60))
@example("''a'' ``b``")
@example("\uff07\uff07")
@example("'\u200b'")
@example(". \u200b. a")
@settings(max_examples=500, deadline=None)
def test_awkward_documents_are_encoded_as_they_stand(vocabulary, text):
    ends = assert_encoded_as_it_stands(vocabulary, text).tolist()
    assert ends == sorted(set(ends)) and (not ends or ends[0] > 0)
    assert ends[-1:] == ([len(vocabulary.encode(text))] if vocabulary.encode(text) else [])


@given(st.lists(awkward, min_size=2, max_size=6))
@settings(max_examples=100, deadline=None)
def test_documents_encoded_together_are_encoded_as_if_alone(vocabulary, texts):
    for together, text in zip(vocabulary.encode_documents(texts, "en"), texts, strict=True):
        alone = vocabulary.encode_document(text, "en")
        assert together.normalized == alone.normalized
        assert together.ids.tolist() == alone.ids.tolist() and together.ends.tolist() == alone.ends.tolist()


def test_sentences_that_no_space_parts_end_where_they_end(train, data_config):
    rng = np.random.default_rng(4)
    characters = [chr(0x4E00 + number) for number in range(300)]

    def sentence() -> str:
        return "".join(rng.choice(characters, rng.integers(3, 20))) + str(rng.choice(["。", "！", "？"]))

    texts = ["".join(sentence() for _ in range(rng.integers(1, 30))) for _ in range(60)]
    training = [sentence for text in texts for sentence in sentences_of(text, "zh")]
    vocabulary = Vocabulary(train(training, data_config(vocab={"size": 400})))
    unknown = Vocabulary(train([text[:3] for text in training[:40]] + ["。！？"], data_config(vocab={"size": 112})))
    for text in texts:
        for known in (vocabulary, unknown):
            _, ids, ends = known.encode_document(text, "zh")
            assert ids.tolist() == known.encode(text) and ends[-1] == len(ids)
        normalized, ids, ends = vocabulary.encode_document(text, "zh")
        assert normalized == vocabulary.normalize(text)
        lengths = [len(vocabulary.pieces[index]) for index in ids]
        lengths[0] -= 1
        places = np.cumsum(lengths)[ends - 1]
        goals = np.cumsum([len(vocabulary.normalize(sentence)) for sentence in sentences_of(text, "zh")])
        assert len(places) <= len(goals)
        assert all(((goals <= place) & (place < goals + 16)).any() for place in places)
        exact = np.isin(goals, np.cumsum(lengths))
        assert set(goals[exact]) <= set(places)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_sentences_end_where_they_end_behind_unknown_characters(byte_fallback):
    model = sentencepiece_model(
        ["東京。", "国。"] * 20,
        vocab_size=280 if byte_fallback else 24,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
    )
    vocabulary = Vocabulary(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ("龍龍龍東京。国国。龍国龍龍。東京。", "龘龍。龍龍龍龍龍東。国。"):
        found = vocabulary.encode_document(text, "zh")
        assert found.ids.tolist() == processor.encode(text)
        assert (vocabulary.pieces.index("<unk>") in found.ids) is not byte_fallback
        marks = [place + 1 for place, character in enumerate(text) if character == "。"]
        offsets = processor.encode(text, out_type="offset_mapping")["offsets"]
        assert [offsets[end - 1][1] for end in found.ends] == marks


@pytest.mark.parametrize("between", ["\u200b\n\n", "\n\n\u200b\n\n", "\u200b ", " \u200b", "\n\n\u200b"])
def test_white_space_around_what_normalizes_to_nothing_parts_words(vocabulary, between):
    text = f"da。{between}do"
    assert vocabulary.encode_document(text, "en").normalized == vocabulary.normalize(text) == "da。 do"
    assert vocabulary.encode_document("da。\u200bdo", "en").normalized == "da。do"


def test_documents_are_encoded_alike_where_pieces_cross_white_space(pseudo_documents):
    documents = pseudo_documents(300, 4)
    model = sentencepiece_model(documents, split_by_whitespace=False)
    vocabulary = Vocabulary(model)
    assert any("\u2581" in piece[1:] for piece in vocabulary.pieces)
    for text in documents[:50]:
        _, ids, ends = vocabulary.encode_document(text, "en")
        assert ids.tolist() == [index for sentence in sentences_of(text, "en") for index in vocabulary.encode(sentence)]
        assert ends.tolist() == sentence_ends(vocabulary, text)


def sentencepiece_model(sentences: list[str], **options) -> bytes:
    import io

    model = io.BytesIO()
    settings = {"vocab_size": 600, "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "minloglevel": 2}
    settings["control_symbols"] = list(SPECIAL_PIECES[2:])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **{**settings, **options}
    )
    return model.getvalue()


def test_the_model_alone_gives_the_same_ids_from_raw_text(prose_vocabulary, prose):
    processor = sentencepiece.SentencePieceProcessor(model_proto=prose_vocabulary.model)
    for text in prose[:120]:
        assert processor.encode(text) == prose_vocabulary.encode_document(text, "en")[1].tolist()


def test_the_model_alone_gives_the_ids_of_words_of_many_thousand_characters(vocabulary, pseudo_documents):
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    word = re.sub(r"\W", "", "".join(pseudo_documents(60, 8)))[:19_000]
    assert len(word) == 19_000
    text = f"Da {word} do. Ba {word[:5000]}, {word[:2000]} be!"
    assert processor.encode(text) == vocabulary.encode_document(text, "en")[1].tolist()


def plainly_normalized(text: str) -> str:
    pieces = re.split("(``|'')", text)
    pieces[1::2] = ['"'] * (len(pieces) // 2)
    for place in range(0, len(pieces), 2):
        pieces[place] = "".join(map(plainly_normalized_character, pieces[place]))
    return " ".join("".join(pieces).split(" ")).strip()


def plainly_normalized_character(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace() or character == "\u2581":
        return " "
    if category in ("Cc", "Cf") and character not in "\u200c\u200d":
        return ""
    for _ in range(2):
        parts = unicodedata.normalize("NFKD", character)
        character = "".join(part for part in parts if unicodedata.category(part)[0] != "M").lower()
    parts = unicodedata.normalize("NFKD", character)
    return unicodedata.normalize("NFC", "".join(part for part in parts if unicodedata.category(part)[0] != "M"))


@given(awkward.filter(lambda text: "\0" not in text))
@settings(max_examples=300, deadline=None)
def test_normalization_in_the_model_is_the_plain_one(vocabulary, text):
    assert vocabulary.normalize(text).split(" ") == (" ".join(plainly_normalized(text).split()) or "").split(" ")


def test_every_character_is_normalized_in_the_model_as_plainly(vocabulary):
    assigned = [chr(point) for point in range(1, 0x30000) if unicodedata.category(chr(point)) not in ("Cs", "Co", "Cn")]
    for begin in range(0, len(assigned), 1000):
        group = assigned[begin : begin + 1000]
        expected = ["x" + plainly_normalized_character(character) + "y" for character in group]
        found = vocabulary.normalize("z".join(f"x{character}y" for character in group)).split("z")
        assert len(found) == len(group) or "z" in "".join(expected)
        text = "z".join(expected)
        assert "z".join(found).split() == text.split()


@pytest.mark.parametrize(("lower_case", "expected"), [(True, "etude ecole"), (False, "Étude École")])
def test_switches_of_normalization_reach_the_model(train, data_config, pseudo_documents, lower_case, expected):
    data = data_config(lower_case=lower_case, strip_accents=lower_case, vocab={"size": 100})
    vocabulary = Vocabulary(train([*pseudo_documents(30, 7), "Étude École é"] * 30, data))
    assert vocabulary.normalize("Étude  École") == expected


def test_too_large_a_size_names_the_largest_that_works(train, data_config, pseudo_documents):
    sentences = pseudo_documents(20, 5)
    with pytest.raises(
        ConfigError, match=r"data\.vocab\.size 30000 is too large .* largest that works is (\d+)"
    ) as error:
        train(sentences, data_config(vocab={"size": 30_000}))
    largest = int(re.search(r"(\d+)$", str(error.value))[1])
    assert Vocabulary(train(sentences, data_config(vocab={"size": largest}))).size == largest
    with pytest.raises(ConfigError, match=f"largest that works is {largest}"):
        train(sentences, data_config(vocab={"size": largest + 1}))


def test_too_small_a_size_is_refused(train, data_config):
    with pytest.raises(ConfigError, match=r"data\.vocab\.size 32 is too small"):
        train(["".join(map(chr, range(0x4E00, 0x4F00)))] * 20, data_config(vocab={"size": 32, "character_coverage": 1}))


def test_trainings_in_different_folders_give_the_same_bytes(vocabulary, pseudo_documents, tmp_path):
    corpus = tmp_path / "sentences.txt"
    corpus.write_text("\n".join(pseudo_documents(600, 1)))
    (tmp_path / "another folder").mkdir()
    command = [sys.executable, "-c", TRAIN_ELSEWHERE, corpus, tmp_path / "another folder"]
    again = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, stdout=subprocess.PIPE, check=True).stdout
    assert again == vocabulary.model
    assert list((tmp_path / "another folder").iterdir()) == []


def test_long_lines_and_words_do_not_vanish_from_training(train, data_config, pseudo_documents):
    line = " ".join(pseudo_documents(150, 6)) + " " + "q" * 5000 + " \ud800 end\0"
    assert len(line) > 50_000
    vocabulary = Vocabulary(train([line], data_config(vocab={"size": 400})))
    assert vocabulary.size == 400


def test_long_words_of_scripts_without_spaces_do_not_vanish_from_training(train, data_config, pseudo_documents):
    sentences = [*pseudo_documents(150, 6), "東西南北中" * 2000]
    pieces = Vocabulary(train(sentences, data_config(vocab={"size": 400}))).pieces
    assert any(set(piece) & set("東西南北中") for piece in pieces)


def word_start_rule(piece: str) -> Iterator[bool]:
    """Whether a piece of Latin, Greek, Cyrillic, Han, Kana or Thai starts a word, from the Unicode blocks."""
    yield piece.startswith("\u2581")
    yield len(piece) == 1 and unicodedata.category(piece)[0] in "PSM"
    for character in piece:
        yield character.isdigit()
        yield "\u0e00" < character <= "\u0e7f" or "\u3041" <= character <= "\u30ff" or "\u4e00" <= character <= "\u9fff"


def test_words_start_as_the_scripts_say(prose_vocabulary):
    starts = dict(zip(prose_vocabulary.pieces, prose_vocabulary.word_starts.tolist(), strict=True))
    assert starts.pop("\u2581") == 2
    for piece in SPECIAL_PIECES:
        starts.pop(piece)
    assert starts == {piece: int(any(word_start_rule(piece))) for piece in starts}
    assert {"s", "ing", "\u2581the", "5", "東", "タ", "ท", "(", ",", "и"} <= set(starts)
    assert [starts[piece] for piece in ("s", "ing", "и")] == [0, 0, 0]
    assert [starts[piece] for piece in ("\u2581the", "5", "東", "タ", "ท", "(", ",")] == [1] * 7


def test_listing_is_sentencepieces_own(vocabulary):
    lines = vocabulary.listing().splitlines()
    assert len(lines) == vocabulary.size
    assert lines[4] == "[MASK]\t0"
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    for index, line in enumerate(lines):
        piece, score = line.split("\t")
        assert piece == processor.id_to_piece(index) and float(score) == pytest.approx(
            processor.get_score(index), rel=1e-4
        )


def test_foreign_models_are_refused_by_name(tmp_path, pseudo_documents):
    foreign = tmp_path / "foreign.model"
    foreign.write_bytes(sentencepiece_model(pseudo_documents(300, 4), control_symbols=[]))
    with pytest.raises(ConfigError, match=r"foreign\.model has .* at id 2 where ALBERT has \[CLS\]"):
        Vocabulary.load(foreign)
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"broken\.model is not a SentencePiece model"):
        Vocabulary.load(tmp_path / "broken.model")
    with pytest.raises(ConfigError, match=r"absent\.model cannot be read"):
        Vocabulary.load(tmp_path / "absent.model")
