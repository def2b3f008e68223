"""A checkpoint on the validation examples, without DeepSpeed: the same figures as training reports."""

import math
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.schema import Config, ConfigError, DataConfig, resolved, validate_config
from data_prep.shards import MANIFEST, Dataset
from data_prep.vocabulary import Vocabulary
from training.batches import Batches, MicroBatch
from training.checkpoint import opened
from training.evaluate import summed_losses, unigram_cross_entropy, validation_metrics
from training.model import Albert, PretrainingLosses, pretraining_losses
from training.run_folder import check_data, check_examples
from training.schedule import num_layers_after

MICRO_BATCH_TOKENS = 16384


def evaluate_checkpoint(path: Path, data: str | None, batches: int | None, console: Console) -> dict:
    """Figures of the checkpoint at `path` (or the newest of the run `path`), in float32, JSON-serialisable.

    On the data set it was trained on, or the one in `data`; on at most `batches` global batches of it. Raises
    `ConfigError`.
    """
    checkpoint, passed_over = opened(path)
    for line in passed_over:
        console.print(f"passed over {line}", soft_wrap=True, markup=False)
    config = validate_config(checkpoint.state["config"], source=str(checkpoint.path))
    objective = config.data.sentence_objective
    dataset = Dataset.open(config.data.output if data is None else data)
    if dataset.manifest["vocabulary"]["digest"] != checkpoint.state["data"]["vocabulary"]:
        raise ConfigError(f"{dataset.folder} has another vocabulary than {checkpoint.path} was trained with")
    data_config = config.data
    if data is not None:
        data_config = _settings_on(dataset, config)
        check_examples(dataset)
    else:
        check_data(config, dataset)
    dataset = dataset.at_hand(config.data.cache, console.print)
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Albert(config.model, vocabulary.size, objective != "none")
    model.load_state_dict(checkpoint.weights())
    model.to(device).eval()

    num_layers = num_layers_after(checkpoint.step, config.training.depth_schedule, config.model.num_hidden_layers)

    def losses(micro_batch: MicroBatch) -> PretrainingLosses:
        batch = micro_batch.to(device)
        logits, sentence_logits = model(
            batch.input_ids,
            batch.token_type_ids,
            batch.lengths,
            batch.masked_positions,
            num_layers,
            batch.most_masked,
        )
        return pretraining_losses(logits, batch.mlm_labels, sentence_logits, batch.sentence_labels)

    size = config.training.global_batch_size
    tokens = max(MICRO_BATCH_TOKENS, data_config.max_length)
    validation_split = dataset.split("validation")
    validation = Batches(validation_split, vocabulary.word_starts, data_config, 0, size, tokens, 0, 1, fixed=True)
    total = min(-(-validation_split.rows // size), batches or validation_split.rows)
    evaluated = track(validation.one_pass(batches), "evaluating", total=total, console=console)
    sums = summed_losses(losses, evaluated, device)
    metrics = validation_metrics(sums, objective)
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "data": dataset.origin,
        "examples": sums.examples,
        "masked_tokens": sums.masked,
        **{name.removeprefix("validation/"): value for name, value in metrics.items()},
        "mlm_perplexity": math.exp(min(700.0, sums.mean_mlm_loss)),
        "unigram_cross_entropy": unigram_cross_entropy(
            dataset.split("train"), validation.one_pass(batches), vocabulary.size
        ),
    }


def _settings_on(dataset: Dataset, config: Config) -> DataConfig:
    """The settings of the run with `config` on another data set than its own: those that shaped the examples are the
    data set's; masks are drawn as in the run, unless the data set holds some. Raises `ConfigError`."""
    run = config.data
    shaping = {key: dataset.manifest["config"].get(key) for key in ("sentence_objective", "max_length", "masking")}
    try:
        made = DataConfig.model_validate({**resolved(run), **shaping, "resample_order": None})
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(
            f"{dataset.folder / MANIFEST} has no valid data.{key}: prepare the data again (python -m data_prep)"
        ) from None
    if made.sentence_objective != run.sentence_objective:
        raise ConfigError(
            f"{dataset.folder} was prepared with data.sentence_objective {made.sentence_objective}, the run learnt "
            f"{run.sentence_objective}: prepare the text with that"
        )
    if made.max_length > config.model.max_position_embeddings:
        raise ConfigError(
            f"{dataset.folder} has examples of up to {made.max_length} tokens, the model has "
            f"{config.model.max_position_embeddings} positions: prepare the text with a lower data.max_length"
        )
    if made.masking.mode == "static":
        return made
    masking = {**resolved(run)["masking"], "mode": "dynamic", "copies": 1}
    if made.max_length != run.max_length:
        masking["max_predictions"] = None
    return DataConfig.model_validate({**resolved(made), "masking": masking})


def print_evaluation(figures: dict, console: Console) -> None:
    """Print `figures` as a table, under the checkpoint's path."""
    console.print(figures["checkpoint"], soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        if name == "checkpoint" or name.endswith("_standard_error"):
            continue
        text = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        error = figures.get(f"{name}_standard_error")
        table.add_row(name.replace("_", " "), text if error is None else f"{text} ± {error:.4f}")
    console.print(table)
