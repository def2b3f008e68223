"""The training loop: global batches in, metrics and checkpoints out, until the last step or a request to stop."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field

from configs.schema import Config
from training.batches import Batches, RankBatch
from training.checkpoint import CheckpointWriter
from training.divergence import DivergedError, DivergenceWatch, Event, not_finite, overflowed
from training.engine import Engine, StoppedError
from training.evaluate import LossSums, validation_metrics
from training.schedule import learning_rate_at, num_layers_after, num_layers_at
from training.tracking import EventsFile, MetricsFile

REPORT_SECONDS = 10.0
LOWEST_LOSS_SCALE = "loss scale already at minimum"
"""What DeepSpeed's plain `Exception` says, on every rank, when gradients overflow and the scale cannot be lowered."""


class StopRequest:
    """Set by SIGTERM or Ctrl-C: all ranks finish the step they are in, unless it is a long one, save, and end."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def _request(self, *_: object) -> None:
        self.requested = True


@dataclass
class Progress:
    """How far a run has come, and what it passed over: step s (from 0) learns from global batch s + `batch_offset`.

    `rate_factor` multiplies the learning rate; `rollbacks` has an entry for each, oldest first; `skipped_steps` counts
    the updates that fp16 passed over.
    """

    step: int = 0
    tokens: int = 0
    batch_offset: int = 0
    rate_factor: float = 1.0
    skipped_steps: int = 0
    rollbacks: list[dict] = field(default_factory=list)

    @classmethod
    def of_state(cls, state: dict) -> "Progress":
        """Where the checkpoint with `state` stood."""
        return cls(state["step"], state["tokens"], **state.get("course", {}))

    def state(self) -> dict:
        """What a checkpoint's state says of it."""
        course = asdict(self)
        return {"step": course.pop("step"), "tokens": course.pop("tokens"), "course": course}


@dataclass(frozen=True)
class Recorder:
    """What rank 0 keeps of a run: its metrics, its events, and its checkpoints with `state(progress)` in them."""

    metrics: MetricsFile
    events: EventsFile
    checkpoints: CheckpointWriter
    state: Callable[[Progress], dict]


def train(
    config: Config,
    engine: Engine,
    batches: Batches,
    validation: Batches,
    progress: Progress,
    stop: StopRequest,
    recorder: Recorder | None,
    watch: DivergenceWatch,
    unigram_cross_entropy: float,
) -> bool:
    """Go on from `progress` (which is kept up to date) to the last step; only rank 0 has a `recorder`.

    Returns whether a signal, to whichever rank, ended it early. Raises `DivergedError`, on all ranks and
    without saving what it led to, at the first loss or gradient that is not finite, and at what `watch` notices unless
    the run is to go on.
    """
    training = config.training
    last_step = training.last_step
    report = _Reports(progress, last_step, config.data.sentence_objective) if recorder is not None else None
    peak = training.learning_rate * progress.rate_factor
    stopping, saved = False, progress.step
    depths = (training.depth_schedule, config.model.num_hidden_layers)
    offset = progress.batch_offset
    with closing(batches.prefetched(progress.step + offset, last_step + offset)) as prefetched:
        batch = next(prefetched, None)
        pending = engine.count_masked(batch) if batch else None
        while batch is not None:
            begin = time.monotonic()
            masked = pending.value()
            following = next(prefetched, None)
            waited = time.monotonic() - begin
            pending = engine.count_masked(following) if following else None
            rate = learning_rate_at(progress.step, peak, training.warmup_steps, training.steps)
            num_layers = num_layers_at(progress.step, *depths)
            if num_layers != num_layers_after(progress.step, *depths):
                # A deeper model starts with a higher loss.
                watch.forget_level()
            try:
                sums, stopping = engine.train_step(
                    progress.step, batch, masked, rate, num_layers, lambda: stop.requested
                )
            except StoppedError:
                stopping = True
                if progress.step > saved:
                    _save(engine, recorder, progress, watch)
                break
            except Exception as error:
                if LOWEST_LOSS_SCALE not in str(error):
                    raise
                event = overflowed(progress.step + 1, watch.healthy_step(progress.step), rate)
                raise _diverged(event, progress.step + offset, recorder) from None
            progress.step += 1
            progress.tokens += batch.tokens
            event = observed(watch, sums, engine.gradient_norm, progress, rate, training.precision)
            if event is not None and (event.kind == "not_finite" or training.on_divergence.action != "warn"):
                raise _diverged(event, progress.step - 1 + offset, recorder)
            seconds = time.monotonic() - begin
            values = _training_metrics(sums, batch, rate, engine.gradient_norm, seconds, waited, config)
            if training.depth_schedule:
                values["train/num_layers"] = num_layers
            if training.precision == "fp16":
                values["train/skipped_steps"] = progress.skipped_steps
            if event is not None:
                values["train/divergence"] = 1
            ending = stopping or progress.step == last_step
            # Whoever is told to stop has no time to evaluate: it is made up for when the run goes on.
            if not stopping and training.evaluates_after(progress.step):
                try:
                    values |= evaluated(config, engine, validation, progress.step, stop, unigram_cross_entropy)
                except StoppedError:
                    stopping = ending = True
            if recorder is not None:
                recorder.metrics.append(progress.step, progress.tokens, values)
                report.step(values, batch.tokens)
                if event is not None:
                    print(f"warning: {event.text}", flush=True)
                    recorder.events.append({**asdict(event), "action": "warn"})
            if progress.step % training.checkpoint.every == 0 or ending:
                _save(engine, recorder, progress, watch)
                saved = progress.step
            if stopping:
                break
            batch = following
    if recorder is not None:
        recorder.checkpoints.wait()
    return stopping


