import io
import json
import math
import shutil

import numpy as np
import pytest
from rich.console import Console

from configs.schema import ConfigError
from data_prep.shards import Dataset
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


def test_a_damaged_checkpoint_is_passed_over_by_name(trained, tmp_path):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    damaged = max((tmp_path / "checkpoints").iterdir())
    (damaged / "weights.safetensors").write_bytes(b"")
    console = Console(record=True, file=io.StringIO(), width=80)
    figures = evaluate_checkpoint(tmp_path, None, 1, console)
    assert figures["step"] < int(damaged.name.removeprefix("step-"))
    assert f"passed over {damaged}: " in console.export_text()


def test_a_checkpoint_is_evaluated_on_data_that_was_prepared_otherwise(trained, small_data, tmp_path):
    prepared = settings(
        small_data,
        data__output=f"{tmp_path}/data",
        data__vocab=f"{{size: 250, model: {small_data}/data/spiece.model}}",
        data__max_length="32",
        data__shards="1",
        data__validation_fraction="0.3",
        data__masking="{mode: static, copies: 1, probability: 0.2}",
    )
    result = run("-m", "data_prep", *prepared)
    assert result.returncode == 0, result.stderr
    figures = evaluate_checkpoint(trained, f"{tmp_path}/data", None, Console(quiet=True))
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    rows = sum(shard["rows"] for shard in manifest["shards"] if shard["split"] == "validation")
    assert figures["examples"] == rows
    # Of examples shorter than the run's, more of which is masked than in the run.
    own = evaluate_checkpoint(trained, None, None, Console(quiet=True))
    assert figures["masked_tokens"] / rows < own["masked_tokens"] / own["examples"]
    assert 3 < figures["mlm_loss"] < figures["unigram_cross_entropy"] + 1


@pytest.mark.matrix
def test_examples_longer_than_the_runs_are_masked_in_proportion(small_data, tmp_path):
    shorter = {
        "data__output": f"{tmp_path}/data",
        "data__vocab": f"{{size: 250, model: {small_data}/data/spiece.model}}",
        "data__max_length": "32",
        "training__output": f"{tmp_path}/run",
        "training__stop_after": "1",
    }
    for module in ("data_prep", "training.pretrain"):
        result = run("-m", module, *settings(small_data, **shorter))
        assert result.returncode == 0, result.stderr
    split = Dataset.open(small_data / "data").split("validation")
    lengths = split.lengths(np.arange(split.rows))
    assert lengths.max() > 40
    figures = evaluate_checkpoint(tmp_path / "run", f"{small_data}/data", None, Console(quiet=True))
    assert figures["masked_tokens"] == np.rint(0.15 * lengths).clip(1, 10).sum()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sentence_objective", "nsp", "was prepared with data.sentence_objective nsp, the run learnt sop"),
        ("max_length", 65, "has examples of up to 65 tokens, the model has 64 positions"),
        ("max_length", "x", "manifest.json has no valid data.max_length: prepare the data again"),
        ("masking", None, "manifest.json has no valid data.masking: prepare the data again"),
        ("masking", {"mode": "static", "probability": 2}, "manifest.json has no valid data.masking.probability"),
    ],
)
def test_data_that_the_model_cannot_read_is_refused(trained, small_data, tmp_path, key, value, message):
    shutil.copytree(small_data / "data", tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    manifest["config"][key] = value
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=message):
        evaluate_checkpoint(trained, f"{tmp_path}/data", None, Console(quiet=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "no complete checkpoint"),
        (["{run}", "--data", "/nowhere"], "no prepared data in /nowhere"),
        (["{run}", "--data", ""], "no prepared data in"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(trained, arguments, message):
    result = run("-m", "pipeline", "evaluate", *(argument.format(run=trained) for argument in arguments))
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message in result.stderr
