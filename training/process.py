"""One training process, from joining the others to leaving them."""

import gc
import json
import sys
from dataclasses import asdict, replace

import deepspeed
import torch
import torch.distributed as dist

from configs.schema import (
    PUBLISHED_BATCH_SIZE,
    PUBLISHED_LEARNING_RATE,
    Config,
    ConfigError,
    TrainingConfig,
    flat,
    resolved,
)
from data_prep.files import located, write_whole
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from training.batches import Batches, global_batch
from training.checkpoint import Checkpoint, CheckpointWriter, drop_after, newest_complete
from training.divergence import DivergedError, DivergenceWatch
from training.engine import Engine, Resumed, State, StoppedError, deepspeed_config, join_processes
from training.evaluate import unigram_cross_entropy
from training.loop import Progress, Recorder, StopRequest, evaluated, print_validation, train
from training.plots import plot_losses
from training.run_folder import CHECKPOINTS, CONFIG, RunFolder
from training.tracking import (
    DATA_DIGEST,
    DATA_FOLDER,
    DATA_RUN,
    EVENTS,
    GIT_COMMIT,
    METRICS,
    RUN_ID,
    BackgroundRun,
    EventsFile,
    MetricsFile,
    git_commit,
)

DEEPSPEED_CONFIG = "ds_config.json"
EXAMPLES_SHOWN = 5
MLFLOW_ANSWER_SECONDS = 15.0
"""How long the first checkpoint waits for the id of its run."""
MLFLOW_CLOSE_SECONDS = {"FINISHED": 60.0, "KILLED": 10.0, "FAILED": 10.0}
"""How long a run that has ended waits for MLflow: one that was told to stop should not keep others waiting."""


def run_process(config: Config, dataset: Dataset, folder: RunFolder) -> None:
    """Train `config` on `dataset` from where `folder` stands."""
    rank, world_size = join_processes()
    _check_same_start(folder)
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    train_split, validation_split = dataset.split("train"), dataset.split("validation")

    def batches(split, seed: int, ranks: tuple[int, int], fixed: bool) -> Batches:
        training = config.training
        return Batches(
            split,
            vocabulary.word_starts,
            config.data,
            seed,
            training.global_batch_size,
            training.micro_batch_tokens,
            *ranks,
            fixed=fixed,
        )

    validation = batches(validation_split, 0, (rank, world_size), fixed=True)
    decided = [float("nan"), False]
    if rank == 0:
        whole_validation = batches(validation_split, 0, (0, 1), fixed=True).one_pass(config.training.evaluate.batches)
        decided = [unigram_cross_entropy(train_split, whole_validation, vocabulary.size), folder.lacks_evaluation]
    # Every rank must come to the same decisions.
    dist.broadcast_object_list(decided)
    unigram, lacks_evaluation = decided
    train_batches = batches(train_split, config.seed, (rank, world_size), fixed=False)
    checkpoint, rollbacks = folder.checkpoint, None
    stop = recorder = tracker = None
    while True:
        engine = _engine(config, vocabulary.size, folder, checkpoint)
        progress = Progress.of_state(checkpoint.state) if checkpoint is not None else Progress()
        if rank == 0 and rollbacks is None:
            _print_start(config, dataset, folder, engine, world_size)
        late = {}
        if rollbacks is not None:
            progress = _lowered(config, progress, rollbacks)
        elif lacks_evaluation:
            if rank == 0:
                print(
                    f"training: the evaluation due at step {progress.step:,} is missing and made first "
                    "(training.evaluate.batches can shorten it)",
                    flush=True,
                )
            # Before an evaluation or a step there is nothing to stop: until here signals end the process.
            stop = StopRequest()
            try:
                late = evaluated(config, engine, validation, progress.step, stop, unigram)
            except StoppedError:
                stopped = True
                break
        watch_state = checkpoint.state.get("watch") if checkpoint is not None else None
        watch = DivergenceWatch(unigram, config.training.warmup_steps, config.training.steps, watch_state)
        if rank == 0:
            try:
                recorder, tracker = _start_recording(config, dataset, folder, progress, late)
            except OSError as error:
                raise ConfigError(f"{folder.path} cannot be written ({error}): make room, then start again") from None
            if late:
                print_validation(progress.step, late, config.data.sentence_objective)
        status, stopped, diverged = "FAILED", False, None
        try:
            stop = stop or StopRequest()
            stopped = train(config, engine, train_batches, validation, progress, stop, recorder, watch, unigram)
            status = "KILLED" if stopped else "FINISHED"
        except DivergedError as error:
            # Without the frames, which would keep this engine while another is made.
            diverged = DivergedError(error.event, error.batch)
        except OSError as error:
            if rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(1)
        finally:
            if rank == 0:
                tags = {"divergence": diverged.event.text} if diverged is not None else {}
                _finish_recording(folder, tracker, status, tags)
        if diverged is None:
            break
        examples, _ = global_batch(config.seed, diverged.batch, config.training.global_batch_size, train_split.rows)
        checkpoint = _answered(config, folder, progress, diverged, examples.tolist(), recorder)
        rollbacks = [*progress.rollbacks, _rollback(progress, diverged, checkpoint)]
        del engine
        gc.collect()
    if rank == 0:
        state = "finished" if not stopped else "stopped, saved" if progress.step else "stopped, nothing to save"
        print(f"training: {folder.path} {state} at step {progress.step:,}", flush=True)
    dist.destroy_process_group()


