import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch.distributed as dist

from configs.schema import ConfigError, load_config
from data_prep.shards import Dataset
from tests.small_run import ROOT, small_overrides
from training import process
from training.checkpoint import Checkpoint
from training.divergence import DivergedError, Event
from training.engine import StoppedError, join_processes
from training.process import rate_warning, run_process
from training.run_folder import RunFolder


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


@pytest.fixture
def alone(monkeypatch):
    """A world of one process, which nobody joined."""
    monkeypatch.setattr(process, "join_processes", lambda: (0, 1))
    monkeypatch.setattr(process, "_check_same_start", lambda _: None)
    monkeypatch.setattr(process, "StopRequest", SimpleNamespace)
    monkeypatch.setattr(process, "_finish_recording", lambda *_: None)
    monkeypatch.setattr(process, "_print_start", lambda *_: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda _: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)


def settings(small_data, **overrides):
    config = load_config(ROOT / "configs" / "demo.yaml", small_overrides(small_data, **overrides))
    return config, Dataset.open(small_data / "data")


def test_a_rollback_lets_go_of_the_diverged_engine_before_it_makes_another(small_data, tmp_path, alone, monkeypatch):
    """Both at once need not fit into a GPU's memory."""

    class Engine:
        pass

    made = []

    def engine(*_):
        gc.collect()
        assert [reference for reference in made if reference() is not None] == []
        new = Engine()
        made.append(weakref.ref(new))
        return new

    def train(config, engine, *_):
        if len(made) == 1:
            try:
                raise RuntimeError(engine)
            except RuntimeError:
                raise DivergedError(Event("spike", 3, 0, 9.0, 5.0, "it jumped"), 2) from None
        return False

    monkeypatch.setattr(process, "_engine", engine)
    monkeypatch.setattr(process, "train", train)
    recorder = SimpleNamespace(events=SimpleNamespace(append=lambda _: None))
    monkeypatch.setattr(process, "_start_recording", lambda *_: (recorder, None))
    config, dataset = settings(small_data, training__on_divergence="rollback")
    run_process(config, dataset, RunFolder(tmp_path, None, [], None))
    assert len(made) == 2


def test_an_evaluation_that_is_made_up_for_may_be_stopped_as_well(small_data, tmp_path, alone, monkeypatch, capsys):
    def evaluated(*_):
        raise StoppedError

    monkeypatch.setattr(process, "_engine", lambda *_: None)
    monkeypatch.setattr(process, "evaluated", evaluated)
    config, dataset = settings(small_data)
    checkpoint = SimpleNamespace(step=20, state={"step": 20, "tokens": 9})
    run_process(config, dataset, RunFolder(tmp_path, checkpoint, [], None, lacks_evaluation=True))
    assert f"{tmp_path} stopped, saved at step 20" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_start_is_named_in_one_line(small_data, alone, monkeypatch):
    monkeypatch.setattr(process, "_engine", lambda *_: None)

    def write_config(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_config", write_config)
    config, dataset = settings(small_data)
    folder = RunFolder(Path("/runs/full"), None, [], None)
    with pytest.raises(ConfigError, match=r"/runs/full cannot be written .*No space left on device") as refused:
        run_process(config, dataset, folder)
    assert "\n" not in str(refused.value)


def test_updates_that_fp16_passed_over_do_not_count_in_bias_correction_after_a_resume(small_data, monkeypatch):
    given = []
    monkeypatch.setattr(process, "Engine", lambda config, size, resumed: given.append(resumed.updates))
    monkeypatch.setattr(Checkpoint, "weights", lambda _: {})
    monkeypatch.setattr(Checkpoint, "moments", lambda _: {})
    config, _ = settings(small_data)
    for course in ({}, {"course": {"skipped_steps": 3}}):
        monkeypatch.setattr(Checkpoint, "state", {"step": 20, "tokens": 9, **course})
        process._engine(config, 250, None, Checkpoint(Path("step-00000020"), 20))
    assert given == [20, 17]
