"""Runs that diverge because their rate is too high, and what the training does about it."""

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from configs.schema import load_config
from data_prep.shards import Dataset
from tests.small_run import ROOT, launched, run, settings
from training.batches import global_batch
from training.checkpoint import opened
from training.divergence import DivergedError, DivergenceWatch
from training.engine import loss_scale_of, set_loss_scale
from training.evaluate import LossSums
from training.loop import Progress, observed, train

TOO_HIGH = {
    "training__learning_rate": "1.0",
    "training__warmup_steps": "50",
    "training__steps": "60",
    "training__checkpoint__every": "5",
}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ROLLBACK = {"training__on_divergence": "{action: rollback, factor: 0.02, at_most: 1}"}


def trained(folder: Path, world_size: int = 1, **overrides: str):
    """The result of training in `folder` with a rate too high."""
    return run(*command(folder, world_size, **overrides), timeout=240)


def command(folder: Path, world_size: int = 1, **overrides: str) -> list[str]:
    arguments = settings(folder, **(TOO_HIGH | overrides))
    return ["-m", "training.pretrain", *arguments] if world_size == 1 else launched(world_size, *arguments)


def only_error(result) -> str:
    """The one line in which the run said why it ended."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    return errors[0]


def course(folder: Path, step: int) -> dict:
    return json.loads((folder / "run" / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["course"]


@pytest.fixture(scope="module")
def rolled_back(workspace):
    """(folder, result of a run that was to stop, its event, result of going on by a rollback)."""
    folder = workspace("diverging")
    stopped = trained(folder, training__on_divergence="stop")
    (event,) = lines(folder / "run" / "events.jsonl")
    newest = max(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert newest == f"step-{event['checkpoint']:08d}"
    return folder, stopped, event, trained(folder, **ROLLBACK)


def test_a_rate_too_high_stops_the_run_and_then_goes_on_by_a_rollback(rolled_back):
    folder, stopped, event, again = rolled_back
    assert stopped.returncode == 1
    assert "training.on_divergence=rollback" in only_error(stopped)
    assert f"the checkpoint of step {event['checkpoint']} is kept" in only_error(stopped)
    assert (event["kind"], event["action"], len(event["examples"])) == ("spike", "stop", 24)
    assert 5 <= event["checkpoint"] <= event["healthy_step"] < event["step"]

    assert again.returncode == 0, again.stdout + again.stderr
    _, answered = lines(folder / "run" / "events.jsonl")
    assert (answered["step"], answered["checkpoint"]) == (event["step"], event["checkpoint"])
    assert answered["loss"] == pytest.approx(event["loss"], rel=1e-3)
    metrics = lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert metrics[-1]["train/mlm_loss"] < event["loss"] - 1
    after = metrics[event["checkpoint"]]
    assert after["train/learning_rate"] == pytest.approx(0.02 * event["checkpoint"] / 50)

    found = course(folder, 60)
    assert found["batch_offset"] == event["step"] - event["checkpoint"]
    assert found["rate_factor"] == 0.02
    assert found["rollbacks"][0]["skipped_batches"] == [event["checkpoint"], event["step"]]


def test_a_rollback_is_a_child_run_in_mlflow_of_the_run_that_failed(rolled_back):
    folder, _, event, _ = rolled_back
    state = json.loads((folder / "run" / "checkpoints" / "step-00000060" / "state.json").read_text())
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        child, parent = store.execute("select run_uuid, value from tags where key = 'mlflow.parentRunId'").fetchone()
        steps = store.execute(
            "select step from metrics where key = 'train/loss' and run_uuid = ? order by step", (child,)
        ).fetchall()
        ended = dict(store.execute("select run_uuid, status from runs").fetchall())
        said = store.execute("select run_uuid, value from tags where key = 'divergence'").fetchall()
    assert child == state["mlflow_run_id"]
    assert parent == (folder / "run" / "mlflow_run_id").read_text().strip()
    assert [step for (step,) in steps] == list(range(event["checkpoint"] + 1, 61))
    assert ended == {parent: "FAILED", child: "FINISHED"}
    assert [run_id for run_id, _ in said] == [parent]
    assert f"step {event['step']}: the MLM loss jumped" in said[0][1]


@pytest.mark.matrix
def test_a_run_killed_after_its_rollback_and_stopped_later_goes_on_as_if_undisturbed(rolled_back, workspace):
    undisturbed, _, event, _ = rolled_back
    folder = workspace("disturbed")
    process = subprocess.Popen(
        [sys.executable, *command(folder, **ROLLBACK)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    events = folder / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while not events.exists() or not events.read_text().endswith("\n"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert kept[-1] == f"step-{event['checkpoint']:08d}"
    assert course(folder, event["checkpoint"])["rollbacks"] == []

    stop_after = event["step"] + 3
    stopped = trained(folder, world_size=2, **ROLLBACK, training__stop_after=str(stop_after), training__zero_stage="2")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert len(course(folder, stop_after)["rollbacks"]) == 1
    resumed = trained(folder, world_size=3, **ROLLBACK, training__zero_stage="3", training__micro_batch_tokens="200")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    assert [(found["step"], found["action"]) for found in lines(events)] == [(event["step"], "rollback")] * 2
    assert course(folder, 60) == course(undisturbed, 60)
    found, expected = (lines(path / "run" / "metrics.jsonl") for path in (folder, undisturbed))
    assert [line["step"] for line in found] == list(range(1, 61))
    for here, there in zip(found, expected, strict=True):
        for name in ("tokens", "train/loss", "train/gradient_norm", "train/learning_rate"):
            assert here[name] == pytest.approx(there[name], rel=1e-4), (name, here["step"])
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        child, _ = store.execute("select run_uuid, value from tags where key = 'mlflow.parentRunId'").fetchone()
        steps = store.execute(
            "select step from metrics where key = 'train/loss' and run_uuid = ? order by step", (child,)
        ).fetchall()
    assert [step for (step,) in steps] == list(range(event["checkpoint"] + 1, 61))


@pytest.mark.matrix
def test_rollbacks_lower_the_rate_and_pass_over_batches_again_until_there_have_been_too_many(workspace):
    folder = workspace("hopeless")
    result = trained(folder, training__on_divergence="{action: rollback, factor: 0.9, at_most: 2}")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "rolling back did not help (times: 2)" in only_error(result)
    events = lines(folder / "run" / "events.jsonl")
    assert [event["action"] for event in events] == ["rollback", "rollback", "stop"]
    assert result.stdout.count("at 0.9 times the rate") == 2

    newest = max(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert newest == events[-1]["checkpoint"]
    found = course(folder, newest)
    metrics = {line["step"]: line for line in lines(folder / "run" / "metrics.jsonl")}
    last = metrics[max(metrics)]
    assert last["train/learning_rate"] == pytest.approx(0.81 * (last["step"] - 1) / 50)
    assert found["rate_factor"] in (0.9, pytest.approx(0.81))
    # Each rollback passes over all batches up to the one at which it was noticed.
    rows, offset = Dataset.open(folder / "data").split("train").rows, 0
    for event in events:
        batch = event["step"] - 1 + offset
        assert event["examples"] == global_batch(0, batch, 24, rows)[0].tolist()
        offset = batch + 1 - event["checkpoint"]
    again = trained(folder, training__on_divergence="{action: rollback, factor: 0.9, at_most: 2}")
    assert again.returncode == 1
    assert "rolling back did not help (times: 2)" in only_error(again)


@pytest.mark.matrix
def test_a_rollback_to_the_start_goes_back_to_the_weights_of_init_from(workspace):
    folder = workspace("given")
    source = {"training__output": f"{folder}/source", "training__learning_rate": "0.01", "training__warmup_steps": "4"}
    assert trained(folder, **source).returncode == 0
    learnt = [line["train/mlm_loss"] for line in lines(folder / "source" / "metrics.jsonl")]
    assert learnt[-1] < learnt[0] - 0.2
    given = {"training__init_from": f"{folder}/source", "training__checkpoint__every": "1000"}
    result = trained(folder, **given, **ROLLBACK)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "back to step 0 at 0.02 times the rate" in result.stdout
    first, *_ = lines(folder / "run" / "metrics.jsonl")
    assert first["step"] == 1
    assert first["train/mlm_loss"] == pytest.approx(learnt[-1], abs=0.1)
    assert course(folder, 60)["rollbacks"][0]["to_step"] == 0


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_rate_and_examples(workspace):
    folder = workspace("infinite")
    overrides = {
        "training__learning_rate": "10",
        "training__gradient_clipping": "0",
        "training__checkpoint__every": "2",
    }
    result = trained(folder, **overrides)
    assert result.returncode == 1, result.stdout + result.stderr
    *warned, event = lines(folder / "run" / "events.jsonl")
    assert all(found["action"] == "warn" for found in warned)
    assert (event["kind"], event["action"], len(event["examples"])) == ("not_finite", "stop", 24)
    error = only_error(result)
    assert f"step {event['step']} is not finite" in error
    assert f"learning rate {10 * (event['step'] - 1) / 50:.3g}" in error
    assert f"its batch held the train examples {', '.join(map(str, event['examples'][:5]))}, …" in error
    rows = Dataset.open(folder / "data").split("train").rows
    assert event["examples"] == global_batch(0, event["step"] - 1, 24, rows)[0].tolist()
    assert [line["step"] for line in lines(folder / "run" / "metrics.jsonl")] == list(range(1, event["step"]))

    assert 0 < event["checkpoint"] <= event["healthy_step"]
    assert f"the checkpoint of step {event['checkpoint']} is kept" in error
    weights = opened(folder / "run" / "checkpoints" / f"step-{event['checkpoint']:08d}")[0].weights()
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_fp16_passes_over_what_is_not_finite_and_counts_it_while_other_precisions_do_not():
    sums = LossSums(50.0, 1.0, 10, 1.0, 1.0, 2)
    watch = DivergenceWatch(6.0, 10, 1000)
    progress = Progress(step=3)
    assert observed(watch, sums, float("inf"), progress, 1e-3, "fp16") is None
    assert progress.skipped_steps == 1
    event = observed(watch, sums, float("inf"), progress, 1e-3, "bf16")
    assert event.kind == "not_finite" and "step 3 is not finite" in event.text and "0.001" in event.text
    assert observed(watch, sums, 1.0, progress, 1e-3, "bf16") is None
    assert progress.skipped_steps == 1


def test_fp16_that_overflows_at_the_lowest_loss_scale_is_a_divergence(monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    scaler = DynamicLossScaler(4.0, 2, 1.0, 1, False, dtype=torch.half)
    sums = LossSums(50.0, 1.0, 10, 1.0, 1.0, 2)

    def train_step(*_):
        scaler.update_scale(True)
        return sums, False

    pending = SimpleNamespace(value=lambda: 10)
    engine = SimpleNamespace(train_step=train_step, count_masked=lambda _: pending, gradient_norm=float("inf"))
    batch = SimpleNamespace(tokens=20, padded_tokens=24)
    batches = SimpleNamespace(prefetched=lambda first, last: (batch for _ in range(first, last)))
    overrides = ["training.precision=fp16", "training.on_divergence=rollback"]
    config = load_config(ROOT / "configs" / "demo.yaml", overrides)
    progress = Progress(step=20, batch_offset=7)
    watch = DivergenceWatch(6.0, 10, 1000)
    stop = SimpleNamespace(requested=False)
    with pytest.raises(DivergedError, match="step 23: gradients overflow even at the lowest loss scale") as raised:
        train(config, engine, batches, batches, progress, stop, None, watch, 6.0)
    assert raised.value.event.kind == "not_finite"
    assert raised.value.batch == 22 + 7
    assert progress.skipped_steps == 2


def test_a_loss_scaler_goes_on_from_what_another_remembered(monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)

    def optimizer():
        return SimpleNamespace(loss_scaler=DynamicLossScaler(2.0**16, 3, 1.0, 2, False, dtype=torch.half))

    overflows = [False, True, True, False, False, False, True, True, False, False, False, False, False]
    first, whole = optimizer(), optimizer()
    for overflow in overflows[:7]:
        first.loss_scaler.update_scale(overflow)
    second = optimizer()
    set_loss_scale(second, json.loads(json.dumps(loss_scale_of(first))))
    for overflow in overflows:
        whole.loss_scaler.update_scale(overflow)
    for overflow in overflows[7:]:
        second.loss_scaler.update_scale(overflow)
    assert loss_scale_of(second) == loss_scale_of(whole)
    assert loss_scale_of(whole)["cur_scale"] != 2.0**16
    assert loss_scale_of(SimpleNamespace()) == {}
