import json
import os

import pytest
import torch

from configs.schema import ConfigError
from training import checkpoint as module
from training.checkpoint import CheckpointWriter, drop_after, newest_complete, opened


def write(folder, step, keep=10, trusted=None):
    writer = CheckpointWriter(folder, keep)
    weights = {"w": torch.full((3, 5), float(step)), "empty": torch.empty(0)}
    moments = {"w.exp_avg": torch.full((3, 5), step + 0.5)}
    writer.write(step, weights, moments, {"step": step, "tokens": 100 * step}, trusted)
    writer.wait()


def test_a_checkpoint_gives_back_what_was_written(tmp_path):
    write(tmp_path, 7)
    found, passed_over = newest_complete(tmp_path)
    assert (found.step, passed_over) == (7, [])
    assert found.state == {"step": 7, "tokens": 700}
    assert torch.equal(found.weights()["w"], torch.full((3, 5), 7.0))
    assert torch.equal(found.moments()["w.exp_avg"], torch.full((3, 5), 7.5))


def test_a_checkpoint_cut_short_at_any_byte_or_altered_is_passed_over_by_name(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    newest = tmp_path / "step-00000002"
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        damaged = [whole[:size] for size in sorted({0, 1, len(whole) // 2, len(whole) - 1})]
        damaged.append(bytes([whole[0] ^ 1]) + whole[1:])
        for content in [None, *damaged]:
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
            found, passed_over = newest_complete(tmp_path)
            # The marker's last byte is a line break, without which it still says the same.
            if file.name == "COMPLETE" and content == whole[:-1]:
                assert found.step == 2
                continue
            assert found.step == 1, (file.name, content)
            assert len(passed_over) == 1
            assert str(newest) in passed_over[0]
        file.write_bytes(whole)
    assert newest_complete(tmp_path)[0].step == 2


@pytest.mark.parametrize(
    "marker",
    ["[]", "{}", '{"files": null}', '{"files": []}', '{"files": {}}', '{"files": {"weights.safetensors": 3}}'],
)
def test_a_marker_that_does_not_vouch_for_every_file_makes_no_checkpoint_complete(tmp_path, marker):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "COMPLETE").write_text(marker)
    found, passed_over = newest_complete(tmp_path)
    assert found.step == 1
    assert passed_over == [f"{tmp_path}/step-00000002: COMPLETE cannot be read"]


def test_old_checkpoints_go_only_once_the_new_one_is_complete(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"step-00000004 could not be written: .*No space left"):
        write(tmp_path, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_the_newest_trusted_checkpoint_is_kept_beside_the_newest_and_found(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step, keep=1, trusted=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000005"]
    assert newest_complete(tmp_path, last_step=2)[0].step == 2
    assert newest_complete(tmp_path, last_step=1) == (None, [])
    drop_after(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_there_is_always_a_trusted_checkpoint_however_often_they_are_written(tmp_path):
    for step in range(1, 30):
        write(tmp_path, step, keep=1, trusted=step - 5)
        found, _ = newest_complete(tmp_path, last_step=max(1, step - 5))
        assert step - 10 <= found.step
        assert len(list(tmp_path.iterdir())) <= 3


def test_a_run_that_went_back_drops_the_damaged_checkpoints_ahead_of_it(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step-00000003" / "COMPLETE").unlink()
    write(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_leftovers_of_a_killed_write_are_no_checkpoint_and_are_removed(tmp_path):
    leftover = tmp_path / ".step-00000009.tmp"
    leftover.mkdir(parents=True)
    (leftover / "COMPLETE").write_text(json.dumps({"files": {}}))
    assert newest_complete(tmp_path) == (None, [])
    write(tmp_path, 10)
    assert not leftover.exists()


def test_opening_a_run_or_a_checkpoint_names_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        opened(tmp_path / "run")
    write(tmp_path / "run" / "checkpoints", 5)
    assert opened(tmp_path / "run")[0].step == 5
    path = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert opened(path)[0].step == 5
    (path / module.WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"step-00000005 .*weights.safetensors is missing"):
        opened(path)
