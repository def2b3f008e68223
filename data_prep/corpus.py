"""Where documents come from: inputs are listed, parted into units of work, and read one document at a time.

A unit is a byte range of a plain file, a whole compressed or parquet file, or some modules of a package. Which unit a
document falls into never shows in the document, so units may be cut anywhere.
"""

import ast
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from configs.schema import ConfigError, InputConfig, fingerprint
from data_prep.files import is_url, located, one_line, opened, sha256_of

UNIT_BYTES = (2**20, 64 * 2**20)
"""The least and the most bytes in a unit of a plain file."""
UNITS = 128
"""How many units a corpus is parted into at least, within those bounds: enough that workers end at about the same time.

Their bytes are a power of two, so that files are parted at the same places when others are added."""
MODULES_BYTES = 2 * 2**20
"""Python source per unit: parsing it is the slow part."""
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
READ_BYTES = 2**20
CHANGE_MARKS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "modified",
    "updated",
)
"""What stores tell of an object that changes with its content."""
WHITE_IN_LINE = b" \t\r\x0b\x0c"
WHITE = WHITE_IN_LINE + b"\n"
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\x0b\x0c]*+\n)++")
WIKI_BEGIN = re.compile(rb"\s*<doc [^>]*>\s*$")
DOCTEST = re.compile(r"^\s*>>>", re.MULTILINE)
RULE = re.compile(r"^\W+$")


class Document(NamedTuple):
    """A document's text, or the kind of problem that made the record unreadable; `place` says where it stands."""

    text: str
    place: str
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """An input file by its path or URL, or for docstrings an installed package by its name, with its modules' paths
    relative to it and their sizes.

    `name` is its path below the folder that the glob fixes: with it documents are told apart, wherever that lies.
    `mark` is what else than its size told of a file that changes with its content, and what it was: ("mtime", "17…").
    """

    settings: InputConfig
    path: str
    name: str
    bytes: int
    identity: str
    mark: tuple[str, str] = ("", "")
    modules: tuple[tuple[str, int], ...] = ()

    def check_unchanged(self) -> None:
        """Raises `OSError` where a file is not the one that was listed; packages may differ from machine to machine."""
        if self.settings.kind == "docstrings":
            return
        try:
            state = _state_of(self.path)
        except OSError as error:
            raise OSError(f"{self.path} cannot be read: {one_line(error)}") from error
        name, value = self.mark
        if state["size"] != self.bytes or str(state.get(name, value)) != value:
            raise OSError(f"{self.path} changed while it was read: run the same command again once it is still")

    def sha256(self, tell: Callable[[int], None] = lambda size: None) -> str:
        """The file's sha256; a package's is that of its modules' digests and names, as `sha256sum` prints them.

        `tell` is told the size in bytes of every block that was read. Raises `OSError` where the file changed since it
        was listed.
        """
        if self.settings.kind != "docstrings":
            self.check_unchanged()
            digest = sha256_of(self.path, tell)
            self.check_unchanged()
            return digest
        folder = package_folder(self.path)
        return fingerprint([[sha256_of(folder / module, tell), module] for module, _ in self.modules])


@dataclass(frozen=True)
class Unit:
    """A piece of work: bytes [begin, end) of a plain file, modules [begin, end) of a package, else the whole."""

    source: Source
    begin: int
    end: int
    bytes: int

    @property
    def identity(self) -> str:
        """Equal only where the documents are, with their places."""
        return fingerprint([self.source.identity, self.source.name, self.begin, self.end])


def list_sources(inputs: tuple[InputConfig, ...]) -> list[Source]:
    """Every input file and package, in a fixed order; raises `ConfigError` where an entry matches nothing."""
    sources: list[Source] = []
    names: set[str] = set()

    def add(position: int, source: Source) -> None:
        name = source.name
        while name in names:
            # No path begins so: two files whose paths below their globs' folders are alike stay two.
            name = f":{position}:{name}"
        names.add(name)
        sources.append(replace(source, name=name))

    for position, settings in enumerate(inputs):
        key = f"data.inputs.{position}.path"
        if settings.kind == "docstrings":
            for package in settings.path.replace(",", " ").split():
                add(position, _package(settings, package, key))
            continue
        matches = _remote_matches(settings.path, key) if is_url(settings.path) else _local_matches(settings.path, key)
        if not matches:
            raise ConfigError(f"{key}: no file matches {settings.path}")
        for path, state in matches:
            size = state["size"]
            mark = next(((name, str(state[name])) for name in CHANGE_MARKS if name in state), ("", ""))
            identity = fingerprint([settings.model_dump(mode="json"), path, size, mark])
            name = os.path.relpath(path, _fixed_folder(settings.path))
            add(position, Source(settings, path, name, size, identity, mark))
    return sources


