"""Notices when the loss leaves its course: a watch on the losses alone, which says the same on every rank.

ALBERT's large models are known to collapse: the loss jumps, or drifts, back to that of a unigram model and stays there.
Two rules look for it:

- a spike: `STEPS_IN_A_ROW` losses far above their running level;
- a plateau: the smoothed loss back at the unigram cross-entropy after it had left it, or still there long after the
  warm-up (larger models rest on it for thousands of steps before they leave it).
"""

import math
from dataclasses import asdict, dataclass, field

STEPS_IN_A_ROW = 3
STEPS_TO_KNOW_THE_LEVEL = 10
LEVEL_HORIZON = 100
SMOOTH_HORIZON = 20
SPREADS_ABOVE = 6.0
"""Mean absolute deviations above the level that are far; for normal noise 4.8 standard deviations."""
LEAST_NATS_ABOVE = 0.5
NATS_BELOW_WHEN_LEFT = 0.3
NATS_BELOW_WHEN_BACK = 0.1
SHORTEST_WAIT_ON_THE_PLATEAU = 1000
WARMUPS_ON_THE_PLATEAU = 4
FRACTION_ON_THE_PLATEAU = 0.2
DOUBTED_STEPS = 5
"""Weights of so many steps before the onset are not trusted either."""


@dataclass(frozen=True)
class Event:
    """What was noticed at finished step `step`: `kind` is spike, plateau or not_finite. Up to `healthy_step` nothing
    was wrong; 0 is the start. Losses in nats."""

    kind: str
    step: int
    healthy_step: int
    loss: float
    level: float
    text: str


class DivergedError(Exception):
    """Training cannot go on from where it is. `batch` is the number of the global batch of the last step."""

    def __init__(self, event: Event, batch: int):
        super().__init__(event.text)
        self.event = event
        self.batch = batch


@dataclass
class WatchState:
    """What a watch remembers, JSON-serialisable."""

    count: int = 0
    level: float = 0.0
    spread: float = 0.0
    smooth: float = 0.0
    high: list[float] = field(default_factory=list)
    last_below: int | None = None
    reported_plateau: bool = False


class DivergenceWatch:
    """Given every step's MLM loss in turn, says when it diverges. Without a finite `unigram_cross_entropy` (nats) only
    spikes are looked for."""

    def __init__(self, unigram_cross_entropy: float, warmup_steps: int, steps: int, state: dict | None = None):
        self._unigram = unigram_cross_entropy
        self._plateau_ends = max(
            SHORTEST_WAIT_ON_THE_PLATEAU, WARMUPS_ON_THE_PLATEAU * warmup_steps, FRACTION_ON_THE_PLATEAU * steps
        )
        self._state = WatchState(**(state or {}))

    def state(self) -> dict:
        """What another watch needs to go on from here."""
        return asdict(self._state)

    def healthy_step(self, step: int) -> int:
        """The last step, of `step` finished ones, whose weights are trusted; 0 if none are."""
        state = self._state
        before = step - len(state.high) - DOUBTED_STEPS
        return max(0, before if state.last_below is None else min(before, state.last_below))

    def forget_level(self) -> None:
        """Learn the running level anew: what comes may be higher, and nothing be wrong."""
        self._state = WatchState(last_below=self._state.last_below, reported_plateau=self._state.reported_plateau)

    def observe(self, step: int, loss: float) -> Event | None:
        """Take in the finite `loss` of finished step `step`, and say what is wrong, if anything, once."""
        state = self._state
        known = state.count >= STEPS_TO_KNOW_THE_LEVEL
        threshold = state.level + max(LEAST_NATS_ABOVE, SPREADS_ABOVE * state.spread)
        state.smooth = _moved(state.smooth, loss, state.count, SMOOTH_HORIZON)
        if known and loss > threshold:
            state.high.append(loss)
            if len(state.high) == STEPS_IN_A_ROW:
                return self._spike(step, sum(state.high) / len(state.high))
        else:
            state.high = []
            if state.count:
                state.spread = _moved(state.spread, abs(loss - state.level), state.count - 1, LEVEL_HORIZON)
            state.level = _moved(state.level, loss, state.count, LEVEL_HORIZON)
        state.count += 1
        return self._plateau(step)

    def _spike(self, step: int, loss: float) -> Event:
        state = self._state
        healthy, level = self.healthy_step(step), state.level
        # The level is learnt anew, so that what stays high is reported once.
        self._state = WatchState(1, loss, 0.0, state.smooth, [], state.last_below, state.reported_plateau)
        text = f"step {step:,}: the MLM loss jumped to {loss:.3f} nats from a running level of {level:.3f}"
        return Event("spike", step, healthy, loss, level, text)

    def _plateau(self, step: int) -> Event | None:
        state = self._state
        if state.smooth < self._unigram - NATS_BELOW_WHEN_LEFT and state.count >= SMOOTH_HORIZON:
            state.last_below, state.reported_plateau = step, False
            return None
        back = state.smooth > self._unigram - NATS_BELOW_WHEN_BACK and state.count >= SMOOTH_HORIZON
        if not back or state.reported_plateau or (state.last_below is None and step < self._plateau_ends):
            return None
        state.reported_plateau = True
        what = "has not left" if state.last_below is None else "is back at"
        levels = f"{state.smooth:.3f} of {self._unigram:.3f} nats"
        text = f"step {step:,}: the MLM loss {what} that of a unigram model ({levels})"
        healthy = 0 if state.last_below is None else self.healthy_step(step)
        return Event("plateau", step, healthy, state.smooth, self._unigram, text)


def not_finite(step: int, healthy_step: int, loss: float, gradient_norm: float, rate: float) -> Event:
    """The event of a loss or gradient that is not finite at `step`, taken with learning rate `rate`."""
    text = f"step {step:,} is not finite (loss {loss}, gradient norm {gradient_norm}, learning rate {rate:.3g})"
    return Event("not_finite", step, healthy_step, loss, math.nan, text)


def overflowed(step: int, healthy_step: int, rate: float) -> Event:
    """The event of fp16 gradients at `step` that overflow however far the loss is scaled down."""
    text = f"step {step:,}: gradients overflow even at the lowest loss scale (learning rate {rate:.3g})"
    return Event("not_finite", step, healthy_step, math.nan, math.nan, text)


def _moved(mean: float, value: float, count: int, horizon: int) -> float:
    """The mean of `count` values after one more; from `horizon` values on the older ones fade."""
    return mean + (value - mean) / min(count + 1, horizon)
