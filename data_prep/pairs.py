"""Cutting a document's tokens into pretraining examples: segments A and B, or one running text.

Plain numpy; nothing here knows of Beam, files or vocabularies. Every draw is a function of (key, chunk), where the
key stands for (seed, document). Lengths and the truncation rule are the reference's (ALBERT paper, appendix; the
`create_pretraining_data` of google-research/albert); departures from it are said where they happen.
"""

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


class Cut(NamedTuple):
    """What became of a document: its pairs, in order, and the tokens that truncation cut off."""

    pairs: list[Pair]
    truncated_tokens: int


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
            return Cut([], 0)
        middle = inner[int(draws(key, _SPLIT)[0] % np.uint64(len(inner)))]
        borders = np.array([0, middle, total])
    count = len(borders) - 1
    chunks = _chunks(borders, target_lengths(key, count, room, short_probability))
    if backwards:
        borders = total - borders[::-1]
        chunks = [(count - last, count - first) for first, last in reversed(chunks)]
    counters = np.arange(len(chunks)) * _DRAWS
    splits = uniforms(key, counters + _SPLIT)
    swaps = (uniforms(key, counters + _SWAP) < 0.5) & swap
    pairs, truncated = [], 0
    for chunk, (first, last) in enumerate(chunks):
        middle = first + 1 + int(splits[chunk] * (last - first - 1))
        begin, border, end = int(borders[first]), int(borders[middle]), int(borders[last])
        a, b = (begin, border), (border, end)
        label = SWAPPED if swaps[chunk] else IN_ORDER
        if label == SWAPPED:
            a, b = b, a
        if end - begin > room:
            truncated += end - begin - room
            a, b = _truncated(a, b, room, int(draws(key, chunk * _DRAWS + _TRUNCATE)[0]))
        pairs.append(Pair(a, b, label))
    return Cut(pairs, truncated)


def running_texts(ends: np.ndarray, key: int, room: int, short_probability: float) -> Cut:
    """A document's sentences as single segments of up to `room` tokens (max_length - 2), without a label.

    Sentences are joined until the next one would not fit; one longer than the target is cut at it, and its rest
    opens the next example, so no token is lost.
    """
    total = int(ends[-1])
    targets = target_lengths(key, total // 2 + 1, room, short_probability) if total else []
    pairs, begin = [], 0
    while begin < total:
        target = int(targets[min(len(pairs), len(targets) - 1)])
        fitting = int(np.searchsorted(ends, begin + target, side="right"))
        end = int(ends[fitting - 1]) if fitting and ends[fitting - 1] > begin else min(begin + target, total)
        pairs.append(Pair((begin, end), (end, end), NO_LABEL))
        begin = end
    return Cut(pairs, 0)


def _chunks(borders: np.ndarray, targets: np.ndarray) -> list[tuple[int, int]]:
    """Ranges [first, last) of sentences, each of at least two and of `targets` tokens (the last may fall short)."""
    count = len(borders) - 1
    chunks, first = [], 0
    while first < count:
        last = int(np.searchsorted(borders, borders[first] + targets[len(chunks)], side="left"))
        last = min(max(last, first + 2), count)
        if last - first == 1:
            # A lone sentence is left: it takes one from the chunk before, or joins it where that has only two.
            previous_first, previous_last = chunks.pop()
            if previous_last - previous_first > 2:
                chunks.append((previous_first, previous_last - 1))
                chunks.append((previous_last - 1, last))
            else:
                chunks.append((previous_first, last))
        else:
            chunks.append((first, last))
        first = last
    return chunks


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


def _truncated(a: tuple[int, int], b: tuple[int, int], room: int, draw: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """A and B cut to `room` tokens: one token at a time from the longer (B on ties), front or back by a fair coin.

    By arithmetic: the longer gives until both are equal, then they take turns; how many of a segment's cuts fall
    at its front is a binomial draw, which is the count of ones among as many random bits.
    """
    length_a, length_b = a[1] - a[0], b[1] - b[0]
    excess = length_a + length_b - room
    level = min(excess, abs(length_a - length_b))
    cut_a, cut_b = (level, 0) if length_a > length_b else (0, level)
    rest = excess - level
    cut_a, cut_b = cut_a + rest // 2, cut_b + (rest + 1) // 2
    front_a, front_b = _ones(draw, 0, cut_a), _ones(draw, 1, cut_b)
    return (a[0] + front_a, a[1] - cut_a + front_a), (b[0] + front_b, b[1] - cut_b + front_b)


def _ones(key: int, stream: int, bits: int) -> int:
    """A draw from Binomial(bits, 1/2)."""
    if not bits:
        return 0
    words = draws(key, (stream << 32) + np.arange((bits + 63) // 64))
    words[-1] >>= np.uint64(-bits % 64)
    return int(np.bitwise_count(words).sum())
