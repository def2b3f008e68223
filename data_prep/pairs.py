"""Cutting a document's tokens into pretraining examples: segments A and B, or one running text.

Plain numpy; nothing here knows of Beam, files or vocabularies. Every draw is a function of (key, chunk), where the
key stands for (seed, document). Lengths and the truncation rule are the reference's (ALBERT paper, appendix; the
`create_pretraining_data` of google-research/albert); departures from it are said where they happen.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import sub
from typing import NamedTuple

import numpy as np

from data_prep.ragged import concatenated_ranges
from data_prep.randomness import draws, uniforms

NO_LABEL = -1
IN_ORDER, SWAPPED = 0, 1


class Pair(NamedTuple):
    """Token ranges [begin, end) of a document: A before B as the example shows them; B is empty without a pair."""

    a: tuple[int, int]
    b: tuple[int, int]
    label: int


@dataclass(frozen=True)
class Cut:
    """What became of some documents: their examples, in order.

    `ranges`: int64 [examples, 4], the token ranges within the example's document as a `Pair` has them: begin and end
    of A, begin and end of B. `labels`: int8 [examples]. `truncated`: int64 [examples], the tokens that truncation cut
    off. `counts`: int64 [documents], examples of each.
    """

    ranges: np.ndarray
    labels: np.ndarray
    truncated: np.ndarray
    counts: np.ndarray

    @property
    def pairs(self) -> list[Pair]:
        rows = zip(self.ranges.tolist(), self.labels.tolist(), strict=True)
        return [Pair((row[0], row[1]), (row[2], row[3]), label) for row, label in rows]


# Numbers of the draws under a chunk's key.
_IS_SHORT, _TARGET, _SPLIT, _SWAP, _TRUNCATE, _DRAWS = range(6)
# Number of a document's own draw, beyond those of its chunks.
_BACKWARDS = 1 << 40
TARGETS_AT_ONCE = 16


def target_lengths(keys: np.ndarray, chunks: np.ndarray, room: int, short_probability: float) -> np.ndarray:
    """int64: tokens that the chunks `chunks` (their numbers) under `keys` aim for: `room`, or with
    `short_probability` uniform in 2..room."""
    counters = chunks * _DRAWS
    short = uniforms(keys, counters + _IS_SHORT) < short_probability
    shorter = 2 + (uniforms(keys, counters + _TARGET) * (room - 1)).astype(np.int64)
    return np.where(short, shorter, room)


def sentence_pairs(
    ends: Sequence[np.ndarray],
    word_begins: Callable[[int], np.ndarray],
    keys: np.ndarray,
    room: int,
    short_probability: float,
    swap: bool,
) -> Cut:
    """The sentences of documents as pairs (A, B), with `swap` exchanged with probability 1/2.

    `ends`: for each document int64 [sentences], the index after each sentence's last token. `word_begins`: what gives
    for a document's number the ascending int64 indices of its tokens that begin a word. `keys`: uint64 [documents].
    `room`: the most tokens A and B may have together (max_length - 3).

    Sentences accumulate until the chunk's target is reached; A gets 1..n-1 of the n, uniformly; the longer of A and
    B (B on ties) is cut until both fit. Both segments always come from one document and both begin and end at
    sentence borders before truncation: a lone sentence at the end takes its predecessor's last sentence along, a
    sentence longer than `room` is first parted at word borders, and a document of a single sentence is split at a
    word border. A document of a single word yields nothing.

    Half of the documents are cut from their end backwards. The sentence that reaches a target is longer than others,
    so cutting always forwards would make second segments the longer ones, and lengths would tell the order.
    """
    keys = np.asarray(keys, dtype=np.uint64)
    backwards = (uniforms(keys, _BACKWARDS) < 0.5).tolist()
    cut_borders = [
        _borders(ends[number].tolist(), partial(word_begins, number), int(keys[number]), room, backwards[number])
        for number in range(len(ends))
    ]
    sentences = np.array([max(0, len(places) - 1) for places in cut_borders], dtype=np.int64)
    targets = target_lengths(
        np.repeat(keys, sentences), concatenated_ranges(0, sentences), room, short_probability
    ).tolist()

    firsts, lasts, borders, counts = [], [], [], []
    target = 0
    for places, reverse in zip(cut_borders, backwards, strict=True):
        count = max(0, len(places) - 1)
        chunks = _chunks(places, targets[target : target + count])
        target += count
        if reverse:
            chunks = [(count - last, count - first) for first, last in reversed(chunks)]
            places = [places[-1] - place for place in reversed(places)]
        firsts += [len(borders) + first for first, _ in chunks]
        lasts += [len(borders) + last for _, last in chunks]
        borders += places
        counts.append(len(chunks))

    borders, counts = np.array(borders, dtype=np.int64), np.array(counts, dtype=np.int64)
    first, last = np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64)
    keys, counters = np.repeat(keys, counts), concatenated_ranges(0, counts) * _DRAWS
    swapped = (uniforms(keys, counters + _SWAP) < 0.5) & swap
    middle = first + 1 + (uniforms(keys, counters + _SPLIT) * (last - first - 1)).astype(np.int64)
    ranges = borders[np.column_stack((first, middle, middle, last))]
    ranges = np.where(swapped[:, None], ranges[:, [2, 3, 0, 1]], ranges)
    excess = np.maximum(0, borders[last] - borders[first] - room)
    ranges += _truncation(ranges, excess, draws(keys, counters + _TRUNCATE))
    labels = np.where(swapped, SWAPPED, IN_ORDER).astype(np.int8)
    return Cut(ranges, labels, excess, counts)


def running_texts(ends: Sequence[np.ndarray], keys: np.ndarray, room: int, short_probability: float) -> Cut:
    """The sentences of documents as single segments of up to `room` tokens (max_length - 2), without a label.

    `ends` and `keys` are those of `sentence_pairs`. Sentences are joined until the next one would not fit; one longer
    than the target is cut at it, and its rest opens the next example, so no token is lost.
    """
    begins, lasts, counts = [], [], []
    for document, key in zip(ends, keys, strict=True):
        borders = document.tolist()
        begin, targets = 0, []
        before = len(begins)
        while begin < borders[-1]:
            chunk = len(begins) - before
            if chunk == len(targets):
                more = np.arange(chunk, 2 * chunk + TARGETS_AT_ONCE)
                targets += target_lengths(np.uint64(key), more, room, short_probability).tolist()
            fitting = bisect_right(borders, begin + targets[chunk])
            end = borders[fitting - 1] if fitting else 0
            if end <= begin:
                end = min(begin + targets[chunk], borders[-1])
            begins.append(begin)
            lasts.append(end)
            begin = end
        counts.append(len(begins) - before)
    begins, lasts = np.array(begins, dtype=np.int64), np.array(lasts, dtype=np.int64)
    labels = np.full(len(lasts), NO_LABEL, dtype=np.int8)
    ranges = np.column_stack((begins, lasts, lasts, lasts))
    return Cut(ranges, labels, np.zeros_like(lasts), np.array(counts, dtype=np.int64))


def _borders(ends: list[int], word_begins: Callable[[], np.ndarray], key: int, room: int, backwards: bool) -> list[int]:
    """0 and the sentence ends of a document, none more than `room` apart, counted from its end if `backwards`; empty
    for a document of a single word."""
    total = ends[-1]
    borders = [0, *ends]
    if backwards:
        borders = [total - border for border in reversed(borders)]
    if max(map(sub, borders[1:], borders)) > room:
        begins = word_begins()
        begins = total - begins[::-1] if backwards else begins
        borders = [0, *_part_long_sentences(np.array(borders[1:]), begins, room).tolist()]
    if len(borders) == 2:
        begins = word_begins()
        inner = begins[(begins > 0) & (begins < total)]
        if not len(inner):
            return []
        inner = total - inner[::-1] if backwards else inner
        borders.insert(1, int(inner[int(draws(key, _SPLIT)[0] % np.uint64(len(inner)))]))
    return borders


def _chunks(borders: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Ranges [first, last) of sentences, each of at least two and of `targets` tokens (the last may fall short)."""
    count = len(borders) - 1
    chunks: list[tuple[int, int]] = []
    first = 0
    while first < count:
        last = bisect_left(borders, borders[first] + targets[len(chunks)], lo=first)
        last = min(max(last, first + 2), count)
        if last - first > 1:
            chunks.append((first, last))
        else:
            # A lone sentence is left: it takes one from the chunk before, or joins it where that has only two.
            previous_first, previous_last = chunks.pop()
            if previous_last - previous_first > 2:
                chunks += [(previous_first, previous_last - 1), (previous_last - 1, last)]
            else:
                chunks.append((previous_first, last))
        first = last
    return chunks


