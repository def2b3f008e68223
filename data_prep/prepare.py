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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from configs.schema import Config, ConfigError, resolved
from data_prep.examples import Counts
from data_prep.files import Lock, locked, sync_folder, write_whole
from data_prep.plan import Plan
from data_prep.shards import FORMAT, MANIFEST, VOCABULARY, Dataset, read_manifest
from data_prep.vocabulary import Vocabulary

DEFAULT_RUNNER = "FnApiRunner"
"""Named always: without a name Beam first tries to download another one."""
POLL_SECONDS = 0.2
RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Killed)\b")
"""The line of a traceback that says what was raised."""
BAD_RECORDS = ("unclosed_article", "invalid_utf8", "invalid_unicode", "broken_json", "missing_field", "syntax_error")


def finished_dataset(config: Config) -> Dataset | None:
    """The data set in `data.output` if it is complete and was made from these settings and inputs, else None."""
    return _finished(Plan.make(config))


def prepare(config: Config, beam_args: list[str], console: Console) -> Dataset:
    """Make the data set of `config`, or find it made; raises `ConfigError` where that cannot be done."""
    plan = Plan.make(config)
    if beam_args:
        check_beam_options(beam_args)
    finished = _finished(plan)
    if finished is not None:
        console.print(f"data: {plan.output} is complete and matches the config; nothing to do", soft_wrap=True)
        return finished
    if not any(argument.startswith("--runner") for argument in beam_args):
        beam_args = [f"--runner={DEFAULT_RUNNER}", *beam_args]
    with locked(plan.output) as lock, _sigterm_interrupts():
        _start_work(plan)
        try:
            _run_steps(plan, beam_args, lock, console)
            manifest = _manifest(plan)
        except ConfigError:
            shutil.rmtree(plan.work, ignore_errors=True)
            raise
        _move_into_place(plan, manifest)
    _print_summary(plan, manifest, console)
    return Dataset.open(plan.output)


def check_beam_options(arguments: list[str]) -> None:
    """Refuse misspelt Beam options and unknown runners, which Beam itself would pass over or find late."""
    # Beam warns through the root logger of libraries that are not here and of the options refused below.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    from apache_beam.runners.runner import create_runner

    for position, argument in enumerate(arguments):
        if not argument.startswith("--") and (position == 0 or not arguments[position - 1].startswith("--")):
            raise ConfigError(f"unexpected argument {argument!r}: options start with -- (see --help)")
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options = PipelineOptions(arguments)
            known = options.get_all_options()
            unknown = sorted(set(options.get_all_options(retain_unknown_options=True)) - set(known))
    except SystemExit:
        raise ConfigError(f"Beam refuses its options: {said.getvalue().strip().rpartition('error: ')[2]}") from None
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean --{close[0]}?" if close else "see --help and Beam's pipeline options"
        raise ConfigError(f"--{unknown[0]} is neither an option of data_prep nor of Beam: {hint}")
    runner = options.view_as(StandardOptions).runner
    if runner:
        try:
            create_runner(runner)
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigError(f"--runner={runner} cannot be used: {str(error).splitlines()[0]}") from None


def _finished(plan: Plan) -> Dataset | None:
    try:
        manifest = read_manifest(plan.output)
        if manifest is None or manifest.get("fingerprint") != plan.fingerprint:
            return None
        dataset = Dataset.open(plan.output)
        # What was altered since is made again, which is the remedy that a refusal names.
        dataset.verify()
        return dataset
    except ConfigError:
        return None


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within it SIGTERM does what Ctrl-C does, so that the step's process is ended too."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _start_work(plan: Plan) -> None:
    """Make the work folder, and remove those of other plans: one of them may hold pieces of this one."""
    for folder in plan.output.glob(".work-*"):
        if folder != plan.work:
            shutil.rmtree(folder)
    for name in ("samples", "units", "sources", "shards"):
        (plan.work / name).mkdir(parents=True, exist_ok=True)
    plan.failure.unlink(missing_ok=True)
    plan.save()


def _run_steps(plan: Plan, beam_args: list[str], lock: Lock, console: Console) -> None:
    units = range(len(plan.units))
    if plan.data.vocab.model:
        write_whole(plan.vocabulary, Path(plan.data.vocab.model).read_bytes())
    if not plan.vocabulary.exists():
        samples = {plan.sample(unit): plan.units[unit].bytes for unit in units}
        _run_step("sample", "sampling text", plan, beam_args, samples, lock, console)
        _run_step("vocabulary", "training vocabulary", plan, [], {plan.vocabulary: 1}, lock, console)
    reports = {plan.unit_report(unit): plan.units[unit].bytes for unit in units}
    _run_step("examples", "making examples", plan, beam_args, reports, lock, console)


