"""One training process, from joining the others to leaving them."""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist

from configs.schema import Config, ConfigError, flat, resolved
from data_prep.files import located, write_whole
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from training.batches import Batches
from training.checkpoint import CheckpointWriter
from training.engine import Engine, Resumed, State, deepspeed_config, join_processes
from training.evaluate import unigram_cross_entropy
from training.loop import Progress, Recorder, StopRequest, train
from training.plots import plot_losses
from training.run_folder import CHECKPOINTS, CONFIG, RunFolder
from training.tracking import (
    DATA_DIGEST,
    DATA_FOLDER,
    DATA_RUN,
    GIT_COMMIT,
    METRICS,
    RUN_ID,
    BackgroundRun,
    MetricsFile,
    git_commit,
)

DEEPSPEED_CONFIG = "ds_config.json"
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
    resumed = None
    checkpoint = folder.checkpoint
    if checkpoint is not None:
        resumed = Resumed(checkpoint.step, State(checkpoint.weights(), checkpoint.moments()))
    initial = folder.initial.weights() if folder.initial is not None else None
    engine = Engine(config, vocabulary.size, initial, resumed)
    progress = Progress(checkpoint.step, checkpoint.state["tokens"]) if checkpoint is not None else Progress(0, 0)

    recorder = tracker = None
    unigram = float("nan")
    if rank == 0:
        whole_validation = batches(validation_split, 0, (0, 1), fixed=True)
        unigram = unigram_cross_entropy(
            train_split, whole_validation.one_pass(config.training.evaluate.batches), vocabulary.size
        )
        recorder, tracker = _start_recording(config, dataset, folder, progress)
        _print_start(config, dataset, folder, engine, world_size)
    status = "FAILED"
    stopped = False
    try:
        # Before the first step there is nothing to save: until here signals end the process.
        stop = StopRequest()
        train_batches = batches(train_split, config.seed, (rank, world_size), fixed=False)
        stopped = train(config, engine, train_batches, validation, progress, stop, recorder, unigram)
        status = "KILLED" if stopped else "FINISHED"
    except (FloatingPointError, OSError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        if rank == 0:
            _finish_recording(folder, tracker, status)
    if rank == 0:
        state = "stopped, saved" if stopped else "finished"
        print(f"training: {folder.path} {state} at step {progress.step:,}", flush=True)
    dist.destroy_process_group()


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
    config: Config, dataset: Dataset, folder: RunFolder, progress: Progress
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
    metrics = MetricsFile(folder.path, progress.step)
    tracker = BackgroundRun(folder.path, config, f"{config.name} pretraining", flat(resolved(config)), tags)

    def state(progress: Progress) -> dict:
        return {
            "step": progress.step,
            "tokens": progress.tokens,
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
    return Recorder(metrics, checkpoints, state), tracker


def _finish_recording(folder: RunFolder, tracker: BackgroundRun, status: str) -> None:
    plot = None
    try:
        plot = plot_losses(folder.path)
    except OSError as error:
        print(f"warning: plots could not be written: {error}", file=sys.stderr, flush=True)
    artifacts = [folder.path / CONFIG, folder.path / DEEPSPEED_CONFIG, *([plot] if plot else [])]
    if not tracker.close(status, artifacts, MLFLOW_CLOSE_SECONDS[status]):
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
    print(
        f"training: {config.name}, {engine.parameter_count():,} parameters, {world_size} processes on "
        f"{engine.device.type}, ZeRO stage {config.training.zero_stage}, {config.training.precision}; "
        f"{config.training.steps:,} steps of {config.training.global_batch_size:,} examples from {dataset.origin}",
        flush=True,
    )
