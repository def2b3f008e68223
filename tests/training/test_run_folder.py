"""What a run's folder says of it, and the weights of another run that it starts with, also where shapes differ."""

import shutil

import pytest
import torch

from configs.schema import Config, ConfigError, ModelConfig, load_config
from data_prep.shards import Dataset
from tests.small_run import ROOT, small_overrides
from training.checkpoint import CheckpointWriter
from training.engine import fitted_weights
from training.model import Albert
from training.run_folder import RunFolder
from training.tracking import MetricsFile

SHAPE = ModelConfig(
    hidden_size=16,
    embedding_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=12,
)


def albert(seed: int, has_sentence_head: bool = True, **shape) -> Albert:
    model = Albert(SHAPE.model_copy(update=shape), 40, has_sentence_head)
    model.initialise(torch.Generator().manual_seed(seed))
    return model.eval()


def taken_over(model: Albert, weights: dict) -> Albert:
    model.load_state_dict(fitted_weights(model, weights))
    return model


def logits(model: Albert, length: int, num_layers: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = torch.randint(5, 40, (2, length), generator=torch.Generator().manual_seed(3))
    return model(ids, torch.zeros_like(ids), None, torch.tensor([1, 4, length + 2]), num_layers)


@pytest.mark.parametrize("layers", [1, 5])
def test_shared_layers_start_a_model_of_another_depth(layers):
    given = albert(0)
    made = taken_over(albert(1, num_hidden_layers=layers), given.state_dict())
    expected = albert(2, num_hidden_layers=layers)
    expected.load_state_dict(given.state_dict())
    torch.testing.assert_close(logits(made, 12), logits(expected, 12))
    if layers > 2:
        torch.testing.assert_close(logits(made, 12, num_layers=2), logits(given, 12))


def test_a_model_without_a_sentence_objective_takes_all_but_the_sentence_head():
    given = albert(0)
    made = taken_over(albert(1, has_sentence_head=False), given.state_dict())
    found, sentence_logits = logits(made, 12)
    assert sentence_logits is None
    torch.testing.assert_close(found, logits(given, 12)[0])


def test_a_model_with_a_sentence_objective_draws_the_head_that_the_weights_lack():
    given = albert(0, has_sentence_head=False)
    made, drawn = taken_over(albert(1), given.state_dict()), albert(1)
    torch.testing.assert_close(logits(made, 12)[0], logits(given, 12)[0])
    torch.testing.assert_close(made.pooler.weight, drawn.pooler.weight)
    torch.testing.assert_close(made.sentence_head.weight, drawn.sentence_head.weight)


@pytest.mark.parametrize("positions", [8, 20])
def test_position_embeddings_are_taken_over_as_far_as_both_reach(positions):
    given = albert(0)
    made = taken_over(albert(1, max_position_embeddings=positions), given.state_dict())
    shorter = min(12, positions)
    torch.testing.assert_close(logits(made, shorter), logits(given, shorter))
    if positions > 12:
        drawn = albert(1, max_position_embeddings=positions).embeddings.position_embeddings.weight
        torch.testing.assert_close(made.embeddings.position_embeddings.weight[12:], drawn[12:])
        assert logits(made, positions)[0].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden_size": 32}, r"has shape \[16.*\] in the weights to start from, this model has \[32"),
        ({"intermediate_size": 48}, "has shape"),
        ({"share": "none"}, "is missing from the weights to start from"),
        ({"num_hidden_groups": 2}, "is missing from the weights to start from"),
    ],
    ids=str,
)
def test_weights_of_another_shape_are_refused_in_one_line(shape, message):
    with pytest.raises(ConfigError, match=message) as refused:
        fitted_weights(albert(1, **shape), albert(0).state_dict())
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def dataset(small_data) -> Dataset:
    return Dataset.open(small_data / "data")


def config(dataset: Dataset, run, init_from="null", deepspeed: str = "{}") -> Config:
    others = {"training__init_from": str(init_from), "training__deepspeed": deepspeed}
    overrides = small_overrides(dataset.folder.parent, training__output=str(run), **others)
    return load_config(ROOT / "configs" / "demo.yaml", overrides)


def write(dataset: Dataset, run, *steps: int, vocabulary: str | None = None, init_from: str | None = None) -> None:
    writer = CheckpointWriter(run / "checkpoints", keep=10)
    data = {"digest": dataset.digest, "vocabulary": vocabulary or dataset.manifest["vocabulary"]["digest"]}
    for step in steps:
        state = {"step": step, "tokens": 9 * step, "data": data, "init_from": init_from}
        writer.write(step, {"w": torch.full((2,), float(step))}, {}, state)
    writer.wait()


