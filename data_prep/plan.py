"""What a data preparation has to do, and where its pieces lie while it is done.

A plan is a function of the configuration and the state of the inputs. What it makes lies in two folders until it is
moved into place: `.work-<its fingerprint>`, and `.work-pieces` for what is made of single ranges and files of the
input. A piece is named by a fingerprint of all that shapes it, so that one which is found there need not be made again,
be it that another plan left it: after a change of some input only what was made of that is done anew.
"""

import importlib.metadata
import json
import math
import os
import pickle
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from configs.schema import Config, ConfigError, DataConfig, fingerprint, resolved
from data_prep.corpus import Source, Unit, list_sources, split_units
from data_prep.examples import EXAMPLES_VERSION, shard_count
from data_prep.files import entry_names, located, opened, reached, sha256_of, write_whole
from data_prep.sampling import SENTENCE_BYTES
from data_prep.shards import FORMAT, SPLITS, VOCABULARY
from data_prep.vocabulary import Vocabulary

SAMPLES, SPILLS, UNITS, SOURCES = "samples", "spills", "units", "sources"
"""What the folder of pieces is parted into."""
HEARTBEATS, FAILURES, SHARDS, SHARD_REPORTS = "heartbeats", "failures", "shards", "shard-reports"
"""What the work folder is parted into; reports lie alone, so that listing them counts them."""

LIBRARIES = ("sentencepiece", "sentencex")
"""What text becomes depends on them."""
UNSHAPING = ("output", "cache", "stall_seconds", "max_bad_fraction")
"""Settings of a job, which no file it makes depends on."""


def data_settings(data: DataConfig) -> dict:
    """The settings that shape the prepared files: without the place, and without masks that are drawn at load."""
    settings = resolved(data)
    for key in (*UNSHAPING, "resample_order"):
        del settings[key]
    if data.masking.mode == "dynamic":
        settings["masking"] = {"mode": "dynamic"}
    return settings


