"""Every cluster shape learns the same, and what it learns is what plain torch and the formula of LAMB give."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import load_config
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from tests.small_run import ROOT, small_overrides
from tests.training.curve_cases import STEPS
from training.batches import Batches
from training.model import Albert, pretraining_losses
from training.schedule import learning_rate_at

EXACT = {f"stage {stage}": {"training__zero_stage": str(stage)} for stage in (0, 1, 2, 3)}
DEALT = {
    "stage 1, small micro-batches": {"training__zero_stage": "1", "training__micro_batch_tokens": "128"},
    "stage 3, checkpointing": {
        "training__zero_stage": "3",
        "training__activation_checkpointing": "true",
        # Else weights as small as these stay gathered.
        "training__deepspeed": "{zero_optimization: {stage3_param_persistence_threshold: 0}}",
    },
    "stage 2, small micro-batches, checkpointing": {
        "training__zero_stage": "2",
        "training__micro_batch_tokens": "200",
        "training__activation_checkpointing": "true",
    },
}
GROWING = {
    f"stage {stage}, growing": {
        "training__zero_stage": str(stage),
        "training__depth_schedule": "[{num_layers: 1, steps: 5}]",
    }
    for stage in (0, 1, 2, 3)
}
OFFLOADED = {
    f"stage {stage}, offloaded": {
        "training__zero_stage": str(stage),
        "training__offload_optimizer": "true",
        "training__micro_batch_tokens": "200",
    }
    for stage in (1, 2, 3)
}
ADAMW = {
    f"stage {stage}, adamw": {
        "training__zero_stage": str(stage),
        "training__optimizer__name": "adamw",
        "training__optimizer__eps": "1e-4",
    }
    for stage in (0, 1, 2, 3)
}
GOLDEN_LOSSES = [6.223439, 6.188205, 6.130268, 6.134882, 6.087874, 6.091017]
GOLDEN_GRADIENT_NORMS = [0.84187, 0.46702, 0.59422, 0.48977, 0.56709, 0.55841]
"""Of every fifth step, from the first; to be replaced where examples, masks, model or optimizer are meant to change."""
RESTARTED = {
    f"stage {stage}, restarted": {"training__zero_stage": str(stage), "training__micro_batch_tokens": "128"}
    for stage in (0, 1, 2, 3)
}


@pytest.fixture(scope="module")
def reference(small_data):
    return plain_curve(small_data, {})


def plain_curve(small_data, overrides: dict) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, gradient norms, weights) of plain torch on whole global batches, with the optimizer in float64."""
    config = load_config(ROOT / "configs" / "demo.yaml", small_overrides(small_data, **overrides))
    dataset = Dataset.open(small_data / "data")
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    training, optimizer = config.training, config.training.optimizer
    batches = Batches(dataset.split("train"), vocabulary.word_starts, config.data, config.seed, 24, 10**6, 0, 1)
    model = Albert(config.model, vocabulary.size)
    model.initialise(torch.Generator().manual_seed(config.seed))
    parameters = dict(model.named_parameters())
    moments = {
        name: [torch.zeros_like(tensor, dtype=torch.float64) for _ in range(2)] for name, tensor in parameters.items()
    }
    losses, norms = [], []
    for step in range(STEPS):
        (batch,) = batches.epoch_batch(step).micro_batches
        scheduled = [stage.num_layers for stage in training.depth_schedule for _ in range(stage.steps)]
        num_layers = scheduled[step] if step < len(scheduled) else None
        logits = model(batch.input_ids, batch.token_type_ids, batch.lengths, batch.masked_positions, num_layers)
        sums = pretraining_losses(logits[0], batch.mlm_labels, logits[1], batch.sentence_labels)
        loss = sums.mlm_loss / len(batch.mlm_labels) + sums.sentence_loss / 24
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(tensor.grad.double().square().sum()) for tensor in parameters.values()))
        losses.append(loss.item())
        norms.append(norm)
        rate = learning_rate_at(step, training.learning_rate, training.warmup_steps, training.steps)
        for name, tensor in parameters.items():
            gradient = tensor.grad.double() * min(1.0, training.gradient_clipping / norm)
            first, second = moments[name]
            first.mul_(optimizer.beta1).add_(gradient, alpha=1 - optimizer.beta1)
            second.mul_(optimizer.beta2).add_(gradient.square(), alpha=1 - optimizer.beta2)
            is_adamw = optimizer.name == "adamw"
            corrections = [1 - beta ** (step + 1) if is_adamw else 1 for beta in (optimizer.beta1, optimizer.beta2)]
            update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + optimizer.eps)
            ratio = 1.0
            if tensor.ndim > 1:
                update = update + optimizer.weight_decay * tensor.detach().double()
            if tensor.ndim > 1 and not is_adamw:
                ratio = float(tensor.detach().double().norm() / update.norm())
            tensor.data.sub_((rate * ratio * update).float())
    return losses, norms, {name: tensor.detach() for name, tensor in parameters.items()}


def test_the_curve_is_the_one_it_has_always_been(reference):
    losses, norms, _ = reference
    assert losses[::5] == pytest.approx(GOLDEN_LOSSES, rel=1e-4)
    assert norms[::5] == pytest.approx(GOLDEN_GRADIENT_NORMS, rel=1e-3)


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    """Trains cases, {name: overrides}, in one launch of `world_size` processes: (results, folder of final weights)."""

    def train(world_size: int, cases: dict, restart_at: dict | None = None):
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        content = [
            {"name": name, "overrides": overrides, "restart_at": (restart_at or {}).get(name)}
            for name, overrides in cases.items()
        ]
        (folder / "cases.json").write_text(json.dumps(content))
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(world_size)]
        command += ["--master_port", str(29700 + world_size), "--module", "tests.training.curve_cases"]
        command += [str(small_data / "data"), str(folder / "cases.json"), str(folder / "results.json")]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
        return json.loads((folder / "results.json").read_text()), folder

    return train


