"""Folders with one writer at a time: the kernel's lock on this machine, a lease that is renewed on object stores."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from configs.schema import ConfigError
from data_prep.files import is_url, located


class LockLostError(ConfigError):
    """What was held is another's now: nothing may be written or removed."""


LOCK_NAME = ".lock"
LOCK_ATTEMPTS = 20
RENEWAL_SECONDS = 5.0
LEASE_SECONDS = 20.0
"""A lease that was not renewed for this long is nobody's."""


@dataclass(frozen=True)
class Lock:
    """A held lock. A child process that inherits `descriptor` (`pass_fds`) holds it too; a lease has none, and may be
    lost to another process where it could not be renewed in time."""

    descriptor: int | None
    lost: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises `ConfigError` if another process took the lease over."""
        if self.lost.is_set():
            raise LockLostError("another process took over the data folder while its store could not be reached")

    @property
    def descriptors(self) -> list[int]:
        return [] if self.descriptor is None else [self.descriptor]

    def name_holder(self, pid: int) -> None:
        """Write down which process others are told about."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{pid}\n".encode(), 0)


@contextmanager
def locked(folder: str | os.PathLike, wait: bool = False) -> Iterator[Lock]:
    """Hold the one writer's lock of `folder`, which is made if need be.

    Raises `ConfigError` if another holds it; with `wait`, for a local folder, waits until it does not.
    """
    with _leased(located(folder)) if is_url(folder) else _flocked(Path(folder), wait) as lock:
        yield lock


@contextmanager
def _flocked(folder: Path, wait: bool) -> Iterator[Lock]:
    """The kernel's lock (flock): it ends with the last process that holds it, however that ends. A folder that holds
    nothing else in the end is removed."""
    path = folder / LOCK_NAME
    descriptor = _opened_lock(path)
    try:
        while not _is_locked(descriptor, path, wait):
            if wait:
                # The holder removed the file.
                os.close(descriptor)
                descriptor = _opened_lock(path)
                continue
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


def _opened_lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written: {error.strerror}") from None


def _is_locked(descriptor: int, path: Path, wait: bool) -> bool:
    """Lock `descriptor`, trying for two seconds, with `wait` for ever: others look whether it is held, and orphans
    take a moment to end.

    False too where `path` is meanwhile another file: a lock on a removed file would hold nobody back.
    """
    for _ in count() if wait else range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
            continue
        return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def _leased(folder: Path) -> Iterator[Lock]:
    """A lock file that names its holder and is rewritten every few seconds; one left as it is is taken over."""
    path = folder / LOCK_NAME
    token = uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_stale(path, folder)
        _renew(path, token, 0)
        # Of two that start at once the last to write holds it.
        time.sleep(1)
        found = _read_lease(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from None
    if found is None or found["token"] != token:
        raise ConfigError(f"{folder} is being written by {_holder(found)}: wait for it, or stop it first")
    ended = threading.Event()
    lock = Lock(None)

    def is_ours() -> bool:
        lease = _read_lease(path)
        return lease is not None and lease["token"] == token

    def renew() -> None:
        renewal = 0
        while not ended.wait(RENEWAL_SECONDS):
            renewal += 1
            # A store that does not answer is asked again.
            with suppress(Exception):
                if not is_ours():
                    lock.lost.set()
                    return
                _renew(path, token, renewal)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            if is_ours():
                path.unlink(missing_ok=True)


def _wait_for_stale(path: Path, folder: Path) -> None:
    """Return once nobody holds the lease at `path`; raises `ConfigError` as soon as its holder is seen to live."""
    lease = _read_lease(path)
    deadline = time.monotonic() + LEASE_SECONDS
    while lease is not None and not _has_died(lease) and time.monotonic() < deadline:
        time.sleep(1)
        now = _read_lease(path)
        if now is not None and now != lease:
            raise ConfigError(f"{folder} is being written by {_holder(now)}: wait for it, or stop it first")
        lease = now


def _renew(path: Path, token: str, renewal: int) -> None:
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "token": token, "renewal": renewal}
    path.fs.pipe_file(path.path, json.dumps(lease).encode())


def _read_lease(path: Path) -> dict | None:
    try:
        # In one request, since the holder may rewrite it between two.
        return json.loads(path.fs.cat_file(path.path))
    except FileNotFoundError:
        return None


def _holder(lease: dict | None) -> str:
    return f"process {lease['pid']} on {lease['host']}" if lease else "another process"


def _has_died(lease: dict) -> bool:
    """Whether the holder was a process of this machine that is no more."""
    return lease["host"] == socket.gethostname() and not Path("/proc", str(lease["pid"])).exists()


def lock_holder(folder: str | os.PathLike) -> int | None:
    """The process id that holds the lock of a local `folder`, or None if none does (or it is a URL)."""
    if is_url(folder):
        return None
    try:
        descriptor = os.open(Path(folder, LOCK_NAME), os.O_RDWR)
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
