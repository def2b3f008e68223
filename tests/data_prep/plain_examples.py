"""Example making, plainly and slowly, as an oracle: lists, loops, Python's `random` and one token at a time.

Written from the description of the procedure, not from the fast one. A token is its index in the document.
"""

import random
from typing import NamedTuple

Tokens = list[int]


class PlainExample(NamedTuple):
    a: Tokens
    b: Tokens
    label: int


def plain_pairs(
    sentences: list[Tokens], begins_word: list[bool], room: int, short_probability: float, rng: random.Random
) -> tuple[list[PlainExample], int]:
    """(examples, truncated tokens) of a document of `sentences`, none of them longer than `room`; 1 = swapped."""
    if len(sentences) == 1:
        (sentence,) = sentences
        inner = [token for token in sentence[1:] if begins_word[token]]
        if not inner:
            return [], 0
        border = rng.choice(inner)
        sentences = [[t for t in sentence if t < border], [t for t in sentence if t >= border]]
    backwards = rng.random() < 0.5
    chunks: list[list[Tokens]] = []
    chunk: list[Tokens] = []
    target = plain_target(room, short_probability, rng)
    for sentence in sentences[::-1] if backwards else sentences:
        chunk.append(sentence)
        if len(chunk) >= 2 and sum(map(len, chunk)) >= target:
            chunks.append(chunk)
            chunk = []
            target = plain_target(room, short_probability, rng)
    if len(chunk) == 1 and len(chunks[-1]) == 2:
        chunks[-1].append(chunk[0])
    elif len(chunk) == 1:
        chunks.append([chunks[-1].pop(), chunk[0]])
    elif chunk:
        chunks.append(chunk)
    examples, truncated = [], 0
    for chunk in chunks:
        in_order = chunk[::-1] if backwards else chunk
        count = rng.randint(1, len(chunk) - 1)
        a = [token for sentence in in_order[:count] for token in sentence]
        b = [token for sentence in in_order[count:] for token in sentence]
        swapped = rng.random() < 0.5
        if swapped:
            a, b = b, a
        while len(a) + len(b) > room:
            longer = a if len(a) > len(b) else b
            longer.pop(0 if rng.random() < 0.5 else -1)
            truncated += 1
        examples.append(PlainExample(a, b, int(swapped)))
    return examples, truncated


def plain_target(room: int, short_probability: float, rng: random.Random) -> int:
    return rng.randint(2, room) if rng.random() < short_probability else room


def plain_words(segment: Tokens, begins_word: list[bool]) -> list[Tokens]:
    """The words of a segment, which itself begins one."""
    words: list[Tokens] = []
    for token in segment:
        if begins_word[token] or not words:
            words.append([])
        words[-1].append(token)
    return words


def plain_masks(segments: list[list[Tokens]], goal: int, ngram: int, rng: random.Random) -> list[int]:
    """The tokens to mask of segments of words, ascending."""
    starts = [(words, index) for words in segments for index in range(len(words))]
    rng.shuffle(starts)
    masked: set[int] = set()
    for words, index in starts:
        if len(masked) >= goal:
            break
        (wanted,) = rng.choices(range(1, ngram + 1), [1 / n for n in range(1, ngram + 1)])
        for n in range(min(wanted, len(words) - index), 0, -1):
            span = [token for word in words[index : index + n] for token in word]
            if len(masked) + len(span) <= goal:
                if not masked & set(span):
                    masked |= set(span)
                break
    if not masked and goal:
        words, index = starts[0]
        masked = set(words[index][:goal])
    return sorted(masked)


def plain_goal(length: int, probability: float, max_predictions: int) -> int:
    """Tokens to mask in an example of `length`, `[CLS]` and `[SEP]` included."""
    return min(max_predictions, max(1, round(length * probability)))


def plain_shown(token: int, mask: int, ordinary: range, rng: random.Random) -> int:
    draw = rng.random()
    if draw < 0.8:
        return mask
    return token if draw < 0.9 else rng.choice(ordinary)