def _local_matches(pattern: str, key: str) -> list[tuple[str, dict]]:
    """(path, state) of the files that match, sorted."""
    paths = sorted(path for path in glob(pattern, recursive=True) if os.path.isfile(path))
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key}: the name of {os.fsencode(path)!r} is not UTF-8: rename the file") from None
    return [(path, _state_of(path)) for path in paths]


def _remote_matches(pattern: str, key: str) -> list[tuple[str, dict]]:
    """(URL, state) of the objects that match, sorted."""
    place = located(pattern)
    prefix = pattern.removesuffix(place.path)
    try:
        found = place.fs.glob(place.path, detail=True)
    except Exception as error:
        raise ConfigError(f"{key}: {pattern} cannot be listed: {one_line(error)}") from None
    return [(prefix + path, info) for path, info in sorted(found.items()) if info["type"] == "file"]


def _state_of(path: str) -> dict:
    """What is told of the file at a path or URL: its `size` in bytes, and some of `CHANGE_MARKS`."""
    if is_url(path):
        place = located(path)
        return place.fs.info(place.path)
    status = os.stat(path)
    return {"size": status.st_size, "mtime": status.st_mtime_ns}


def _fixed_folder(pattern: str) -> str:
    """The folder of `pattern` before its first wildcard."""
    folder = os.path.dirname(pattern)
    while has_magic(folder):
        folder = os.path.dirname(folder)
    return folder or "/"


def split_units(sources: list[Source]) -> list[Unit]:
    least, most = UNIT_BYTES
    share = sum(source.bytes for source in sources) // UNITS
    unit_bytes = min(most, max(least, 1 << share.bit_length() >> 1))
    units = []
    for source in sources:
        if source.modules:
            units += _module_units(source)
        elif (
            source.settings.kind in ("text", "jsonl")
            and not source.path.endswith(tuple(COMPRESSED))
            and source.settings.document_per == "block"
        ):
            for begin in range(0, source.bytes, unit_bytes):
                end = min(begin + unit_bytes, source.bytes)
                units.append(Unit(source, begin, end, end - begin))
        else:
            units.append(Unit(source, 0, source.bytes, source.bytes))
    return units


class UnitReader:
    """The documents that begin in `unit`, in order, once; unreadable records come with their problem.

    Iterating raises `OSError`, naming the file, where the file itself is bad or changed since it was listed.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        self._position: Callable[[], int] = lambda: 0

    @property
    def bytes_read(self) -> int:
        """How much of the unit's bytes is behind."""
        return max(0, min(self._unit.bytes, self._position()))

    def __iter__(self) -> Iterator[Document]:
        source = self._unit.source
        source.check_unchanged()
        try:
            yield from self._documents()
        except (OSError, EOFError, pa.ArrowException, KeyError) as error:
            source.check_unchanged()
            raise OSError(f"{source.path} cannot be read: {one_line(error)}") from error
        source.check_unchanged()

    def _documents(self) -> Iterator[Document]:
        unit = self._unit
        settings, path, name = unit.source.settings, unit.source.path, unit.source.name
        if settings.kind == "docstrings":
            yield from self._docstrings()
        elif settings.kind == "parquet":
            yield from self._parquet_texts()
        else:
            with _decompressed(path) as (file, position):
                self._position = lambda: position() - unit.begin
                if settings.kind == "text" and settings.document_per == "file":
                    yield _decoded(file.read(), f"{name}:0")
                elif settings.kind == "text":
                    yield from _blocks(file, unit)
                elif settings.kind == "jsonl":
                    yield from _json_lines(file, unit)
                else:
                    yield from _wiki_articles(file, name)

    def _docstrings(self) -> Iterator[Document]:
        source = self._unit.source
        folder = package_folder(source.path)
        read = 0
        for module, size in source.modules[self._unit.begin : self._unit.end]:
            place = f"{source.name}/{module}:0"
            content = (folder / module).read_bytes()
            if len(content) != size:
                raise OSError(f"{module} has {len(content)} bytes here and {size} where the job was started")
            read += size
            self._position = lambda position=read: position
            try:
                tree = ast.parse(content)
            except (SyntaxError, ValueError, RecursionError):
                yield Document("", place, "syntax_error")
                continue
            text = docstring_text(tree)
            if text:
                yield _unescaped(text, place)

    def _parquet_texts(self) -> Iterator[Document]:
        source = self._unit.source
        field, row = source.settings.text_field, 0
        with opened(source.path) as raw:
            file = pa.parquet.ParquetFile(raw)
            if field not in file.schema_arrow.names:
                raise OSError(f"it has no column {field} (its columns: {', '.join(file.schema_arrow.names)})")
            self._position = lambda: self._unit.bytes * row // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                column = batch.column(0)
                if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                    # Bytes, for pyarrow ends at the first that are no UTF-8.
                    column = column.cast(pa.large_binary())
                for value in column.to_pylist():
                    place = f"{source.name}:{row}"
                    if isinstance(value, bytes):
                        yield _decoded(value, place)
                    elif isinstance(value, str):
                        yield Document(value, place)
                    else:
                        yield Document("" if value is None else str(value), place, "missing_field")
                    row += 1


