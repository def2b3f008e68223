"""Drives a data preparation: checks, the steps in processes of their own, progress, and the manifest last."""

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, suppress
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from typing import BinaryIO, NoReturn

from rich.console import Console

from configs.schema import Config, ConfigError, resolved
from data_prep.examples import TEXT_COUNTS, Counts
from data_prep.files import entry_names, is_url, moved, one_line, remove_folder, sync_folder, write_whole
from data_prep.locks import Lock, locked
from data_prep.plan import FAILURES, HEARTBEATS, SAMPLES, SOURCES, SPILLS, UNITS, UNSHAPING, Plan
from data_prep.progress import Progress, counts_of
from data_prep.shards import FORMAT, MANIFEST, SPLITS, VOCABULARY, Dataset, check_shard_tokens, read_manifest
from data_prep.vocabulary import Vocabulary

DEFAULT_RUNNER = "FnApiRunner"
"""Named always: without a name Beam first tries to download another one."""
DASK_RUNNER = "apache_beam.runners.dask.dask_runner.DaskRunner"
FULL_NAMES = {"DaskRunner": DASK_RUNNER, "--runner=DaskRunner": f"--runner={DASK_RUNNER}"}
"""A runner that Beam has but does not know by its short name."""
WAIT_SECONDS = 0.1
SECONDS_TO_END = 10
TAIL_LINES, TAIL_CHARACTERS, REASON_CHARACTERS = 10, 200, 300
READERS = 16
LOG_BYTES = 2**16
RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Killed)\b")
"""The line of a traceback that says what was raised."""
OURS = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}-of-\d{{5,}}\.arrow|\..+\.[0-9a-f]{{12}}\.tmp")
"""Shards of a former data set, and what a killed job had half-written; other files of the folder stay."""
BAD_RECORDS = ("unclosed_article", "invalid_utf8", "invalid_unicode", "broken_json", "missing_field", "syntax_error")


def finished_dataset(config: Config) -> Dataset | None:
    """The data set in `data.output` if it is complete and was made from these settings and inputs, else None.

    Raises `ConfigError` where more of its documents were unreadable than `data.max_bad_fraction` allows.
    """
    return _finished(Plan.make(config))


def prepare(config: Config, beam_args: list[str], console: Console) -> Dataset:
    """Make the data set of `config`, or find it made; raises `ConfigError` where that cannot be done."""
    plan = Plan.make(config)
    if beam_args:
        beam_args = [FULL_NAMES.get(argument, argument) for argument in beam_args]
        check_beam_options(beam_args)
    finished = _finished(plan)
    if finished is not None:
        _remove_leftovers(plan)
        console.print(f"data: {plan.output} is complete and matches the config; nothing to do", soft_wrap=True)
        return finished
    if not any(argument.startswith("--runner") for argument in beam_args):
        beam_args = [f"--runner={DEFAULT_RUNNER}", *beam_args]
    with locked(plan.output) as lock, _sigterm_interrupts():
        try:
            _start_work(plan)
            _run_steps(plan, beam_args, lock, console)
            manifest = _manifest(plan)
            lock.check()
            _move_into_place(plan, manifest)
        except (ConfigError, StepFailedError):
            # What is done serves the next start, whatever setting or file mends the matter.
            raise
        except Exception as error:
            if not (is_url(plan.output) or isinstance(error, OSError)):
                raise
            # Disks are full. Stores have errors of their own for networks that fail.
            raise StepFailedError(
                f"{plan.output}: {one_line(error)[:REASON_CHARACTERS]}; the same command goes on from here"
            ) from error
    _print_summary(plan, manifest, console)
    return Dataset.open(plan.output)


