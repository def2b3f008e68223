"""The typed description of every setting, and how a YAML file becomes one.

`load_config` reads a preset, applies `--set a.b=value` overrides and validates the whole. Unknown keys are
refused by name. Settings carry the defaults of ALBERT-base v2 as published, so a preset only says what differs.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from yaml import YAMLError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Path_ = Annotated[str, AfterValidator(lambda path: absolute_path(path))]
LocalPath = Annotated[Path_, AfterValidator(lambda path: local_path(path))]
Language = Annotated[str, AfterValidator(lambda code: language_code(code))]

LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]{4})?(-([a-z]{2}|[0-9]{3}))?", re.IGNORECASE)
CACHE = "~/.cache/albert-pretraining"
PUBLISHED_LEARNING_RATE, PUBLISHED_BATCH_SIZE = 0.00176, 4096
DEEPSPEED_GENERATED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "data_types",
    "memory_efficient_linear",
)
ZERO_GENERATED_KEYS = (
    "stage",
    "sub_group_size",
    "round_robin_gradients",
    "parameter_alignment",
    "offload_optimizer",
    "offload_param",
    "compute_grad_norm",
)
"""Those that say where a parameter's optimizer state lies, and whether there is a norm, which training relies on."""


class ConfigError(ValueError):
    """A configuration, or a state of files it names, that cannot be used; its text is one line with a remedy."""


def absolute_path(path: str) -> str:
    """`path` made absolute against the working directory; URLs (`s3://…`) and the empty string stay as they are."""
    return path if not path or "://" in path else os.path.abspath(os.path.expanduser(path))


def local_path(path: str) -> str:
    if "://" in path:
        raise ValueError(f"{path} is a URL: only data folders may be; name a folder that all nodes share")
    return path


def language_code(code: str) -> str:
    """`code` if it has the shape of one: sentencex splits sentences of codes it does not know as it does English."""
    if not LANGUAGE.fullmatch(code):
        raise ValueError(f"{code!r} is no language code such as en, pt-BR or zh-Hant")
    return code


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        # Python takes them for the numbers 1 and 0.
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, bool) and bool not in (annotation, *get_args(annotation)):
                raise ValueError(f"takes no {str(item).lower()}")
        return value


class InputConfig(Section):
    """One source of documents; several may be mixed."""

    kind: Literal["text", "jsonl", "parquet", "wikiextractor", "docstrings"]
    path: str = Field(min_length=1, description="a glob; for docstrings, names of installed packages")
    text_field: str = "text"
    document_per: Literal["block", "file"] = "block"

    @model_validator(mode="after")
    def _make_path_absolute(self) -> Self:
        if self.kind != "docstrings":
            object.__setattr__(self, "path", absolute_path(self.path))
        return self


class VocabularyConfig(Section):
    size: Annotated[int, Field(ge=32)] = 30000
    model: Path_ | None = Field(None, description="an existing spiece.model to use instead of training one")
    character_coverage: Annotated[float, Field(gt=0.9, le=1)] = 0.99995
    sample_sentences: PositiveInt = 1_000_000


class FiltersConfig(Section):
    """Documents outside these bounds are dropped and counted by reason; null switches a filter off."""

    min_words: PositiveInt | None = None
    max_nonletter_fraction: Probability | None = None


class MaskingConfig(Section):
    mode: Literal["dynamic", "static"] = "dynamic"
    copies: Annotated[int, Field(gt=0, lt=2**16)] = Field(
        1, description="static masking: how many differently masked copies of each example"
    )
    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    max_predictions: PositiveInt | None = Field(None, description="default: round(probability * data.max_length)")
    ngram: Annotated[int, Field(ge=1, le=10)] = 3
    whole_word: bool = True