def test_a_run_starts_with_a_runs_newest_complete_checkpoint_or_the_one_named(dataset, tmp_path):
    write(dataset, tmp_path / "former", 5, 10, 15)
    (tmp_path / "former" / "checkpoints" / "step-00000015" / "COMPLETE").unlink()
    for init_from, step in (
        (tmp_path / "former", 10),
        (tmp_path / "former" / "checkpoints" / "step-00000005", 5),
    ):
        folder = RunFolder.open(config(dataset, tmp_path / "new", init_from), dataset, extend=False)
        assert (folder.checkpoint, folder.finished) == (None, False)
        assert ["step-00000015: " in line for line in folder.passed_over] == ([True] if step == 10 else [])
        assert folder.initial_weights()["w"].tolist() == [step, step]
    assert RunFolder.open(config(dataset, tmp_path / "new"), dataset, extend=False).initial_weights() is None


def test_what_no_run_can_start_with_is_refused_by_name(dataset, tmp_path):
    write(dataset, tmp_path / "cut", 5)
    path = tmp_path / "cut" / "checkpoints" / "step-00000005"
    (path / "optimizer.safetensors").unlink()
    write(dataset, tmp_path / "other", 5, vocabulary="f" * 64)
    for init_from, message in (
        (tmp_path / "cut", r"no complete checkpoint in .*cut/checkpoints .*optimizer.safetensors is missing"),
        (path, r"step-00000005 is no complete checkpoint: optimizer.safetensors is missing"),
        (tmp_path / "none", r"no complete checkpoint in .*none/checkpoints"),
        (tmp_path / "other", r"step-00000005 was trained with another vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            RunFolder.open(config(dataset, tmp_path / "new", init_from), dataset, extend=False)
        assert "\n" not in str(refused.value)


def test_a_run_all_of_whose_checkpoints_were_damaged_is_not_started_over_unasked(dataset, tmp_path):
    write(dataset, tmp_path, 5, 10)
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    for path in checkpoints:
        (path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"no checkpoint of {tmp_path} is whole any more .*: restore one") as refused:
        RunFolder.open(config(dataset, tmp_path), dataset, extend=False)
    assert all(str(path) in str(refused.value) for path in checkpoints)
    assert "\n" not in str(refused.value)
    # What a kill within the first writing leaves behind was never whole.
    for path in checkpoints:
        (path / "COMPLETE").unlink()
    folder = RunFolder.open(config(dataset, tmp_path), dataset, extend=False)
    assert (folder.checkpoint, len(folder.passed_over)) == (None, 2)


def test_a_run_that_went_on_still_knows_the_weights_it_started_with(dataset, tmp_path):
    """A rollback may go back to its start."""
    first = tmp_path / "former" / "checkpoints" / "step-00000010"
    write(dataset, tmp_path / "former", 10, 20)
    write(dataset, tmp_path / "run", 3, init_from=str(first))
    settings = config(dataset, tmp_path / "run", tmp_path / "former")
    folder = RunFolder.open(settings, dataset, extend=False)
    assert folder.checkpoint.step == 3
    assert folder.initial_weights()["w"].tolist() == [10, 10]
    shutil.rmtree(first)
    folder = RunFolder.open(settings, dataset, extend=False)
    with pytest.raises(ConfigError, match="step-00000010 is no complete checkpoint"):
        folder.initial_weights()


@pytest.mark.parametrize(
    ("step", "evaluated", "lacks_evaluation", "finished"),
    [
        (20, False, True, False),
        (20, True, False, False),
        (30, False, False, False),
        (40, True, False, True),
        (40, False, True, False),
    ],
)
def test_a_run_that_was_stopped_before_an_evaluation_lacks_it(
    dataset, tmp_path, step, evaluated, lacks_evaluation, finished
):
    write(dataset, tmp_path, step)
    metrics = MetricsFile(tmp_path, 0)
    for number in range(1, step + 1):
        evaluation = {"validation/mlm_loss": 5.0} if number % 20 == 0 and (number < step or evaluated) else {}
        metrics.append(number, number, {"train/loss": 6.0} | evaluation)
    folder = RunFolder.open(config(dataset, tmp_path), dataset, extend=False)
    assert (folder.lacks_evaluation, folder.finished) == (lacks_evaluation, finished)


def test_a_deepspeed_setting_that_was_taken_away_is_a_change(dataset, tmp_path):
    both = "{prescale_gradients: true, gradient_predivide_factor: 2}"
    RunFolder(tmp_path, None, [], None).write_config(config(dataset, tmp_path, deepspeed=both))
    fewer = config(dataset, tmp_path, deepspeed="{gradient_predivide_factor: 2}")
    with pytest.raises(ConfigError, match=r"training.deepspeed.prescale_gradients \(True -> None\)"):
        RunFolder.open(fewer, dataset, extend=False)


@pytest.mark.parametrize("content", [b"a: [b\n", b"\xff\xfe\x00", b"a: ${b\n", b"- a\n"], ids=repr)
def test_a_damaged_config_of_a_run_is_refused_by_name(dataset, tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.yaml"):
        RunFolder.open(config(dataset, tmp_path), dataset, extend=False)
