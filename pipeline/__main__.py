"""`python -m pipeline`: commands over the steps."""

import json
from pathlib import Path
from typing import Annotated

import typer

from configs.schema import CACHE, load_config, run_command

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run all steps, or look at what they made.",
)


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="YAML file with the settings, such as configs/demo.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key.path=value: override; repeatable")] = None,
    extend: Annotated[bool, typer.Option(help="go on with a run whose training.steps was raised")] = False,
    hostfile: Annotated[str | None, typer.Option(help="nodes to train on, a line each: NAME slots=GPUS")] = None,
) -> None:
    """Prepare the data and pretrain, skipping what is complete and matches the config; sum up at the end."""

    def command() -> None:
        settings = load_config(config, set_ or [])
        from pipeline.run import run_pipeline

        run_pipeline(settings, config, set_ or [], extend, hostfile)

    run_command(command)


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(help="a prepared data folder, such as data/demo")],
    config: Annotated[str | None, typer.Option(help="say how much its batches would be padded")] = None,
    examples: Annotated[int, typer.Option(min=0, help="examples to show")] = 3,
    verify: Annotated[bool, typer.Option(help="digest every file and compare with the manifest")] = False,
    cache: Annotated[str, typer.Option(help="the folder for the copy of a data folder that is a URL")] = CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Show what a data folder holds: counts, drops by reason, lengths, labels, padding, and some examples."""

    def command() -> None:
        training = load_config(config).training if config is not None else None
        from rich.console import Console

        from pipeline.inspection import dataset_summary, open_dataset, print_dataset

        dataset = open_dataset(folder, verify, cache)
        summary = dataset_summary(dataset, training)
        if as_json:
            typer.echo(json.dumps(summary, indent=1))
            return
        console = Console(highlight=False)
        print_dataset(dataset, summary, examples, console)
        if verify:
            console.print("\nevery file is as the manifest says")

    run_command(command)


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(help="a run's folder, such as runs/demo: its newest complete checkpoint")],
    checkpoint: Annotated[str | None, typer.Option(help="another checkpoint than the newest, by its folder")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="a data folder with the same vocabulary and sentence objective, instead of the run's"),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="evaluate on so many global batches only")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Evaluate a checkpoint on the validation examples: losses, perplexity, and accuracies with standard errors."""

    def command() -> None:
        from rich.console import Console

        from pipeline.evaluation import evaluate_checkpoint, print_evaluation

        figures = evaluate_checkpoint(Path(checkpoint or run), data, batches, Console(stderr=True))
        if as_json:
            typer.echo(json.dumps(figures, indent=1))
        else:
            print_evaluation(figures, Console(highlight=False))

    run_command(command)


if __name__ == "__main__":
    app()