def evaluated(
    config: Config, engine: Engine, validation: Batches, step: int, stop: StopRequest, unigram_cross_entropy: float
) -> dict[str, float]:
    """Validation metrics after `step` steps, through the layers that the last of them used; raises `StoppedError`."""
    num_layers = num_layers_after(step, config.training.depth_schedule, config.model.num_hidden_layers)
    batches = validation.one_pass(config.training.evaluate.batches)
    sums = engine.evaluate(batches, num_layers, lambda: stop.requested)
    metrics = validation_metrics(sums, config.data.sentence_objective)
    return metrics | {"validation/unigram_cross_entropy": unigram_cross_entropy}


def _diverged(event: Event, batch: int, recorder: Recorder | None) -> DivergedError:
    """The error of `event`, once no checkpoint is being written any more."""
    if recorder is not None:
        recorder.checkpoints.wait()
    return DivergedError(event, batch)


def _save(engine: Engine, recorder: Recorder | None, progress: Progress, watch: DivergenceWatch) -> None:
    state = engine.gathered_state()
    if recorder is not None:
        described = recorder.state(progress) | {"watch": watch.state(), "loss_scale": engine.loss_scale()}
        trusted = watch.healthy_step(progress.step)
        recorder.checkpoints.write(progress.step, state.weights, state.moments, described, trusted)


def observed(
    watch: DivergenceWatch, sums: LossSums, gradient_norm: float, progress: Progress, rate: float, precision: str
) -> Event | None:
    """What is wrong with the step just finished. In fp16 gradients overflow now and then: DeepSpeed passes over the
    step and lowers its loss scale, and here it is counted."""
    loss = sums.mean_mlm_loss + sums.mean_sentence_loss
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return watch.observe(progress.step, sums.mean_mlm_loss)
    if precision == "fp16":
        progress.skipped_steps += 1
        return None
    return not_finite(progress.step, watch.healthy_step(progress.step), loss, gradient_norm, rate)


def _training_metrics(
    sums: LossSums,
    batch: RankBatch,
    rate: float,
    gradient_norm: float,
    seconds: float,
    waited: float,
    config: Config,
) -> dict[str, float]:
    values = {
        "train/loss": sums.mean_mlm_loss + sums.mean_sentence_loss,
        "train/mlm_loss": sums.mean_mlm_loss,
        "train/mlm_accuracy": sums.mlm_correct / max(1, sums.masked),
    }
    objective = config.data.sentence_objective
    if objective != "none":
        values[f"train/{objective}_loss"] = sums.mean_sentence_loss
        values[f"train/{objective}_accuracy"] = sums.sentence_correct / sums.examples
    return values | {
        "train/learning_rate": rate,
        "train/gradient_norm": gradient_norm,
        "speed/tokens_per_second": batch.tokens / seconds,
        "speed/padding_fraction": 1 - batch.tokens / batch.padded_tokens,
        "speed/data_wait_fraction": waited / seconds,
    }


def print_validation(step: int, values: dict[str, float], sentence_objective: str) -> None:
    """A line on the validation metrics in `values`."""
    accuracy = f"validation/{sentence_objective}_accuracy"
    sentence = ""
    if accuracy in values:
        sentence = (
            f", {sentence_objective.upper()} accuracy {values[accuracy]:.3f} "
            f"± {values[accuracy + '_standard_error']:.3f}"
        )
    print(
        f"step {step:>6,}  validation: MLM loss {values['validation/mlm_loss']:.3f} "
        f"(unigram {values['validation/unigram_cross_entropy']:.3f}), "
        f"MLM accuracy {values['validation/mlm_accuracy']:.3f}{sentence}",
        flush=True,
    )


class _Reports:
    """A line on the terminal now and then, and at every evaluation."""

    def __init__(self, progress: Progress, last_step: int, sentence_objective: str):
        self._objective = sentence_objective
        self._progress = progress
        self._last_step = last_step
        self._begin = self._reported = time.monotonic()
        self._first_step = progress.step
        self._tokens = 0

    def step(self, values: dict[str, float], tokens: int) -> None:
        now = time.monotonic()
        self._tokens += tokens
        step = self._progress.step
        if "validation/mlm_loss" in values:
            print_validation(step, values, self._objective)
        elif now - self._reported >= REPORT_SECONDS or step == self._first_step + 1:
            left = (now - self._begin) / (step - self._first_step) * (self._last_step - step)
            loss = f"train/{self._objective}_loss"
            sentence = f", {self._objective.upper()} {values[loss]:.3f}" if loss in values else ""
            print(
                f"step {step:>6,} of {self._last_step:,}  loss {values['train/loss']:.3f} "
                f"(MLM {values['train/mlm_loss']:.3f}{sentence})  rate {values['train/learning_rate']:.2e}  "
                f"{self._tokens / (now - self._begin):,.0f} tokens/s  {_duration(left)} left",
                flush=True,
            )
            self._reported = now


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
