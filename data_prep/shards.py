"""The prepared data set on disk: Arrow shards, `spiece.model` and `manifest.json`.

A shard is an uncompressed Arrow IPC file, read through a memory map: opening costs nothing and rows are reached at
random. `manifest.json` is written last; a folder without it, or whose files differ from it, is not a data set.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from configs.schema import ConfigError, DataConfig, fingerprint
from data_prep.files import (
    COPY_BYTES,
    file_sizes,
    is_url,
    one_line,
    opened,
    reached,
    replaced_file,
    sha256_of,
    write_whole,
)
from data_prep.locks import locked
from data_prep.ragged import concatenated_ranges

FORMAT = 1
"""Raised when shards made by older code must be made again."""
MANIFEST = "manifest.json"
VOCABULARY = "spiece.model"
SPLITS = ("train", "validation")
ROWS_PER_BATCH = 16384
MOST_TOKENS = 2**31 - 1
"""In a shard: Arrow's lists have offsets of 32 bits."""
COPIERS = 4


def shard_schema(vocabulary_size: int, static_masks: bool) -> pa.Schema:
    """Columns of a shard; token ids are uint16, int32 for vocabularies over 65,535."""
    ids = pa.list_(pa.field("item", pa.uint16() if vocabulary_size <= 65535 else pa.int32(), nullable=False))
    positions = pa.list_(pa.field("item", pa.uint16(), nullable=False))
    columns = [
        ("input_ids", ids),
        ("segment_b_start", pa.uint16()),
        ("sentence_label", pa.int8()),
        ("document", pa.uint64()),
        ("chunk", pa.uint32()),
    ]
    if static_masks:
        columns += [
            ("masked_positions", positions),
            ("masked_labels", ids),
            ("masked_inputs", ids),
            ("copy", pa.uint16()),
        ]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def check_shard_tokens(name: str, tokens: int, data: DataConfig) -> None:
    """Refuse a shard `name` of examples that have more `tokens`, in all copies of static masking, than can be merged:
    duplicates count, which are removed from the rows in memory."""
    tokens *= data.masking.copies
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"{name} would hold {tokens:,} tokens or more before duplicates are removed, "
            f"a shard takes {MOST_TOKENS:,}: raise data.shards ({data.shards})"
        )


def write_shard(path: Path, table: pa.Table) -> dict:
    """Write `table` as one shard, whole or not at all, the same bytes for the same rows; returns {bytes, sha256}."""
    with replaced_file(path) as temporary:
        with pa.ipc.new_file(str(temporary), table.schema) as writer:
            for batch in table.combine_chunks().to_batches(max_chunksize=ROWS_PER_BATCH):
                writer.write_batch(batch)
        return {"bytes": temporary.stat().st_size, "sha256": sha256_of(temporary)}


@dataclass(frozen=True)
class Rows:
    """Examples taken from shards, in the order asked for. `input_ids`: all ids end to end; `lengths`,
    `segment_b_start`, `sentence_label`: int64 [rows]; `columns`: static masks where the shards have them, as
    (values end to end, counts)."""

    input_ids: np.ndarray
    lengths: np.ndarray
    segment_b_start: np.ndarray
    sentence_label: np.ndarray
    static_masks: dict[str, np.ndarray] | None


