"""Which examples a global batch holds, how it is dealt to ranks and micro-steps, and what the model is given.

Global batch k is a function of (seed, k) alone: positions k*B .. k*B+B-1 of an endless stream that runs through a keyed
permutation of the examples for each epoch. Any k is reached in constant time and nothing of an epoch's order is held.
A batch is sorted by length and cut into as many groups of about equal tokens as there are ranks times micro-steps: so
padding is small and every rank takes the same number of micro-steps. Masks and pair order are drawn under keys of
(seed, epoch, example): how a batch is dealt changes nothing of what is learnt.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from queue import Full, Queue

import numpy as np
import torch

from configs.schema import DataConfig
from data_prep.masking import Masks, draw_masks
from data_prep.pairs import SWAPPED
from data_prep.randomness import Permutation, digest64, draws, uniforms
from data_prep.shards import Rows, Split
from data_prep.vocabulary import PAD

LENGTH_MULTIPLE = 8
"""Rows are padded to a multiple of it, which matrix units prefer."""
PREFETCHED_STEPS = 2


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass is given. Integers are int64.

    `input_ids`, `token_type_ids`: [rows, length], padded at the end; `lengths`: [rows], or None where no row is padded;
    `masked_positions`: [masked], ascending indices into rows * length; `mlm_labels`: [masked]; `sentence_labels`:
    [rows], -1 where there is none; `most_masked`: tokens masked in the row with most. A micro-batch without examples
    (there are more ranks than examples) holds one row of padding that counts for nothing.
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    lengths: torch.Tensor | None
    masked_positions: torch.Tensor
    mlm_labels: torch.Tensor
    sentence_labels: torch.Tensor
    most_masked: int

    def to(self, device: torch.device) -> "MicroBatch":
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch, with counts of `masked` tokens of this rank and, the same on every rank, of
    `examples`, `tokens` and `padded_tokens` (with padding) of the whole."""

    micro_batches: list[MicroBatch]
    masked: int
    examples: int
    tokens: int
    padded_tokens: int