def check_beam_options(arguments: list[str]) -> None:
    """Refuse misspelt Beam options and unknown runners, which Beam itself would pass over or find late."""
    # Beam warns through the root logger of libraries that are not here and of the options refused below.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.options.pipeline_options import StandardOptions
    from apache_beam.runners.runner import create_runner

    for position, argument in enumerate(arguments):
        if not argument.startswith("--") and (position == 0 or not arguments[position - 1].startswith("--")):
            raise ConfigError(f"unexpected argument {argument!r}: options start with -- (see --help)")
    runner = _beam_options(arguments).view_as(StandardOptions).runner
    if runner:
        try:
            # Some runners bring options of their own.
            create_runner(runner)
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigError(f"--runner={runner} cannot be used: {str(error).splitlines()[0]}") from None
    options = _beam_options(arguments)
    known = options.get_all_options()
    unknown = sorted(set(options.get_all_options(retain_unknown_options=True)) - set(known))
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean --{close[0]}?" if close else "see --help and Beam's pipeline options"
        raise ConfigError(f"--{unknown[0]} is neither an option of data_prep nor of Beam: {hint}")


def _beam_options(arguments: list[str]):
    """Beam's options of `arguments`; raises `ConfigError` with what its parser says of them."""
    from apache_beam.options.pipeline_options import PipelineOptions

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options = PipelineOptions(arguments)
            options.get_all_options()
            return options
    except SystemExit:
        raise ConfigError(f"Beam refuses its options: {said.getvalue().strip().rpartition('error: ')[2]}") from None


def _finished(plan: Plan) -> Dataset | None:
    try:
        manifest = read_manifest(plan.output)
        if manifest is None or manifest.get("fingerprint") != plan.fingerprint:
            return None
        dataset = Dataset.open(plan.output)
        # What was altered since is made again, which is the remedy that a refusal names. A store keeps what it has.
        if not is_url(plan.output):
            dataset.verify()
    except ConfigError:
        return None
    documents = manifest["documents"]
    _check_counts(
        plan, Counts(documents["read"], documents["used"], Counter(documents["dropped"]), documents["bad_samples"])
    )
    return dataset


def _remove_leftovers(plan: Plan) -> None:
    """Remove from a complete data set what its making left if it was killed at the very end."""
    found = [name for name in entry_names(plan.output) if name.startswith(".work-")]
    if found:
        # Where another job is at it, that one removes them.
        with suppress(ConfigError), locked(plan.output):
            for name in found:
                remove_folder(plan.output / name)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within it SIGTERM does what Ctrl-C does, so that the step's process is ended too."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _start_work(plan: Plan) -> None:
    """Make the work folder, and remove those of other plans."""
    for name in entry_names(plan.output):
        if name.startswith(".work-") and name not in (plan.work.name, plan.pieces.name):
            remove_folder(plan.output / name)
    plan.save()


def _run_steps(plan: Plan, beam_args: list[str], lock: Lock, console: Console) -> None:
    if plan.data.vocab.model:
        write_whole(plan.vocabulary, Vocabulary.load(plan.data.vocab.model).model)
    elif not _has_vocabulary(plan):
        _keep_pieces(plan, (SAMPLES,), plan.sample_keys)
        _run_step("sample", "sampling text", plan, beam_args, lock, console)
        _run_step("vocabulary", "training vocabulary", plan, [], lock, console)
    _keep_pieces(plan, (UNITS, SPILLS), plan.unit_keys)
    _keep_pieces(plan, (SOURCES,), plan.source_keys)
    _run_step("examples", "making examples", plan, beam_args, lock, console)


def _has_vocabulary(plan: Plan) -> bool:
    """Whether the vocabulary was trained and lies whole in the work folder."""
    try:
        return Vocabulary(plan.vocabulary.read_bytes()).size == plan.data.vocab.size
    except (FileNotFoundError, ConfigError):
        return False


def _keep_pieces(plan: Plan, folders: tuple[str, ...], keys: list[str]) -> None:
    """Remove from the `folders` of pieces all that are not named by `keys`: what other plans left takes room."""
    kept = set(keys)
    for folder in folders:
        for name in entry_names(plan.pieces / folder):
            if re.split("[-.]", name)[0] not in kept:
                (plan.pieces / folder / name).unlink(missing_ok=True)