class Split:
    """The examples of one split, numbered 0..rows-1 over its shards in order; nothing is read until it is asked for."""

    def __init__(self, paths: list[Path]):
        """Raises `ConfigError` naming a file that is no shard."""
        self._batches: list[pa.RecordBatch] = []
        for path in paths:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                self._batches += [reader.get_batch(index) for index in range(reader.num_record_batches)]
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(
                    f"{path} cannot be read ({one_line(error)}): prepare the data again (python -m data_prep)"
                ) from None
        self._first_rows = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self.rows = int(self._first_rows[-1])
        self.static_masks = bool(self._batches) and "masked_positions" in self._batches[0].schema.names

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """int64: numbers of tokens of the examples `indices` (int64)."""
        lengths = np.empty(len(indices), dtype=np.int64)
        for batch, places, rows in self._by_batch(indices):
            offsets, _ = self._lists["input_ids"][batch]
            lengths[places] = offsets[rows + 1] - offsets[rows]
        return lengths

    def take(self, indices: np.ndarray) -> Rows:
        """The examples `indices` (int64), copied out of the shards."""
        input_ids, lengths = self._take_lists("input_ids", indices)
        masks = None
        if self.static_masks:
            masks = {}
            for name in ("masked_positions", "masked_labels", "masked_inputs"):
                masks[name], masks["counts"] = self._take_lists(name, indices)
        scalars = {name: np.empty(len(indices), dtype=np.int64) for name in ("segment_b_start", "sentence_label")}
        for batch, places, rows in self._by_batch(indices):
            for name, values in scalars.items():
                values[places] = self._batches[batch].column(name).to_numpy()[rows]
        return Rows(input_ids, lengths, **scalars, static_masks=masks)

    def token_counts(self, vocabulary_size: int) -> np.ndarray:
        """int64 [vocabulary_size]: how often each id occurs, read through once."""
        counts = np.zeros(vocabulary_size, dtype=np.int64)
        for batch in self._batches:
            column = batch.column("input_ids")
            counts += np.bincount(column.flatten().to_numpy(), minlength=vocabulary_size)
        return counts

    def identities(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """(document, chunk) of the examples `indices`."""
        found: list[tuple[int, int]] = [(0, 0)] * len(indices)
        for batch, places, rows in self._by_batch(indices):
            documents, chunks = (self._batches[batch].column(name).to_numpy() for name in ("document", "chunk"))
            for place, row in zip(places, rows, strict=True):
                found[place] = (int(documents[row]), int(chunks[row]))
        return found

    @cached_property
    def _lists(self) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """Per list column and record batch, views of its offsets and values."""
        names = [field.name for field in self._batches[0].schema if pa.types.is_list(field.type)]
        return {
            name: [
                (batch.column(name).offsets.to_numpy(), batch.column(name).values.to_numpy()) for batch in self._batches
            ]
            for name in names
        }

    def _by_batch(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(record batch, places among `indices`, rows in the batch), for every record batch that is touched."""
        if not len(indices):
            return
        batches = np.searchsorted(self._first_rows, indices, side="right") - 1
        order = np.argsort(batches, kind="stable")
        touched, starts = np.unique(batches[order], return_index=True)
        for batch, places in zip(touched, np.split(order, starts[1:]), strict=True):
            yield int(batch), places, indices[places] - self._first_rows[batch]

    def _take_lists(self, name: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(values end to end, counts) of a list column."""
        counts = np.empty(len(indices), dtype=np.int64)
        begins = np.empty(len(indices), dtype=np.int64)
        groups = list(self._by_batch(indices))
        for batch, places, rows in groups:
            offsets, _ = self._lists[name][batch]
            begins[places] = offsets[rows]
            counts[places] = offsets[rows + 1] - begins[places]
        targets = np.cumsum(counts) - counts
        taken = np.empty(int(counts.sum()), dtype=self._lists[name][0][1].dtype)
        for batch, places, _ in groups:
            sizes = counts[places]
            found = self._lists[name][batch][1][concatenated_ranges(begins[places], sizes)]
            taken[concatenated_ranges(targets[places], sizes)] = found
        return taken, counts


class Dataset:
    """A finished data folder: its manifest, vocabulary path and splits."""

    def __init__(self, folder: Path, manifest: dict, origin: str | None = None):
        """`origin` is the folder or URL of which `folder` is a copy, if it is one."""
        self.folder = folder
        self.manifest = manifest
        self.origin = origin or str(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike) -> "Dataset":
        """Read the manifest and check the presence and size of every file it names; raises `ConfigError`."""
        folder = reached(folder)
        manifest = read_manifest(folder)
        if manifest is None:
            raise ConfigError(f"no prepared data in {folder} ({MANIFEST} is missing): run python -m data_prep first")
        if manifest["format"] != FORMAT:
            raise ConfigError(
                f"{folder} has format {manifest['format']}, this version reads {FORMAT}: prepare the data again"
            )
        if not _is_manifest(manifest):
            raise ConfigError(
                f"{folder / MANIFEST} lacks what a manifest holds: prepare the data again (python -m data_prep)"
            )
        sizes = file_sizes(folder)
        for entry in _files(manifest):
            path = folder / entry["file"]
            size = sizes.get(entry["file"])
            if size != entry["bytes"]:
                state = "is missing" if size is None else f"has {size} bytes"
                raise ConfigError(
                    f"{path} {state}, the manifest says {entry['bytes']}: prepare the data again (python -m data_prep)"
                )
        return cls(folder, manifest)

    def verify(self) -> None:
        """Digest every file and compare with the manifest; raises `ConfigError` naming the first that differs."""
        entries = list(_files(self.manifest))
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda entry: sha256_of(self.folder / entry["file"]), entries)
            for entry, digest in zip(entries, digests, strict=True):
                if digest != entry["sha256"]:
                    raise ConfigError(
                        f"{self.folder / entry['file']} was altered (its sha256 is not the manifest's): "
                        "prepare the data again (python -m data_prep)"
                    )

    def at_hand(self, cache: str, tell: Callable[[str], None], check: bool = True) -> "Dataset":
        """This data set in a folder of this machine: itself, or if it lies behind a URL its copy under `cache`.

        Every file is digested as it arrives; with `check` also what an earlier copy left. Processes of one machine
        wait for the one that copies. `tell` is told, before anything is copied, what takes how much room.
        """
        if not is_url(self.folder):
            return self
        folder = Path(cache, self.digest)
        with locked(folder, wait=True):
            if not (folder / MANIFEST).exists() or check:
                self._copy_missing(folder, tell)
                write_whole(folder / MANIFEST, json.dumps(self.manifest))
        return Dataset(folder, self.manifest, self.origin)

    def _copy_missing(self, folder: Path, tell: Callable[[str], None]) -> None:
        entries = list(_files(self.manifest))
        with ThreadPoolExecutor(COPIERS) as pool:
            whole = pool.map(lambda entry: _is_whole(folder / entry["file"], entry), entries)
            missing = [entry for entry, is_whole in zip(entries, whole, strict=True) if not is_whole]
            size = sum(entry["bytes"] for entry in missing)
            if not missing:
                return
            tell(f"data: copying {self.folder} to {folder} ({size / 1e6:,.1f} MB; every node keeps a copy)")
            free = shutil.disk_usage(folder).free
            if size > free:
                raise ConfigError(
                    f"{folder} has room for {free / 1e6:,.1f} MB, the data set takes {size / 1e6:,.1f} MB: "
                    "name another data.cache"
                )
            for _ in pool.map(lambda entry: _copy(self.folder, folder, entry), missing):
                pass

    @property
    def digest(self) -> str:
        """The manifest's own digest: it names this data set."""
        return fingerprint(self.manifest)

    @property
    def vocabulary_path(self) -> Path:
        return self.folder / VOCABULARY

    @property
    def vocabulary_size(self) -> int:
        return self.manifest["vocabulary"]["size"]

    def split(self, name: str) -> Split:
        shards = [entry["file"] for entry in self.manifest["shards"] if entry["split"] == name]
        return Split([self.folder / file for file in shards])


def _is_whole(path: Path, entry: dict) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["sha256"]


def _copy(origin: Path, folder: Path, entry: dict) -> None:
    """Copy the file of a manifest's `entry`; raises `ConfigError` if what arrives is not what the manifest says."""
    source, target = origin / entry["file"], folder / entry["file"]
    try:
        with replaced_file(target) as temporary, opened(source) as reader, open(temporary, "wb") as writer:
            digest = hashlib.sha256()
            while block := reader.read(COPY_BYTES):
                digest.update(block)
                writer.write(block)
            if digest.hexdigest() != entry["sha256"]:
                raise ConfigError(
                    f"{source} was altered (its sha256 is not the manifest's): prepare the data again "
                    "(python -m data_prep)"
                )
    except OSError as error:
        raise ConfigError(f"{source} cannot be copied to {folder}: {one_line(error)}") from None


def read_manifest(folder: Path) -> dict | None:
    """The manifest of `folder`, or None if there is none; raises `ConfigError` if it cannot be read."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): prepare the data again (python -m data_prep)") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ConfigError(f"{path} is no manifest: prepare the data again (python -m data_prep)")
    return manifest


def _is_manifest(content: object) -> bool:
    """Whether `content` has the parts that readers rely on."""
    try:
        files = [(entry["file"], entry["bytes"], entry["sha256"]) for entry in _files(content)]
        counts = [(shard["split"], shard["rows"] + shard["tokens"]) for shard in content["shards"]]
        sections = [dict(content[name]) for name in ("config", "vocabulary", "documents", "corpus")]
        documents = content["documents"]
        sections += [[documents["read"] + documents["used"]], [dict(documents["dropped"]), documents["bad_samples"]]]
        numbers = content["format"] + content["examples"] + content["tokens"] + content["vocabulary"]["size"]
        return all((files, counts, sections, numbers, content["fingerprint"], content["inputs"]))
    except (TypeError, KeyError, ValueError):
        return False


def _files(manifest: dict) -> Iterator[dict]:
    vocabulary = manifest["vocabulary"]
    yield {"file": VOCABULARY, "bytes": vocabulary["bytes"], "sha256": vocabulary["digest"]}
    yield from manifest["shards"]
