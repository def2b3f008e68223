"""All steps in order, each a process of its own, skipping those whose outputs are complete and match the config."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from configs.schema import Config, ConfigError
from data_prep.locks import lock_holder
from data_prep.prepare import finished_dataset
from data_prep.shards import Dataset
from pipeline.lineage import log_data_run
from pipeline.report import print_summary
from training.run_folder import RunFolder, check_data, check_former_config

CPU_PROCESSES = 2
SECONDS_TO_SAVE = 60


def run_pipeline(config: Config, config_path: str, overrides: list[str], extend: bool, hostfile: str | None) -> None:
    """Prepare, track the data, pretrain, and sum up; raises `ConfigError`, and exits with a failed step's code."""
    if hostfile is not None and not Path(hostfile).is_file():
        raise ConfigError(f"hostfile {hostfile} not found")
    for folder in (config.data.output, config.training.output):
        holder = lock_holder(folder)
        if holder is not None:
            raise ConfigError(
                f"{folder} is being written by process {holder}: wait for it, or stop it (kill {holder}) first"
            )
    check_former_config(config, extend)
    console = Console(highlight=False)
    settings = ["--config", config_path, *(part for override in overrides for part in ("--set", override))]
    seconds: dict[str, float | None] = {"data": None, "training": None}

    dataset = finished_dataset(config)
    if dataset is not None:
        console.print(f"data: {dataset.folder} is complete and matches the config; skipped")
    else:
        seconds["data"] = _run_step("data", [sys.executable, "-m", "data_prep", *settings], config.data.output, console)
        dataset = Dataset.open(config.data.output)
    check_data(config, dataset)
    log_data_run(config, dataset, console)

    folder = RunFolder.open(config, dataset, extend)
    if folder.finished:
        console.print(f"training: {folder.path} is complete at step {folder.checkpoint.step:,}; skipped")
    else:
        arguments = [*settings, *(["--extend"] if extend else [])]
        command = [*_launcher(config, hostfile), "--module", "training.pretrain", *arguments]
        seconds["training"] = _run_step("training", command, config.training.output, console)
        folder = RunFolder.open(config, dataset, extend)
        if not folder.finished:
            raise ConfigError(_interrupted("training"))
    print_summary(config, dataset, folder, seconds, console)


def _interrupted(name: str) -> str:
    return f"{name} was interrupted; the same command goes on from what it had saved"


def _launcher(config: Config, hostfile: str | None) -> list[str]:
    """DeepSpeed's launcher, for this machine's GPUs (or two processes on its CPU), or for the nodes of `hostfile`."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level=warning"]
    if hostfile is not None:
        return [*launcher, f"--hostfile={hostfile}"]
    processes = config.training.processes_per_node
    if processes == "auto":
        processes = count_gpus() or CPU_PROCESSES
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [*launcher, f"--num_gpus={processes}", f"--master_port={port}"]


def count_gpus() -> int:
    """The NVIDIA GPUs that this process may use, 0 where there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() and not device.strip().startswith("-")])
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _run_step(name: str, command: list[str], output: str, console: Console) -> float:
    """Run a step and return its seconds; Ctrl-C and SIGTERM let it save and end, then end the pipeline too."""
    console.rule(f"{name}: {shlex.join(command[1:])}", align="left", style="dim")
    begin = time.monotonic()
    environment = dict(os.environ)
    if not count_gpus():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    # In a session of its own the step gets signals from us alone, once.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        os.killpg(process.pid, signal.SIGTERM)

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
        _wait_for_writers(output)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if interrupted:
        raise ConfigError(_interrupted(name))
    if code:
        raise ConfigError(f"{name} failed (exit code {code}); its messages are above")
    return time.monotonic() - begin


def _wait_for_writers(folder: str) -> None:
    """The launcher may end before the processes that it started."""
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while lock_holder(folder) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