def _part_long_sentences(ends: np.ndarray, word_begins: np.ndarray, room: int) -> np.ndarray:
    """`ends` with further ends inside sentences longer than `room`, so that two neighbouring parts fit together.

    They fall at word borders; anywhere, where a word itself is too long.
    """
    lengths = np.diff(ends, prepend=0)
    parted: list[int] = []
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        begin = end - length
        parts = -(-length // (room // 2)) if length > room else 1
        for part in range(1, parts):
            goal = begin + length * part // parts
            word = int(np.searchsorted(word_begins, goal, side="right")) - 1
            previous = parted[-1] if parted else 0
            parted.append(int(word_begins[word]) if word >= 0 and word_begins[word] > previous else goal)
        parted.append(end)
    return np.array(parted, dtype=np.int64)


def _truncation(ranges: np.ndarray, excess: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """int64 [examples, 4], to be added to `ranges`: one token at a time goes from the longer of A and B (B on ties),
    front or back by a fair coin, until `excess` tokens are gone.

    By arithmetic: the longer gives until both are equal, then they take turns; how many of a segment's cuts fall
    at its front is a binomial draw, which is the count of ones among as many random bits.
    """
    longer_by = (ranges[:, 1] - ranges[:, 0]) - (ranges[:, 3] - ranges[:, 2])
    level = np.minimum(excess, np.abs(longer_by))
    rest = excess - level
    cut_a = np.where(longer_by > 0, level, 0) + rest // 2
    cut_b = np.where(longer_by > 0, 0, level) + (rest + 1) // 2
    front_a, front_b = _ones(keys, 0, cut_a), _ones(keys, 1, cut_b)
    return np.column_stack((front_a, front_a - cut_a, front_b, front_b - cut_b))


def _ones(keys: np.ndarray, stream: int, bits: np.ndarray) -> np.ndarray:
    """int64 draws from Binomial(bits, 1/2), one for each key."""
    words = -(-bits // 64)
    last = np.cumsum(words)
    word = concatenated_ranges(0, words)
    found = draws(np.repeat(keys, words), (stream << 32) + word)
    some = bits > 0
    found[last[some] - 1] >>= (-bits[some] % 64).astype(np.uint64)
    ones = np.concatenate(([0], np.cumsum(np.bitwise_count(found), dtype=np.int64)))
    return ones[last] - ones[last - words]
