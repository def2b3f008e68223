"""All steps by one command, as a user runs them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from rich.console import Console

from configs.schema import ConfigError, load_config
from pipeline import run as pipeline_run
from pipeline.evaluation import evaluate_checkpoint
from pipeline.run import count_gpus, run_pipeline
from tests.ports import free_port
from tests.small_run import ROOT, run, settings, small_overrides, write_corpus


def pipeline(folder, **overrides) -> list[str]:
    config, *others = settings(folder, **overrides)[1:]
    return ["-m", "pipeline", "run", config, *others]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, output) of a whole pipeline run."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder / "corpus.txt", documents=300)
    result = run(*pipeline(folder), timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def test_one_command_goes_from_text_to_a_checkpoint_and_sums_up(finished):
    folder, output = finished
    assert (folder / "run" / "checkpoints" / "step-00000040" / "COMPLETE").exists()
    manifest = json.loads((folder / "data" / "manifest.json").read_text())
    summary = output[output.index("documents ") :]
    assert f"{manifest['documents']['used']:,} of {manifest['documents']['read']:,}" in summary
    assert f"{manifest['tokens']:,} in {manifest['examples']:,} examples" in summary
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['validation/mlm_loss']:.3f} nats at step 40" in summary
    assert f"{last['validation/unigram_cross_entropy']:.3f} nats" in summary
    assert f"{last['validation/sop_accuracy']:.3f} ± {last['validation/sop_accuracy_standard_error']:.3f}" in summary
    assert f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db" in summary


def test_a_checkpoint_evaluated_alone_gets_the_figures_that_two_processes_reported(finished):
    folder, _ = finished
    figures = evaluate_checkpoint(folder / "run", None, None, Console(quiet=True))
    reported = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    names = [name for name in reported if name.startswith("validation/")]
    assert len(names) == 7
    assert {name: figures[name.removeprefix("validation/")] for name in names} == pytest.approx(
        {name: reported[name] for name in names}, rel=1e-5
    )


def test_a_second_run_skips_what_is_complete_and_says_so(finished):
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.arrow")}
    begin = time.monotonic()
    result = run(*pipeline(folder))
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - begin < 10
    assert result.stdout.count("skipped") == 4
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.arrow")} == before


def test_mlflow_serves_the_data_run_and_the_training_run_with_their_curve(finished):
    folder, _ = finished
    port = free_port()
    command = ["-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, *command, "--workers", "1"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        from mlflow import MlflowClient

        client = MlflowClient(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        experiment = client.get_experiment_by_name("albert")
        runs = {found.info.run_name: found for found in client.search_runs([experiment.experiment_id])}
        assert set(runs) == {"demo data", "demo pretraining"}
        training, data = runs["demo pretraining"], runs["demo data"]
        history = client.get_metric_history(training.info.run_id, "train/loss")
        assert sorted(point.step for point in history) == list(range(1, 41))
        assert training.info.status == data.info.status == "FINISHED"
        assert training.data.params["training.learning_rate"] == "0.004"
        assert training.data.tags["data.run_id"] == data.info.run_id
        assert training.data.tags["data.digest"] == data.data.tags["data.digest"]
        assert {file.path for file in client.list_artifacts(training.info.run_id)} >= {"config.yaml", "loss.png"}
        assert [file.path for file in client.list_artifacts(data.info.run_id)] == ["manifest.json"]
        manifest = json.loads((folder / "data" / "manifest.json").read_text())
        assert data.data.metrics["data/examples"] == manifest["examples"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def test_training_that_ended_early_without_an_error_does_not_count_as_done(finished, tmp_path, monkeypatch, capsys):
    """As where SIGTERM was sent to the training processes."""
    folder, _ = finished
    overrides = small_overrides(folder, training__output=f"{tmp_path}/run")
    path = ROOT / "configs" / "demo.yaml"
    monkeypatch.setattr(pipeline_run, "_run_step", lambda *_: 1.0)
    with pytest.raises(ConfigError, match="training was interrupted; the same command goes on"):
        run_pipeline(load_config(path, overrides), str(path), overrides, extend=False, hostfile=None)
    assert "look further" not in capsys.readouterr().out


@pytest.mark.parametrize(("visible", "gpus"), [("-1", 0), ("", 0), ("0,3", 2), ("0,-1", 1)])
def test_gpus_are_those_that_the_environment_shows(monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == gpus


def test_ctrl_c_saves_and_the_same_command_goes_on_also_where_gpus_are_hidden(finished, tmp_path, monkeypatch):
    folder, _ = finished
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    other = {"training__output": f"{tmp_path}/run", "training__steps": "400", "training__checkpoint__every": "100"}
    process = subprocess.Popen(
        [sys.executable, *pipeline(folder, **other)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    path = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith("error: training was interrupted; the same command goes on")
    step = json.loads(path.read_text().splitlines()[-1])["step"]
    assert 5 <= step < 400
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "COMPLETE").exists()

    other["training__stop_after"] = str(step + 2)
    result = run(*pipeline(folder, **other))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"going on from {tmp_path}/run/checkpoints/step-{step:08d}" in result.stdout
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, step + 3))


@pytest.mark.matrix
def test_an_mlflow_that_never_answers_holds_nothing_up_for_long(finished, tmp_path):
    folder, _ = finished
    data_run = folder / "data" / "mlflow_run_id"
    known = data_run.read_text()
    data_run.unlink()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        others = {"training__output": f"{tmp_path}/run", "training__stop_after": "4", "tracking__uri": uri}
        begin = time.monotonic()
        result = run(*pipeline(folder, **others), timeout=400)
    data_run.write_text(known)
    assert result.returncode == 0, result.stdout + result.stderr
    assert time.monotonic() - begin < 240
    assert "MLflow did not take the data run" in result.stdout
    assert "MLflow does not have all of this run yet" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "run" / "checkpoints" / "step-00000004" / "COMPLETE").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training__colour": "red"}, "unknown key training.colour"),
        ({"data__inputs__0__path": "/nowhere/*.txt", "data__output": "nowhere"}, "no file matches /nowhere/*.txt"),
        ({"training__learning_rate": "0.1"}, "holds a run with other settings"),
    ],
)
def test_refusals_come_before_any_step_in_one_line(finished, overrides, message):
    folder, _ = finished
    begin = time.monotonic()
    result = run(*pipeline(folder, **overrides))
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message in result.stderr
    assert time.monotonic() - begin < 5


def test_a_second_start_while_the_first_runs_is_refused(finished):
    folder, _ = finished
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from data_prep.locks import locked; from pathlib import Path\n"
            f"with locked(Path('{folder}/run')): print('held', flush=True); input()",
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    try:
        result = run(*pipeline(folder, training__learning_rate="0.1"))
        assert result.returncode != 0
        assert result.stderr.strip() == (
            f"error: {folder}/run is being written by process {holder.pid}: "
            f"wait for it, or stop it (kill {holder.pid}) first"
        )
    finally:
        holder.communicate(b"\n")


@pytest.mark.parametrize("module", ["pipeline", "data_prep", "training.pretrain"])
def test_help_answers_at_once_without_heavy_imports(module):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'apache_beam', 'mlflow', 'deepspeed', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
