"""What pieces of work leave for the driver to see, in this process, without an engine."""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from configs.schema import load_config
from data_prep import job, progress
from data_prep.files import write_whole
from data_prep.plan import Plan
from data_prep.progress import Progress
from data_prep.vocabulary import Vocabulary


@pytest.fixture
def plan(tmp_path, pseudo_documents, vocabulary: Vocabulary, write_config) -> Plan:
    """Two files to be prepared with a given vocabulary."""
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(pseudo_documents(20, number)))
    (tmp_path / "given.model").write_bytes(vocabulary.model)
    inputs = [{"kind": "text", "path": str(tmp_path / "*.txt")}]
    plan = Plan.make(
        load_config(write_config(tmp_path, "data", inputs=inputs, vocab={"model": str(tmp_path / "given.model")}))
    )
    plan.save()
    write_whole(plan.vocabulary, vocabulary.model)
    return plan


def watched(plan: Plan, step: str = "examples") -> Progress:
    return Progress(plan, step, step, Console(file=io.StringIO()))


def beat(plan: Plan, piece: Path, **done: int) -> None:
    write_whole(plan.heartbeat(piece), json.dumps(done))


def test_digests_and_merges_show_that_they_go_on(plan, monkeypatch):
    monkeypatch.setattr(job, "HEARTBEAT_SECONDS", 0.0)
    spill, merge = job.SpillUnit(str(plan.path)), job.MergeShard(str(plan.path))
    assert list(spill.process(("source", 0))) == []
    assert json.loads(plan.heartbeat(plan.source_report(0)).read_text()) == {"bytes": plan.sources[0].bytes}
    places = [place for unit in (0, 1) for shard, place in spill.process(("unit", unit)) if shard == 0]
    assert list(merge.process((0, places))) == [0]
    assert json.loads(plan.heartbeat(plan.shard_report(0)).read_text()) == {"batches": 2}


@pytest.mark.parametrize("piece", [("unit_report", 1), ("source_report", 0), ("shard_report", 2)], ids=lambda p: p[0])
def test_a_heartbeat_of_any_piece_is_a_sign_of_work(plan, piece):
    name, number = piece
    shown = watched(plan)
    shown.look()
    time.sleep(0.05)
    shown.look()
    assert shown.idle_seconds >= 0.05
    beat(plan, getattr(plan, name)(number), bytes=5)
    shown.look()
    assert shown.idle_seconds < 0.05


def test_only_what_the_step_itself_did_counts_as_its_progress(plan, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    total = sum(source.bytes for source in plan.sources)
    for piece in (plan.sample(0), plan.source_report(0)):
        beat(plan, piece, bytes=total)
    out = io.StringIO()
    shown = Progress(plan, "examples", "title", Console(file=out))
    shown.look()
    assert out.getvalue().startswith("title: 0.0 of ")
    beat(plan, plan.unit_report(0), bytes=total, examples=7)
    shown.look()
    assert f"title: {total / 1e6:,.1f} of {total / 1e6:,.1f} MB, 7 examples" in out.getvalue()


@pytest.mark.parametrize("error", [OSError("the network is down"), PermissionError("SlowDown")])
def test_a_look_that_fails_is_followed_by_another(plan, monkeypatch, error):
    shown = watched(plan)
    with monkeypatch.context() as patch:

        def entry_names(folder: Path) -> set[str]:
            raise error

        patch.setattr(progress, "entry_names", entry_names)
        shown.look()
    list(job.SpillUnit(str(plan.path)).process(("unit", 0)))
    shown.look()
    assert shown.counts.read == 20 and not shown.all_units_done


def test_a_failure_counts_until_its_piece_is_made_after_all(plan):
    said = "1.txt cannot be read"
    for piece in (plan.sample(1), plan.unit_report(1), plan.source_report(1)):
        write_whole(plan.failure(piece), said)
        assert list(plan.failures()) == [said]
        write_whole(piece, "{}")
        assert list(plan.failures()) == []


def test_a_bad_file_is_told_to_the_driver_by_those_who_read_it_and_who_digest_it(plan):
    Path(plan.sources[1].path).unlink()
    for kind in ("unit", "source"):
        with pytest.raises(OSError, match=r"1\.txt cannot be read"):
            list(job.SpillUnit(str(plan.path)).process((kind, 1)))
    found = list(plan.failures())
    assert len(found) == 2 and all(said.startswith(f"{plan.sources[1].path} cannot be read: ") for said in found)