def _engine(config: Config, vocabulary_size: int, folder: RunFolder, checkpoint: Checkpoint | None) -> Engine:
    if checkpoint is not None:
        state = State(checkpoint.weights(), checkpoint.moments())
        updates = checkpoint.step - Progress.of_state(checkpoint.state).skipped_steps
        resumed = Resumed(updates, state, checkpoint.state.get("loss_scale", {}))
        return Engine(config, vocabulary_size, resumed=resumed)
    return Engine(config, vocabulary_size, folder.initial_weights())


def _answered(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    diverged: DivergedError,
    examples: list[int],
    recorder: Recorder | None,
) -> Checkpoint | None:
    """The checkpoint to go back to (None: the start), the newer ones removed; ends the process if it is to stop."""
    settings, event = config.training.on_divergence, diverged.event
    rolls_back = settings.action == "rollback" and len(progress.rollbacks) < settings.at_most
    found = [None]
    if recorder is not None:
        checkpoints = folder.path / CHECKPOINTS
        checkpoint, _ = newest_complete(checkpoints, event.healthy_step)
        if rolls_back or (checkpoint is not None and event.kind != "not_finite"):
            drop_after(checkpoints, checkpoint.step if checkpoint is not None else 0)
        found = [checkpoint]
        action = "rollback" if rolls_back else "stop"
        back_to = checkpoint.step if checkpoint is not None else 0
        recorder.events.append({**asdict(event), "action": action, "checkpoint": back_to, "examples": examples})
        shown = ", ".join(str(example) for example in examples[:EXAMPLES_SHOWN])
        more = ", …" if len(examples) > EXAMPLES_SHOWN else ""
        text = f"{event.text}; its batch held the train examples {shown}{more} (all are in {folder.path / EVENTS})"
        if rolls_back:
            print(f"training: {text}; back to step {back_to:,} at {settings.factor} times the rate", flush=True)
        else:
            kept = (
                f"the checkpoint of step {back_to:,} is kept"
                if checkpoint is not None
                else "no checkpoint is from before"
            )
            remedy = (
                f"rolling back did not help (times: {len(progress.rollbacks)}); a lower training.learning_rate may"
                if progress.rollbacks
                else f"{kept}; go on with training.on_divergence=rollback, or start anew with a lower "
                "training.learning_rate or a longer warm-up"
            )
            print(f"error: {text}: {remedy}", file=sys.stderr, flush=True)
    dist.broadcast_object_list(found)
    if not rolls_back:
        sys.exit(1)
    return found[0]


def _rollback(progress: Progress, diverged: DivergedError, checkpoint: Checkpoint | None) -> dict:
    """The lasting record of going back: batches from the one the checkpoint would have gone on with are passed over."""
    to_step = checkpoint.step if checkpoint is not None else 0
    offset = Progress.of_state(checkpoint.state).batch_offset if checkpoint is not None else 0
    return {
        "kind": diverged.event.kind,
        "from_step": diverged.event.step,
        "to_step": to_step,
        "skipped_batches": [to_step + offset, diverged.batch + 1],
    }


def _lowered(config: Config, progress: Progress, rollbacks: list[dict]) -> Progress:
    """`progress` of a checkpoint (or the start) as it goes on after the last of `rollbacks`."""
    offset = rollbacks[-1]["skipped_batches"][1] - progress.step
    factor = config.training.on_divergence.factor
    rate_factor = (rollbacks[-2]["rate_factor"] if len(rollbacks) > 1 else 1.0) * factor
    rollbacks = [*rollbacks[:-1], {**rollbacks[-1], "rate_factor": rate_factor}]
    return replace(progress, batch_offset=offset, rate_factor=rate_factor, rollbacks=rollbacks)


