"""Commands run to their end, and what they took."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]

SAMPLING_SECONDS = 0.05


def set_options(overrides: Iterable[str]) -> list[str]:
    """`overrides`, key.path=value each, as arguments of a command."""
    return [part for override in overrides for part in ("--set", override)]


def prepare(preset: str, overrides: Iterable[str]) -> None:
    """Make the data set of `preset` with `overrides`, unless it is there."""
    command = [sys.executable, "-m", "data_prep", "--config", preset, *set_options(overrides)]
    subprocess.run(command, cwd=ROOT, check=True)


@dataclass(frozen=True)
class Used:
    """What a process and its children took: CPU seconds, wall seconds, peak memory in bytes (shared pages once)."""

    cpu: float
    wall: float
    memory: int


def run(*command: str, watch_memory: bool = False) -> Used:
    """Run `python command…` to its end, looking at its memory now and then, which costs time; exits where it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    peak = 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT)
        watched = psutil.Process(process.pid)
        while watch_memory and process.poll() is None:
            looked = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                tree = [watched, *watched.children(recursive=True)]
                peak = max(peak, sum(part.memory_full_info().pss for part in tree))
            # Summing up a large process's pages holds it up.
            time.sleep(max(SAMPLING_SECONDS, 20 * (time.monotonic() - looked)))
        process.wait()
        wall = time.monotonic() - begin
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode(errors="replace")[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Used(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall, peak)