def _run_step(step: str, title: str, plan: Plan, beam_args: list[str], lock: Lock, console: Console) -> None:
    """Run one step in a process of its own, with its progress shown; ends it where it stands still."""
    start = f"from data_prep.step import main; main({os.getpid()})"
    command = [sys.executable, "-c", start, step, str(plan.path), *beam_args]
    log = _log_of(plan, step)
    for name in (HEARTBEATS, FAILURES):
        remove_folder(plan.work / name)
    stuck = False
    with open(log, "wb", buffering=0) as log_file, Progress(plan, step, title, console) as progress:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=lock.descriptors, process_group=0
        )
        log_writer = Thread(target=_write_log, args=(process.stdout, log_file), daemon=True)
        log_writer.start()
        try:
            lock.name_holder(process.pid)
            looked = 0.0
            while process.poll() is None:
                if time.monotonic() - looked >= progress.seconds_between_looks:
                    progress.look()
                    looked = time.monotonic()
                    _check_units(plan, progress)
                lock.check()
                stuck = 0 < plan.data.stall_seconds < progress.idle_seconds
                if stuck:
                    break
                time.sleep(WAIT_SECONDS)
            if process.returncode == 0:
                progress.look()
                _check_units(plan, progress)
        finally:
            _end(process)
            log_writer.join(SECONDS_TO_END)
            lock.name_holder(os.getpid())
    if stuck:
        console.print(f"the end of {log}:\n{_tail(log)}", markup=False, highlight=False, soft_wrap=True)
        raise StepFailedError(
            f"step {step!r} got nothing done for {plan.data.stall_seconds} s (data.stall_seconds) and was ended; "
            "the same command goes on from here"
        )
    if process.returncode:
        _raise_failure(plan, step, log, process.returncode)


def _write_log(messages: BinaryIO, log: BinaryIO) -> None:
    """Write to `log` what a step and its workers say, as far as there is room.

    They themselves must not: a worker of Beam's own runner that cannot print its failure never reports it.
    """
    with messages:
        while block := os.read(messages.fileno(), LOG_BYTES):
            # It is closed when the step has ended, which programs that an engine started may outlive.
            with suppress(OSError, ValueError):
                log.write(block)


def _end(process: subprocess.Popen) -> None:
    """End the step's process, and the workers that it started."""
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, None)):
        if process.poll() is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def _log_of(plan: Plan, step: str) -> Path:
    """Where a step's messages go: the work folder, or for one behind a URL this machine's folder for logs."""
    if not is_url(plan.work):
        return plan.work / f"{step}.log"
    folder = Path(tempfile.gettempdir(), f"albert-data-prep-{plan.fingerprint[:16]}")
    folder.mkdir(exist_ok=True)
    return folder / f"{step}.log"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line[:TAIL_CHARACTERS]}" for line in lines)


def _raise_failure(plan: Plan, step: str, log: Path, code: int) -> NoReturn:
    failure = next(plan.failures(), None)
    if failure is not None:
        if is_url(failure.split(" ")[0]):
            # What a network withheld may come at the next try.
            raise StepFailedError(f"{failure}; the same command goes on from here")
        raise ConfigError(failure)
    lines = log.read_text(errors="replace").splitlines()
    if lines and lines[-1].startswith("error: "):
        raise ConfigError(lines[-1].removeprefix("error: "))
    raised = [line for line in lines if RAISED.match(line)]
    reason = raised[-1] if raised else f"exit code {code}"
    raise StepFailedError(
        f"step {step!r} failed: {reason[:REASON_CHARACTERS]}; its log is {log}; the same command goes on from here"
    )


class StepFailedError(RuntimeError):
    """A step's process died of something that is not the user's configuration."""


