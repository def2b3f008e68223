"""The learning rate and the depth as functions of the step."""

from collections.abc import Sequence

from configs.schema import DepthConfig


def learning_rate_at(step: int, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of `step`, counted from 0 (the first update has step 0 and rate 0).

    Linear warm-up from 0, then linear decay to 0 over all `total_steps`, counted from step 0 as the reference
    implementation does: so the rate drops a little where the warm-up ends. From `total_steps` on it is 0.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, 1 - step / total_steps)


def num_layers_at(step: int, depth_schedule: Sequence[DepthConfig], num_hidden_layers: int) -> int:
    """The layers that `step`, counted from 0, passes through: those of `depth_schedule`, then all."""
    end = 0
    for stage in depth_schedule:
        end += stage.steps
        if step < end:
            return stage.num_layers
    return num_hidden_layers


def num_layers_after(steps: int, depth_schedule: Sequence[DepthConfig], num_hidden_layers: int) -> int:
    """The layers that the last of so many `steps` passed through; before the first those that it will."""
    return num_layers_at(max(0, steps - 1), depth_schedule, num_hidden_layers)
