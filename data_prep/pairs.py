"""Cutting a document's tokens into pretraining examples: segments A and B, or one running text.

Plain numpy; nothing here knows of Beam, files or vocabularies. Every draw is a function of (key, chunk), where the
key stands for (seed, document). Lengths and the truncation rule are the reference's (ALBERT paper, appendix; the
`create_pretraining_data` of google-research/albert); departures from it are said where they happen.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    """What became of a document: its examples, in order, and the tokens that truncation cut off.

    `ranges`: int64 [examples, 4], the token ranges as a `Pair` has them: begin and end of A, begin and end of B.
    `labels`: int8 [examples].
    """

    ranges: np.ndarray
    labels: np.ndarray
    truncated_tokens: int

    @property
    def pairs(self) -> list[Pair]:
        rows = zip(self.ranges.tolist(), self.labels.tolist(), strict=True)
        return [Pair((row[0], row[1]), (row[2], row[3]), label) for row, label in rows]


# Numbers of the draws under a chunk's key.
_IS_SHORT, _TARGET, _SPLIT, _SWAP, _TRUNCATE, _DRAWS = range(6)
# Number of a document's own draw, beyond those of its chunks.
_BACKWARDS = 1 << 40


def target_lengths(key: int, chunks: int, room: int, short_probability: float) -> np.ndarray:
    """int64 [chunks]: tokens each chunk aims for: `room`, or with `short_probability` uniform in 2..room."""
    counters = np.arange(chunks) * _DRAWS
    short = uniforms(key, counters + _IS_SHORT) < short_probability
    shorter = 2 + (uniforms(key, counters + _TARGET) * (room - 1)).astype(np.int64)
    return np.where(short, shorter, room)


def sentence_pairs(
    ends: np.ndarray, word_begins: np.ndarray, key: int, room: int, short_probability: float, swap: bool
) -> Cut:
    """A document's sentences as pairs (A, B), with `swap` exchanged with probability 1/2.

    `ends`: int64 [sentences], the index after each sentence's last token. `word_begins`: ascending int64 indices of
    the tokens that begin a word. `room`: the most tokens A and B may have together (max_length - 3).

    Sentences accumulate until the chunk's target is reached; A gets 1..n-1 of the n, uniformly; the longer of A and
    B (B on ties) is cut until both fit. Both segments always come from one document and both begin and end at
    sentence borders before truncation: a lone sentence at the end takes its predecessor's last sentence along, a
    sentence longer than `room` is first parted at word borders, and a document of a single sentence is split at a
    word border. A document of a single word yields nothing.

    Half of the documents are cut from their end backwards. The sentence that reaches a target is longer than others,
    so cutting always forwards would make second segments the longer ones, and lengths would tell the order.
    """
    total = ends[-1]
    borders = np.concatenate(([0], ends))
    backwards = uniforms(key, _BACKWARDS)[0] < 0.5
    if backwards:
        borders, word_begins = total - borders[::-1], total - word_begins[::-1]
    borders = np.concatenate(([0], _part_long_sentences(borders[1:], word_begins, room)))
    if len(borders) == 2:
        inner = word_begins[(word_begins > 0) & (word_begins < total)]
        if not len(inner):
            return Cut(np.empty((0, 4), dtype=np.int64), np.empty(0, dtype=np.int8), 0)
        middle = inner[int(draws(key, _SPLIT)[0] % np.uint64(len(inner)))]
        borders = np.array([0, middle, total])
    count = len(borders) - 1
    first, last = _chunks(borders, target_lengths(key, count, room, short_probability))
    if backwards:
        borders = total - borders[::-1]
        first, last = count - last[::-1], count - first[::-1]
    counters = np.arange(len(first)) * _DRAWS
    splits = uniforms(key, counters + _SPLIT)
    swapped = (uniforms(key, counters + _SWAP) < 0.5) & swap
    middle = first + 1 + (splits * (last - first - 1)).astype(np.int64)
    in_order = borders[np.column_stack((first, middle, middle, last))]
    ranges = np.where(swapped[:, None], in_order[:, [2, 3, 0, 1]], in_order)
    excess = np.maximum(0, borders[last] - borders[first] - room)
    if excess.any():
        ranges += _truncation(ranges, excess, draws(key, counters + _TRUNCATE))
    labels = np.where(swapped, SWAPPED, IN_ORDER).astype(np.int8)
    return Cut(ranges, labels, int(excess.sum()))


def running_texts(ends: np.ndarray, key: int, room: int, short_probability: float) -> Cut:
    """A document's sentences as single segments of up to `room` tokens (max_length - 2), without a label.

    Sentences are joined until the next one would not fit; one longer than the target is cut at it, and its rest
    opens the next example, so no token is lost.
    """
    total = int(ends[-1])
    targets = target_lengths(key, total // 2 + 1, room, short_probability)
    borders, reached = ends.tolist(), [0]
    while reached[-1] < total:
        begin = reached[-1]
        target = int(targets[min(len(reached), len(targets)) - 1])
        fitting = bisect_right(borders, begin + target)
        whole = borders[fitting - 1] if fitting else 0
        reached.append(whole if whole > begin else min(begin + target, total))
    begins, ends = np.array(reached[:-1], dtype=np.int64), np.array(reached[1:], dtype=np.int64)
    return Cut(np.column_stack((begins, ends, ends, ends)), np.full(len(ends), NO_LABEL, dtype=np.int8), 0)


def _chunks(borders: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, last): int64 [chunks], ranges of sentences, each of at least two and of `targets` tokens (the last may
    fall short)."""
    count = len(borders) - 1
    places, goals = borders.tolist(), targets.tolist()
    firsts, lasts = [], []
    first = 0
    while first < count:
        last = bisect_left(places, places[first] + goals[len(firsts)], lo=first)
        last = min(max(last, first + 2), count)
        if last - first > 1:
            firsts.append(first)
        elif lasts[-1] - firsts[-1] > 2:
            # A lone sentence is left: it takes one from the chunk before, or joins it where that has only two.
            lasts[-1] -= 1
            firsts.append(lasts[-1])
        else:
            lasts.pop()
        lasts.append(last)
        first = last
    return np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64)


def _part_long_sentences(ends: np.ndarray, word_begins: np.ndarray, room: int) -> np.ndarray:
    """`ends` with further ends inside sentences longer than `room`, so that two neighbouring parts fit together.

    They fall at word borders; anywhere, where a word itself is too long.
    """
    lengths = np.diff(ends, prepend=0)
    if lengths.max() <= room:
        return ends
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
    word = np.arange(words.sum()) - np.repeat(last - words, words)
    found = draws(np.repeat(keys, words), (stream << 32) + word)
    some = bits > 0
    found[last[some] - 1] >>= (-bits[some] % 64).astype(np.uint64)
    ones = np.concatenate(([0], np.cumsum(np.bitwise_count(found), dtype=np.int64)))
    return ones[last] - ones[last - words]
