"""Runs that diverge because their rate is too high, and what the training does about it."""

import contextlib
import json
import shutil
import sqlite3
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from configs.schema import load_config
from tests.small_run import ROOT, run, settings
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


@pytest.fixture(scope="module")
def stopped(small_data, tmp_path_factory):
    """(folder, result) of a run that was to stop, and a folder in which one may go on from there."""
    folder = tmp_path_factory.mktemp("diverging")
    shutil.copytree(small_data / "data", folder / "data")
    shutil.copy(small_data / "corpus.txt", folder / "corpus.txt")
    result = run("-m", "training.pretrain", *settings(folder, **TOO_HIGH, training__on_divergence="stop"))
    return folder, result


def test_a_rate_too_high_stops_the_run_and_then_goes_on_by_a_rollback(stopped):
    folder, result = stopped
    assert result.returncode == 1, result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "training.on_divergence=rollback" in errors[0]
    assert "Traceback" not in result.stderr
    (event,) = lines(folder / "run" / "events.jsonl")
    assert (event["kind"], event["action"], len(event["examples"])) == ("spike", "stop", 24)
    assert 5 <= event["checkpoint"] <= event["healthy_step"] < event["step"]
    newest = max(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert newest == f"step-{event['checkpoint']:08d}"

    rollback = "{action: rollback, factor: 0.02, at_most: 1}"
    again = run("-m", "training.pretrain", *settings(folder, **TOO_HIGH, training__on_divergence=rollback))
    assert again.returncode == 0, again.stdout + again.stderr
    _, answered = lines(folder / "run" / "events.jsonl")
    assert (answered["step"], answered["checkpoint"]) == (event["step"], event["checkpoint"])
    assert answered["loss"] == pytest.approx(event["loss"], rel=1e-3)
    metrics = lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert metrics[-1]["train/mlm_loss"] < event["loss"] - 1
    after = metrics[event["checkpoint"]]
    assert after["train/learning_rate"] == pytest.approx(0.02 * event["checkpoint"] / 50)

    state = json.loads((folder / "run" / "checkpoints" / "step-00000060" / "state.json").read_text())
    course = state["course"]
    assert course["batch_offset"] == event["step"] - event["checkpoint"]
    assert course["rate_factor"] == 0.02
    assert course["rollbacks"][0]["skipped_batches"] == [event["checkpoint"], event["step"]]

    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        child, parent = store.execute("select run_uuid, value from tags where key = 'mlflow.parentRunId'").fetchone()
        steps = store.execute(
            "select step from metrics where key = 'train/loss' and run_uuid = ? order by step", (child,)
        ).fetchall()
    assert child == state["mlflow_run_id"]
    assert parent == (folder / "run" / "mlflow_run_id").read_text().strip()
    assert [step for (step,) in steps] == list(range(event["checkpoint"] + 1, 61))


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
