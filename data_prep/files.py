"""Files that are whole or absent, and folders with one writer at a time."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.schema import ConfigError

LOCK_NAME = ".lock"
LOCK_ATTEMPTS = 3


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; on success it is synced and renamed to `path`, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` so that a reader sees all of it or the former file."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Lock:
    """A held lock. A child process that inherits `descriptor` (`pass_fds`) holds it too."""

    descriptor: int

    def name_holder(self, pid: int) -> None:
        """Write down which process others are told about."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{pid}\n".encode(), 0)


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the one writer's lock of `folder`, which is made if need be; raises `ConfigError` if another holds it.

    The lock is the kernel's (flock): it ends with the last process that holds it, however that ends. A folder that
    holds nothing else in the end is removed.
    """
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        if not _is_locked(descriptor, path):
            holder = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"{folder} is being written by process {holder}: wait for it, or stop it (kill {holder}) first"
            )
        lock = Lock(descriptor)
        lock.name_holder(os.getpid())
        try:
            yield lock
        finally:
            if {entry.name for entry in folder.iterdir()} == {LOCK_NAME}:
                path.unlink()
                folder.rmdir()
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, path: Path) -> bool:
    """Lock `descriptor`, trying again for a moment, for others take the lock to look whether it is held.

    False too where `path` is meanwhile another file: a lock on a removed file would hold nobody back.
    """
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
            continue
        return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def lock_holder(folder: Path) -> int | None:
    """The process id that holds the lock of `folder`, or None if none does."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return int(os.read(descriptor, 64).decode(errors="replace").strip() or 0)
    finally:
        os.close(descriptor)