class Batches:
    """The global batches of one split, as one rank sees them.

    With `fixed` masks (for evaluation) masks are those of one epoch and pairs keep their order, batch after batch.
    """

    def __init__(
        self,
        split: Split,
        word_starts: np.ndarray,
        data: DataConfig,
        seed: int,
        global_batch_size: int,
        micro_batch_tokens: int,
        rank: int,
        world_size: int,
        fixed: bool = False,
    ):
        self._split = split
        self._word_starts = word_starts
        self._data = data
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._micro_batch_tokens = micro_batch_tokens
        self._rank = rank
        self._world_size = world_size
        self._fixed = fixed

    def epoch_batch(self, number: int) -> RankBatch:
        """Global batch `number`, counted from 0, of the endless shuffled stream."""
        return self._rank_batch(*global_batch(self._seed, number, self._global_batch_size, self._split.rows))

    def one_pass(self, batches: int | None = None) -> Iterator[RankBatch]:
        """All examples once, in their stored order, the last batch as large as it comes; at most `batches` of them."""
        for number, begin in enumerate(range(0, self._split.rows, self._global_batch_size)):
            if batches is not None and number >= batches:
                return
            indices = np.arange(begin, min(begin + self._global_batch_size, self._split.rows))
            yield self._rank_batch(indices, np.zeros_like(indices))

    def prefetched(self, first: int, last: int) -> Iterator[RankBatch]:
        """Global batches `first` to `last` - 1, made ahead of their use in a thread."""
        queue: Queue = Queue(maxsize=PREFETCHED_STEPS)
        stopped = threading.Event()

        def put(item: RankBatch | BaseException | None) -> None:
            while not stopped.is_set():
                try:
                    return queue.put(item, timeout=0.5)
                except Full:
                    continue

        def produce() -> None:
            try:
                for number in range(first, last):
                    if stopped.is_set():
                        return
                    put(self.epoch_batch(number))
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=produce, name="batches", daemon=True)
        thread.start()
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join()

    def _rank_batch(self, indices: np.ndarray, epochs: np.ndarray) -> RankBatch:
        lengths = self._split.lengths(indices)
        groups = deal(lengths, self._world_size, self._micro_batch_tokens)
        mine = [step[self._rank] for step in groups]
        places = np.concatenate(mine)
        micro_batches, masked = self._collate(indices[places], epochs[places], [len(group) for group in mine])
        padded = sum(len(group) * padded_length(lengths[group]) for step in groups for group in step)
        return RankBatch(micro_batches, masked, len(indices), int(lengths.sum()), padded)

    def _collate(self, indices: np.ndarray, epochs: np.ndarray, sizes: list[int]) -> tuple[list[MicroBatch], int]:
        """Micro-batches of `sizes` rows each, and the tokens masked in all of them."""
        if not len(indices):
            return [_empty_micro_batch() for _ in sizes], 0
        rows = self._split.take(indices)
        keys = example_keys(self._seed, epochs, indices)
        input_ids = padded_rows(rows)
        segment_b_start, labels = rows.segment_b_start, rows.sentence_label
        if self._data.resample_order and not self._fixed:
            swapped = (uniforms(keys, 0) < 0.5).astype(np.int64)
            exchanged = (swapped != labels) & (segment_b_start < rows.lengths)
            input_ids, segment_b_start = exchange_segments(input_ids, rows.lengths, segment_b_start, exchanged)
            labels = np.where(exchanged, SWAPPED - labels, labels)
        if rows.static_masks is None:
            masks = draw_masks(input_ids, rows.lengths, segment_b_start, keys, self._word_starts, self._data.masking)
        else:
            masks = _static_masks(rows)
        columns = np.arange(input_ids.shape[1])
        token_types = (columns >= segment_b_start[:, None]) & (columns < rows.lengths[:, None])
        shown = input_ids.astype(np.int64)
        shown[masks.rows, masks.columns] = masks.inputs
        micro_batches, begin = [], 0
        for size in sizes:
            part = slice(begin, begin + size)
            begin += size
            micro_batches.append(
                _micro_batch(shown[part], token_types[part], rows.lengths[part], labels[part], masks, part)
                if size
                else _empty_micro_batch()
            )
        return micro_batches, len(masks.labels)