def read_report(path: Path) -> dict | None:
    """The report at `path`; None where it is not there, or not whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def named_by(piece: Path) -> str:
    """The name of a file about the file `piece`."""
    return f"{piece.parent.name}-{piece.name}"


def versions() -> dict[str, str]:
    """Of all that text goes through here; a container's Python may be another patch release than the driver's."""
    python = platform.python_version().rpartition(".")[0]
    return {"python": python, **{name: importlib.metadata.version(name) for name in LIBRARIES}}


@dataclass(frozen=True)
class Plan:
    """`versions` are the driver's: what was made with others is not mixed with what is made with these, but a finished
    data set stays."""

    data: DataConfig
    seed: int
    sources: tuple[Source, ...]
    fingerprint: str
    versions: dict[str, str]

    @classmethod
    def make(cls, config: Config) -> "Plan":
        """Look at the inputs; raises `ConfigError` where one is missing or the given vocabulary cannot be used."""
        data = config.data
        reached(data.output)
        sources = tuple(list_sources(data.inputs))
        given = Vocabulary.load(data.vocab.model).digest if data.vocab.model else None
        identity = [
            FORMAT,
            EXAMPLES_VERSION,
            data_settings(data),
            config.seed,
            [source.identity for source in sources],
            given,
        ]
        return cls(data, config.seed, sources, fingerprint(identity), versions())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """The plan at `path`; raises `ConfigError` in an environment that would carry it out differently."""
        with opened(path) as file:
            plan = pickle.load(file)
        if plan.versions != versions():
            name = next(name for name, version in versions().items() if plan.versions.get(name) != version)
            raise ConfigError(
                f"a worker has {name} {versions()[name]}, the job was started with {plan.versions.get(name)}: "
                "install the same on all"
            )
        return plan

    def save(self) -> None:
        write_whole(self.path, pickle.dumps(replace(self)))

    @cached_property
    def units(self) -> list[Unit]:
        return split_units(list(self.sources))

    @cached_property
    def output(self) -> Path:
        return located(self.data.output)

    @property
    def work(self) -> Path:
        return self.output / f".work-{fingerprint([self.fingerprint, self.versions])[:16]}"

    @property
    def pieces(self) -> Path:
        """Where pieces lie that may serve other plans too."""
        return self.output / ".work-pieces"

    @property
    def path(self) -> Path:
        """Where the plan itself lies for the processes that carry it out."""
        return self.work / "plan.pickle"

    def heartbeat(self, piece: Path) -> Path:
        """Rewritten now and then while the file `piece` is made: {bytes, examples, …} so far."""
        return self.work / HEARTBEATS / named_by(piece)

    def failure(self, piece: Path) -> Path:
        """Where it says in one line why the job cannot go on: the file `piece` cannot be made."""
        return self.work / FAILURES / named_by(piece)

    def failures(self) -> Iterator[str]:
        """What was said so of pieces that are not there: engines may have made others at a second try."""
        for name in sorted(entry_names(self.work / FAILURES)):
            folder, _, file = name.rpartition("-")
            if not name.startswith(".") and not (self.pieces / folder / file).exists():
                yield (self.work / FAILURES / name).read_text()

    @property
    def vocabulary(self) -> Path:
        return self.work / VOCABULARY

    @cached_property
    def sample_keys(self) -> list[str]:
        """What the units' samples are named by."""
        shaping = [self.data.filters.model_dump(mode="json"), self.data.vocab.sample_sentences, self.sampling_rate]
        return [self._key(unit.identity, *shaping) for unit in self.units]

    @cached_property
    def unit_keys(self) -> list[str]:
        """What the units' spills and reports are named by; the vocabulary has to be there."""
        settings = data_settings(self.data)
        for key in ("inputs", "vocab", "masking"):
            del settings[key]
        vocabulary = sha256_of(self.vocabulary)
        return [self._key(unit.identity, settings, vocabulary) for unit in self.units]

    @cached_property
    def source_keys(self) -> list[str]:
        return [self._key(source.identity) for source in self.sources]

    def _key(self, *shaping: object) -> str:
        return fingerprint([FORMAT, EXAMPLES_VERSION, self.versions, self.seed, *shaping])[:32]

    def sample(self, unit: int) -> Path:
        return self.pieces / SAMPLES / f"{self.sample_keys[unit]}.jsonl"

    def spill(self, unit: int, part: int) -> Path:
        return self.pieces / SPILLS / f"{self.unit_keys[unit]}-{part:03d}.arrow"

    def unit_report(self, unit: int) -> Path:
        """Written when all of a unit's rows are spilled: {path, begin, end, counts, examples, tokens, spills}."""
        return self.pieces / UNITS / f"{self.unit_keys[unit]}.json"

    def source_report(self, source: int) -> Path:
        """The digest of an input: {path, sha256}."""
        return self.pieces / SOURCES / f"{self.source_keys[source]}.json"

    def shard(self, number: int) -> Path:
        return self.work / SHARDS / self.shard_name(number)

    def shard_report(self, number: int) -> Path:
        """Written when a shard is finished: {rows, tokens, bytes, sha256, duplicate_documents, text_counts}."""
        return self.work / SHARD_REPORTS / f"{number:06d}.json"

    @cached_property
    def shard_splits(self) -> list[str]:
        """The split of every shard, by number."""
        return [split for split, count in zip(SPLITS, shard_count(self.data), strict=True) for _ in range(count)]

    def shard_name(self, number: int) -> str:
        split = self.shard_splits[number]
        return f"{split}-{number - self.shard_splits.index(split):05d}-of-{self.shard_splits.count(split):05d}.arrow"

    @property
    def sampling_rate(self) -> float:
        """The share of documents drawn for the vocabulary: enough for `vocab.sample_sentences`, not much more.

        A power of two, so that samples are of use when the inputs grow a little.
        """
        total = sum(source.bytes for source in self.sources)
        enough = self.data.vocab.sample_sentences * SENTENCE_BYTES / max(1, total)
        return min(1.0, 2.0 ** math.ceil(math.log2(enough)))