RESTARTED_ADAMW = {f"{name}, restarted": overrides for name, overrides in ADAMW.items()}
ALL = EXACT | RESTARTED | DEALT | GROWING | OFFLOADED | ADAMW | RESTARTED_ADAMW
OTHERS = ("stage 2, restarted", "stage 3, growing", "stage 2, offloaded", "stage 1, adamw")
SOME = EXACT | {name: ALL[name] for name in (*DEALT, *OTHERS)}


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, SOME), *(pytest.param(world_size, ALL, marks=pytest.mark.matrix) for world_size in (1, 2, 3))],
    ids=["2, some", "1", "2", "3"],
)
def test_every_stage_micro_batch_restart_and_depth_follows_plain_torch(
    small_data, reference, trained, world_size, cases
):
    growing = plain_curve(small_data, GROWING["stage 0, growing"])
    assert growing[0] != pytest.approx(reference[0], rel=1e-4)
    adamw = plain_curve(small_data, ADAMW["stage 0, adamw"])
    assert adamw[0] != pytest.approx(reference[0], rel=1e-4)
    restarted = [*RESTARTED, *RESTARTED_ADAMW]
    results, folder = trained(world_size, cases, restart_at=dict.fromkeys(restarted, 3))
    assert set(results) == set(cases)
    for name, found in results.items():
        losses, norms, weights = growing if name in GROWING else adamw if "adamw" in name else reference
        assert found["losses"] == pytest.approx(losses, rel=1e-5), name
        assert found["gradient_norms"] == pytest.approx(norms, rel=1e-5), name
        assert found["stops"] == ([3] if name in restarted else []), name
        assert ("evaluation" in found["given_up"]) == (name in restarted), name
        assert "long step" in found["given_up"] or name not in RESTARTED, name
        final = load_file(folder / f"{name}.safetensors")
        assert set(final) == set(weights)
        for key, expected in weights.items():
            difference = (final[key] - expected).norm()
            assert difference <= 2e-5 * expected.norm() + 1e-6, (name, key, float(difference))


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile for CPUs needs a C++ compiler")
def test_layers_compiled_once_for_all_lengths_follow_plain_torch(small_data, reference, trained):
    compiled = {"training__compile": "true", "training__zero_stage": "1"}
    cases = {
        "compiled": compiled,
        "compiled, checkpointing": compiled | {"training__activation_checkpointing": "1"},
        "compiled, growing": compiled | GROWING["stage 1, growing"],
    }
    results, _ = trained(1, cases)
    growing = plain_curve(small_data, GROWING["stage 0, growing"])
    for name, found in results.items():
        losses, norms, _ = growing if "growing" in name else reference
        assert found["losses"] == pytest.approx(losses, rel=1e-5), name
        assert found["gradient_norms"] == pytest.approx(norms, rel=1e-5), name
        # Not one for each length.
        assert 0 < found["compiled_graphs"] <= 10, name


@pytest.mark.parametrize(
    ("stages", "offloaded"),
    [
        ([1], False),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (([0, 2, 3], False), ([1, 2, 3], True))),
    ],
    ids=str,
)
def test_half_precision_stays_near_the_float32_curve_and_restarts_exactly_as_does_dropout(
    small_data, reference, trained, stages, offloaded
):
    losses, _, _ = reference
    cases = {}
    for stage in stages:
        for kind in ("straight", "restarted"):
            cases[f"stage {stage} {kind}"] = {
                "training__zero_stage": str(stage),
                "training__precision": "bf16",
                "training__offload_optimizer": str(offloaded),
            }
            if stage != 1 and not offloaded:
                cases[f"stage {stage} adamw {kind}"] = ADAMW[f"stage {stage}, adamw"] | {"training__precision": "bf16"}
    dropout = {"training__zero_stage": "1", "model__hidden_dropout_prob": "0.1"}
    cases |= {"dropout straight": dropout, "dropout restarted": dropout}
    results, folder = trained(2, cases, restart_at={name: 3 for name in cases if "restarted" in name})
    assert results["dropout straight"]["losses"] == pytest.approx(results["dropout restarted"]["losses"], rel=1e-6)
    assert results["dropout straight"]["losses"] != pytest.approx(losses, rel=1e-4)
    adamw_losses, _, _ = plain_curve(small_data, ADAMW["stage 0, adamw"])
    for name in [name.removesuffix(" straight") for name in cases if name.startswith("stage") and "straight" in name]:
        straight, restarted = results[f"{name} straight"], results[f"{name} restarted"]
        expected = adamw_losses if "adamw" in name else losses
        assert straight["losses"] == pytest.approx(expected, rel=2e-3), name
        assert restarted["losses"] == pytest.approx(straight["losses"], rel=1e-6), name
        pair = [load_file(folder / f"{name} {kind}.safetensors") for kind in ("straight", "restarted")]
        for key in pair[0]:
            torch.testing.assert_close(pair[1][key], pair[0][key], rtol=1e-5, atol=1e-7, msg=f"{name}: {key}")
