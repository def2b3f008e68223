import json
import math

import pytest

from tests.small_run import run, settings


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
