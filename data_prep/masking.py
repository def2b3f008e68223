"""Masked language modelling: which tokens are predicted, and what the model sees in their place.

n-gram masking of whole words (ALBERT paper, section 4.1): spans of n words, n = 1..N with p(n) proportional to 1/n,
never overlapping, never over the budget and never over a segment border; 80 % of the chosen tokens become `[MASK]`,
10 % stay, 10 % become another ordinary piece. Plain numpy, vectorised over a batch of examples: one pass of the loop
places one span in every example that still has room. Draws are functions of each example's key alone, so an
example's masks do not depend on the batch it is in.
"""

from dataclasses import dataclass

import numpy as np

from configs.schema import MaskingConfig
from data_prep.randomness import draws, uniforms
from data_prep.vocabulary import FIRST_ORDINARY_ID, MASK

# Streams of draws under an example's key: one for each purpose, then numbered by position.
_ORDER, _LENGTH, _REPLACE, _PIECE = (stream << 32 for stream in range(1, 5))


@dataclass(frozen=True)
class Masks:
    """Masked tokens of a batch, in order of (row, column). `rows`, `columns`: int64 [masked]; `labels`, `inputs`: the
    original ids and what the model sees, in the dtype of the ids."""

    rows: np.ndarray
    columns: np.ndarray
    labels: np.ndarray
    inputs: np.ndarray


def masked_goal(lengths: np.ndarray, masking: MaskingConfig) -> np.ndarray:
    """int64: tokens to mask in examples of `lengths` (with `[CLS]` and `[SEP]`): 15 %, at least one, half to even."""
    goal = np.rint(lengths * masking.probability).astype(np.int64)
    return np.minimum(masking.max_predictions, np.maximum(1, goal))


def draw_masks(
    input_ids: np.ndarray,
    lengths: np.ndarray,
    segment_b_start: np.ndarray,
    keys: np.ndarray,
    word_starts: np.ndarray,
    masking: MaskingConfig,
) -> Masks:
    """The masks of a batch of examples.

    `input_ids`: [B, L] padded; `lengths`, `segment_b_start`: [B] (the latter is the length where there is no B);
    `keys`: uint64 [B]; `word_starts`: the vocabulary's table. Every example with an ordinary token gets a mask.
    """
    width = input_ids.shape[1]
    lengths = lengths.astype(np.int64)
    words = _words(input_ids, lengths, segment_b_start.astype(np.int64), word_starts, masking.whole_word)
    goal = np.minimum(masked_goal(lengths, masking), words.maskable)
    chosen = _choose(words, goal, keys, masking.ngram, width)
    chosen_rows, columns = np.nonzero(chosen[:, :width])
    labels = input_ids[chosen_rows, columns]
    return Masks(chosen_rows, columns, labels, _shown(labels, chosen_rows, columns, keys, len(word_starts)))


@dataclass(frozen=True)
class _Words:
    """Words of a batch, row by row. `begin`: int64 [B, W + 1], each word's first column, then the end of the last
    word repeated; `end`: int64 [B, W], the column after a word's last token; `run_end`: int64 [B, W], the index after
    the last word that a span from this word may hold (a segment's end); `count`: [B]; `maskable`: tokens in words."""

    begin: np.ndarray
    end: np.ndarray
    run_end: np.ndarray
    count: np.ndarray
    maskable: np.ndarray


