"""The fast making of examples against the plain one, on the same documents, by distribution."""

import random
from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from scipy.stats import chi2_contingency, ks_2samp

from configs.schema import MaskingConfig
from data_prep.masking import draw_masks
from data_prep.pairs import sentence_pairs
from data_prep.vocabulary import CLS, FIRST_ORDINARY_ID, MASK, SEP
from tests.data_prep.plain_examples import plain_goal, plain_masks, plain_pairs, plain_shown, plain_words

ROOM = 61
VOCABULARY = 500
FIRST_CONTINUATION = 350
WORD_STARTS = np.array([1] * FIRST_CONTINUATION + [0] * (VOCABULARY - FIRST_CONTINUATION), dtype=np.uint8)
DOCUMENTS = 60
REPEATS = 70
CHANCE = 1e-4
"""Of a difference at least as large as is allowed, were both distributed alike."""


class Text(NamedTuple):
    ids: np.ndarray
    ends: np.ndarray
    begins_word: np.ndarray
    sentences: list[list[int]]


class Masked(NamedTuple):
    """A masked example: tokens by their place in the document, masked ones and what is shown in their stead."""

    document: int
    a: list[int]
    b: list[int]
    label: int
    masked: list[int]
    shown: list[int]


class Made(NamedTuple):
    examples: list[Masked]
    per_document: list[tuple[int, int]]
    truncated: list[int]


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Documents of one to 25 sentences of up to 60 tokens; a third of the tokens go on with a word."""
    rng = np.random.default_rng(1)
    made = []
    for document in range(DOCUMENTS):
        count = 1 if document % 10 == 0 else int(rng.integers(2, 26))
        lengths = np.clip(rng.gamma(2, 6, size=count).astype(int), 1, ROOM - 1)
        if count == 1:
            lengths += 5
        ends = np.cumsum(lengths)
        ids = rng.integers(FIRST_ORDINARY_ID, VOCABULARY, size=ends[-1])
        ids[np.concatenate(([0], ends[:-1]))] = 7
        ids[ends[-1] // 2] = 8
        sentences = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
        made.append(Text(ids.astype(np.uint16), ends, WORD_STARTS[ids] != 0, sentences))
    return made


@pytest.fixture(scope="module")
def masking() -> MaskingConfig:
    return MaskingConfig(max_predictions=8)


@pytest.fixture(scope="module")
def fast(texts, masking) -> Made:
    places, rows, starts, per_document, truncated = [], [], [], [], []
    for repeat in range(REPEATS):
        for number, text in enumerate(texts):
            begins = np.flatnonzero(text.begins_word)
            key = np.array([repeat * DOCUMENTS + number], dtype=np.uint64)
            cut = sentence_pairs([text.ends], lambda _, begins=begins: begins, key, ROOM, 0.1, True)
            per_document.append((number, len(cut.pairs)))
            truncated.append(cut.truncated.sum())
            for pair in cut.pairs:
                a, b = list(range(*pair.a)), list(range(*pair.b))
                places.append((number, a, b, pair.label))
                rows.append([CLS, *text.ids[a], SEP, *text.ids[b], SEP])
                starts.append(len(a) + 2)
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), dtype=np.uint16)
    for row, content in zip(padded, rows, strict=True):
        row[: len(content)] = content
    keys = np.random.default_rng(2).integers(2**63, size=len(rows)).astype(np.uint64)
    masks = draw_masks(padded, lengths, np.array(starts), keys, WORD_STARTS, masking)
    masked: list[list[int]] = [[] for _ in rows]
    shown: list[list[int]] = [[] for _ in rows]
    for row, column, label, seen in zip(masks.rows, masks.columns, masks.labels, masks.inputs, strict=True):
        number, a, b, _ = places[row]
        token = [None, *a, None, *b][column]
        assert texts[number].ids[token] == label
        masked[row].append(token)
        shown[row].append(int(seen))
    examples = [Masked(*place, tokens, seen) for place, tokens, seen in zip(places, masked, shown, strict=True)]
    return Made(examples, per_document, truncated)


@pytest.fixture(scope="module")
def slow(texts, masking) -> Made:
    rng = random.Random(3)
    examples, per_document, truncated = [], [], []
    for _ in range(REPEATS):
        for number, text in enumerate(texts):
            begins = text.begins_word.tolist()
            found, lost = plain_pairs(text.sentences, begins, ROOM, 0.1, rng)
            per_document.append((number, len(found)))
            truncated.append(lost)
            for example in found:
                goal = plain_goal(len(example.a) + len(example.b) + 3, masking.probability, masking.max_predictions)
                words = [plain_words(segment, begins) for segment in (example.a, example.b)]
                masked = plain_masks(words, goal, masking.ngram, rng)
                if example.label == 1:
                    in_example = {token: place for place, token in enumerate(example.a + example.b)}
                    masked.sort(key=in_example.get)
                ordinary = range(FIRST_ORDINARY_ID, VOCABULARY)
                shown = [plain_shown(int(text.ids[token]), MASK, ordinary, rng) for token in masked]
                examples.append(Masked(number, example.a, example.b, example.label, masked, shown))
    return Made(examples, per_document, truncated)


def assert_alike(first: Iterable[Hashable], second: Iterable[Hashable]) -> None:
    """Chi-square of two samples' counts by category; categories seen less than ten times are one."""
    counts = [Counter(first), Counter(second)]
    kinds = sorted(set(counts[0]) | set(counts[1]), key=repr)
    rare = [kind for kind in kinds if sum(count[kind] for count in counts) < 10]
    table = [[count[kind] for kind in kinds if kind not in rare] for count in counts]
    if rare:
        for row, count in zip(table, counts, strict=True):
            row.append(sum(count[kind] for kind in rare))
    assert len(table[0]) > 1
    assert chi2_contingency(np.array(table)).pvalue > CHANCE


