import random
import time
import unicodedata
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import FiltersConfig
from data_prep.text import (
    MAX_WORD_CHARACTERS,
    SPLIT_CHARACTERS,
    filter_reason,
    normalization_rules,
    sentences_of,
)

QUOTE_PAIRS = {"``": '"', "''": '"'}


def plain_normalization(character: str, lower_case: bool, strip_accents: bool) -> str:
    def decomposed(text: str) -> str:
        parts = unicodedata.normalize("NFKD", text)
        return "".join(part for part in parts if not (strip_accents and unicodedata.category(part).startswith("M")))

    if character.isspace() or character == "\u2581":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf") and character not in "\u200c\u200d":
        return ""
    text = decomposed(character)
    if lower_case:
        text = decomposed(text.lower())
    return unicodedata.normalize("NFC", text)


@cache
def table(lower_case: bool, strip_accents: bool) -> dict[str, str]:
    rules = {}
    for line in normalization_rules(lower_case, strip_accents).splitlines():
        source, target = line.split("\t")
        key = "".join(chr(int(point, 16)) for point in source.split())
        assert key not in rules
        rules[key] = "".join(chr(int(point, 16)) for point in target.split())
    return rules


@pytest.mark.parametrize(("lower_case", "strip_accents"), [(True, True), (False, True), (True, False), (False, False)])
def test_rules_say_what_plain_normalization_does(lower_case, strip_accents):
    rules = dict(table(lower_case, strip_accents))
    assert {key: rules.pop(key) for key in QUOTE_PAIRS} == QUOTE_PAIRS
    for code_point in range(1, 0x110000):
        character = chr(code_point)
        if unicodedata.category(character) in ("Cs", "Co", "Cn"):
            assert character not in rules
        else:
            assert rules.get(character, character) == plain_normalization(character, lower_case, strip_accents)
    assert "\0" not in rules


def test_rules_keep_or_drop_what_their_switches_say():
    assert table(True, True)["É"] == "e"
    assert table(False, True)["É"] == "E"
    assert table(True, False)["É"] == "é"
    assert "É" not in table(False, False)
    assert "\u094d" not in table(True, False) and table(True, True)["\u094d"] == ""
    assert table(True, True)["\u3000"] == " " and table(True, True)["ﬁ"] == "fi"


text_like = st.text(st.sampled_from("ab .!?\n\t\r'\"(é字。\u00a0\u200b1"), max_size=300)


@given(text_like | st.text(st.characters(codec="utf-8"), max_size=200))
@example("a" * 5000 + " b. C")
@example("a" * 50_000 + "。" + "b" * 1999 + " c" + "字" * 30_000)
@example("One. Two.\n\nThree\n \nFour")
@settings(max_examples=300, deadline=None)
def test_sentences_lose_nothing_but_white_space(text):
    found = sentences_of(text, "en")
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in found)


def test_sentences_end_at_sentence_marks_and_blank_lines():
    text = "Dr. Smith came. He saw\nit all!\n\nno full stop here\n \nAnd then?"
    assert [" ".join(sentence.split()) for sentence in sentences_of(text, "en")] == [
        "Dr. Smith came.",
        "He saw it all!",
        "no full stop here",
        "And then?",
    ]


@pytest.mark.parametrize("separator", [" ", "\n", "\t", "\u3000", "\r"])
def test_long_text_is_only_cut_between_words(separator):
    words = [f"word{number}" for number in range(5000)]
    assert " ".join(sentences_of(separator.join(words), "en")).split() == words


@pytest.mark.parametrize(("end", "between"), [(".", " "), ("。", ""), ("؟", " ")], ids=["latin", "han", "arabic"])
def test_sentences_are_whole_wherever_they_stand_in_a_long_paragraph(end, between):
    lengths = random.Random(3).choices(range(3, 300), k=1000)
    sentences = ["字" * length + end if end == "。" else "A" + "b" * length + end for length in lengths]
    assert sentences_of(between.join(sentences), "en") == sentences


def test_words_of_many_thousand_characters_are_whole_and_longer_ones_are_cut():
    text = "She said " + "q" * (MAX_WORD_CHARACTERS - 1) + " twice. Then " + "z" * 100_000 + " came. End."
    found = sentences_of(text, "en")
    words = " ".join(found).split()
    assert words[:5] == ["She", "said", "q" * (MAX_WORD_CHARACTERS - 1), "twice.", "Then"]
    assert words[-2:] == ["came.", "End."]
    parts = [len(word) for word in words[5:-2]]
    assert sum(parts) == 100_000 and len(parts) > 1
    assert all(MAX_WORD_CHARACTERS <= part < MAX_WORD_CHARACTERS + SPLIT_CHARACTERS for part in parts[:-1])


def test_two_megabytes_in_one_line_take_seconds():
    # Quoted and bracketed words cost the sentence splitter the square of their number.
    words = random.Random(1).choices(["Foo", "bar.", "baz?", "(x)", "'q", '"z"', "i.e.", "[1]"], k=500_000)
    begin = time.monotonic()
    assert " ".join(sentences_of(" ".join(words), "en")).split() == words
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(
    ("text", "filters", "reason"),
    [
        ("one two three", {"min_words": 3}, None),
        ("one  two\n", {"min_words": 3}, "min_words"),
        ("", {"min_words": 1}, "min_words"),
        ("ab12", {"max_nonletter_fraction": 0.5}, None),
        ("a b 1 2 3", {"max_nonletter_fraction": 0.5}, "max_nonletter_fraction"),
        ("", {"max_nonletter_fraction": 0.5}, None),
        ("1", {}, None),
    ],
)
def test_filters_name_the_reason(text, filters, reason):
    assert filter_reason(text, FiltersConfig(**filters)) == reason
