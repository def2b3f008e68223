"""Commands run to their end, and what they took."""

import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

SAMPLING_SECONDS = 0.05


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
