import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import MaskingConfig
from data_prep.masking import Masks, draw_masks, masked_goal
from data_prep.vocabulary import CLS, FIRST_ORDINARY_ID, MASK, SEP
from tests.data_prep.plain_examples import plain_masks

SIZE = 100
CONTINUATIONS = range(60, 99)
BARE_SEPARATOR = 99
WORD_STARTS = np.array([1] * 60 + [0] * 39 + [2], dtype=np.uint8)


def batch(count: int, width: int, seed: int, pieces: tuple[int, int] = (FIRST_ORDINARY_ID, SIZE)):
    """(ids, lengths, starts of B, keys) of random examples; a tenth of them have no B."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(*pieces, size=(count, width)).astype(np.uint16)
    lengths = rng.integers(8, width + 1, size=count)
    starts = rng.integers(3, lengths - 1)
    starts[rng.random(count) < 0.1] = width + 1
    starts = np.minimum(starts, lengths)
    for row, (end, start) in enumerate(zip(lengths, starts, strict=True)):
        ids[row, 0] = CLS
        ids[row, start - 1] = ids[row, end - 1] = SEP
        ids[row, end:] = 0
    return ids, lengths, starts, rng.integers(2**63, size=count).astype(np.uint64)


def masking(**settings) -> MaskingConfig:
    return MaskingConfig(**{"max_predictions": 10_000, **settings})


def columns_by_row(masks: Masks, rows: int) -> list[list[int]]:
    return [
        columns.tolist() for columns in np.split(masks.columns, np.cumsum(np.bincount(masks.rows, minlength=rows))[:-1])
    ]


def words_of(ids: np.ndarray, length: int, start: int) -> list[list[list[int]]]:
    """The words (lists of columns) of A and of B, by the rule as it is told."""
    segments = [range(1, start - 1), range(start, length - 1)]
    found = []
    for segment in segments:
        words: list[list[int]] = []
        for column in segment:
            kind = WORD_STARTS[ids[column]]
            after_bare = words and ids[column - 1] == BARE_SEPARATOR
            if not words or (kind != 0 and not after_bare):
                words.append([column])
            else:
                words[-1].append(column)
        found.append(words)
    return found


def runs(columns: list[int]) -> list[int]:
    """Lengths of the runs of consecutive numbers."""
    cuts = [0, *(place for place in range(1, len(columns)) if columns[place] != columns[place - 1] + 1), len(columns)]
    return [end - begin for begin, end in pairwise(cuts)]


def test_goal_is_fifteen_percent_rounded_half_to_even_within_bounds():
    lengths = np.arange(3, 600)
    expected = [min(77, max(1, round(length * 0.15))) for length in lengths.tolist()]
    assert masked_goal(lengths, masking(max_predictions=77)).tolist() == expected
    assert masked_goal(np.array([10, 30, 50, 512]), masking(max_predictions=77)).tolist() == [2, 4, 8, 77]


def test_single_token_words_are_masked_to_the_goal_exactly():
    ids, lengths, starts, keys = batch(500, 64, 1, pieces=(5, 60))
    counts = np.bincount(draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking()).rows, minlength=500)
    np.testing.assert_array_equal(counts, masked_goal(lengths, masking()))


def test_whole_words_are_masked_up_to_the_goal_and_at_least_once():
    ids, lengths, starts, keys = batch(2000, 48, 2)
    counts = np.bincount(draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking()).rows, minlength=2000)
    goal = masked_goal(lengths, masking())
    assert (counts <= goal).all() and (counts >= 1).all()
    assert counts.sum() > 0.97 * goal.sum()


def test_spans_are_drawn_with_one_over_n():
    count, width = 3000, 1002
    ids = np.full((count, width), 7, dtype=np.uint16)
    keys = np.random.default_rng(3).integers(2**63, size=count).astype(np.uint64)
    lengths = np.full(count, width)
    masks = draw_masks(ids, lengths, lengths, keys, WORD_STARTS, masking(max_predictions=3))
    found = Counter(tuple(sorted(runs(columns))) for columns in columns_by_row(masks, count))
    one, two, three = 6 / 11, 3 / 11, 2 / 11
    expected = {(3,): three, (1, 2): two + one * (two + three), (1, 1, 1): one * one}
    for shape, share in expected.items():
        assert found[shape] / count == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / count) + 0.01)


def test_words_are_whole_and_only_ordinary_places_are_masked():
    ids, lengths, starts, keys = batch(3000, 40, 4)
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking())
    goals = masked_goal(lengths, masking())
    cut_words = 0
    for row, columns in enumerate(columns_by_row(masks, len(ids))):
        segments = words_of(ids[row], lengths[row], starts[row])
        masked, words = set(columns), [set(word) for words in segments for word in words]
        assert masked <= set().union(*words)
        if any(masked & word not in (set(), word) for word in words):
            cut_words += 1
            assert min(map(len, words)) > goals[row] == len(masked)
    assert cut_words > 0


def test_spans_never_cross_a_segment_border():
    """A of one word: with the next two it would be a span of three, were there no border."""
    count, width = 30_000, 20
    ids = np.full((count, width), 7, dtype=np.uint16)
    ids[:, 0], ids[:, 2], ids[:, -1] = CLS, SEP, SEP
    keys = np.random.default_rng(16).integers(2**63, size=count).astype(np.uint64)
    masks = draw_masks(
        ids, np.full(count, width), np.full(count, 3), keys, WORD_STARTS, masking(max_predictions=3, probability=0.5)
    )
    found = Counter(map(tuple, columns_by_row(masks, count)))
    # Drawn first, each word opens a span of three twice in eleven; two spans rarely make up the same.
    drawn_first = count * 2 / 11 / 17
    assert found[(3, 4, 5)] > drawn_first
    assert found[(1, 3, 4)] < drawn_first / 2


@given(
    seed=st.integers(0, 2**32),
    width=st.integers(8, 80),
    ngram=st.integers(1, 10),
    whole_word=st.booleans(),
    probability=st.floats(0.01, 0.99),
    max_predictions=st.integers(1, 80),
    pieces=st.sampled_from([(5, 60), (5, 100), (60, 99), (60, 100), (99, 100)]),
)
@settings(max_examples=200, deadline=None)
def test_masks_are_sound_under_every_setting(seed, width, ngram, whole_word, probability, max_predictions, pieces):
    ids, lengths, starts, keys = batch(15, width, seed, pieces)
    given_ids = ids.copy()
    chosen = MaskingConfig(ngram=ngram, whole_word=whole_word, probability=probability, max_predictions=max_predictions)
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, chosen)
    np.testing.assert_array_equal(ids, given_ids)
    np.testing.assert_array_equal(masks.labels, ids[masks.rows, masks.columns])
    changed = masks.inputs[masks.inputs != masks.labels]
    assert ((changed == MASK) | ((changed >= FIRST_ORDINARY_ID) & (changed < SIZE))).all()
    goals = masked_goal(lengths, chosen)
    for row, columns in enumerate(columns_by_row(masks, len(ids))):
        ordinary = set(range(1, lengths[row] - 1)) - {starts[row] - 1}
        assert len(set(columns)) == len(columns) and set(columns) <= ordinary
        assert 1 <= len(columns) <= min(goals[row], len(ordinary))
        if not whole_word and ngram == 1:
            assert len(columns) == min(goals[row], len(ordinary))


def test_words_after_a_border_or_a_bare_separator_are_told_apart():
    ids = np.array([[CLS, 61, 62, 63, SEP, 64, 65, 66, SEP], [CLS, 99, 7, 61, SEP, 8, 99, 61, SEP]], dtype=np.uint16)
    seen = [set(), set()]
    for key in range(200):
        keys = np.array([key, key], dtype=np.uint64)
        masks = draw_masks(
            ids, np.array([9, 9]), np.array([5, 5]), keys, WORD_STARTS, masking(probability=0.34, ngram=2)
        )
        for row, columns in enumerate(columns_by_row(masks, 2)):
            seen[row].add(tuple(columns))
    assert seen[0] == {(1, 2, 3), (5, 6, 7)}
    assert seen[1] == {(1, 2, 3), (5, 6, 7)} | {(5,), (6, 7)} & seen[1]


def test_four_fifths_become_mask_one_tenth_stays_one_tenth_is_replaced():
    ids, lengths, starts, keys = batch(6000, 256, 5, pieces=(5, 60))
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking())
    count = len(masks.rows)
    assert count > 100_000
    same_by_chance = 0.1 / (SIZE - FIRST_ORDINARY_ID)
    shares = {
        0.8: (masks.inputs == MASK).mean(),
        0.1 + same_by_chance: (masks.inputs == masks.labels).mean(),
        0.1 - same_by_chance: ((masks.inputs != MASK) & (masks.inputs != masks.labels)).mean(),
    }
    for share, found in shares.items():
        assert found == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / count))


def test_replacements_are_every_ordinary_piece_equally_often_and_no_other():
    ids, lengths, starts, keys = batch(6000, 256, 6, pieces=(5, 60))
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking())
    replaced = masks.inputs[(masks.inputs != MASK) & (masks.inputs != masks.labels)]
    counts = np.bincount(replaced, minlength=SIZE)
    assert counts[:FIRST_ORDINARY_ID].sum() == 0
    expected = len(replaced) / (SIZE - FIRST_ORDINARY_ID)
    assert (np.abs(counts[FIRST_ORDINARY_ID:] - expected) < 5 * np.sqrt(expected)).all()


def test_labels_restore_the_originals_in_order_of_row_and_column():
    ids, lengths, starts, keys = batch(300, 64, 7)
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking())
    np.testing.assert_array_equal(masks.labels, ids[masks.rows, masks.columns])
    assert masks.labels.dtype == masks.inputs.dtype == ids.dtype
    places = masks.rows * 64 + masks.columns
    assert (np.diff(places) > 0).all()


@pytest.mark.parametrize("settings", [{}, {"ngram": 1}, {"whole_word": False}])
def test_masks_do_not_depend_on_the_batch_nor_on_its_padding(settings):
    ids, lengths, starts, keys = batch(200, 48, 8)
    whole = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking(**settings))
    chosen = np.random.default_rng(9).permutation(200)[:70]
    wider = np.full((70, 90), BARE_SEPARATOR, dtype=np.uint16)
    wider[:, :48] = np.where(np.arange(48) < lengths[chosen, None], ids[chosen], 61)
    part = draw_masks(wider, lengths[chosen], starts[chosen], keys[chosen], WORD_STARTS, masking(**settings))
    alone = [
        draw_masks(
            ids[[row], : lengths[row]], lengths[[row]], starts[[row]], keys[[row]], WORD_STARTS, masking(**settings)
        )
        for row in chosen
    ]
    for position, row in enumerate(chosen):
        for name in ("columns", "labels", "inputs"):
            expected = getattr(whole, name)[whole.rows == row]
            np.testing.assert_array_equal(getattr(part, name)[part.rows == position], expected)
            np.testing.assert_array_equal(getattr(alone[position], name), expected)


def test_other_keys_give_other_masks():
    ids, lengths, starts, keys = batch(200, 48, 10)
    first = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking())
    second = draw_masks(ids, lengths, starts, keys + np.uint64(1), WORD_STARTS, masking())
    same = sum(a == b for a, b in zip(columns_by_row(first, 200), columns_by_row(second, 200), strict=True))
    assert same < 20


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("pieces", [(5, 60), (5, 100)], ids=["single-token-words", "longer-words"])
def test_masks_are_distributed_as_a_plain_version_draws_them(ngram, pieces):
    count = 1500
    ids, lengths, starts, keys = batch(count, 64, 11, pieces)
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking(ngram=ngram))
    goals = masked_goal(lengths, masking())
    rng = random.Random(12)
    fast = columns_by_row(masks, count)
    slow = [plain_masks(words_of(ids[row], lengths[row], starts[row]), goals[row], ngram, rng) for row in range(count)]
    if pieces == (5, 60):
        assert [len(columns) for columns in fast] == [len(columns) for columns in slow]
    assert sum(map(len, fast)) == pytest.approx(sum(map(len, slow)), rel=0.01)
    fast_runs, slow_runs = (
        Counter(min(run, 8) for columns in found for run in runs(columns)) for found in (fast, slow)
    )
    for run in range(1, 9):
        difference = fast_runs[run] - slow_runs[run]
        assert abs(difference) <= 4.5 * np.sqrt(fast_runs[run] + slow_runs[run] + 1)


def test_every_token_of_single_token_words_is_masked_equally_often():
    count, width = 20_000, 34
    ids = np.full((count, width), 7, dtype=np.uint16)
    keys = np.random.default_rng(13).integers(2**63, size=count).astype(np.uint64)
    lengths = np.full(count, width)
    masks = draw_masks(ids, lengths, lengths, keys, WORD_STARTS, masking(ngram=1))
    counts = np.bincount(masks.columns, minlength=width)
    assert counts[0] == counts[-1] == 0
    expected = count * round(0.15 * width) / (width - 2)
    assert (np.abs(counts[1:-1] - expected) < 4.5 * np.sqrt(expected)).all()


def test_without_ngrams_single_words_are_masked():
    count, width = 400, 2002
    ids = np.tile(np.array([7, 61], dtype=np.uint16), (count, width // 2))
    ids = np.column_stack([np.full(count, CLS), ids[:, : width - 2], np.full(count, SEP)]).astype(np.uint16)
    lengths, keys = np.full(count, width), np.arange(count).astype(np.uint64)
    for ngram, chance_of_neighbours in ((1, 0.005), (3, 5 / 11)):
        masks = draw_masks(ids, lengths, lengths, keys, WORD_STARTS, masking(ngram=ngram, max_predictions=4))
        neighbours = sum(len(runs(columns)) == 1 for columns in columns_by_row(masks, count)) / count
        assert neighbours == pytest.approx(chance_of_neighbours, abs=0.1)


def test_tokens_are_masked_singly_without_whole_words():
    ids, lengths, starts, keys = batch(1000, 64, 15, pieces=(60, 99))
    masks = draw_masks(ids, lengths, starts, keys, WORD_STARTS, masking(whole_word=False))
    np.testing.assert_array_equal(np.bincount(masks.rows, minlength=1000), masked_goal(lengths, masking()))
    special = np.zeros(ids.shape, dtype=bool)
    special[:, 0] = True
    special[np.arange(1000), starts - 1] = special[np.arange(1000), lengths - 1] = True
    assert not special[masks.rows, masks.columns].any() and (masks.columns < lengths[masks.rows]).all()


def test_examples_without_ordinary_tokens_get_no_mask():
    ids = np.array([[CLS, SEP, 0, 0], [CLS, 7, SEP, 0]], dtype=np.uint16)
    masks = draw_masks(
        ids, np.array([2, 3]), np.array([2, 3]), np.array([1, 2], dtype=np.uint64), WORD_STARTS, masking()
    )
    assert masks.rows.tolist() == [1] and masks.columns.tolist() == [1]
