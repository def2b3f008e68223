"""A run's folder: what it holds already, and whether a configuration may go on with it."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from configs.schema import Config, ConfigError, flat, read_yaml, resolved, validate_config
from data_prep.files import write_whole
from data_prep.plan import data_settings
from data_prep.shards import Dataset
from training.checkpoint import Checkpoint, named, newest_complete, once_complete, opened
from training.tracking import VALIDATION, read_metrics

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"

CURVE_KEEPS = (
    "name",
    "data.output",
    "data.cache",
    "data.stall_seconds",
    "data.inputs",
    "data.max_bad_fraction",
    "training.output",
    "training.processes_per_node",
    "training.micro_batch_tokens",
    "training.stop_after",
    "training.zero_stage",
    "training.offload_optimizer",
    "training.activation_checkpointing",
    "training.compile",
    "training.on_divergence",
    "training.evaluate",
    "training.checkpoint",
    "tracking",
)
"""Settings that may change while a run goes on, since the curve does not depend on them, or not before it diverges."""


def check_data(config: Config, dataset: Dataset) -> None:
    """Refuse data that was prepared under other settings than `config` names, or that holds no examples.

    Where its inputs lay does not matter: data may be prepared on another machine.
    """
    made = flat(dataset.manifest["config"])
    wanted = flat(data_settings(config.data))
    changed = [key for key, value in wanted.items() if key != "inputs" and made.get(key) != value]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{dataset.folder} was prepared with data.{key} {made.get(key)!r}, the config says {wanted[key]!r}: "
            "run python -m data_prep, or name another data.output"
        )
    check_examples(dataset)


def check_examples(dataset: Dataset) -> None:
    """Refuse data without examples to train or to evaluate on."""
    for split in ("train", "validation"):
        if not sum(shard["rows"] for shard in dataset.manifest["shards"] if shard["split"] == split):
            raise ConfigError(
                f"{dataset.folder} has no {split} examples: add text or change data.validation_fraction, prepare again"
            )


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>` as found: its newest complete checkpoint, lines about newer ones that were passed over, and the
    checkpoint of another run whose weights it started, or starts, with.

    `lacks_evaluation` where one is due after the checkpoint's step and the metrics have none, since the run was told to
    stop before it; the run has not `finished` without.
    """

    path: Path
    checkpoint: Checkpoint | None
    passed_over: list[str]
    initial: Checkpoint | None
    lacks_evaluation: bool = False
    finished: bool = False

    @classmethod
    def open(cls, config: Config, dataset: Dataset, extend: bool) -> "RunFolder":
        """Look at the folder; raises `ConfigError` where `config` or the data would change the run's curve."""
        training = config.training
        path = Path(training.output)
        check_former_config(config, extend)
        checkpoint, passed_over = newest_complete(path / CHECKPOINTS)
        if checkpoint is None and once_complete(path / CHECKPOINTS):
            raise ConfigError(
                f"no checkpoint of {path} is whole any more ({'; '.join(passed_over)}): restore one, or remove "
                f"{path / CHECKPOINTS} to start over"
            )
        if checkpoint is not None and checkpoint.state["data"]["digest"] != dataset.digest:
            raise ConfigError(
                f"{path} was trained on other data than {dataset.folder} now holds: name another training.output, "
                "or prepare the former data again"
            )
        initial = None
        if checkpoint is None and training.init_from:
            initial, not_taken = opened(Path(training.init_from))
            passed_over += not_taken
            if initial.state["data"]["vocabulary"] != dataset.manifest["vocabulary"]["digest"]:
                raise ConfigError(
                    f"{initial.path} was trained with another vocabulary than that of {dataset.folder}: "
                    "prepare the data with data.vocab.model set to the spiece.model it was trained with"
                )
        elif checkpoint is not None and checkpoint.state.get("init_from"):
            initial = named(Path(checkpoint.state["init_from"]))
        step = checkpoint.step if checkpoint is not None else 0
        lacks_evaluation = training.evaluates_after(step) and _has_no_evaluation(path, step)
        finished = step >= training.last_step and not lacks_evaluation
        return cls(path, checkpoint, passed_over, initial, lacks_evaluation, finished)

    def initial_weights(self) -> dict | None:
        """The weights the run starts with, by name, if it was given any; raises `ConfigError` where they are gone."""
        if self.initial is None:
            return None
        # A run that goes on did not look at them when it was opened.
        return (self.initial if self.checkpoint is None else opened(self.initial.path)[0]).weights()

    def write_config(self, config: Config) -> None:
        write_whole(self.path / CONFIG, OmegaConf.to_yaml(OmegaConf.create(resolved(config))))


def _has_no_evaluation(path: Path, step: int) -> bool:
    """Whether there are metrics of `step`, and none of an evaluation among them."""
    return any(
        line["step"] == step and not any(name.startswith(VALIDATION) for name in line) for line in read_metrics(path)
    )


def check_former_config(config: Config, extend: bool) -> None:
    """Refuse to go on with the run in `training.output` where `config` would change its curve."""
    file = Path(config.training.output) / CONFIG
    if not file.exists():
        return
    try:
        content = OmegaConf.to_container(read_yaml(file))
    except ConfigError as error:
        raise ConfigError(
            f"{error}: restore it from the config in a checkpoint's state.json, or name another training.output"
        ) from None
    former = validate_config(content, source=str(file))
    old, new = flat(resolved(former)), flat(resolved(config))
    changed = [key for key in old | new if old.get(key) != new.get(key) and not _keeps_curve(key)]
    if changed == ["training.steps"] and config.training.steps > former.training.steps:
        if not extend:
            raise ConfigError(
                f"{file.parent} was started for {former.training.steps:,} steps, the config says "
                f"{config.training.steps:,}: add --extend to go on to there (the schedule changes with it)"
            )
        return
    if changed:
        keys = ", ".join(f"{key} ({old.get(key)!r} -> {new.get(key)!r})" for key in changed[:3])
        remedy = f"or remove {file.parent}, which has no checkpoint yet"
        if once_complete(file.parent / CHECKPOINTS):
            remedy = "(training.init_from takes over its weights), or restore them"
        raise ConfigError(
            f"{file.parent} holds a run with other settings: {keys}: name another training.output {remedy}"
        )


def _keeps_curve(key: str) -> bool:
    return any(key == kept or key.startswith(kept + ".") for kept in CURVE_KEEPS)
