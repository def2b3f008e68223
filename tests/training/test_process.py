import os

import deepspeed
import pytest
import torch.distributed as dist

from configs.schema import load_config
from training.engine import join_processes
from training.process import rate_warning


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ([], False),
        (["training.global_batch_size=1025"], False),
        (["training.global_batch_size=1024"], True),
        (["training.global_batch_size=256"], True),
        (["training.global_batch_size=256", "training.learning_rate=0.0004"], False),
        (["training.global_batch_size=256", "training.scale_from_batch=4096"], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["base", "xxlarge"])
def test_the_published_rate_with_a_much_smaller_batch_is_warned_of_with_the_remedy(preset, overrides, warns):
    training = load_config(f"configs/{preset}.yaml", overrides).training
    warning = rate_warning(training)
    assert (warning is not None) == warns
    if warns:
        assert f"0.00176 is meant for batches of 4,096, not {training.global_batch_size:,}" in warning
        assert "training.scale_from_batch=4096 converts rate and steps" in warning


@pytest.fixture
def joined(monkeypatch):
    """Calls of DeepSpeed's accelerator, and of its joining, where processes are joined; they join nothing."""
    calls = []
    accelerator = deepspeed.accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: calls.append(("joined",)))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(dist, "get_rank", lambda: int(os.environ["RANK"]))
    monkeypatch.setattr(dist, "get_world_size", lambda: int(os.environ["WORLD_SIZE"]))
    return calls


def test_a_process_has_its_own_gpu_before_it_first_communicates(joined, monkeypatch):
    for name, value in (("RANK", 5), ("WORLD_SIZE", 6), ("LOCAL_RANK", 2), ("LOCAL_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    assert join_processes() == (5, 6)
    assert sorted(joined) == [("device", 2), ("joined",)]