def spans(example: Masked) -> list[int]:
    """Lengths of the runs of masked neighbours."""
    order = {token: place for place, token in enumerate([*example.a, None, *example.b])}
    places = sorted(order[token] for token in example.masked)
    cuts = [0, *(i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places)]
    return [end - begin for begin, end in pairwise(cuts)]


def test_enough_examples_are_compared(fast, slow):
    assert min(len(fast.examples), len(slow.examples)) > 10_000


def test_numbers_of_examples_per_document_agree(fast, slow):
    assert_alike(fast.per_document, slow.per_document)


def test_lengths_agree(fast, slow):
    lengths = [[len(e.a) + len(e.b) for e in made.examples] for made in (fast, slow)]
    assert_alike(*lengths)
    assert ks_2samp(*lengths).pvalue > CHANCE
    for segment in ("a", "b"):
        assert_alike(*([len(getattr(e, segment)) for e in made.examples] for made in (fast, slow)))


def test_places_where_documents_are_cut_agree(fast, slow):
    """Where the second segment begins, by document."""
    assert_alike(*([(e.document, max(e.a[0], e.b[0])) for e in made.examples] for made in (fast, slow)))


def test_numbers_of_sentences_in_the_first_segment_agree(fast, slow, texts):
    def sentences(example: Masked) -> tuple[int, int]:
        first, second = sorted((example.a, example.b))
        places = (first[0], second[0], second[-1])
        begin, border, end = np.searchsorted(texts[example.document].ends, places, side="right").tolist()
        return end + 1 - begin, border - begin

    assert_alike(*([sentences(e) for e in made.examples] for made in (fast, slow)))


def test_ranges_left_by_truncation_agree(fast, slow):
    full = [[e for e in made.examples if len(e.a) + len(e.b) == ROOM] for made in (fast, slow)]
    for end in (0, -1):
        assert_alike(*([(e.document, min(e.a, e.b)[end] // 4) for e in found] for found in full))
    assert ks_2samp(fast.truncated, slow.truncated).pvalue > CHANCE
    assert_alike([lost // 10 for lost in fast.truncated], [lost // 10 for lost in slow.truncated])


def test_labels_agree_and_tell_the_order(fast, slow):
    for made in (fast, slow):
        assert all((e.a[0] > e.b[0]) == (e.label == 1) for e in made.examples)
    assert_alike(*([e.label for e in made.examples] for made in (fast, slow)))
    assert_alike(*([(e.document, e.label) for e in made.examples] for made in (fast, slow)))


def test_masked_fractions_agree(fast, slow):
    assert_alike(*([(len(e.a) + len(e.b), len(e.masked)) for e in made.examples] for made in (fast, slow)))
    fractions = [[len(e.masked) / (len(e.a) + len(e.b) + 3) for e in made.examples] for made in (fast, slow)]
    assert ks_2samp(*fractions).pvalue > CHANCE


def test_lengths_of_masked_spans_agree(fast, slow):
    assert_alike(*([run for e in made.examples for run in spans(e)] for made in (fast, slow)))


def test_places_of_masks_agree(fast, slow):
    """By distance from the nearer border of the segment."""

    def distances(example: Masked) -> list[tuple[bool, int]]:
        place = {token: place for segment in (example.a, example.b) for place, token in enumerate(segment)}
        return [(token in example.b, place[token]) for token in example.masked]

    assert_alike(*([found for e in made.examples for found in distances(e)] for made in (fast, slow)))


def test_what_is_shown_agrees(fast, slow, texts):
    def kinds(made: Made) -> list[str]:
        return [
            "mask" if seen == MASK else "same" if seen == texts[e.document].ids[token] else "other"
            for e in made.examples
            for token, seen in zip(e.masked, e.shown, strict=True)
        ]

    assert_alike(kinds(fast), kinds(slow))
    shown = [[seen for e in made.examples for seen in e.shown if seen != MASK] for made in (fast, slow)]
    assert_alike(*shown)
