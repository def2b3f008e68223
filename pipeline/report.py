"""The summary at the end of the steps: what was made, how good it is, and where to look further."""

import os

from rich.console import Console
from rich.table import Table

from configs.schema import Config
from data_prep.shards import Dataset
from training.run_folder import RunFolder
from training.tracking import read_metrics


def print_summary(
    config: Config, dataset: Dataset, folder: RunFolder, seconds: dict[str, float | None], console: Console
) -> None:
    """Print the state of `config`'s data and run; `seconds` are the steps' times, None for those skipped."""
    manifest = dataset.manifest
    documents = manifest["documents"]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in documents["dropped"].items())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "documents", f"{documents['used']:,} of {documents['read']:,}" + (f" (dropped: {dropped})" if dropped else "")
    )
    table.add_row("tokens", f"{manifest['tokens']:,} in {manifest['examples']:,} examples")
    table.add_row("vocabulary", f"{manifest['vocabulary']['size']:,} pieces")
    for step, spent in seconds.items():
        table.add_row(f"time of {step}", "skipped" if spent is None else f"{spent:,.0f} s")
    course = folder.checkpoint.state.get("course", {}) if folder.checkpoint is not None else {}
    if rollbacks := course.get("rollbacks"):
        where = ", ".join(f"{rollback['from_step']:,} to {rollback['to_step']:,}" for rollback in rollbacks)
        table.add_row("rollbacks", f"from step {where}; the rate is {course['rate_factor']:g} times that of the config")
    evaluated = [line for line in read_metrics(folder.path) if "validation/mlm_loss" in line]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        loss, unigram = last["validation/mlm_loss"], last["validation/unigram_cross_entropy"]
        table.add_row(
            "validation MLM loss",
            f"{loss:.3f} nats at step {last['step']:,} (step {first['step']:,}: {first['validation/mlm_loss']:.3f})",
        )
        table.add_row(
            "unigram cross-entropy",
            f"{unigram:.3f} nats: the model is {abs(unigram - loss):.3f} {'below' if loss < unigram else 'above'}",
        )
        table.add_row("validation MLM accuracy", f"{last['validation/mlm_accuracy']:.3f}")
        objective = config.data.sentence_objective
        accuracy = f"validation/{objective}_accuracy"
        if accuracy in last:
            table.add_row(
                f"validation {objective.upper()} accuracy",
                f"{last[accuracy]:.3f} ± {last[accuracy + '_standard_error']:.3f} (chance: 0.5)",
            )
    console.rule(f"{config.name}", align="left", style="dim")
    console.print(table)
    console.print("look further:")
    for command in (
        f"mlflow ui --backend-store-uri {_shortened(config.tracking.uri, 'sqlite:///')}",
        f"open {_shortened(str(folder.path / 'plots' / 'loss.png'))}",
    ):
        console.print(f"  {command}", soft_wrap=True)


def _shortened(path: str, prefix: str = "") -> str:
    """`path` (behind `prefix`) relative to the working directory where it lies below it."""
    here = prefix + os.getcwd() + os.sep
    return prefix + path.removeprefix(here) if path.startswith(here) else path