def _run_step(
    step: str, title: str, plan: Plan, beam_args: list[str], outputs: dict[Path, int], lock: Lock, console: Console
) -> None:
    """Run one step in a process of its own; `outputs` are the files whose appearance shows progress, with weights."""
    log = plan.work / f"{step}.log"
    command = [sys.executable, "-c", "from data_prep.job import main; main()", step, str(plan.path), *beam_args]
    total = max(1, sum(outputs.values()))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    begin = time.monotonic()
    with open(log, "wb") as log_file, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, rate="")
        process = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT, pass_fds=[lock.descriptor])
        lock.name_holder(process.pid)
        waiting = dict(outputs)
        try:
            while process.poll() is None:
                for path in [path for path in waiting if path.exists()]:
                    progress.advance(task, waiting.pop(path))
                done = total - sum(waiting.values())
                if step != "vocabulary":
                    progress.update(task, rate=f"{done / (time.monotonic() - begin + 1e-9) / 1e6:.1f} MB/s")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            lock.name_holder(os.getpid())
        if process.returncode == 0:
            progress.update(task, completed=total)
    if process.returncode:
        _raise_failure(plan, step, log, process.returncode)


def _raise_failure(plan: Plan, step: str, log: Path, code: int) -> NoReturn:
    lines = log.read_text(errors="replace").splitlines()
    if plan.failure.exists():
        raise ConfigError(plan.failure.read_text())
    if lines and lines[-1].startswith("error: "):
        raise ConfigError(lines[-1].removeprefix("error: "))
    raised = [line for line in lines if RAISED.match(line)]
    reason = raised[-1] if raised else f"exit code {code}"
    raise StepFailedError(f"step {step!r} failed: {reason}; its log is {log}; the same command goes on from here")


class StepFailedError(RuntimeError):
    """A step's process died of something that is not the user's configuration."""


def _manifest(plan: Plan) -> dict:
    """The manifest, from the reports of units, sources and shards: a function of config, seed and inputs alone."""
    counts = Counts()
    for unit in range(len(plan.units)):
        report = json.loads(plan.unit_report(unit).read_text())["counts"]
        counts.add(Counts(**{**report, "dropped": Counter(report["dropped"])}))
    shards, duplicates = [], 0
    for number, split in enumerate(plan.shard_splits):
        report = json.loads(plan.shard_report(number).read_text())
        duplicates += report.pop("duplicate_documents")
        shards.append({"file": plan.shard_name(number), "split": split, **report})
    if duplicates:
        counts.used -= duplicates
        counts.dropped["duplicate"] = duplicates
    _check_counts(plan, counts)
    vocabulary = Vocabulary.load(plan.vocabulary)
    config = resolved(plan.data)
    del config["output"]
    return {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "config": config,
        "seed": plan.seed,
        "vocabulary": {
            "size": vocabulary.size,
            "digest": vocabulary.digest,
            "bytes": len(vocabulary.model),
            "unknown_fraction": round(counts.unknown_tokens / max(1, counts.corpus_tokens), 8),
            "tokens_per_word": round(counts.corpus_tokens / max(1, counts.words), 6),
        },
        "inputs": [
            {
                "path": source.path,
                "bytes": source.bytes,
                "sha256": json.loads(plan.source_report(number).read_text())["sha256"],
            }
            for number, source in enumerate(plan.sources)
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
        "corpus": {"words": counts.words, "tokens": counts.corpus_tokens, "truncated_tokens": counts.truncated_tokens},
    }


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
            f"{plan.data.max_bad_fraction} allows: {samples}"
        )


def _move_into_place(plan: Plan, manifest: dict) -> None:
    """Swap the former data set for the new one; without a manifest the folder is no data set in between."""
    output = plan.output
    (output / MANIFEST).unlink(missing_ok=True)
    sync_folder(output)
    for stale in output.glob("*.arrow"):
        stale.unlink()
    vocabulary = Vocabulary.load(plan.vocabulary)
    os.replace(plan.vocabulary, output / VOCABULARY)
    write_whole(output / "spiece.vocab", vocabulary.listing())
    for number in range(len(plan.shard_splits)):
        os.replace(plan.shard(number), output / plan.shard_name(number))
    sync_folder(output)
    write_whole(output / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(plan.work)


def _print_summary(plan: Plan, manifest: dict, console: Console) -> None:
    documents = manifest["documents"]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in documents["dropped"].items()) or "none"
    console.print(
        f"data: {plan.output}: {documents['used']:,} documents of {documents['read']:,} (dropped: {dropped}), "
        f"{manifest['examples']:,} examples, {manifest['tokens']:,} tokens, "
        f"vocabulary {manifest['vocabulary']['size']:,}",
        soft_wrap=True,
    )
