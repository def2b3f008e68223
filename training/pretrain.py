"""`deepspeed --module training.pretrain --config C`: pretrain ALBERT on prepared data, or go on where it stopped.

Everything that can be refused is refused before torch is imported. Under the launcher every process runs this; rank 0
alone holds the run folder's lock, writes, and speaks.
"""

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from configs.schema import Config, ConfigError, exit_with_error, load_config

SECONDS_FOR_RANK_0_TO_SPEAK = 5

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[str, typer.Option(help="YAML file with the settings, such as configs/demo.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key.path=value: override; repeatable")] = None,
    extend: Annotated[bool, typer.Option(help="go on with a run whose training.steps was raised")] = False,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True, help="given by the launcher")] = 0,
) -> None:
    """Pretrain ALBERT on the prepared data; a run that was stopped goes on from its newest complete checkpoint.

    Start it by `deepspeed --module training.pretrain …` for several processes or nodes, or by
    `python -m training.pretrain …` for one.
    """
    try:
        pretrain(load_config(config, set_ or []), extend)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            exit_with_error(error)
        # The launcher ends all processes when the first one fails.
        time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
        sys.exit(2)
    # Everything is written: gloo's threads may abort a process that ends in the ordinary way, and the launcher would
    # report a finished run as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def pretrain(config: Config, extend: bool = False) -> None:
    """Train from the newest checkpoint of `training.output`, or from the start; raises `ConfigError`."""
    from data_prep.locks import locked
    from data_prep.shards import Dataset
    from training.run_folder import RunFolder, check_data

    is_rank_0 = os.environ.get("RANK", "0") == "0"
    dataset = Dataset.open(config.data.output)
    check_data(config, dataset)
    with ExitStack() as stack:
        if is_rank_0:
            stack.enter_context(locked(Path(config.training.output)))
        folder = RunFolder.open(config, dataset, extend)
        if folder.finished:
            if is_rank_0:
                print(f"training: {folder.path} is complete at step {folder.checkpoint.step:,}; nothing to do")
            return
        is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        copy = dataset.at_hand(config.data.cache, partial(print, flush=True), check=is_first_of_node)
        if copy is dataset and is_rank_0:
            dataset.verify()
        from training.process import run_process

        run_process(config, copy, folder)


if __name__ == "__main__":
    app()
