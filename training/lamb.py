"""LAMB (You et al., arXiv 1904.00962) in the form ALBERT was trained with, also on tensors that ZeRO has partitioned.

Per tensor, with gradient g, weights w and rate:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2          (no bias correction)
    u = m / (sqrt(v) + eps) + decay w
    w -= rate * |w| / |u| * u

Biases and LayerNorm weights have no decay and no trust ratio |w| / |u|. A ratio needs the norms of whole tensors, while
ZeRO leaves each rank one flat slice of every parameter group: so a group holds ONE tensor, and the squared norms are
summed over the ranks, all that one `step()` needs in one all-reduce (two floats a tensor).
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig


def parameter_groups(model: nn.Module, config: OptimizerConfig, learning_rate: float) -> list[dict]:
    """One optimizer group per parameter tensor, in the order of `named_parameters()`, fit for `Lamb` and for AdamW."""
    groups = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1  # vectors are the biases and the LayerNorm weights
        groups.append(
            {
                "params": [parameter],
                "name": name,
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
    """LAMB over groups of one float32 tensor each, with the keys that `parameter_groups` gives them.

    Built with the whole tensors. With a `norm_group`, the tensors found at each step are this rank's flat slices:
    of equal size, in the order of the ranks, the last ones padded, as ZeRO makes them (a slice may be empty or all
    padding). All ranks of the group then step with the same tensors.

    State: `exp_avg` and `exp_avg_sq`, float32 in the parameter's shape; with bias correction also the group's integer
    `step`.
    """

    def __init__(self, groups: list[dict], norm_group: torch.distributed.ProcessGroup | None = None):
        super().__init__(groups, {})
        self.norm_group = norm_group
        for group in self.param_groups:
            if len(group["params"]) != 1:
                raise ValueError(f"a parameter group of Lamb holds one tensor, not {len(group['params'])}")
            group["numel"] = group["params"][0].numel()

    def create_state(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Create zero state for `parameters` (default: those in the groups) that have none yet.

        To be called once the parameters are those that will be stepped, that is after `deepspeed.initialize`.
        """
        for parameter in self._grouped_parameters() if parameters is None else parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Raises RuntimeError if its state was not created before."""
        weights, updates, groups = [], [], []
        for group in self.param_groups:
            for parameter in group["params"]:  # none, where ZeRO 3 steps one group after the other
                if parameter.grad is not None and self._has_state(parameter):
                    weight, update = self._update(parameter, group)
                    weights.append(weight)
                    updates.append(update)
                    groups.append(group)

        ratios = iter(self._trust_ratios(weights, updates, groups))
        for weight, update, group in zip(weights, updates, groups, strict=True):
            if group["adapt"]:
                weight.addcmul_(update, next(ratios), value=-group["lr"])
            else:
                weight.add_(update, alpha=-group["lr"])

    def _grouped_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _has_state(self, parameter: Tensor) -> bool:
        if parameter in self.state:
            return True
        # DeepSpeed's wrapper for bfloat16 without ZeRO steps once inside `initialize`, with zero gradients: decay must
        # not move the weights then. A zero gradient in training is a gradient like any other.
        if parameter.grad.any():
            raise RuntimeError("Lamb.create_state() must be called before the first step")
        return False

    def _update(self, parameter: Tensor, group: dict) -> tuple[Tensor, Tensor]:
        """The weights (a view) and the step to take along them, before trust ratio and rate; moves the moments on."""
        state = self.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        if self.norm_group is not None:
            # ZeRO 3 leaves the padding uninitialised, NaNs included.
            start = torch.distributed.get_rank(self.norm_group) * parameter.numel()
            tensors = tuple(tensor[: max(0, group["numel"] - start)] for tensor in tensors)
        weight, gradient, exp_avg, exp_avg_sq = tensors

        beta1, beta2 = group["betas"]
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["bias_correction"]:
            group["step"] = group.get("step", 0) + 1
            exp_avg = exp_avg / (1 - beta1 ** group["step"])
            exp_avg_sq = exp_avg_sq / (1 - beta2 ** group["step"])
        update = exp_avg / exp_avg_sq.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        return weight, update

    def _trust_ratios(self, weights: list[Tensor], updates: list[Tensor], groups: list[dict]) -> list[Tensor]:
        """|w| / |u| as 0-d tensors, one for each of the adapted `groups`; 1 where either norm is zero."""
        adapted = [index for index, group in enumerate(groups) if group["adapt"]]
        if not adapted:
            return []
        pairs = [(weights[index], updates[index]) for index in adapted]
        # Not `torch.norm`: on the CPU it sums naively, 1e-4 off for a word table and 6e-3 for xxlarge's largest tensor.
        squares = torch.stack([tensor.square().sum() for pair in pairs for tensor in pair])
        if self.norm_group is not None:
            torch.distributed.all_reduce(squares, group=self.norm_group)
        ratios = []
        for index, (weight_norm, update_norm) in zip(adapted, squares.sqrt().view(-1, 2), strict=True):
            ratio = weight_norm / update_norm
            if groups[index]["clamp"] is not None:
                ratio = ratio.clamp(*groups[index]["clamp"])
            ratios.append(torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0))
        return ratios