def read_documents(unit: Unit) -> UnitReader:
    return UnitReader(unit)


@lru_cache
def package_folder(name: str) -> Path:
    """Where the installed package `name` lies, which is not imported; raises `OSError` if it is not there."""
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise OSError(f"{name} is not an installed top-level package")
    return Path(next(iter(spec.submodule_search_locations)))


def _package(settings: InputConfig, name: str, key: str) -> Source:
    try:
        root = package_folder(name)
    except OSError as error:
        raise ConfigError(f"{key}: {error}") from None
    modules = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    if not modules:
        raise ConfigError(f"{key}: package {name} has no Python modules")
    states = [os.stat(root / module) for module in modules]
    identity = fingerprint([name, [[m, s.st_size, s.st_mtime_ns] for m, s in zip(modules, states, strict=True)]])
    sizes = [state.st_size for state in states]
    return Source(settings, name, name, sum(sizes), identity, modules=tuple(zip(modules, sizes, strict=True)))


def _module_units(source: Source) -> Iterator[Unit]:
    begin, size = 0, 0
    for position, (_, module_size) in enumerate(source.modules):
        size += module_size
        if size >= MODULES_BYTES or position + 1 == len(source.modules):
            yield Unit(source, begin, position + 1, size)
            begin, size = position + 1, 0