def _words(
    input_ids: np.ndarray, lengths: np.ndarray, segment_b_start: np.ndarray, word_starts: np.ndarray, whole_word: bool
) -> _Words:
    rows, width = input_ids.shape
    columns = np.arange(width)
    last = lengths[:, None] - 1
    border = segment_b_start[:, None] - 1
    ordinary = (columns > 0) & (columns < last) & (columns != border)
    if whole_word:
        kind = word_starts[input_ids]
        starts = kind != 0
        starts[:, 1:] &= kind[:, :-1] != 2
    else:
        starts = np.ones_like(ordinary)
    starts[:, 1] = True
    in_b = np.minimum(segment_b_start, width - 1)
    starts[np.arange(rows), in_b] = True
    starts &= ordinary
    count = starts.sum(axis=1)
    word_count = max(1, int(count.max(initial=1)))
    row, column = np.nonzero(starts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.zeros((rows, word_count + 1), dtype=np.int64)
    begin[row, index] = column
    slots = np.arange(word_count + 1)
    begin = np.where(slots < count[:, None], begin, last)
    # A word of A that reaches the border ends before its [SEP].
    end = np.where((begin[:, :-1] < border) & (begin[:, 1:] > border), border, begin[:, 1:])
    words_in_a = (begin[:, :-1] < border).sum(axis=1)
    words_in_a = np.minimum(words_in_a, count)
    run_end = np.where(slots[:-1] < words_in_a[:, None], words_in_a[:, None], count[:, None])
    return _Words(begin, end, run_end, count, ordinary.sum(axis=1))


def _choose(words: _Words, goal: np.ndarray, keys: np.ndarray, ngram: int, width: int) -> np.ndarray:
    """bool [B, width + 1]: the tokens to mask. Words are tried in a random order, each once, as the start of a span."""
    rows, word_count = words.end.shape
    slots = np.arange(word_count, dtype=np.uint64)
    order_draws = draws(keys[:, None], slots + np.uint64(_ORDER))
    order_draws[slots >= words.count[:, None]] = np.iinfo(np.uint64).max
    order = np.argsort(order_draws, axis=1, kind="stable")
    span_words = _span_words(keys, word_count, ngram)
    used = np.zeros((rows, word_count + ngram), dtype=bool)
    # +1 where a span begins and -1 after its end: their running sum marks the span.
    edges = np.zeros((rows, width + 1), dtype=np.int8)
    left = goal.copy()
    active = np.flatnonzero((left > 0) & (words.count > 0))
    for turn in range(word_count):
        active = active[(left[active] > 0) & (turn < words.count[active])]
        if not len(active):
            break
        start = order[active, turn]
        begin = words.begin[active, start]
        size = np.zeros(len(active), dtype=np.int64)
        length = np.zeros(len(active), dtype=np.int64)
        for n in range(1, ngram + 1):
            tokens = words.end[active, np.minimum(start + n, word_count) - 1] - begin
            fits = (
                (n <= span_words[active, turn]) & (start + n <= words.run_end[active, start]) & (tokens <= left[active])
            )
            size = np.where(fits, tokens, size)
            length = np.where(fits, n, length)
        placed = size > 0
        for n in range(ngram):
            placed &= ~(used[active, start + n] & (n < length))
        where, first = active[placed], start[placed]
        for n in range(ngram):
            inside = n < length[placed]
            used[where[inside], first[inside] + n] = True
        edges[where, begin[placed]] += 1
        edges[where, begin[placed] + size[placed]] -= 1
        left[where] -= size[placed]
    # Where no whole word fits the budget, the first one tried is cut.
    empty = np.flatnonzero((left == goal) & (goal > 0))
    begin, end = words.begin[empty, order[empty, 0]], words.end[empty, order[empty, 0]]
    edges[empty, begin] += 1
    edges[empty, np.minimum(begin + goal[empty], end)] -= 1
    return np.cumsum(edges, axis=1, dtype=np.int8).astype(bool)


def _span_words(keys: np.ndarray, turns: int, ngram: int) -> np.ndarray:
    """int8 [B, turns]: words wanted in the span of each turn: n with probability proportional to 1/n."""
    if ngram == 1:
        return np.ones((len(keys), turns), dtype=np.int8)
    cumulative = np.cumsum(1.0 / np.arange(1, ngram + 1))
    cumulative /= cumulative[-1]
    draw = uniforms(keys[:, None], np.arange(turns)[None, :] + _LENGTH)
    return (1 + np.searchsorted(cumulative[:-1], draw, side="right")).astype(np.int8)


def _shown(
    labels: np.ndarray, rows: np.ndarray, columns: np.ndarray, keys: np.ndarray, vocabulary_size: int
) -> np.ndarray:
    """What the model sees at masked places: `[MASK]` (80 %), the token itself (10 %), an ordinary piece (10 %)."""
    draw = uniforms(keys[rows], columns + _REPLACE)
    piece = uniforms(keys[rows], columns + _PIECE) * (vocabulary_size - FIRST_ORDINARY_ID)
    replacement = (FIRST_ORDINARY_ID + piece.astype(np.int64)).astype(labels.dtype)
    return np.where(draw < 0.8, np.array(MASK, dtype=labels.dtype), np.where(draw < 0.9, labels, replacement))