class DataConfig(Section):
    output: Path_ = Field(description="the data folder; like every path here it may be a URL (s3://, gs://, hdfs://)")
    cache: LocalPath = Field(
        CACHE,
        validate_default=True,
        description="where each node keeps a data folder that is a URL",
    )
    stall_seconds: NonNegativeInt = Field(
        1800, description="how long nothing may get done before the job is ended; 0: for ever"
    )
    inputs: Annotated[tuple[InputConfig, ...], Field(min_length=1)]
    language: Language = Field("en", description="how sentences are split: a code such as en, pt-BR, zh-Hant")
    lower_case: bool = True
    strip_accents: bool = True
    deduplicate: bool = True
    filters: FiltersConfig = FiltersConfig()
    max_bad_fraction: Probability = 0.01
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    shards: PositiveInt = 8
    vocab: VocabularyConfig = VocabularyConfig()
    max_length: Annotated[int, Field(ge=8, le=65535)] = 512
    short_probability: Probability = 0.1
    sentence_objective: Literal["sop", "nsp", "none"] = "sop"
    resample_order: bool | None = Field(
        None, description="SOP: draw the order anew each epoch; default: with dynamic masks"
    )
    masking: MaskingConfig = MaskingConfig()

    @model_validator(mode="after")
    def _fill_defaults(self) -> Self:
        masking = self.masking
        if masking.max_predictions is None:
            masking = masking.model_copy(
                update={"max_predictions": max(1, round(masking.probability * self.max_length))}
            )
            object.__setattr__(self, "masking", masking)
        if self.resample_order is None:
            object.__setattr__(self, "resample_order", self.sentence_objective == "sop" and masking.mode == "dynamic")
        if self.resample_order and (self.sentence_objective != "sop" or masking.mode == "static"):
            raise ValueError("resample_order needs sentence_objective: sop and masking.mode: dynamic")
        if masking.copies > 1 and masking.mode == "dynamic":
            raise ValueError("masking.copies above 1 needs masking.mode: static")
        return self


class ModelConfig(Section):
    """The shape of the model, under Hugging Face's names. The vocabulary size comes from the data."""

    hidden_size: PositiveInt = 768
    embedding_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Literal["gelu_new", "gelu", "relu"] = "gelu_new"
    share: Literal["all", "attention", "ffn", "none"] = "all"
    num_hidden_groups: PositiveInt = 1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: Literal[2] = 2
    hidden_dropout_prob: Annotated[float, Field(ge=0, lt=1)] = 0.0
    attention_probs_dropout_prob: Annotated[float, Field(ge=0, lt=1)] = 0.0
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    layer_norm_eps: Annotated[float, Field(gt=0)] = 1e-12

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_hidden_groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups {self.num_hidden_groups} exceeds num_hidden_layers {self.num_hidden_layers}"
            )
        return self


class OptimizerConfig(Section):
    """LAMB as the paper's code defines it, or AdamW from torch. `clamp` and `bias_correction` reach other LAMBs."""

    name: Literal["lamb", "adamw"] = "lamb"
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-6
    bias_correction: bool = Field(False, description="LAMB's; AdamW always has it")
    clamp: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] | None = Field(
        None, description="bounds of LAMB's trust ratio"
    )

    @model_validator(mode="after")
    def _check_clamp(self) -> Self:
        if self.clamp is not None and not 0 <= self.clamp[0] <= self.clamp[1]:
            raise ValueError(f"clamp {list(self.clamp)} must be [lowest, highest] trust ratio")
        if self.clamp is not None and self.name != "lamb":
            raise ValueError(f"clamp bounds LAMB's trust ratio, which {self.name} has not: leave it out")
        return self


class EvaluateConfig(Section):
    every: PositiveInt = 1000
    batches: PositiveInt | None = Field(None, description="global batches of validation examples; default: all of them")


class CheckpointConfig(Section):
    every: PositiveInt = 1000
    keep: PositiveInt = Field(3, description="the newest so many, and up to two that a rollback would go back to")


class DivergenceConfig(Section):
    """What to do when the loss jumps, falls back to that of a unigram model, or is not finite. Short: the action alone.

    `warn` says so and goes on (not past what is not finite), `stop` ends the run at the checkpoint from before,
    `rollback` goes on from there at a lower rate and with other batches.
    """

    action: Literal["warn", "stop", "rollback"] = "warn"
    factor: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="rollback: multiplies the learning rate")
    at_most: PositiveInt = Field(3, description="rollback: so many times, then stop")


def _section_of_action(value: Any) -> Any:
    return {"action": value} if isinstance(value, str) else value


