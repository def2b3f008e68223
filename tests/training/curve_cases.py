"""Run by the launcher in `test_same_curve.py`: trains every case of a JSON list in one set of processes.

    curve_cases.py DATA CASES OUTPUT

A case is {name, overrides, restart_at}; OUTPUT gets {name: {losses, gradient_norms, given_up, stops, compiled_graphs}},
and beside it the final weights as `<name>.safetensors`. At a restart the last rank is told to stop: in an evaluation
and, with more than two micro-batches, a step that would take too long, both of which are given up; then in the step
after the restart, which is finished.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters

from configs.schema import load_config
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from tests.small_run import ROOT, small_overrides
from training.batches import Batches
from training.engine import Engine, Resumed, StoppedError, join_processes
from training.schedule import learning_rate_at, num_layers_at

STEPS = 30


def main() -> None:
    data, cases, output = sys.argv[-3:]
    rank, world_size = join_processes()
    dataset = Dataset.open(data)
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    results = {}
    for case in json.loads(Path(cases).read_text()):
        config = load_config(ROOT / "configs" / "demo.yaml", small_overrides(Path(data).parent, **case["overrides"]))
        training = config.training
        batches = Batches(
            dataset.split("train"),
            vocabulary.word_starts,
            config.data,
            config.seed,
            training.global_batch_size,
            training.micro_batch_tokens,
            rank,
            world_size,
        )
        engine = Engine(config, vocabulary.size)
        torch._dynamo.reset()
        counters.clear()
        losses, norms, given_up, stops = [], [], [], []
        for step in range(STEPS):
            batch = batches.epoch_batch(step)
            masked = engine.count_masked(batch).value()
            rate = learning_rate_at(step, training.learning_rate, training.warmup_steps, training.steps)
            num_layers = num_layers_at(step, training.depth_schedule, config.model.num_hidden_layers)
            step_arguments = (step, batch, masked, rate, num_layers)
            should_stop = partial(bool, step == case.get("restart_at") and rank == world_size - 1)
            if step == case.get("restart_at"):
                if _is_given_up(partial(engine.evaluate, [batch], num_layers, should_stop)):
                    given_up.append("evaluation")
                with mock.patch("training.engine.SECONDS_TO_FINISH_A_STEP", -1.0):
                    if len(batch.micro_batches) > 2 and _is_given_up(
                        partial(engine.train_step, *step_arguments, should_stop)
                    ):
                        given_up.append("long step")
                # On other ranks the state is empty, so each reads what rank 0 wrote, as from a checkpoint.
                state = engine.gathered_state()
                folder = Path(output).parent / f"{case['name']}-restart"
                engine = _restarted(config, vocabulary.size, state, step, folder, rank)
            sums, is_to_stop = engine.train_step(*step_arguments, should_stop)
            if is_to_stop:
                stops.append(step)
            losses.append(sums.mean_mlm_loss + sums.mean_sentence_loss)
            norms.append(engine.gradient_norm)
        weights = engine.gathered_state().weights
        if rank == 0:
            save_file(weights, Path(output).with_name(f"{case['name']}.safetensors"))
        results[case["name"]] = {
            "losses": losses,
            "gradient_norms": norms,
            "given_up": given_up,
            "stops": stops,
            "compiled_graphs": counters["stats"]["unique_graphs"],
        }
    if rank == 0:
        Path(output).write_text(json.dumps(results))
    # gloo's threads may abort a process that ends in the ordinary way.
    os._exit(0)


def _is_given_up(work: Callable[[], object]) -> bool:
    try:
        work()
    except StoppedError:
        return True
    return False


def _restarted(config, vocabulary_size, state, step, folder, rank) -> Engine:
    import torch.distributed as dist
    from safetensors.torch import load_file

    from training.engine import State

    if rank == 0:
        folder.mkdir()
        save_file(state.weights, folder / "weights.safetensors")
        save_file(state.moments, folder / "moments.safetensors")
    dist.barrier()
    saved = State(load_file(folder / "weights.safetensors"), load_file(folder / "moments.safetensors"))
    return Engine(config, vocabulary_size, resumed=Resumed(step, saved))


if __name__ == "__main__":
    main()
