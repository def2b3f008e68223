"""Where ZeRO leaves the tensors of a parameter group.

Under ZeRO an optimizer steps one flat tensor per parameter group and rank. Stages 1 and 2 lay the group's tensors end
to end, pad, and give every rank an equal slice of the whole; stage 3 slices every tensor by itself, pads each, and lays
a rank's slices end to end. Knowing that, whole tensors can be measured, gathered and dealt out again.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class Partition:
    """The tensors of one parameter group, of `sizes` elements each, over the ranks of the default process group."""

    def __init__(self, sizes: list[int], zero_stage: int):
        self._sizes = sizes
        self._zero_stage = zero_stage

    def segments(self, part: Tensor) -> list[Tensor]:
        """Views of what this rank's flat `part` holds of each tensor, without padding; some may be empty."""
        return [part[inside] for inside, _ in self._spans(dist.get_rank(), part.numel())]

    def whole(self, part: Tensor) -> list[Tensor]:
        """The whole tensors, flat, from the parts of all ranks, which must all call; only rank 0 gets them."""
        part = _communicable(part)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(part, parts)
        if parts is None:
            return []
        tensors = [part.new_empty(size) for size in self._sizes]
        for rank, rank_part in enumerate(parts):
            for tensor, (inside, of_tensor) in zip(tensors, self._spans(rank, part.numel()), strict=True):
                tensor[of_tensor] = rank_part[inside]
        return tensors

    def deal(self, tensors: list[Tensor], part: Tensor) -> None:
        """Copy this rank's share of the whole `tensors`, flat, into its `part`."""
        for tensor, (inside, of_tensor) in zip(tensors, self._spans(dist.get_rank(), part.numel()), strict=True):
            part[inside] = tensor[of_tensor].to(part.device)

    def _spans(self, rank: int, part_size: int) -> list[tuple[slice, slice]]:
        """Per tensor, the span of it in the part of `rank`, and the span of the tensor that this is."""
        spans = []
        position = 0
        for size in self._sizes:
            if self._zero_stage == 3:
                slice_size = -(-size // dist.get_world_size())
                begin = min(size, rank * slice_size)
                end = min(size, begin + slice_size)
                inside = position
                position += slice_size
            else:
                begin = min(size, max(0, rank * part_size - position))
                end = min(size, max(0, (rank + 1) * part_size - position))
                inside = max(0, position - rank * part_size)
                position += size
            spans.append((slice(inside, inside + end - begin), slice(begin, end)))
        return spans


def all_reduced(values: list[Tensor]) -> Tensor:
    """0-d `values` as one tensor, summed over the ranks."""
    stacked = torch.stack(values)
    summed = _communicable(stacked)
    dist.all_reduce(summed)
    return summed.to(stacked.device)


def _communicable(tensor: Tensor) -> Tensor:
    """`tensor` where the ranks' backend takes it: NCCL only from the GPU, which ZeRO-Offload's state is not on."""
    return tensor.cuda() if dist.get_backend() == "nccl" else tensor
