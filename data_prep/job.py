"""The Beam side of data preparation: two pipelines, each in a process of its own.

    sample:    units of input ──► a bounded sample of documents per unit, in a file
    examples:  units of input ──► one Arrow file per unit, with one record batch per shard in it
                              ──► (shard, where its rows lie) ──► GroupByKey ──► the finished shard, in a file

Only metadata crosses the shuffle, so an engine's memory does not grow with the corpus. Each piece of work ends with a
small JSON file beside its output: work found done is not done again, and the driver counts those files to show
progress, whatever the engine. Writes are idempotent, since engines may run an element twice.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints import Tuple

from configs.schema import ConfigError, run_command
from data_prep.corpus import Document, read_documents
from data_prep.examples import ExampleMaker, finish_shard
from data_prep.files import bytes_between, is_url, replaced_file, write_whole
from data_prep.plan import Plan, read_report
from data_prep.sampling import is_whole_sample, merged_sample, sample_content, sampled_documents
from data_prep.shards import write_shard
from data_prep.vocabulary import Vocabulary, train_vocabulary

SPILL_TOKENS = 16 * 2**20
"""Rows are spilled at least this often within a unit, which bounds a worker's memory."""

HEARTBEAT_SECONDS = 5.0
REMOTE_HEARTBEAT_SECONDS = 30.0

Place = tuple[int, int, int, int]
"""Where some rows of a shard lie: (unit, part, first byte, byte after the last) of a spill file."""


@lru_cache(maxsize=1)
def plan_at(path: str) -> Plan:
    return Plan.load(path)


@lru_cache(maxsize=1)
def vocabulary_at(path: Path) -> Vocabulary:
    return Vocabulary.load(path)


class Heartbeat:
    """Tells the driver now and then that the file `piece` is being made, and how far that has come."""

    def __init__(self, plan: Plan, piece: Path):
        self._path = plan.heartbeat(piece)
        self._interval = REMOTE_HEARTBEAT_SECONDS if is_url(plan.work) else HEARTBEAT_SECONDS
        self._due = time.monotonic() + self._interval

    def beat(self, done: Callable[[], dict[str, int]]) -> None:
        """Write down what is `done`, if it is time to."""
        if time.monotonic() >= self._due:
            with suppress(OSError):
                write_whole(self._path, json.dumps(done()))
            self._due = time.monotonic() + self._interval


@contextmanager
def told_failures(plan: Plan, piece: Path) -> Iterator[None]:
    """A bad file's name is left for the driver, since engines bury exceptions."""
    try:
        yield
    except OSError as error:
        write_whole(plan.failure(piece), str(error))
        raise


def documents_of(plan: Plan, unit: int, piece: Path, examples: Callable[[], int] = lambda: 0) -> Iterator[Document]:
    """The documents of a unit, of which `piece` is made, with heartbeats that tell how many `examples` there are."""
    reader = read_documents(plan.units[unit])
    heartbeat = Heartbeat(plan, piece)
    with told_failures(plan, piece):
        for document in reader:
            yield document
            heartbeat.beat(lambda: {"bytes": reader.bytes_read, "examples": examples()})


def source_digest(plan: Plan, source: int) -> dict:
    """An input's report, made with heartbeats."""
    piece = plan.source_report(source)
    heartbeat, read = Heartbeat(plan, piece), 0

    def tell(size: int) -> None:
        nonlocal read
        read += size
        heartbeat.beat(lambda: {"bytes": read})

    with told_failures(plan, piece):
        return {"path": plan.sources[source].path, "sha256": plan.sources[source].sha256(tell)}


class PlannedWork(beam.DoFn):
    """Work on numbered pieces of a plan, which each worker reads once."""

    def __init__(self, plan_path: str):
        self.plan_path = plan_path


class SampleUnit(PlannedWork):
    """Unit number -> its sample file."""

    def process(self, unit: int) -> Iterator[int]:
        plan = plan_at(self.plan_path)
        path = plan.sample(unit)
        if not is_whole_sample(path):
            sample = sampled_documents(documents_of(plan, unit, path), plan.data, plan.seed, plan.sampling_rate)
            write_whole(path, sample_content(sample))
        yield unit


class SpillUnit(PlannedWork):
    """("unit" or "source", number) -> (shard, where rows of it lie). A source is only digested, for the manifest."""

    def process(self, piece: tuple[str, int]) -> Iterator[Tuple[int, Tuple[int, int, int, int]]]:
        plan = plan_at(self.plan_path)
        kind, number = piece
        if kind == "source":
            path = plan.source_report(number)
            if read_report(path) is None:
                write_whole(path, json.dumps(source_digest(plan, number)))
            return
        report = read_report(plan.unit_report(number))
        if report is None or not _has_spills(plan, number, report):
            report = spill_unit(plan, number)
            write_whole(plan.unit_report(number), json.dumps(report))
        for part, spill in enumerate(report["spills"]):
            for shard, (begin, end) in zip(spill["shards"], pairwise(spill["offsets"]), strict=True):
                yield shard, (number, part, begin, end)


def _has_spills(plan: Plan, unit: int, report: dict) -> bool:
    """Whether what the report of a unit tells of is there: a cleaner of old files may have been at it."""
    try:
        sizes = [plan.spill(unit, part).stat().st_size for part in range(len(report["spills"]))]
    except FileNotFoundError:
        return False
    return sizes == [spill["offsets"][-1] for spill in report["spills"]]