def _manifest(plan: Plan) -> dict:
    """The manifest, from the reports of units, sources and shards: a function of config, seed and inputs alone."""
    counts = Counts()
    for report in _reports(plan.unit_report(unit) for unit in range(len(plan.units))):
        counts.add(counts_of(report))
    digests = [report["sha256"] for report in _reports(plan.source_report(n) for n in range(len(plan.sources)))]
    shards, duplicates, text = [], 0, Counter()
    numbers = range(len(plan.shard_splits))
    for number, report in zip(numbers, _reports(map(plan.shard_report, numbers)), strict=True):
        duplicates += report.pop("duplicate_documents")
        text.update(report.pop("text_counts"))
        shards.append({"file": plan.shard_name(number), "split": plan.shard_splits[number], **report})
    if duplicates:
        counts.used -= duplicates
        counts.dropped["duplicate"] = duplicates
    _check_counts(plan, counts)
    vocabulary = Vocabulary.load(plan.vocabulary)
    config = resolved(plan.data)
    for key in UNSHAPING:
        del config[key]
    return {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "config": config,
        "seed": plan.seed,
        "vocabulary": {
            "size": vocabulary.size,
            "digest": vocabulary.digest,
            "bytes": len(vocabulary.model),
            "unknown_fraction": round(text["unknown_tokens"] / max(1, text["tokens"]), 8),
            "tokens_per_word": round(text["tokens"] / max(1, text["words"]), 6),
        },
        "inputs": [
            {"path": source.path, "bytes": source.bytes, "sha256": digest}
            for source, digest in zip(plan.sources, digests, strict=True)
        ],
        "shards": shards,
        "documents": {
            "read": counts.read,
            "used": counts.used,
            "dropped": dict(sorted(counts.dropped.items())),
            "bad_samples": counts.bad_samples,
        },
        "examples": sum(shard["rows"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "corpus": {name: text[name] for name in TEXT_COUNTS},
    }


def _reports(paths: Iterable[Path]) -> Iterator[dict]:
    """The reports at `paths`, in their order, many at a time: a store may take a while for each."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(lambda path: json.loads(path.read_text()), paths)


def _check_units(plan: Plan, progress: Progress) -> None:
    """Refuse what is sure to be refused by what is known of the units so far."""
    for shard, tokens in progress.shard_tokens.items():
        check_shard_tokens(plan.shard_name(shard), tokens, plan.data)
    if progress.all_units_done:
        _check_counts(plan, progress.counts)


def _check_counts(plan: Plan, counts: Counts) -> None:
    lost = counts.read - counts.used - counts.dropped.total()
    if lost:
        raise RuntimeError(f"{lost} of {counts.read} documents are neither used nor counted as dropped")
    if not counts.used:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items())) or "none found"
        raise ConfigError(f"no document of {counts.read} could be used ({reasons}): check data.inputs and data.filters")
    bad = sum(counts.dropped[kind] for kind in BAD_RECORDS)
    if bad > plan.data.max_bad_fraction * counts.read:
        samples = ", ".join(f"{sample['place']} ({sample['kind']})" for sample in counts.bad_samples)
        raise ConfigError(
            f"{bad} of {counts.read} documents are unreadable, more than data.max_bad_fraction "
            f"{plan.data.max_bad_fraction} allows: {samples}; with a larger one the same command goes on from here"
        )


def _move_into_place(plan: Plan, manifest: dict) -> None:
    """Swap the former data set for the new one; without a manifest the folder is no data set in between."""
    output = plan.output
    (output / MANIFEST).unlink(missing_ok=True)
    sync_folder(output)
    for name in entry_names(output):
        if OURS.fullmatch(name):
            (output / name).unlink()
    vocabulary = Vocabulary.load(plan.vocabulary)
    write_whole(output / "spiece.vocab", vocabulary.listing())
    for number in range(len(plan.shard_splits)):
        moved(plan.shard(number), output / plan.shard_name(number))
    # Last, for whoever goes on from here needs it.
    moved(plan.vocabulary, output / VOCABULARY)
    sync_folder(output)
    write_whole(output / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    remove_folder(plan.work)
    remove_folder(plan.pieces)
    if is_url(output):
        shutil.rmtree(_log_of(plan, "examples").parent, ignore_errors=True)


def _print_summary(plan: Plan, manifest: dict, console: Console) -> None:
    documents = manifest["documents"]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in documents["dropped"].items()) or "none"
    console.print(
        f"data: {plan.output}: {documents['used']:,} documents of {documents['read']:,} (dropped: {dropped}), "
        f"{manifest['examples']:,} examples, {manifest['tokens']:,} tokens, "
        f"vocabulary {manifest['vocabulary']['size']:,}",
        soft_wrap=True,
    )
