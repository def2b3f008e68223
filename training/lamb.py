"""LAMB (You et al., arXiv 1904.00962) in the form ALBERT was trained with, also on tensors that ZeRO has partitioned.

Per tensor, with gradient g, weights w and rate:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2          (no bias correction)
    u = m / (sqrt(v) + eps) + decay w
    w -= rate * |w| / |u| * u

Biases and LayerNorm weights have no decay and no trust ratio |w| / |u|. A ratio needs the norms of whole tensors, while
ZeRO leaves each rank a flat part of every parameter group: squared norms are summed per tensor over what a rank has of
it, then over the ranks, in one all-reduce a step (two floats a tensor).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig
from training.partition import Partition, all_reduced


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, learning_rate: float, zero_stage: int = 0
) -> list[dict]:
    """Two optimizer groups, fit for `Lamb` and for AdamW: the matrices, and the vectors (biases, LayerNorm weights).

    Few groups, because ZeRO communicates for each. Both keep the order of `named_parameters()`. `names` has the names,
    `partition` says what a rank will find of the tensors (None: all of them, at `zero_stage` 0).
    """
    named = list(model.named_parameters())
    groups = []
    for is_matrix in (True, False):
        chosen = [(name, parameter) for name, parameter in named if (parameter.ndim > 1) is is_matrix]
        groups.append(
            {
                "params": [parameter for _, parameter in chosen],
                "names": [name for name, _ in chosen],
                "partition": Partition([parameter.numel() for _, parameter in chosen], zero_stage)
                if zero_stage
                else None,
                "lr": learning_rate,
                "betas": (config.beta1, config.beta2),
                "eps": config.eps,
                "weight_decay": config.weight_decay if is_matrix else 0.0,
                "adapt": is_matrix,
                "bias_correction": config.bias_correction,
                "clamp": config.clamp,
            }
        )
    return groups


class Lamb(torch.optim.Optimizer):
    """LAMB over float32 tensors, in groups with the keys that `parameter_groups` gives them.

    Where a group has a `partition`, its one tensor at each step is this rank's flat part; all ranks step alike.
    State: `exp_avg` and `exp_avg_sq`, float32 in the tensors' shapes; with bias correction also the group's integer
    `step`.
    """

    def __init__(self, groups: list[dict]):
        super().__init__(groups, {})

    def create_state(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Create zero state for `parameters` (default: those in the groups) that have none yet.

        To be called once the parameters are those that will be stepped, that is after `deepspeed.initialize`.
        """
        grouped = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in grouped if parameters is None else parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Raises RuntimeError if its state was not created before."""
        for group in self.param_groups:
            # ZeRO steps one group after the other: the rest have no gradients then, or no tensors.
            stepped = [part for part in group["params"] if part.grad is not None and self._has_state(part)]
            if not stepped:
                continue
            if group["bias_correction"]:
                group["step"] = group.get("step", 0) + 1
            updates = self._updates(stepped, group)
            if group["adapt"]:
                _scale_by_trust(stepped, updates, group["partition"], group["clamp"])
            torch._foreach_add_(stepped, updates, alpha=-group["lr"])

    def _has_state(self, parameter: Tensor) -> bool:
        if parameter in self.state:
            return True
        # DeepSpeed's wrapper for bfloat16 without ZeRO steps once inside `initialize`, with zero gradients: decay must
        # not move the weights then. A zero gradient in training is a gradient like any other.
        if parameter.grad.any():
            raise RuntimeError("Lamb.create_state() must be called before the first step")
        return False

    def _updates(self, parameters: list[Tensor], group: dict) -> list[Tensor]:
        """The steps to take, before trust ratio and rate; moves the moments on."""
        gradients = [parameter.grad for parameter in parameters]
        exp_avg = [self.state[parameter]["exp_avg"] for parameter in parameters]
        exp_avg_sq = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sq)
        if group["bias_correction"]:
            torch._foreach_div_(denominators, math.sqrt(1 - beta2 ** group["step"]))
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(exp_avg, denominators)
        if group["bias_correction"]:
            torch._foreach_div_(updates, 1 - beta1 ** group["step"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates


def _scale_by_trust(
    weights: list[Tensor], updates: list[Tensor], partition: Partition | None, clamp: tuple[float, float] | None
) -> None:
    """Multiply each tensor's update by |w| / |u| (1 where either is zero), clamped if asked."""
    if partition is not None:
        # Padding stays out: ZeRO 3 leaves it uninitialised, NaNs included.
        (weight,), (update,) = weights, updates
        weights, updates = partition.segments(weight), partition.segments(update)
    # Not `torch.norm`: on the CPU it sums naively, 1e-4 off for a word table and 6e-3 for xxlarge's largest tensor.
    squares = [tensor.square().sum() for tensor in (*weights, *updates)]
    summed = torch.stack(squares) if partition is None else all_reduced(squares)
    weight_norms, update_norms = summed.sqrt().view(2, -1)
    ratios = weight_norms / update_norms
    if clamp is not None:
        ratios = ratios.clamp(*clamp)
    ratios = torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)
    torch._foreach_mul_(updates, list(ratios.unbind()))
