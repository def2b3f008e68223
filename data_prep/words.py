"""Ids of words that were met before: a corpus repeats its words, and finding one again is faster than SentencePiece.

Pieces never cross white space, so the ids of a text are those of its words, end to end. Where two ways to part a word
have the same score, SentencePiece's choice depends on what stands before it; such words are told.
"""

from collections.abc import Callable, Sequence
from itertools import chain, count, repeat
from typing import NamedTuple

import numpy as np

from data_prep.ragged import concatenated_ranges

MAX_CHARACTERS = 4 * 2**20
"""Of the words kept, about 80 MB of memory."""
MAX_MISSING = 0.2
"""The share of words that are not kept at which all are forgotten."""


class FoundWords(NamedTuple):
    """`ids`: of words, end to end. For each word `counts`: int64, its ids, `characters`: int64, and `ambiguous`: bool,
    whether there are several ways to part it."""

    ids: np.ndarray
    counts: np.ndarray
    characters: np.ndarray
    ambiguous: np.ndarray


class WordIds:
    """The ids of words, kept once `encode` (words -> lists of ids) has found them; `pieces` are the vocabulary's.

    What is kept is bounded: when it is full, words that are not in it are encoded anew each time, and when these
    become many, as where a corpus changes its language, all are forgotten.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], pieces: Sequence[str], dtype: type[np.integer]):
        self._encode = encode
        self._pieces = pieces
        self._first_characters = np.array([ord(piece[0]) for piece in pieces])
        self._last_characters = np.array([ord(piece[-1]) for piece in pieces])
        self._dtype = dtype
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._kept_characters = 0
        self._ids = np.empty(0, dtype=self._dtype)
        self._ends = np.zeros(1, dtype=np.int64)
        self._characters = np.empty(0, dtype=np.int64)
        self._ambiguous = np.empty(0, dtype=bool)

    def of(self, words: list[str]) -> FoundWords:
        is_full = self._kept_characters > MAX_CHARACTERS
        found = np.fromiter(map(self._numbers.get, words, repeat(-1)), dtype=np.int64, count=len(words))
        missing = np.flatnonzero(found < 0)
        ids, ends, characters, ambiguous = self._ids, self._ends, self._characters, self._ambiguous
        if len(missing):
            missing_words = [words[place] for place in missing]
            new = dict(zip(dict.fromkeys(missing_words), count(len(characters)), strict=False))
            found[missing] = [new[word] for word in missing_words]
            new_ids, new_ends, new_characters, new_ambiguous = self._encoded(list(new))
            ids = np.concatenate((ids, new_ids))
            ends = np.concatenate((ends, ends[-1] + new_ends))
            characters = np.concatenate((characters, new_characters))
            ambiguous = np.concatenate((ambiguous, new_ambiguous))
            if not is_full:
                self._numbers |= new
                self._kept_characters += int(new_characters.sum())
                self._ids, self._ends, self._characters, self._ambiguous = ids, ends, characters, ambiguous
            elif len(missing) > MAX_MISSING * len(words):
                self._forget()
        begins = ends[found]
        counts = ends[found + 1] - begins
        return FoundWords(ids[concatenated_ranges(begins, counts)], counts, characters[found], ambiguous[found])

    def _encoded(self, words: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids, ends, characters, whether ambiguous) of different words."""
        encoded = self._encode(words)
        ids = np.fromiter(chain.from_iterable(encoded), dtype=self._dtype)
        counts = np.fromiter(map(len, encoded), dtype=np.int64, count=len(words))
        characters = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        return ids, np.cumsum(counts), characters, self._ambiguous_words(ids, counts)

    def _ambiguous_words(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """bool: whether two neighbouring pieces of a word could change places: `==`, `====` or `====`, `==`."""
        first, last = self._first_characters[ids], self._last_characters[ids]
        word = np.repeat(np.arange(len(counts)), counts)
        alike = (first[1:] == first[:-1]) & (last[1:] == last[:-1])
        alike &= (ids[1:] != ids[:-1]) & (word[1:] == word[:-1])
        ambiguous = np.zeros(len(counts), dtype=bool)
        for place in np.flatnonzero(alike):
            left, right = self._pieces[ids[place]], self._pieces[ids[place + 1]]
            if left + right == right + left:
                ambiguous[word[place]] = True
        return ambiguous
