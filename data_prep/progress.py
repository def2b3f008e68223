"""How far a step has come, told by the files in the work folder, whatever the engine; and whether it stands still."""

import json
import time
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from data_prep.examples import Counts
from data_prep.files import entry_names, is_url
from data_prep.plan import HEARTBEATS, SAMPLES, SHARD_REPORTS, SOURCES, UNITS, Plan, read_report

POLL_SECONDS = 0.2
REMOTE_POLL_SECONDS = 3.0
LINE_SECONDS = 30.0
"""Between lines of progress where the output is no terminal."""


def counts_of(report: dict) -> Counts:
    """What the report of a unit counts."""
    return Counts(**{**report["counts"], "dropped": Counter(report["counts"]["dropped"])})


@dataclass(frozen=True)
class Done:
    """What is behind: bytes of input read, examples made, shards merged."""

    bytes: int = 0
    examples: int = 0
    shards: int = 0


class Progress:
    """Shows the progress of `step` on `console`, and knows when it last got on; a context manager.

    `counts` and `shard_tokens` are those of the units that were made into examples so far; `all_units_done` says
    whether that is every one.
    """

    def __init__(self, plan: Plan, step: str, title: str, console: Console):
        self._plan, self._step, self._title, self._console = plan, step, title, console
        self._finished = {"sample": SAMPLES, "examples": UNITS}.get(step)
        self._total = sum(unit.bytes for unit in plan.units)
        self._counted: set[int] = set()
        self._examples = 0
        self._begin = self._changed = self._printed = time.monotonic()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._begin_bytes: int | None = None
        self._signs: tuple = ()
        self.counts = Counts()
        self.shard_tokens: Counter[int] = Counter()
        self.all_units_done = False

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def seconds_between_looks(self) -> float:
        return REMOTE_POLL_SECONDS if is_url(self._plan.work) else POLL_SECONDS

    @property
    def idle_seconds(self) -> float:
        """How long nothing has appeared or changed; 0 for a step that leaves no signs on its way."""
        return time.monotonic() - self._changed if self._finished else 0.0

    def look(self) -> None:
        """Look at the work folder, and show what is done."""
        now = time.monotonic()
        text = f"{self._title}, {now - self._begin:.0f} s"
        if self._finished:
            try:
                done, signs = self._look_at_work()
            except Exception as error:
                # Stores have errors of their own for networks that fail; the next look may succeed.
                if not (isinstance(error, OSError) or is_url(self._plan.work)):
                    raise
                return
            if signs != self._signs:
                self._signs, self._changed = signs, now
            if self._begin_bytes is None:
                self._begin_bytes = done.bytes
            text = f"{self._title}: {self._line(done, now - self._begin)}"
        if self._live:
            self._live.update(Text(text), refresh=True)
        elif now - self._printed >= LINE_SECONDS:
            self._printed = now
            self._console.print(text, soft_wrap=True)

    def _line(self, done: Done, seconds: float) -> str:
        parts = [f"{done.bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB"]
        if done.examples:
            parts.append(f"{done.examples:,} examples")
        rate = (done.bytes - (self._begin_bytes or 0)) / max(seconds, 1e-9)
        if rate and done.bytes < self._total:
            parts += [f"{rate / 1e6:.1f} MB/s", f"{_duration((self._total - done.bytes) / rate)} left"]
        elif self._step == "examples" and done.bytes >= self._total:
            parts.append(f"{done.shards} of {len(self._plan.shard_splits)} shards merged")
        return ", ".join([*parts, f"{_duration(seconds)} so far"])

    def _look_at_work(self) -> tuple[Done, tuple]:
        """(what is done, something that changes whenever work goes on)."""
        plan = self._plan
        keys = plan.unit_keys if self._finished == UNITS else plan.sample_keys
        found = {name.partition(".")[0] for name in entry_names(plan.pieces / self._finished)}
        finished = {unit for unit, key in enumerate(keys) if key in found}
        if self._finished == UNITS:
            for unit in sorted(finished - self._counted):
                report = read_report(plan.unit_report(unit))
                if report is None:
                    finished.remove(unit)
                else:
                    self._count(report)
                    self._counted.add(unit)
            self.all_units_done = len(finished) == len(keys)
        done = sum(plan.units[unit].bytes for unit in finished)
        examples = self._examples
        sources = entry_names(plan.pieces / SOURCES)
        shards = {name for name in entry_names(plan.work / SHARD_REPORTS) if not name.startswith(".")}
        numbers = {f"{self._finished}-{key}": unit for unit, key in enumerate(keys)}
        made = {f"{SOURCES}-{name}" for name in sources} | {f"{SHARD_REPORTS}-{name}" for name in shards}
        beats = []
        for name in sorted(entry_names(plan.work / HEARTBEATS) - made):
            unit = numbers.get(name.partition(".")[0])
            if name.startswith(".") or unit in finished:
                continue
            beat = self._beat(name)
            beats.append((name, *beat.values()))
            if unit is not None:
                done += beat.get("bytes", 0)
                examples += beat.get("examples", 0)
        return Done(done, examples, len(shards)), (len(finished), len(sources), len(shards), tuple(beats))

    def _count(self, report: dict) -> None:
        self._examples += report["examples"]
        self.counts.add(counts_of(report))
        self.shard_tokens.update({int(shard): tokens for shard, tokens in report["tokens"].items()})

    def _beat(self, name: str) -> dict:
        try:
            return json.loads((self._plan.work / HEARTBEATS / name).read_text())
        except (OSError, ValueError):
            return {}


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