def docstring_text(tree: ast.Module) -> str:
    """The docstrings of a module in source order as paragraphs of prose: without doctests and underlines."""
    nodes = [tree] + [
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    nodes[1:] = sorted(nodes[1:], key=lambda node: (node.lineno, node.col_offset))
    paragraphs = []
    for node in nodes:
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            if DOCTEST.search(paragraph):
                continue
            lines = [line.rstrip() for line in paragraph.splitlines() if line.strip() and not RULE.match(line)]
            if lines:
                paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


@contextmanager
def _decompressed(path: str) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """(the content of the file, what tells the position in the file itself)."""
    with opened(path) as raw:
        compression = COMPRESSED.get(os.path.splitext(path)[1])
        if compression is not None:
            stream = pa.CompressedInputStream(pa.PythonFile(raw), compression)
            yield io.BufferedReader(stream, READ_BYTES), raw.tell
        else:
            file = io.BufferedReader(raw, READ_BYTES) if is_url(path) else raw
            yield file, file.tell


def _decoded(content: bytes, place: str) -> Document:
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError:
        return Document(content.decode("utf-8", "replace"), place, "invalid_utf8")
    return Document(text.replace("\r\n", "\n"), place)


def _unescaped(text: str, place: str) -> Document:
    """A document of `text` from a literal, whose escapes can spell halves of surrogate pairs: no Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Document(text.encode("utf-8", "replace").decode(), place, "invalid_unicode")
    return Document(text, place)


def _first_line_start(file: BinaryIO, unit: Unit) -> int | None:
    """Where the first line starts that starts in `unit`, or None. Reads no more than the unit."""
    if unit.begin == 0:
        return 0
    position = unit.begin - 1
    file.seek(position)
    while position < unit.end - 1 and (content := file.read(READ_BYTES)):
        found = content.find(b"\n")
        if found >= 0:
            start = position + found + 1
            return start if start < unit.end else None
        position += len(content)
    return None


def _follows_blank_line(file: BinaryIO, start: int) -> bool:
    """Whether the line before the one that starts at `start` is blank, or there is none."""
    place = max(0, start - 1)
    while place > 0:
        step = min(place, 4096)
        file.seek(place - step)
        content = file.read(step).rstrip(WHITE_IN_LINE)
        if content:
            return content.endswith(b"\n")
        place -= step
    return True


def _lines(file: BinaryIO, unit: Unit) -> Iterator[tuple[int, bytes]]:
    """(offset, line) from the first line that starts in `unit` to the end of the file."""
    position = _first_line_start(file, unit)
    if position is None:
        return
    if position:
        file.seek(position)
    for line in file:
        yield position, line
        position += len(line)


def _blocks(file: BinaryIO, unit: Unit) -> Iterator[Document]:
    """Runs of lines that are not blank; a block belongs to the unit in which it begins."""
    start = _first_line_start(file, unit)
    if start is None:
        return
    whole_file = unit.end >= unit.source.bytes
    # Where the block that is read begins in `buffer`; None inside one that began in an earlier unit.
    begin = 1 if _follows_blank_line(file, start) else None
    if start:
        file.seek(start)
    # A line break comes before every line.
    buffer, offset, searched = b"\n", start - 1, 0
    # Ever more of a block without end, so that the time is linear.
    while content := file.read(max(READ_BYTES, len(buffer))):
        buffer += content
        # A gap that reaches the end may go on.
        limit = len(buffer.rstrip(WHITE))
        for gap in BLANK_LINES.finditer(buffer, searched, limit):
            if begin is not None and gap.start() + 1 > begin:
                yield _decoded(buffer[begin : gap.start() + 1], f"{unit.source.name}:{offset + begin}")
            begin = gap.end()
            if offset + begin >= unit.end and not whole_file:
                return
        if begin is None and offset + limit >= unit.end and not whole_file:
            return
        done = limit if begin is None else min(begin, limit)
        buffer, offset, searched = buffer[done:], offset + done, limit - done
        begin = None if begin is None else begin - done
    rest = buffer[begin:] if begin is not None else b""
    # The lines after the last that is not blank go, and the line break that ends it stays.
    last_line_break = rest.find(b"\n", len(rest.rstrip(WHITE)))
    rest = rest[: last_line_break + 1] if last_line_break >= 0 else rest
    if rest.strip():
        yield _decoded(rest, f"{unit.source.name}:{offset + begin}")


def _json_lines(file: BinaryIO, unit: Unit) -> Iterator[Document]:
    whole_file = unit.end >= unit.source.bytes
    name, field = unit.source.name, unit.source.settings.text_field
    for position, line in _lines(file, unit):
        if position >= unit.end and not whole_file:
            return
        if not line.strip():
            continue
        place = f"{name}:{position}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield Document(line.decode("utf-8", "replace"), place, "broken_json")
            continue
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            yield Document(line.decode("utf-8", "replace"), place, "missing_field")
        else:
            yield _unescaped(record[field], place)


def _wiki_articles(file: BinaryIO, name: str) -> Iterator[Document]:
    article: list[bytes] | None = None
    position = begin = 0
    for line in file:
        if WIKI_BEGIN.match(line):
            if article is not None:
                yield Document(b"".join(article).decode("utf-8", "replace"), f"{name}:{begin}", "unclosed_article")
            article, begin = [], position
        elif line.strip() == b"</doc>":
            if article is not None:
                yield _decoded(b"".join(article), f"{name}:{begin}")
            article = None
        elif article is not None:
            article.append(line)
        position += len(line)
    if article is not None:
        yield Document(b"".join(article).decode("utf-8", "replace"), f"{name}:{begin}", "unclosed_article")
