"""`python -m data_prep`: raw text to a vocabulary and sharded examples."""

from typing import Annotated

import typer

from configs.schema import exit_with_error, load_config, run_command

HELP = """Turn raw text into a SentencePiece vocabulary and sharded pretraining examples.

Further options are Beam's, such as --runner=FlinkRunner --flink_master=HOST:8081; the default runner is Beam's own on
this machine. A data folder that is complete and matches the config is left as it is; interrupted work is continued.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    help=HELP,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True},
)
def main(
    context: typer.Context,
    config: Annotated[str, typer.Option(help="YAML file with the settings, such as configs/demo.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key.path=value: override; repeatable")] = None,
) -> None:
    def command() -> None:
        settings = load_config(config, set_ or [])
        from rich.console import Console

        from data_prep.prepare import StepFailedError, prepare

        try:
            prepare(settings, context.args, Console(stderr=True))
        except StepFailedError as failure:
            exit_with_error(failure)
        except KeyboardInterrupt:
            exit_with_error("interrupted; the same command goes on from here")

    run_command(command)


if __name__ == "__main__":
    app()