def spill_unit(plan: Plan, unit: int) -> dict:
    """Write the rows of a unit's documents to spill files; returns the unit's report."""
    maker = ExampleMaker(vocabulary_at(plan.vocabulary), plan.data, plan.seed)
    spills: list[dict] = []
    tokens: Counter[int] = Counter()

    def spill() -> None:
        rows = maker.take_rows()
        if rows:
            offsets = _write_spill(plan.spill(unit, len(spills)), list(rows.values()))
            spills.append({"shards": list(rows), "offsets": offsets})
            tokens.update({shard: len(batch["input_ids"].flatten()) for shard, batch in rows.items()})

    for document in documents_of(plan, unit, plan.unit_report(unit), lambda: maker.examples):
        maker.add(document)
        if maker.tokens >= SPILL_TOKENS:
            spill()
    spill()
    piece = plan.units[unit]
    return {
        "path": piece.source.path,
        "begin": piece.begin,
        "end": piece.end,
        "counts": vars(maker.counts),
        "examples": maker.examples,
        "tokens": tokens,
        "spills": spills,
    }


class MergeShard(PlannedWork):
    """(shard, where its rows lie) -> the finished shard."""

    def process(self, element: tuple[int, Iterable[Place]]) -> Iterator[int]:
        shard, places = element
        plan = plan_at(self.plan_path)
        if not is_merged(plan, shard):
            heartbeat = Heartbeat(plan, plan.shard_report(shard))
            batches: list[pa.RecordBatch] = []
            for place in sorted(places):
                batches.append(_read_spill(plan, place))
                heartbeat.beat(lambda: {"batches": len(batches)})
            merge_shard(plan, shard, batches)
        yield shard


def is_merged(plan: Plan, shard: int) -> bool:
    """Whether the finished `shard` lies whole in the work folder; one that was moved into place is made again."""
    report = read_report(plan.shard_report(shard))
    try:
        return report is not None and plan.shard(shard).stat().st_size == report["bytes"]
    except FileNotFoundError:
        return False


def merge_shard(plan: Plan, shard: int, batches: list[pa.RecordBatch]) -> None:
    """Write the finished `shard` of rows `batches`, and its report."""
    finished = finish_shard(batches, vocabulary_at(plan.vocabulary), plan.data, plan.seed)
    report = {
        **write_shard(plan.shard(shard), finished.table),
        "rows": len(finished.table),
        "tokens": finished.tokens,
        "duplicate_documents": finished.duplicate_documents,
        "text_counts": finished.text_counts,
    }
    write_whole(plan.shard_report(shard), json.dumps(report))


def _write_spill(path: Path, batches: list[pa.RecordBatch]) -> list[int]:
    """Write each batch as an Arrow stream of its own, end to end; returns where they begin, and the end."""
    offsets = [0]
    with replaced_file(path) as temporary, pa.OSFile(str(temporary), "wb") as file:
        for batch in batches:
            with pa.ipc.new_stream(file, batch.schema) as writer:
                writer.write_batch(batch)
            offsets.append(file.tell())
    return offsets


def _read_spill(plan: Plan, place: Place) -> pa.RecordBatch:
    unit, part, begin, end = place
    return pa.ipc.open_stream(bytes_between(plan.spill(unit, part), begin, end)).read_next_batch()


def run_sample(plan_path: str, beam_args: list[str]) -> None:
    units = range(len(Plan.load(plan_path).units))
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Units" >> beam.Create(units)
            | "Spread" >> beam.Reshuffle()
            | "Sample" >> beam.ParDo(SampleUnit(plan_path)).with_output_types(int)
        )


def run_examples(plan_path: str, beam_args: list[str]) -> None:
    plan = Plan.load(plan_path)
    pieces = [("unit", number) for number in range(len(plan.units))]
    pieces += [("source", number) for number in range(len(plan.sources))]
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Pieces" >> beam.Create(pieces)
            | "Spread" >> beam.Reshuffle()
            | "Examples" >> beam.ParDo(SpillUnit(plan_path)).with_output_types(Tuple[int, Tuple[int, int, int, int]])
            | "By shard" >> beam.GroupByKey()
            | "Merge" >> beam.ParDo(MergeShard(plan_path)).with_output_types(int)
        )
    for shard in range(len(plan.shard_splits)):
        if not is_merged(plan, shard):
            merge_shard(plan, shard, [])


def run_vocabulary(plan_path: str, beam_args: list[str]) -> None:
    """Train `spiece.model` on the merged sample. No pipeline, but a process of its own: it changes its folder."""
    plan = Plan.load(plan_path)
    paths = [plan.sample(unit) for unit in range(len(plan.units))]
    sentences = merged_sample(paths, plan.data)
    first = next(sentences, None)
    if first is None:
        raise ConfigError(
            "data.inputs hold no usable text: check paths, kinds, text_field, encoding (UTF-8) and filters"
        )
    sentences = chain([first], sentences)
    with tempfile.TemporaryDirectory(prefix="albert-") as folder:
        write_whole(plan.vocabulary, train_vocabulary(sentences, plan.data, Path(folder)))
        os.chdir("/")


STEPS = {"sample": run_sample, "vocabulary": run_vocabulary, "examples": run_examples}


def main() -> None:
    """Entry point of a step's process: `step plan_path [Beam options]`."""
    step, plan_path, *beam_args = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    run_command(lambda: STEPS[step](plan_path, beam_args))
