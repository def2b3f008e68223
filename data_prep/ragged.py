"""Rows of different lengths that lie end to end in one flat array."""

import numpy as np


def concatenated_ranges(begins: np.ndarray | int, sizes: np.ndarray) -> np.ndarray:
    """int64: begin, begin + 1, … for each of `begins`, as many as its size, one range after the other."""
    return np.arange(sizes.sum()) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
