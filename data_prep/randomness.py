"""Every random draw of the project as a keyed hash, so that nothing depends on the order of work.

A *key* is 64 bits that say what a draw is for (seed, document, chunk, …); a *counter* numbers the draws under one
key. `draws` is splitmix64's output function over keys and counters, a few nanoseconds a draw in numpy and the same
on every platform and library version. `Permutation` is a keyed bijection of 0..n-1 in constant memory: it stands
for a shuffled list without holding one.
"""

import hashlib

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def digest64(*parts: bytes | str | int) -> int:
    """A 64-bit digest (blake2b) of a sequence of parts, each delimited: ("ab", "c") differs from ("a", "bc")."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return int.from_bytes(hasher.digest(), "little")


def mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 in, well-mixed uint64 out, a bijection."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draws(keys: np.ndarray | int, counters: np.ndarray | int) -> np.ndarray:
    """uint64 draws number `counters` under `keys` (broadcast together)."""
    # One-dimensional at least: numpy warns where a scalar wraps around.
    keys = np.atleast_1d(np.asarray(keys, dtype=np.uint64))
    counters = np.atleast_1d(np.asarray(counters, dtype=np.uint64))
    return mixed(keys + (counters + np.uint64(1)) * np.uint64(GOLDEN))


def uniforms(keys: np.ndarray | int, counters: np.ndarray | int) -> np.ndarray:
    """float64 draws in [0, 1) number `counters` under `keys` (broadcast together)."""
    return (draws(keys, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """A keyed bijection of 0..size-1: a Feistel network over the next power of four, walked until it is in range."""

    _ROUNDS = 6

    def __init__(self, key: int, size: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._low = np.uint64((1 << int(self._half)) - 1)
        self._round_keys = draws(key & _MASK64, np.arange(self._ROUNDS))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64 images of `positions` (int64, each in 0..size-1)."""
        values = np.asarray(positions).astype(np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._low
        for key in self._round_keys:
            left, right = right, left ^ (mixed(right + key) & self._low)
        return (left << self._half) | right
