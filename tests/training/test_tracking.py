import contextlib
import sqlite3
import subprocess
import sys
import time

import pytest

from configs.schema import validate_config
from tests.small_run import ROOT
from training import tracking
from training.plots import plot_losses
from training.tracking import BackgroundRun, MetricsFile, read_metrics

TAGS = {tracking.DATA_DIGEST: "d" * 64, tracking.DATA_FOLDER: "/data/x"}


@pytest.fixture
def config(tmp_path):
    return validate_config(
        {
            "name": "tracked",
            "data": {"output": str(tmp_path / "data"), "inputs": [{"kind": "text", "path": "x"}]},
            "training": {"output": str(tmp_path)},
            "tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"},
        },
        source="test",
    )


def points(folder, metric: str = "train/loss") -> list[tuple[int, float]]:
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        query = "select step, value from metrics where key = ? order by step"
        return store.execute(query, (metric,)).fetchall()


def test_metrics_are_cut_back_to_the_step_a_run_continues_from(tmp_path):
    written = MetricsFile(tmp_path, 0)
    for step in range(1, 6):
        written.append(step, 10 * step, {"train/loss": 1.0 / step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "tok')
    continued = MetricsFile(tmp_path, 3)
    continued.append(4, 44, {"train/loss": 9.0})
    lines = list(read_metrics(tmp_path))
    assert [(line["step"], line["tokens"]) for line in lines] == [(1, 10), (2, 20), (3, 30), (4, 44)]


def test_metrics_that_are_not_finite_are_left_out_and_a_run_with_gaps_is_plotted(tmp_path):
    written = MetricsFile(tmp_path, 0)
    written.append(1, 10, {"train/mlm_loss": 6.0, "train/gradient_norm": float("inf")})
    written.append(2, 20, {"train/mlm_loss": float("nan"), "train/gradient_norm": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = read_metrics(tmp_path)
    assert "train/gradient_norm" not in first
    assert "train/mlm_loss" not in second
    assert plot_losses(tmp_path).stat().st_size


def test_an_outage_of_mlflow_is_survived_and_caught_up_without_doubles(tmp_path, config, monkeypatch):
    monkeypatch.setattr(tracking, "SEND_SECONDS", 0.05)
    real_send, failures = tracking.Run.send, []

    def failing_send(self, lines):
        if len(failures) < 2:
            failures.append(len(lines))
            raise ConnectionError("no answer")
        real_send(self, lines)

    monkeypatch.setattr(tracking.Run, "send", failing_send)
    written = MetricsFile(tmp_path, 0)
    tracker = BackgroundRun(tmp_path, config, "tracked", {"a": 1}, TAGS)
    for step in range(1, 101):
        written.append(step, step, {"train/loss": float(step)})
        time.sleep(0.01)
    assert tracker.close("FINISHED", [], timeout=60)
    assert len(failures) == 2
    assert points(tmp_path) == [(step, float(step)) for step in range(1, 101)]


def test_a_resumed_run_is_sent_only_the_steps_mlflow_does_not_have(tmp_path, config):
    written = MetricsFile(tmp_path, 0)
    first = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    for step in range(1, 8):
        written.append(step, step, {"train/loss": float(step)})
    assert first.close("KILLED", [], timeout=60)
    run_id = (tmp_path / tracking.RUN_ID).read_text()
    continued = MetricsFile(tmp_path, 5)
    second = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    for step in range(6, 11):
        continued.append(step, step, {"train/loss": float(step)})
    assert second.close("FINISHED", [], timeout=60)
    assert points(tmp_path) == [(step, float(step)) for step in range(1, 11)]
    assert (tmp_path / tracking.RUN_ID).read_text() == run_id


def test_a_late_evaluation_joins_its_step_and_is_sent_by_itself(tmp_path, config):
    evaluation = {"validation/mlm_loss": 3.0, "validation/unigram_cross_entropy": 4.0}
    written = MetricsFile(tmp_path, 0)
    first = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    written.append(1, 1, {"train/loss": 1.0} | evaluation)
    written.append(2, 2, {"train/loss": 2.0})
    assert first.close("KILLED", [], timeout=60)
    continued = MetricsFile(tmp_path, 2, evaluation | {"validation/mlm_accuracy": float("nan")})
    second = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    continued.append(3, 3, {"train/loss": 3.0})
    assert second.close("FINISHED", [], timeout=60)
    lines = list(read_metrics(tmp_path))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1] == {"step": 2, "tokens": 2, "time": lines[1]["time"], "train/loss": 2.0} | evaluation
    assert points(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    for name, value in evaluation.items():
        assert points(tmp_path, name) == [(1, value), (2, value)]


def test_evaluations_of_steps_that_mlflow_had_from_before_a_kill_are_sent(tmp_path, config, monkeypatch):
    monkeypatch.setattr(tracking, "SEND_SECONDS", 0.05)
    written = MetricsFile(tmp_path, 0)
    killed = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    for step in range(1, 6):
        written.append(step, step, {"train/loss": 1.0})
    assert killed.close("KILLED", [], timeout=60)
    continued = MetricsFile(tmp_path, 2)
    again = BackgroundRun(tmp_path, config, "tracked", {}, TAGS)
    for step in (3, 4, 5, 6):
        continued.append(step, step, {"train/loss": 1.0, "validation/unigram_cross_entropy": 4.0})
        deadline = time.monotonic() + 60
        while len(points(tmp_path, "validation/unigram_cross_entropy")) < step - 2:
            assert time.monotonic() < deadline, step
            time.sleep(0.1)
    assert again.close("FINISHED", [], timeout=60)
    assert [step for step, _ in points(tmp_path, "validation/unigram_cross_entropy")] == [3, 4, 5, 6]
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_an_mlflow_that_never_answers_is_reported_and_stops_nothing(tmp_path, config, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = config.model_copy(
        update={"tracking": config.tracking.model_copy(update={"uri": "http://127.0.0.1:9"})}
    )
    written = MetricsFile(tmp_path, 0)
    tracker = BackgroundRun(tmp_path, unreachable, "tracked", {}, TAGS)
    written.append(1, 1, {"train/loss": 1.0})
    assert not tracker.close("FINISHED", [], timeout=5)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_a_store_whose_making_was_killed_is_made_again(tmp_path):
    code = f"from training.tracking import mlflow_client; mlflow_client('sqlite:///{tmp_path}/mlflow.db')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    client = tracking.mlflow_client(f"sqlite:///{tmp_path}/mlflow.db")
    assert client.create_experiment("works")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_run_that_was_deleted_in_mlflow_is_made_anew(tmp_path, config):
    first = tracking.Run(tmp_path, config, "tracked", {}, TAGS)
    first.client.delete_run(first.id)
    assert tracking.Run(tmp_path, config, "tracked", {}, TAGS).id != first.id


def test_a_run_about_other_data_is_a_new_run(tmp_path, config):
    first = tracking.Run(tmp_path, config, "tracked", {}, TAGS)
    again = tracking.Run(tmp_path, config, "tracked", {}, TAGS)
    other = tracking.Run(tmp_path, config, "tracked", {}, TAGS | {tracking.DATA_DIGEST: "e" * 64})
    assert first.id == again.id != other.id
    run = other.client.get_run(other.id)
    assert run.info.run_name == "tracked"
    assert run.inputs.dataset_inputs[0].dataset.name == "x"
    assert run.info.artifact_uri.startswith((tmp_path / "artifacts").as_uri())
