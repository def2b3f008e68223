"""Checkpoints: whole tensors in safetensors and a state in JSON, the same whatever the cluster that wrote them.

A checkpoint is written beside its place, synced, given a marker with the size and digest of every file, and renamed.
Reading trusts nothing but the marker. Nothing is ever unpickled.
"""

import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configs.schema import ConfigError
from data_prep.files import sha256_of, sync_folder, write_whole

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MARKER = "COMPLETE"
NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> dict:
        return json.loads((self.path / STATE).read_text())

    def weights(self) -> dict:
        """Weights by name, float32 on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.path / WEIGHTS)

    def moments(self) -> dict:
        """The optimizer's moments, by `name.exp_avg` and `name.exp_avg_sq`, float32 on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.path / OPTIMIZER)


def incompleteness(path: Path) -> str | None:
    """Why the folder `path` is no complete checkpoint, or None if it is one."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        expected = [(name, files[name]["bytes"], files[name]["sha256"]) for name in (WEIGHTS, OPTIMIZER, STATE)]
    except FileNotFoundError:
        return f"{MARKER} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MARKER} cannot be read"
    for name, size, digest in expected:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if sha256_of(file) != digest:
            return f"{name} was altered"
    return None


def newest_complete(folder: Path, last_step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint in `folder` (of `last_step` at most), and a line for each newer one that was
    passed over."""
    passed_over = []
    for step, path in sorted(_found(folder), reverse=True):
        if last_step is not None and step > last_step:
            continue
        reason = incompleteness(path)
        if reason is None:
            return Checkpoint(path, step), passed_over
        passed_over.append(f"{path}: {reason}")
    return None, passed_over


def once_complete(folder: Path) -> bool:
    """Whether a checkpoint in `folder` has a marker, whole or damaged: a kill in the first writing leaves none."""
    return any((path / MARKER).exists() for _, path in _found(folder))


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints in `folder` that are newer than `step`, the newest first."""
    for _, path in sorted((found for found in _found(folder) if found[0] > step), reverse=True):
        _remove(path)


def named(path: Path) -> Checkpoint:
    """The checkpoint whose folder is `path`, without a look at it."""
    return Checkpoint(path, int(NAME.fullmatch(path.name)[1]))


def opened(path: Path) -> tuple[Checkpoint, list[str]]:
    """The complete checkpoint at `path`, or the newest in the run `path` and a line for each newer one that was passed
    over; raises `ConfigError`."""
    if NAME.fullmatch(path.name):
        reason = incompleteness(path)
        if reason is not None:
            raise ConfigError(f"{path} is no complete checkpoint: {reason}")
        return named(path), []
    checkpoint, passed_over = newest_complete(path / "checkpoints")
    if checkpoint is None:
        found = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise ConfigError(f"no complete checkpoint in {path / 'checkpoints'}{found}")
    return checkpoint, passed_over


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, and prunes old ones once a newer one is complete."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def write(self, step: int, weights: dict, moments: dict, state: dict, trusted: int | None = None) -> None:
        """Start writing; waits for the one before, and raises its error if it failed.

        The newest checkpoint of step `trusted` at most, and the one after it, are kept beside the newest ones.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, step, weights, moments, state, trusted)

    def wait(self) -> None:
        """Return when nothing is being written; raises `OSError` if the last write failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, step: int, weights: dict, moments: dict, state: dict, trusted: int | None) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._folder / f"step-{step:08d}"
        partial = self._folder / f".{path.name}.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            save_file(weights, partial / WEIGHTS)
            save_file(moments, partial / OPTIMIZER)
            write_whole(partial / STATE, json.dumps(state, indent=1) + "\n")
            files = {}
            for name in (WEIGHTS, OPTIMIZER, STATE):
                _sync(partial / name)
                files[name] = {"bytes": (partial / name).stat().st_size, "sha256": sha256_of(partial / name)}
            write_whole(partial / MARKER, json.dumps({"step": step, "files": files}, indent=1) + "\n")
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
            sync_folder(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(f"checkpoint {path} could not be written: {error}") from error
        self._prune(step, trusted)

    def _prune(self, newest: int, trusted: int | None) -> None:
        """Keep `newest` and the ones before it, `keep` in all, the newest up to `trusted`, and the one that will be
        trusted next; what is left of writes that were cut off goes too."""
        found = sorted(_found(self._folder))
        kept = [path for step, path in found if step <= newest][-self._keep :]
        if trusted is not None:
            kept += [path for step, path in found if step <= trusted][-1:]
            kept += [path for step, path in found if step > trusted][:1]
        for _, path in found:
            if path not in kept:
                _remove(path)
        for partial in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _found(folder: Path) -> list[tuple[int, Path]]:
    paths = folder.glob("step-*") if folder.is_dir() else ()
    return [(int(match[1]), path) for path in paths if (match := NAME.fullmatch(path.name))]


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
