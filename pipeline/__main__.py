"""`python -m pipeline`: commands over the steps."""

from typing import Annotated

import typer

from configs.schema import load_config, run_command

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Run all steps, or look at what they made.")


@app.callback()
def commands() -> None:
    """Keep `run` a command of its own name, however many there are."""


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


if __name__ == "__main__":
    app()