def global_batch(seed: int, number: int, size: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(examples, their epochs), int64 [size]: a function of (seed, number) for a data set of `rows` examples."""
    positions = number * size + np.arange(size, dtype=np.int64)
    epochs, places = np.divmod(positions, rows)
    indices = np.empty(size, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = Permutation(digest64(seed, "order", int(epoch)), rows)(places[chosen])
    return indices, epochs


def example_keys(seed: int, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """uint64: the keys of all draws that are made anew for each example in each epoch."""
    return draws(draws(digest64(seed, "load"), epochs), indices)


def deal(lengths: np.ndarray, world_size: int, micro_batch_tokens: int) -> list[list[np.ndarray]]:
    """A global batch as [micro-step][rank] -> places in the batch, longest examples first.

    As few micro-steps as `micro_batch_tokens` (with padding) allow, the same number on every rank; for these, groups
    whose largest is as small as can be. Some are empty where there are more ranks than examples.
    """
    order = np.argsort(-lengths, kind="stable")
    padded = (-(-lengths[order] // LENGTH_MULTIPLE) * LENGTH_MULTIPLE).tolist()
    micro_steps = -(-(len(_bounds(padded, micro_batch_tokens)) - 1) // world_size)
    groups = micro_steps * world_size
    too_small, capacity = sum(padded) // groups // 2, micro_batch_tokens
    while capacity - too_small > LENGTH_MULTIPLE:
        middle = (too_small + capacity) // 2
        if len(_bounds(padded, middle)) - 1 <= groups:
            capacity = middle
        else:
            too_small = middle
    bounds = _bounds(padded, capacity)
    while len(bounds) - 1 < min(groups, len(order)):
        # The group with the most rows can be parted.
        widest = int(np.argmax(np.diff(bounds)))
        bounds.insert(widest + 1, (bounds[widest] + bounds[widest + 1] + 1) // 2)
    bounds += [len(order)] * (groups + 1 - len(bounds))
    parts = np.split(order, bounds[1:-1])
    return [parts[step * world_size : (step + 1) * world_size] for step in range(micro_steps)]


def _bounds(padded: list[int], capacity: int) -> list[int]:
    """Where groups of rows of `padded` lengths (descending) begin and end, each filled up to `capacity` tokens."""
    bounds = [0]
    while bounds[-1] < len(padded):
        bounds.append(min(len(padded), bounds[-1] + max(1, capacity // padded[bounds[-1]])))
    return bounds


def padded_length(lengths: np.ndarray) -> int:
    """The width that rows of `lengths` are padded to."""
    return -(-int(lengths.max(initial=0)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def padded_rows(rows: Rows) -> np.ndarray:
    """[rows, width]: the ids of `rows`, padded at the end."""
    padded = np.full((len(rows.lengths), padded_length(rows.lengths)), PAD, dtype=rows.input_ids.dtype)
    padded[np.arange(padded.shape[1]) < rows.lengths[:, None]] = rows.input_ids
    return padded


def exchange_segments(
    input_ids: np.ndarray, lengths: np.ndarray, segment_b_start: np.ndarray, exchanged: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `segment_b_start` with A and B exchanged in the rows where `exchanged` is true."""
    rows = np.flatnonzero(exchanged)
    if not len(rows):
        return input_ids, segment_b_start
    columns = np.arange(input_ids.shape[1])
    length, start = lengths[rows, None], segment_b_start[rows, None]
    new_start = length - start + 1
    in_b_before = columns < new_start - 1
    source = np.where(in_b_before, start + columns - 1, columns - new_start + 1)
    is_separator = (columns == new_start - 1) | (columns == length - 1)
    source = np.where(is_separator, length - 1, source)
    source = np.where((columns == 0) | (columns >= length), columns, source)
    input_ids, segment_b_start = input_ids.copy(), segment_b_start.copy()
    input_ids[rows] = np.take_along_axis(input_ids[rows], source, axis=1)
    segment_b_start[rows] = new_start[:, 0]
    return input_ids, segment_b_start


def _micro_batch(
    shown: np.ndarray, token_types: np.ndarray, lengths: np.ndarray, labels: np.ndarray, masks: Masks, part: slice
) -> MicroBatch:
    width = padded_length(lengths)
    first, last = np.searchsorted(masks.rows, (part.start, part.stop))
    positions = (masks.rows[first:last] - part.start) * width + masks.columns[first:last]
    return MicroBatch(
        input_ids=torch.from_numpy(shown[:, :width].copy()),
        token_type_ids=torch.from_numpy(token_types[:, :width].astype(np.int64)),
        lengths=torch.from_numpy(lengths.copy()) if (lengths < width).any() else None,
        masked_positions=torch.from_numpy(positions),
        mlm_labels=torch.from_numpy(masks.labels[first:last].astype(np.int64)),
        sentence_labels=torch.from_numpy(labels.copy()),
        most_masked=int(np.bincount(masks.rows[first:last] - part.start, minlength=1).max()),
    )


def _empty_micro_batch() -> MicroBatch:
    row = torch.full((1, LENGTH_MULTIPLE), PAD)
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(row, torch.zeros_like(row), None, nothing, nothing, torch.tensor([-1]), 0)


def _static_masks(rows: Rows) -> Masks:
    masks = rows.static_masks
    return Masks(
        np.repeat(np.arange(len(rows.lengths)), masks["counts"]),
        masks["masked_positions"].astype(np.int64),
        masks["masked_labels"],
        masks["masked_inputs"],
    )
