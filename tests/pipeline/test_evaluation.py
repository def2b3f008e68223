import json
import math
import shutil

import pytest
from rich.console import Console

from pipeline.evaluation import evaluate_checkpoint
from tests.small_run import launched, run, settings


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    """A run of 20 steps on the small data set."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    result = run(
        "-m", "training.pretrain", *settings(small_data, training__output=str(folder), training__stop_after="20")
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_a_checkpoint_gets_the_figures_that_training_reported(trained):
    result = run("-m", "pipeline", "evaluate", str(trained), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    reported = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["step"] == reported["step"] == 20
    for name, value in reported.items():
        if name.startswith("validation/"):
            assert found[name.removeprefix("validation/")] == pytest.approx(value, rel=1e-5), name
    assert found["mlm_perplexity"] == pytest.approx(math.exp(found["mlm_loss"]))


@pytest.mark.matrix
@pytest.mark.parametrize(("world_size", "zero_stage"), [(2, "3"), (3, "2")])
def test_a_checkpoint_gets_the_figures_that_any_world_size_reports_of_it(
    trained, small_data, tmp_path, world_size, zero_stage
):
    others = {"training__output": f"{tmp_path}/run", "training__stop_after": "22", "training__zero_stage": zero_stage}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    name = "checkpoints/step-00000020"
    shutil.copytree(trained / name, tmp_path / "run" / name)
    others["training__micro_batch_tokens"] = "192"
    result = run(*launched(world_size, *settings(small_data, **others)), timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    reported = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert reported["step"] == 22
    figures = evaluate_checkpoint(tmp_path / "run", None, None, Console(quiet=True))
    names = [name for name in reported if name.startswith("validation/")]
    assert len(names) == 7
    assert {name: figures[name.removeprefix("validation/")] for name in names} == pytest.approx(
        {name: reported[name] for name in names}, rel=1e-5
    )


def test_another_checkpoint_can_be_named_and_is_shown_as_a_table(trained):
    path = trained / "checkpoints" / "step-00000010"
    result = run("-m", "pipeline", "evaluate", str(trained), "--checkpoint", str(path), "--batches", "1")
    assert result.returncode == 0, result.stderr
    assert str(path) in result.stdout.replace("\n", "")
    assert "sop accuracy" in result.stdout
    assert "±" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["/nowhere"], "no complete checkpoint"), (["{run}", "--data", "/nowhere"], "no prepared data in /nowhere")],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(trained, arguments, message):
    result = run("-m", "pipeline", "evaluate", *(argument.format(run=trained) for argument in arguments))
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message in result.stderr
