"""The learning rate as a function of the step."""


def learning_rate_at(step: int, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of `step`, counted from 0 (the first update has step 0 and rate 0).

    Linear warm-up from 0, then linear decay to 0 over all `total_steps`, counted from step 0 as the reference
    implementation does: so the rate drops a little where the warm-up ends. From `total_steps` on it is 0.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, 1 - step / total_steps)