class DepthConfig(Section):
    """A depth of the model for some steps."""

    num_layers: PositiveInt
    steps: PositiveInt


class TrainingConfig(Section):
    output: LocalPath
    init_from: LocalPath | None = None
    processes_per_node: PositiveInt | Literal["auto"] = "auto"
    global_batch_size: PositiveInt = PUBLISHED_BATCH_SIZE
    micro_batch_tokens: PositiveInt = 16384
    steps: PositiveInt = 125_000
    stop_after: PositiveInt | None = None
    warmup_steps: NonNegativeInt = 3125
    learning_rate: Annotated[float, Field(gt=0)] = PUBLISHED_LEARNING_RATE
    scale_from_batch: PositiveInt | None = Field(
        None,
        description="the batch size that learning_rate, steps and warmup_steps are meant for: they are converted to "
        "global_batch_size, the rate by the square root of the batch sizes' ratio, the steps by its inverse",
    )
    depth_schedule: tuple[DepthConfig, ...] = Field(
        (),
        description="fewer layers for the first steps, which shared layers allow: [{num_layers: 3, steps: 1000}, …], "
        "then model.num_hidden_layers",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    gradient_clipping: Annotated[float, Field(ge=0)] = Field(1.0, description="global norm; 0 switches it off")
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = Field(
        False, description="ZeRO-Offload: float32 weights, moments and the optimizer's step in the host's memory"
    )
    activation_checkpointing: bool | PositiveInt = Field(
        False, description="compute activations again in the backward pass: of all layers, or of the first so many"
    )
    compile: bool = Field(False, description="torch.compile for the layers: faster on GPUs, after a minute's wait")
    on_divergence: Annotated[DivergenceConfig, BeforeValidator(_section_of_action)] = DivergenceConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deepspeed: dict[str, Any] = Field({}, description="merged into the generated DeepSpeed configuration")

    @property
    def last_step(self) -> int:
        """The step after which a run ends."""
        return min(self.steps, self.stop_after or self.steps)

    def evaluates_after(self, step: int) -> bool:
        """Whether a run is evaluated once it has finished `step` steps."""
        return step % self.evaluate.every == 0 or step == self.last_step

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self._scale_to_batch()
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile does not work at zero_stage 3, which gathers weights layer by layer: use 2")
        scheduled = sum(stage.steps for stage in self.depth_schedule)
        if scheduled >= self.steps:
            raise ValueError(f"depth_schedule takes {scheduled} steps, which must be below steps {self.steps}")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below steps {self.steps}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.precision == "fp16" and self.zero_stage == 0:
            raise ValueError("precision fp16 does not work at zero_stage 0 (DeepSpeed leaves the loss unscaled): use 1")
        generated = sorted(set(self.deepspeed) & set(DEEPSPEED_GENERATED_KEYS))
        zero_optimization = self.deepspeed.get("zero_optimization", {})
        if not isinstance(zero_optimization, dict):
            raise ValueError(
                f"deepspeed.zero_optimization must be a mapping of DeepSpeed's keys, not {zero_optimization}"
            )
        generated += [f"zero_optimization.{key}" for key in zero_optimization if key in ZERO_GENERATED_KEYS]
        if generated:
            raise ValueError(
                f"deepspeed.{generated[0]} is generated from the other settings (global_batch_size, "
                "micro_batch_tokens, optimizer, precision, zero_stage, offload_optimizer, gradient_clipping): set those"
            )
        return self

    def _scale_to_batch(self) -> None:
        """Convert to `global_batch_size` by the square-root rule, once."""
        if self.scale_from_batch is None:
            return
        ratio = self.global_batch_size / self.scale_from_batch
        object.__setattr__(self, "learning_rate", self.learning_rate * math.sqrt(ratio))
        object.__setattr__(self, "steps", max(1, round(self.steps / ratio)))
        object.__setattr__(self, "warmup_steps", round(self.warmup_steps / ratio))
        object.__setattr__(self, "scale_from_batch", None)


class TrackingConfig(Section):
    uri: str = "sqlite:///runs/mlflow.db"
    experiment: str = "albert"

    @model_validator(mode="after")
    def _make_uri_absolute(self) -> Self:
        prefix = "sqlite:///"
        if self.uri.startswith(prefix):
            object.__setattr__(self, "uri", prefix + absolute_path(self.uri[len(prefix) :]))
        return self


class Config(Section):
    name: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        for key, folder in (("data.output", self.data.output), ("training.output", self.training.output)):
            if not folder:
                raise ValueError(f"{key} is empty: name a folder")
        if self.data.max_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.max_length {self.data.max_length} exceeds model.max_position_embeddings "
                f"{self.model.max_position_embeddings}"
            )
        depths = [stage.num_layers for stage in self.training.depth_schedule]
        if depths and self.model.share != "all":
            raise ValueError(f"training.depth_schedule needs model.share: all, not {self.model.share}")
        growing = [self.model.num_hidden_groups - 1, *depths, self.model.num_hidden_layers]
        if depths and sorted(set(growing)) != growing:
            raise ValueError(
                f"training.depth_schedule must grow from at least num_hidden_groups {self.model.num_hidden_groups} to "
                f"below num_hidden_layers {self.model.num_hidden_layers}, not {depths}"
            )
        if self.training.micro_batch_tokens < self.data.max_length:
            raise ValueError(
                f"training.micro_batch_tokens {self.training.micro_batch_tokens} does not hold one example of "
                f"data.max_length {self.data.max_length}"
            )
        return self


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """The validated configuration in the YAML file `path`, with `a.b=value` overrides applied in order.

    Values of overrides are YAML; positions in lists are dotted (`data.inputs.0.path=…`). Raises `ConfigError`.
    """
    file = Path(path)
    if not file.is_file():
        presets = ", ".join(sorted(f"configs/{preset.name}" for preset in Path(__file__).parent.glob("*.yaml")))
        raise ConfigError(f"config file {path} not found; presets: {presets}")
    tree = read_yaml(file)
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path} must hold a mapping of sections (name, data, model, training, tracking)")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {override!r} must have the form key.path=value")
        try:
            parsed = OmegaConf.create(f"value: {value}") if value.strip() else OmegaConf.create({"value": None})
            OmegaConf.update(tree, key.strip(), parsed["value"], merge=False)
        except (YAMLError, OmegaConfBaseException, ValueError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(f"--set {override!r} cannot be applied: {_one_line(error)}") from None
    try:
        content = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    return validate_config(content, source=str(path))


def read_yaml(path: str | os.PathLike) -> DictConfig | ListConfig:
    """What the YAML file `path` holds, interpolations unresolved; raises `ConfigError`."""
    try:
        return OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from None


def validate_config(content: dict, source: str) -> Config:
    """`content` (plain dicts and lists) as a `Config`; errors name the key, and `source`, in one line."""
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        messages = [_one_line(_describe(item)) for item in error.errors() if item["type"] != "too_short"]
        messages = messages or [_one_line(_describe(item)) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(messages)) from None


def resolved(config: Section) -> dict:
    """`config` as plain JSON-serialisable dicts and lists, defaults included."""
    return config.model_dump(mode="json")


def flat(tree: dict, prefix: str = "") -> dict:
    """A nested dict as one level of dotted keys; lists are values."""
    items: dict = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return items


def fingerprint(content: Any) -> str:
    """A hexadecimal digest of JSON-serialisable `content` that does not depend on the order of keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def exit_with_error(error: Exception | str) -> NoReturn:
    """Print `error` as one line on stderr and exit with code 2."""
    print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
    sys.exit(2)


def run_command(command: Callable[[], None]) -> None:
    """Run a command-line `command`; a `ConfigError` ends the process in one line and exit code 2."""
    try:
        command()
    except ConfigError as error:
        exit_with_error(error)


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())


def _describe(item: dict) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggestion(item['loc'])}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _suggestion(location: tuple) -> str:
    from difflib import get_close_matches

    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        section = next((arg for arg in getattr(annotation, "__args__", ()) if hasattr(arg, "model_fields")), annotation)
    known = list(section.model_fields)
    matches = get_close_matches(str(location[-1]), known, n=1)
    return f" (did you mean {matches[0]}?)" if matches else f" (known here: {', '.join(known)})"
