"""Ids of words that were met before: a corpus repeats its words, and finding one again is faster than SentencePiece.

Pieces never cross white space, so the ids of a text are those of its words, end to end. Where two ways to part a word
have the same score, SentencePiece's choice depends on what stands before it; such words are told.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MAX_CHARACTERS = 4 * 2**20
"""Of the words kept; beyond, all are forgotten, which bounds the memory."""


class FoundWords(NamedTuple):
    """`ids`: of words, end to end. For each word `counts`: int64, its ids, `characters`: int64, and `ambiguous`: bool,
    whether there are several ways to part it."""

    ids: np.ndarray
    counts: np.ndarray
    characters: np.ndarray
    ambiguous: np.ndarray


class WordIds:
    """The ids of words, each encoded once by `encode` (words -> lists of ids); `pieces` are the vocabulary's."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], pieces: Sequence[str], dtype: type[np.integer]):
        self._encode = encode
        self._pieces = pieces
        self._dtype = dtype
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._characters = 0
        self._ids = np.empty(0, dtype=self._dtype)
        self._ends = np.zeros(1, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)
        self._ambiguous = np.empty(0, dtype=bool)

    def of(self, words: list[str]) -> FoundWords:
        if self._characters > MAX_CHARACTERS:
            self._forget()
        numbers = self._numbers
        unknown = set(words).difference(numbers)
        if unknown:
            self._add(list(unknown))
        found = np.fromiter(map(numbers.__getitem__, words), dtype=np.int64, count=len(words))
        begins = self._ends[found]
        counts = self._ends[found + 1] - begins
        places = np.arange(counts.sum()) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        return FoundWords(self._ids[places], counts, self._lengths[found], self._ambiguous[found])

    def _add(self, words: list[str]) -> None:
        encoded = self._encode(words)
        self._numbers.update(zip(words, range(len(self._numbers), len(self._numbers) + len(words)), strict=True))
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        self._lengths = np.concatenate((self._lengths, lengths))
        self._characters += int(lengths.sum())
        flat = np.array([index for ids in encoded for index in ids], dtype=self._dtype)
        self._ids = np.concatenate((self._ids, flat))
        ends = self._ends[-1] + np.cumsum([len(ids) for ids in encoded])
        self._ends = np.concatenate((self._ends, ends))
        self._ambiguous = np.concatenate((self._ambiguous, [self._is_ambiguous(ids) for ids in encoded]))

    def _is_ambiguous(self, ids: list[int]) -> bool:
        """Whether two neighbouring pieces could change places: `==`, `====` or `====`, `==`."""
        for left, right in pairwise(ids):
            if left != right:
                first, second = self._pieces[left], self._pieces[right]
                if first[-1] == second[-1] and first + second == second + first:
                    return True
        return False
