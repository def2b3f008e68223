"""Files that are whole or absent, on this machine and, through fsspec, wherever a URL leads (`s3://`, `gs://`, …)."""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from upath import UPath

from configs.schema import ConfigError

WHOLE_ON_ARRIVAL = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Stores that show an object only when all of it has arrived; elsewhere a rename makes it so."""
COPY_BYTES = 2**20


def is_url(place: str | os.PathLike) -> bool:
    return "://" in str(place)


def located(place: str | os.PathLike) -> Path:
    """`place`, a path or URL, as a path object. Raises `ConfigError` where what its protocol needs is not there."""
    if not is_url(place):
        return Path(place)
    protocol = str(place).partition("://")[0]
    try:
        # Without a cache of listings, for other processes write there too.
        path = UPath(place, use_listings_cache=False)
        _ = path.fs
        return path
    except ImportError as error:
        raise ConfigError(f"{protocol}:// needs a package that is not installed: {error}") from None
    except ValueError:
        raise ConfigError(
            f"{place}: no file system is known for {protocol}:// (fsspec lists those there are)"
        ) from None
    except Exception as error:
        raise ConfigError(f"{place} cannot be reached: {one_line(error)}") from None


def reached(place: str | os.PathLike) -> Path:
    """`located(place)`, after a look at it if it is a URL. Raises `ConfigError` where its store does not answer."""
    path = located(place)
    if is_url(path):
        try:
            path.fs.info(path.path)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise ConfigError(f"{place} cannot be reached: {one_line(error)}") from None
    return path


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary local path to write to; on success the file is synced and becomes `path`, else it is removed."""
    if is_url(path):
        with tempfile.TemporaryDirectory(prefix="albert-") as folder:
            temporary = Path(folder, path.name)
            yield temporary
            _upload(temporary, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_temporary_name(path.name))
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_name(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex[:12]}.tmp"


def _upload(local: Path, path: Path) -> None:
    if path.protocol in WHOLE_ON_ARRIVAL:
        path.fs.put_file(str(local), path.path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    arriving = path.with_name(_temporary_name(path.name))
    path.fs.put_file(str(local), arriving.path)
    path.unlink(missing_ok=True)
    path.fs.mv(arriving.path, path.path)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` so that a reader sees all of it or the former file."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def moved(source: Path, target: Path) -> None:
    """Rename `source` to `target`, which it replaces; on object stores the store copies it and drops the old name."""
    if is_url(source):
        target.unlink(missing_ok=True)
        source.fs.mv(source.path, target.path)
    else:
        os.replace(source, target)


def remove_folder(folder: Path) -> None:
    """Remove `folder` and all it holds, if it is there."""
    if is_url(folder):
        if folder.exists():
            folder.fs.rm(folder.path, recursive=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def entry_names(folder: Path) -> set[str]:
    """The names of what is in `folder`; none where there is no such folder."""
    try:
        if is_url(folder):
            return {path.rstrip("/").rpartition("/")[2] for path in folder.fs.ls(folder.path, detail=False)}
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def file_sizes(folder: Path) -> dict[str, int]:
    """The sizes in bytes of the files in `folder` by name; none where there is no such folder."""
    try:
        if is_url(folder):
            found = folder.fs.ls(folder.path, detail=True)
            return {info["name"].rpartition("/")[2]: info["size"] for info in found if info["type"] == "file"}
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    except FileNotFoundError:
        return {}


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a local `folder` durable."""
    if is_url(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opened(place: str | os.PathLike) -> BinaryIO:
    """The file at the path or URL `place`, to be read in binary."""
    return located(place).open("rb")


def sha256_of(place: str | os.PathLike, tell: Callable[[int], None] = lambda size: None) -> str:
    """The file's sha256; `tell` is told the size in bytes of every block that was read."""
    with opened(place) as file:
        digest = hashlib.sha256()
        while block := file.read(COPY_BYTES):
            digest.update(block)
            tell(len(block))
        return digest.hexdigest()


def bytes_between(place: str | os.PathLike, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of the file at the path or URL `place`."""
    path = located(place)
    if is_url(path):
        return path.fs.cat_file(path.path, start=begin, end=end)
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(end - begin)