def _check_same_start(folder: RunFolder) -> None:
    """Refuse to start where processes see different checkpoints: they would train different models."""
    step = folder.checkpoint.step if folder.checkpoint is not None else 0
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    if len(set(steps)) > 1:
        others = next(rank for rank, seen in enumerate(steps) if seen != steps[0])
        raise ConfigError(
            f"process 0 sees step {steps[0]} in {folder.path}, process {others} sees step {steps[others]}: "
            "the run's folder must be on a file system that all nodes share"
        )


def _start_recording(
    config: Config, dataset: Dataset, folder: RunFolder, progress: Progress, late: dict[str, float]
) -> tuple[Recorder, BackgroundRun]:
    folder.write_config(config)
    write_whole(folder.path / DEEPSPEED_CONFIG, json.dumps(deepspeed_config(config.training), indent=1) + "\n")
    commit = git_commit()
    data_run = located(dataset.origin) / RUN_ID
    tags = {
        "kind": "pretraining",
        "run.folder": str(folder.path),
        DATA_FOLDER: dataset.origin,
        DATA_DIGEST: dataset.digest,
        **({DATA_RUN: data_run.read_text().strip()} if data_run.exists() else {}),
        **({GIT_COMMIT: commit} if commit else {}),
    }
    metrics = MetricsFile(folder.path, progress.step, late)
    rollbacks = len(progress.rollbacks)
    name = f"{config.name} pretraining" + (f", rollback {rollbacks}" if rollbacks else "")
    params = flat(resolved(config))
    if rollbacks:
        tags["rollback"] = json.dumps(progress.rollbacks[-1])
    first_after = progress.rollbacks[-1]["to_step"] if rollbacks else 0
    tracker = BackgroundRun(folder.path, config, name, params, tags, rollbacks, first_after)

    def state(progress: Progress) -> dict:
        return {
            **progress.state(),
            "config": resolved(config),
            "data": {
                "folder": dataset.origin,
                "digest": dataset.digest,
                "vocabulary": dataset.manifest["vocabulary"]["digest"],
                "inputs": dataset.manifest["inputs"],
            },
            "init_from": str(folder.initial.path) if folder.initial is not None else None,
            "mlflow_run_id": tracker.run_id(MLFLOW_ANSWER_SECONDS),
            "git_commit": commit,
            "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        }

    checkpoints = CheckpointWriter(folder.path / CHECKPOINTS, config.training.checkpoint.keep)
    return Recorder(metrics, EventsFile(folder.path), checkpoints, state), tracker


def _finish_recording(folder: RunFolder, tracker: BackgroundRun, status: str, tags: dict[str, str]) -> None:
    plot = None
    try:
        plot = plot_losses(folder.path)
    except OSError as error:
        print(f"warning: plots could not be written: {error}", file=sys.stderr, flush=True)
    artifacts = [folder.path / CONFIG, folder.path / DEEPSPEED_CONFIG, *([plot] if plot else [])]
    if not tracker.close(status, artifacts, MLFLOW_CLOSE_SECONDS[status], tags):
        print(
            f"warning: MLflow does not have all of this run yet; {folder.path / METRICS} has, and the rest is sent "
            "when the run goes on",
            file=sys.stderr,
            flush=True,
        )


def _print_start(config: Config, dataset: Dataset, folder: RunFolder, engine: Engine, world_size: int) -> None:
    for line in folder.passed_over:
        print(f"training: passed over {line}", flush=True)
    if folder.checkpoint is not None:
        print(f"training: going on from {folder.checkpoint.path}", flush=True)
    elif folder.initial is not None:
        print(f"training: starting with the weights of {folder.initial.path}", flush=True)
    if warning := rate_warning(config.training):
        print(f"warning: {warning}", flush=True)
    print(
        f"training: {config.name}, {engine.parameter_count():,} parameters, {world_size} processes on "
        f"{engine.device.type}, ZeRO stage {config.training.zero_stage}, {config.training.precision}; "
        f"{config.training.steps:,} steps of {config.training.global_batch_size:,} examples from {dataset.origin}",
        flush=True,
    )


def rate_warning(training: TrainingConfig) -> str | None:
    """What is wrong with the published rate where batches are a quarter of the published size, or smaller."""
    if training.learning_rate != PUBLISHED_LEARNING_RATE or 4 * training.global_batch_size > PUBLISHED_BATCH_SIZE:
        return None
    return (
        f"training.learning_rate {PUBLISHED_LEARNING_RATE} is meant for batches of {PUBLISHED_BATCH_SIZE:,}, not "
        f"{training.global_batch_size:,}: training.scale_from_batch={PUBLISHED_BATCH_SIZE} converts rate and steps"
    )
