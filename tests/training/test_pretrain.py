"""The training command under DeepSpeed's launcher: a curve, undisturbed and disturbed."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import load_config
from tests.small_run import ROOT, launched, run, settings
from training.divergence import DivergenceWatch
from training.engine import StoppedError
from training.evaluate import LossSums
from training.loop import Progress, Recorder, train


def two_processes(*arguments: str) -> list[str]:
    """The whole command that trains on two processes."""
    return [sys.executable, *launched(2, *arguments)]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {line["step"]: (line["train/loss"], line["train/gradient_norm"]) for line in metrics(folder)}


def mlflow_points(folder: Path, metric: str = "train/loss") -> list[tuple[str, int]]:
    """(run, step) of every point of `metric` that the SQLite store holds, read without MLflow."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        return store.execute("select run_uuid, step from metrics where key = ? order by step", (metric,)).fetchall()


def final_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "checkpoints" / f"step-{step:08d}" / "weights.safetensors")


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until the run in `folder` has finished `step` steps."""
    path = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks_of(folder: Path) -> list[int]:
    """The training processes whose command line names `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text().split("\0")
            if "training.pretrain" in command[2:5] and any(str(folder) in part for part in command):
                found.append(int(path.parent.name))
    return found


def rank_of(pids: list[int], rank: int) -> int:
    """The one of `pids` that has `rank`."""
    return next(pid for pid in pids if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(workspace) -> Path:
    """A finished run of 40 steps on two processes."""
    folder = workspace("undisturbed")
    result = subprocess.run(two_processes(*settings(folder)), cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_a_run_leaves_everything_that_was_promised(undisturbed):
    lines = metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert all(line["tokens"] > 0 and line["speed/tokens_per_second"] > 0 for line in lines)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert [line["step"] for line in lines if "validation/mlm_loss" in line] == [20, 40]
    checkpoints = sorted(path.name for path in (undisturbed / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-00000030", "step-00000040"]
    assert {path.name for path in (undisturbed / "run").iterdir()} >= {"config.yaml", "ds_config.json", "plots"}
    assert (undisturbed / "run" / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_tells_how_to_make_it_again(undisturbed):
    state = json.loads((undisturbed / "run" / "checkpoints" / "step-00000040" / "state.json").read_text())
    assert state["step"] == 40
    assert state["tokens"] == metrics(undisturbed)[-1]["tokens"]
    assert state["config"]["training"]["steps"] == 40
    assert state["data"]["inputs"][0]["path"] == str(undisturbed.parent / "small0" / "corpus.txt")
    assert len(state["data"]["inputs"][0]["sha256"]) == 64
    assert [(state["mlflow_run_id"], 40)] == mlflow_points(undisturbed)[-1:]


def test_mlflow_has_every_step_once_under_one_run(undisturbed):
    points = mlflow_points(undisturbed)
    assert [step for _, step in points] == list(range(1, 41))
    assert len({run_id for run_id, _ in points}) == 1
    assert [step for _, step in mlflow_points(undisturbed, "validation/mlm_loss")] == [20, 40]


def test_a_finished_run_is_not_run_again(undisturbed):
    before = (undisturbed / "run" / "metrics.jsonl").read_bytes()
    result = run("-m", "training.pretrain", *settings(undisturbed))
    assert result.returncode == 0
    assert "complete at step 40" in result.stdout
    assert (undisturbed / "run" / "metrics.jsonl").read_bytes() == before


def test_an_evaluation_that_a_stop_prevented_is_made_up_for(undisturbed, tmp_path):
    """As left behind by a signal between the last step and the end of the evaluation after it."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    shutil.copy(undisturbed / "mlflow.db", tmp_path)
    *others, last = metrics(undisturbed)
    validation = {name: value for name, value in last.items() if name.startswith("validation/")}
    without = {name: value for name, value in last.items() if name not in validation}
    lines = [json.dumps(line) + "\n" for line in (*others, without)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("delete from metrics where step = 40 and key like 'validation/%'")
        store.execute("update runs set status = 'KILLED'")

    elsewhere = {"training__output": f"{tmp_path}/run", "tracking__uri": f"sqlite:///{tmp_path}/mlflow.db"}
    again = run(*launched(2, *settings(undisturbed, **elsewhere, training__zero_stage="3")))
    assert again.returncode == 0, again.stderr
    assert "step     40  validation: MLM loss" in again.stdout
    *kept, evaluated = metrics(tmp_path)
    assert kept == others
    assert {name: evaluated[name] for name in without} == without
    assert evaluated == pytest.approx(last, rel=1e-5)
    assert [step for _, step in mlflow_points(tmp_path, "validation/mlm_loss")] == [20, 40]
    assert [step for _, step in mlflow_points(tmp_path)] == list(range(1, 41))
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]


def test_what_aborts_at_the_interpreters_end_does_not_fail_a_finished_run(undisturbed, tmp_path, monkeypatch):
    """Threads of gloo do so now and then."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("-c", "print('started')").returncode < 0
    result = run("-m", "training.pretrain", *settings(undisturbed))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing to do" in result.stdout


def test_a_killed_run_goes_on_as_if_nothing_had_happened_with_other_processes_and_stage(undisturbed, workspace):
    folder = workspace("killed")
    first = subprocess.Popen(
        two_processes(*settings(folder)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    wait_for_step(folder, 15, first)
    launchers = [
        first.pid,
        *(int(child) for child in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()),
    ]
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)
    first.wait()

    refused = run("-m", "training.pretrain", *settings(folder))
    assert refused.returncode != 0
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "is being written by process" in refused.stderr

    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(ranks)
    interrupted_at = max(curve(folder))
    alone = run(
        "-m", "training.pretrain", *settings(folder, training__zero_stage="2", training__micro_batch_tokens="640")
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert f"going on from {folder}/run/checkpoints/step-000000{interrupted_at // 10}0" in alone.stdout

    expected, found = curve(undisturbed), curve(folder)
    assert list(found) == list(range(1, 41))
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-4), step
    points = mlflow_points(folder)
    assert [step for _, step in points] == list(range(1, 41))
    assert len({run_id for run_id, _ in points}) == 1
    weights = final_weights(folder, 40)
    for name, expected_weight in final_weights(undisturbed, 40).items():
        torch.testing.assert_close(weights[name], expected_weight, rtol=1e-3, atol=1e-5)


def test_sigterm_to_one_process_saves_and_ends_all_and_the_run_goes_on_from_there(undisturbed, workspace):
    folder = workspace("stopped")
    # An evaluation asks by itself whether to stop.
    without_evaluation = {"training__evaluate__every": "1000"}
    process = subprocess.Popen(
        two_processes(*settings(folder, **without_evaluation)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for_step(folder, 13, process)
    begin = time.monotonic()
    os.kill(rank_of(ranks_of(folder), 1), signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    wait_until_gone(ranks_of(folder))
    assert time.monotonic() - begin < 30
    assert "Traceback" not in output.decode()
    stopped_at = metrics(folder)[-1]["step"]
    assert 13 <= stopped_at < 40
    assert (folder / "run" / "checkpoints" / f"step-{stopped_at:08d}" / "COMPLETE").exists()

    other = {"training__stop_after": "25", "training__zero_stage": "0"}
    again = run("-m", "training.pretrain", *settings(folder, **without_evaluation, **other))
    assert again.returncode == 0, again.stderr
    found, expected = curve(folder), curve(undisturbed)
    assert list(found) == list(range(1, 26))
    for step in found:
        assert found[step] == pytest.approx(expected[step], rel=1e-4), step


@pytest.mark.matrix
def test_sigterm_within_a_long_step_ends_the_run_without_it_and_the_run_starts_anew(workspace):
    folder = workspace("long_steps")
    # Thousands of micro-batches.
    long_steps = settings(folder, training__global_batch_size="12000", training__micro_batch_tokens="64")
    process = subprocess.Popen(
        two_processes(*long_steps), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while "12,000 examples" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(4)
    begin = time.monotonic()
    os.kill(rank_of(ranks_of(folder), 1), signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert time.monotonic() - begin < 15
    assert "stopped, nothing to save at step 0" in output and "Traceback" not in output
    assert not list((folder / "run").glob("checkpoints/step-*"))
    again = run("-m", "training.pretrain", *long_steps, "--set", "training.global_batch_size=24")
    assert "training.global_batch_size (12000 -> 24)" in again.stderr
    assert f"or remove {folder}/run, which has no checkpoint yet" in again.stderr


@pytest.mark.parametrize(
    ("stopped_in", "checkpoint_every", "stop_after", "checkpoints"),
    [("step", 7, 9, [7]), ("step", 5, 9, [5, 7]), ("evaluation", 5, 9, [5, 7]), ("evaluation", 5, 7, [5, 7])],
)
def test_a_run_stopped_within_a_step_or_an_evaluation_saves_the_last_finished_step_once(
    stopped_in, checkpoint_every, stop_after, checkpoints
):
    sums = LossSums(50.0, 1.0, 10, 1.0, 1.0, 2)
    saved, metrics = [], []

    def train_step(step, *_):
        if (step, stopped_in) == (7, "step"):
            raise StoppedError
        return sums, False

    def evaluate(*_):
        if stopped_in == "evaluation":
            raise StoppedError
        return sums

    engine = SimpleNamespace(
        train_step=train_step,
        evaluate=evaluate,
        count_masked=lambda _: SimpleNamespace(value=lambda: 10),
        gradient_norm=1.0,
        gathered_state=lambda: SimpleNamespace(weights={}, moments={}),
        loss_scale=dict,
    )
    batch = SimpleNamespace(tokens=20, padded_tokens=24)
    batches = SimpleNamespace(
        prefetched=lambda first, last: (batch for _ in range(first, last)), one_pass=lambda batches: iter(())
    )
    recorder = Recorder(
        SimpleNamespace(append=lambda step, tokens, values: metrics.append(step)),
        None,
        SimpleNamespace(write=lambda step, *_: saved.append(step), wait=lambda: None),
        lambda progress: {},
    )
    overrides = {"checkpoint.every": checkpoint_every, "evaluate.every": 7, "stop_after": stop_after}
    config = load_config(
        ROOT / "configs" / "demo.yaml", [f"training.{name}={value}" for name, value in overrides.items()]
    )
    progress = Progress(step=2)
    stop = SimpleNamespace(requested=True)
    watch = DivergenceWatch(6.0, 10, 1000)
    assert train(config, engine, batches, batches, progress, stop, recorder, watch, 6.0)
    assert progress.step == 7
    assert metrics == [3, 4, 5, 6, 7]
    assert saved == checkpoints


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training__learning_rate": "0.1"}, "training.learning_rate (0.004 -> 0.1)"),
        ({"training__steps": "80"}, "--extend"),
        ({"data__max_length": "32"}, "data.max_length 64, the config says 32"),
        ({"data__output": "nowhere"}, "run python -m data_prep first"),
        ({"training__colour": "red"}, "unknown key training.colour"),
    ],
)
def test_what_cannot_go_on_is_refused_in_one_line_that_names_it(undisturbed, overrides, message):
    begin = time.monotonic()
    result = run("-m", "training.pretrain", *settings(undisturbed, **overrides))
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message in result.stderr
    assert time.monotonic() - begin < 5


def test_a_shard_cut_short_or_altered_is_refused_by_name(workspace):
    folder = workspace("damaged")
    shard = folder / "data" / "train-00001-of-00003.arrow"
    whole = shard.read_bytes()
    for content, message in (
        (whole[:-100], "the manifest says"),
        (whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:], "was altered"),
    ):
        shard.write_bytes(content)
        result = run("-m", "training.pretrain", *settings(folder))
        assert result.returncode != 0
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert str(shard) in result.stderr
        assert message in result.stderr
        assert not (folder / "run").exists()


def test_the_launcher_prints_a_refusal_once(workspace):
    folder = workspace("refused")
    result = subprocess.run(
        two_processes(*settings(folder, training__colour="red")), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert (result.stdout + result.stderr).count("unknown key training.colour") == 1
    assert "Traceback" not in result.stdout + result.stderr


def test_weights_of_another_run_start_a_new_one_and_the_published_rate_is_warned_of(undisturbed, workspace):
    folder = workspace("initialised")
    others = {"training__init_from": f"{undisturbed}/run", "model__num_hidden_layers": "3"}
    others |= {"training__stop_after": "2", "training__learning_rate": "0.00176"}
    result = run("-m", "training.pretrain", *settings(folder, **others))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "starting with the weights of" in result.stdout
    assert "warning: training.learning_rate 0.00176 is meant for batches of 4,096, not 24" in result.stdout
    assert metrics(folder)[0]["train/loss"] < metrics(undisturbed)[0]["train/loss"] - 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__hidden_size": "64"}, "has shape"),
        (
            {"training__deepspeed": "{zero_optimization: {reduce_bucket_size: many}}"},
            "DeepSpeed does not take reduce_bucket_size",
        ),
        ({"training__deepspeed": "{progressive_layer_drop: {enabled: true}}"}, "training.deepspeed: Progressive Layer"),
        ({"training__precision": "fp16"}, "fp16 needs a GPU"),
    ],
)
def test_what_only_the_model_or_deepspeed_finds_unfit_is_refused_in_one_line(undisturbed, tmp_path, overrides, message):
    others = {"training__output": f"{tmp_path}/run", "training__init_from": f"{undisturbed}/run"}
    result = run("-m", "training.pretrain", *settings(undisturbed, **others, **overrides))
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.stderr
    assert message in errors[0]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "training__deepspeed__zero_optimization__round_robin_gradients",
        "training__deepspeed__zero_optimization__sub_group_size",
        "training__deepspeed__data_types",
        "training__deepspeed__zero_optimization__compute_grad_norm",
    ],
)
def test_deepspeed_settings_that_would_move_the_optimizer_state_are_refused(undisturbed, setting):
    result = run("-m", "training.pretrain", *settings(undisturbed, **{setting: "{}"}))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "is generated from the other settings" in result.stderr


def test_a_full_disk_is_reported_in_one_line_and_the_last_checkpoint_kept(workspace):
    folder = workspace("full")
    disk = folder / "run"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        result = run(
            "-m",
            "training.pretrain",
            *settings(folder, training__checkpoint__keep="100", training__checkpoint__every="2"),
        )
        assert result.returncode == 1, result.stderr
        errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, result.stderr
        assert "could not be written" in errors[0]
        assert "Traceback" not in result.stderr
        complete = sorted(path.parent.name for path in (disk / "checkpoints").glob("*/COMPLETE"))
        assert complete
        assert not list((disk / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
