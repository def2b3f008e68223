import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from configs.schema import ModelConfig, OptimizerConfig
from tests.ports import free_port
from training.lamb import Lamb, parameter_groups
from training.model import Albert

STEPS = 20
RATE = 0.01
SHAPES = [(7, 5), (7,), (3, 2), (1,), (2, 11)]


class Tensors(torch.nn.Module):
    """A few tensors of odd sizes; the 1-d ones stand for biases."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(SHAPES):
            setattr(self, f"tensor_{index}", torch.nn.Parameter(torch.randn(shape, generator=generator)))


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]


def reference_weights(weights: list[torch.Tensor], config: OptimizerConfig) -> list[torch.Tensor]:
    """The formula of LAMB in float64, tensor by tensor."""
    weights = [weight.detach().double() for weight in weights]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    for step in range(STEPS):
        for index, gradient in enumerate(gradients(step)):
            weight, g = weights[index], gradient.double()
            first[index] = config.beta1 * first[index] + (1 - config.beta1) * g
            second[index] = config.beta2 * second[index] + (1 - config.beta2) * g * g
            m, v = first[index], second[index]
            if config.bias_correction:
                m, v = m / (1 - config.beta1 ** (step + 1)), v / (1 - config.beta2 ** (step + 1))
            update, ratio = m / (v.sqrt() + config.eps), 1.0
            if weight.ndim > 1:
                update = update + config.weight_decay * weight
                ratio = float(weight.norm() / update.norm())
                if config.clamp is not None:
                    ratio = min(max(ratio, config.clamp[0]), config.clamp[1])
            weights[index] = weight - RATE * ratio * update
    return weights


def trained_weights(config: OptimizerConfig) -> list[torch.Tensor]:
    model = Tensors()
    optimizer = Lamb(parameter_groups(model, config, RATE))
    optimizer.create_state()
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("clamp", [None, (0.5, 0.9)])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_follow_the_formula(clamp, bias_correction, weight_decay):
    config = OptimizerConfig(clamp=clamp, bias_correction=bias_correction, weight_decay=weight_decay)
    for weight, expected in zip(
        trained_weights(config), reference_weights(Tensors().parameters(), config), strict=True
    ):
        assert (weight.double() - expected).norm() < 1e-6 * expected.norm()


def test_norms_of_large_tensors_are_summed_exactly():
    weight = torch.randn(30_000, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight.clone())
    optimizer = Lamb(parameter_groups(model, OptimizerConfig(weight_decay=0), RATE))
    optimizer.create_state()
    model.weight.grad = torch.ones_like(weight)
    optimizer.step()
    update = 0.1 / (0.001**0.5 + 1e-6)
    ratio = weight.double().norm().item() / (update * weight.numel() ** 0.5)
    assert (weight - model.weight).double().mean().item() == pytest.approx(RATE * ratio * update, rel=1e-5)


def test_biases_and_layer_norms_have_neither_decay_nor_trust_ratio():
    config = ModelConfig(hidden_size=8, num_attention_heads=2, intermediate_size=16, embedding_size=4)
    model = Albert(config, vocabulary_size=20)
    groups = parameter_groups(model, OptimizerConfig(), RATE)
    grouped = {name: group for group in groups for name in group["names"]}
    assert set(grouped) == {name for name, _ in model.named_parameters()}
    for name, group in grouped.items():
        plain = name.endswith("bias") or "layer_norm" in name
        assert group["adapt"] is not plain
        assert group["weight_decay"] == (0 if plain else 0.01)
    for group in groups:
        assert [id(parameter) for parameter in group["params"]] == [
            id(model.get_parameter(name)) for name in group["names"]
        ]


def test_zero_weights_take_the_update_unscaled():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Lamb(parameter_groups(model, OptimizerConfig(), RATE))
    optimizer.create_state()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.allclose(model.weight, torch.full((2, 2), -RATE * 0.1 / (0.001**0.5 + 1e-6)))


def test_step_without_gradients_changes_nothing():
    model = Tensors()
    optimizer = Lamb(parameter_groups(model, OptimizerConfig(bias_correction=True), RATE))
    optimizer.create_state()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all("step" not in group for group in optimizer.param_groups)


def test_zero_gradients_change_nothing_before_the_state_exists_and_decay_afterwards():
    model = Tensors()
    optimizer = Lamb(parameter_groups(model, OptimizerConfig(), RATE))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not optimizer.state

    optimizer.create_state()
    optimizer.step()
    for weight, parameter in zip(before, model.parameters(), strict=True):
        expected = weight * (1 - RATE) if weight.ndim > 1 else weight  # |w| / |0.01 w| * 0.01 w = w
        assert torch.allclose(parameter, expected, rtol=1e-6)


def test_real_gradients_before_the_state_exists_are_refused():
    model = Tensors()
    optimizer = Lamb(parameter_groups(model, OptimizerConfig(), RATE))
    model.tensor_0.grad = torch.ones_like(model.tensor_0)
    with pytest.raises(RuntimeError, match="create_state"):
        optimizer.step()


def test_state_dict_continues_the_same_weights():
    config = OptimizerConfig(bias_correction=True)
    model = Tensors()
    optimizer = Lamb(parameter_groups(model, config, RATE))
    optimizer.create_state()
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = optimizer.state_dict()
            optimizer = Lamb(parameter_groups(model, config, RATE))
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(model.parameters(), gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), trained_weights(config), strict=True))


def flat_part(tensors: list[torch.Tensor], zero_stage: int, rank: int, world_size: int) -> torch.Tensor:
    """What ZeRO leaves of `tensors` on `rank`, with its padding made NaN: slices of all (1, 2), or of each (3)."""

    def sliced(flat: torch.Tensor) -> torch.Tensor:
        size = -(-flat.numel() // world_size)
        padded = torch.cat((flat, flat.new_full((size * world_size - flat.numel(),), torch.nan)))
        return padded[rank * size : (rank + 1) * size].clone()

    flats = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat([sliced(flat) for flat in flats]) if zero_stage == 3 else sliced(torch.cat(flats))


def train_parts(rank: int, world_size: int, port: int, folder: str) -> None:
    """Train this rank's parts, group by group as ZeRO does; rank 0 saves the whole tensors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    for zero_stage in (1, 3):
        model = Tensors()
        by_name = dict(model.named_parameters())
        optimizer = Lamb(parameter_groups(model, OptimizerConfig(), RATE, zero_stage))
        parts = [flat_part(group["params"], zero_stage, rank, world_size) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.create_state(parts)
        for step in range(STEPS):
            by_gradient = dict(zip(by_name, gradients(step), strict=True))
            for group, part in zip(optimizer.param_groups, parts, strict=True):
                part.grad = flat_part([by_gradient[name] for name in group["names"]], zero_stage, rank, world_size)
                group["params"] = [part]
                optimizer.step()
                group["params"] = []
                part.grad = None
        whole = {}
        for group, part in zip(optimizer.param_groups, parts, strict=True):
            partition = group["partition"]
            gathered = [partition.whole(part)]
            assert len(gathered[0]) == (len(group["names"]) if rank == 0 else 0)
            dist.broadcast_object_list(gathered)
            whole |= dict(zip(group["names"], gathered[0], strict=True))
            dealt = torch.full_like(part, torch.nan)
            partition.deal(gathered[0], dealt)
            assert torch.equal(dealt, part) or torch.equal(dealt.nan_to_num(7), part.nan_to_num(7))
        if rank == 0:
            torch.save([whole[name] for name in by_name], Path(folder) / f"{zero_stage}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may abort a process that ends in the ordinary way.
    os._exit(0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_partitioned_tensors_take_the_same_steps_as_whole_ones(world_size, tmp_path):
    mp.spawn(train_parts, args=(world_size, free_port(), str(tmp_path)), nprocs=world_size)
    for zero_stage in (1, 3):
        found = torch.load(tmp_path / f"{zero_stage}.pt")
        for weight, whole in zip(trained_weights(OptimizerConfig()), found, strict=True):
            torch.testing.assert_close(whole.view_as(weight), weight, rtol=1e-6, atol=1e-7)
