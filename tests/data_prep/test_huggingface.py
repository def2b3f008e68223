from collections.abc import Iterator

import pytest
import sentencepiece
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.normalizers import Precompiled, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as Steps

from data_prep.vocabulary import SPECIAL_PIECES, Vocabulary

SCRIPTS = [
    "東京タワー 国立 大学 你好 世界",
    "ภาษาไทย สวัสดี",
    "Привет мир и люди",
    "مرحبا بالعالم السلام",
    "שלום עולם",
    "한국어 문장",
    "é ß ñ ø œ þ <da> [do]",
    "😀 👩 👍 ☃ † ‡ ½ 1 2 3 4 5 6 7 8 9 0 + = _ / : ; ! ?",
]
PREPENDED = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""The format characters that form one grapheme with what follows."""
NASTY = [
    "",
    " ",
    "\u2581",
    "\u2581\u2581 da\u2581de \u2581[MASK]\u2581",
    *(f"da {piece} do {piece}{piece} x{piece}y" for piece in SPECIAL_PIECES),
    "[mask] [ MASK ] <s> </s> <unk><pad>",
    "\ufeffda do",
    "da\r\ndo\r\n\r\nba\n",
    "\tda\u00a0do\u3000ba\u2028be\u0085bi",
    "``da'' ''do`` '''ba''' ````be'''' `'` '`'",
    "'\u200b' `\u200d` \uff07\uff07 \u2019\u2019 ‘‘ ’’",
    "da\x01do\x07 \x1b[31m ba\x7f\x9f",
    "مرحبا بالعالم، hello שלום! \u202bda\u202c do\u200f",
    "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪🇫🇷 ❤️ ☃\ufe0f 1️⃣",
    "e\u0301e\u0301\u0301 a\u0308\u0323 \u0301 \u0301\u0301 x\u0489 n\u0303o",
    "Ǆ ǅ ﬁ ﬃ ½ ² Ⅷ ① ㎏ ﷺ İ ı ß ẞ ſ Å K Ω",
    "東京。タワー、国！ﾀﾜｰ ｶﾞ が か\u3099",
    "ภาษาไทย ก\u0e33 नमस्ते கொ",
    "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8",
    '(da) "do" -ba- .be. –bi– £1 €2 ... ((((()))))--- """',
    "\U0001f9ff\U000e0041\ue000\U000f0000\uffff\U0010ffff\ufffd",
    "d" * 3000 + " " + "da" * 3000 + "." * 500,
    "a\u0300" * 500,
]


@pytest.fixture(scope="module")
def vocabulary(train, pseudo_documents, data_config) -> Vocabulary:
    data = data_config(vocab={"size": 900, "character_coverage": 1.0})
    return Vocabulary(train([*pseudo_documents(300, 30), *SCRIPTS * 20], data))


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of the fields of a protocol buffer: varints, and strings of bytes of whatever is delimited."""

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    place = 0
    while place < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield key >> 3, message[place : place + size]
        place += size


def charsmap(model: bytes) -> bytes:
    """`ModelProto.normalizer_spec.precompiled_charsmap`."""
    normalizer = next(value for number, value in fields(model) if number == 3)
    return next(value for number, value in fields(normalizer) if number == 2)


@pytest.fixture(scope="module")
def huggingface(vocabulary) -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    pieces = [
        (piece, -1e6 if piece in SPECIAL_PIECES else processor.get_score(index))
        for index, piece in enumerate(vocabulary.pieces)
    ]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=1))
    quotes = [Replace("``", '"'), Replace("''", '"')]
    tokenizer.normalizer = Sequence([*quotes, Precompiled(charsmap(vocabulary.model))])
    tokenizer.pre_tokenizer = Steps([WhitespaceSplit(), Metaspace(prepend_scheme="always")])
    return tokenizer


@pytest.mark.parametrize("text", NASTY)
def test_hugging_faces_tokenizer_gives_our_ids_of_nasty_texts(vocabulary, huggingface, text):
    assert huggingface.encode(text).ids == vocabulary.encode(text)


def test_hugging_faces_tokenizer_gives_our_ids_of_ordinary_texts(vocabulary, huggingface, pseudo_documents):
    texts = [*pseudo_documents(200, 31), *SCRIPTS]
    for text, found in zip(texts, huggingface.encode_batch(texts), strict=True):
        assert found.ids == vocabulary.encode(text)


def test_hugging_faces_tokenizer_gives_our_ids_of_every_code_point(vocabulary, huggingface):
    """But for what follows one of the PREPENDED, which Hugging Face's `Precompiled` drops with it."""
    characters = [chr(point) for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
    characters = [character for character in characters if character not in PREPENDED]
    for begin in range(0, len(characters), 2000):
        group = characters[begin : begin + 2000]
        text = " ".join(f"{character} da{character}de" for character in group)
        if huggingface.encode(text).ids != vocabulary.encode(text):
            alone = [text for character in group for text in (character, f"da{character}de")]
            different = [text for text in alone if huggingface.encode(text).ids != vocabulary.encode(text)]
            raise AssertionError(f"{different or text!r}")
    for character in PREPENDED:
        for text in (character, f"da{character}", f"da de {character}"):
            assert huggingface.encode(text).ids == vocabulary.encode(text)
