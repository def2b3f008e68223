"""Wall time to the validation loss that a straightforward Hugging Face loop ends with.

    python benchmarks/time_to_loss.py [--seeds 0 1 2] [--steps 800] [--folder DIR] [--only NAME …]

The demo's text as examples of 512 tokens, a model of the demo's width with six layers. The reference is a loop over
Hugging Face's `AlbertForPreTraining` (SDPA) with torch's AdamW: same examples, masks and number of steps, padded to
512, all layers from the first step. The rows below it add one ingredient each. Evaluations do not count; everything
else does, from the first step on. The time to the loss ends with the first evaluation at or below the reference's last
that passes through all layers.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

import torch
import torch.nn.functional as F

from benchmarks.hugging_face import hugging_face_inputs, hugging_face_model
from benchmarks.processes import ROOT, prepare
from configs.schema import Config, load_config
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from training.batches import Batches, RankBatch
from training.engine import Engine, join_processes
from training.lamb import parameter_groups
from training.schedule import learning_rate_at, num_layers_at

LENGTH = 512
LAYERS = 6
VALIDATION_BATCHES = 24
EVALUATED_FROM, EVALUATED_EVERY = 0.8, 0.04
"""Shares of the steps."""

REFERENCE = "Hugging Face, AdamW"
WHOLE = {"training.optimizer.name": "adamw", "training.learning_rate": "0.001", "training.micro_batch_tokens": "8192"}
SORTED = WHOLE | {"training.micro_batch_tokens": "1024"}
GROWING = SORTED | {"training.depth_schedule": "growing"}
LAMB = {"training.micro_batch_tokens": "1024", "training.depth_schedule": "growing", "training.learning_rate": "0.01"}
VARIANTS = {
    REFERENCE: WHOLE,
    "this model and loop": WHOLE,
    "+ batches sorted by length, by token budget": SORTED,
    "+ growing depth": GROWING,
    "+ LAMB": LAMB,
}
"""Learning rates are the best for each optimizer and depth of those tried (benchmarks/README.md)."""
GROWTH = ((1, 0.4), (2, 0.25), (4, 0.15))
"""(layers, share of the steps), then all layers."""


@dataclass(frozen=True)
class Course:
    """What a run came to: (seconds of training, validation MLM loss) at each evaluation, the last at its end."""

    evaluations: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return self.evaluations[-1][0]

    @property
    def loss(self) -> float:
        return self.evaluations[-1][1]

    def seconds_to(self, loss: float) -> float | None:
        return next((seconds for seconds, reached in self.evaluations if reached <= loss), None)


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        courses: dict[str, list[Course]] = {}
        for seed in arguments.seeds:
            for name, overrides in VARIANTS.items():
                if arguments.only and not any(part in name for part in arguments.only):
                    continue
                config = _config(folder, arguments, seed, overrides)
                if not courses:
                    _prepare(config, folder)
                course = _measured(name, config, time.process_time if arguments.cpu_seconds else time.perf_counter)
                courses.setdefault(name, []).append(course)
                print(f"seed {seed}, {name}: {course.loss:.3f} nats after {course.seconds:.0f} s", flush=True)
                with open(folder / "courses.jsonl", "a") as file:
                    file.write(json.dumps({"name": name, "seed": seed, "evaluations": course.evaluations}) + "\n")
    if REFERENCE in courses:
        _print_table(courses)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", nargs="*", help="only variants with these words in their names")
    parser.add_argument("--cpu-seconds", action="store_true", help="instead of wall time: where other work goes on")
    parser.add_argument("--set", action="append", default=[], help="key.path=value for every variant")
    parser.add_argument("--folder", help="keep the prepared examples and the courses here")
    return parser.parse_args()


def _config(folder: Path, arguments: argparse.Namespace, seed: int, overrides: dict[str, str]) -> Config:
    settings = {
        "seed": seed,
        "data.output": folder / "data",
        "data.max_length": LENGTH,
        "model.max_position_embeddings": LENGTH,
        "model.num_hidden_layers": LAYERS,
        "training.output": folder / "run",
        "training.global_batch_size": 4,
        "training.steps": arguments.steps,
        "training.warmup_steps": arguments.steps // 10,
        **overrides,
    }
    if settings.get("training.depth_schedule") == "growing":
        stages = [f"{{num_layers: {layers}, steps: {round(share * arguments.steps)}}}" for layers, share in GROWTH]
        settings["training.depth_schedule"] = f"[{', '.join(stages)}]"
    return load_config(
        ROOT / "configs" / "demo.yaml", [*(f"{key}={value}" for key, value in settings.items()), *arguments.set]
    )


def _prepare(config: Config, folder: Path) -> None:
    settings = [f"data.output={config.data.output}", f"data.max_length={LENGTH}"]
    settings += [f"model.max_position_embeddings={LENGTH}", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    prepare("configs/demo.yaml", settings)


def _measured(name: str, config: Config, clock: Callable[[], float]) -> Course:
    dataset = Dataset.open(config.data.output)
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    rank, world_size = join_processes()

    def batches(split: str, fixed: bool = False) -> Batches:
        training = config.training
        sizes = (training.global_batch_size, training.micro_batch_tokens)
        seed = 0 if fixed else config.seed
        arguments = (vocabulary.word_starts, config.data, seed, *sizes, rank, world_size)
        return Batches(dataset.split(split), *arguments, fixed=fixed)

    validation = list(batches("validation", fixed=True).one_pass(VALIDATION_BATCHES))
    trainer = (_HuggingFace if name == REFERENCE else _Ours)(config, vocabulary.size)
    evaluations, seconds = [], 0.0
    steps = config.training.steps
    first, every = round(steps * EVALUATED_FROM), max(1, round(steps * EVALUATED_EVERY))
    with closing(batches("train").prefetched(0, steps)) as prefetched:
        begin = clock()
        for step, batch in enumerate(prefetched):
            trainer.train_step(step, batch)
            ending = step + 1 == steps
            if ending or (name != REFERENCE and step >= first and (steps - step - 1) % every == 0):
                seconds += clock() - begin
                evaluations.append((seconds, trainer.validation_loss(validation)))
                begin = clock()
    return Course(evaluations)


class _Ours:
    def __init__(self, config: Config, vocabulary_size: int):
        self._training = config.training
        self._layers = config.model.num_hidden_layers
        self._engine = Engine(config, vocabulary_size)

    def train_step(self, step: int, batch: RankBatch) -> None:
        training = self._training
        rate = learning_rate_at(step, training.learning_rate, training.warmup_steps, training.steps)
        num_layers = num_layers_at(step, training.depth_schedule, self._layers)
        self._engine.train_step(step, batch, batch.masked, rate, num_layers)
        self._trained_layers = num_layers

    def validation_loss(self, batches: list[RankBatch]) -> float:
        return self._engine.evaluate(batches, self._trained_layers).mean_mlm_loss


class _HuggingFace:
    def __init__(self, config: Config, vocabulary_size: int):
        self._training = training = config.training
        torch.manual_seed(config.seed)
        self._model = hugging_face_model(config, vocabulary_size)
        groups = parameter_groups(self._model, training.optimizer, training.learning_rate)
        self._optimizer = torch.optim.AdamW(groups)

    def train_step(self, step: int, batch: RankBatch) -> None:
        training = self._training
        self._model.train()
        (micro_batch,) = batch.micro_batches
        loss = self._model(**hugging_face_inputs(micro_batch, torch.device("cpu"), LENGTH)).loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), training.gradient_clipping)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(step, training.learning_rate, training.warmup_steps, training.steps)
        self._optimizer.step()

    @torch.no_grad()
    def validation_loss(self, batches: list[RankBatch]) -> float:
        self._model.eval()
        loss = masked = 0.0
        for batch in batches:
            for micro_batch in batch.micro_batches:
                given = hugging_face_inputs(micro_batch, torch.device("cpu"))
                labels = given.pop("labels").flatten()
                logits = self._model(**given).prediction_logits.flatten(0, 1)
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                masked += len(micro_batch.mlm_labels)
        return loss / masked


def _print_table(courses: dict[str, list[Course]]) -> None:
    print("\nmeans over the seeds; the ratio's range in brackets")
    for name, found in courses.items():
        pairs = list(zip(found, courses[REFERENCE], strict=True))
        reached = [ours.seconds_to(theirs.loss) for ours, theirs in pairs]
        seconds, losses = (
            statistics.mean(values) for values in zip(*((c.seconds, c.loss) for c in found), strict=True)
        )
        if None in reached:
            ratio = f"not reached with {reached.count(None)} of {len(found)} seeds"
        else:
            ratios = [when / theirs.seconds for when, (_, theirs) in zip(reached, pairs, strict=True)]
            ratio = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:48}  {seconds:6.0f} s in all, {losses:.3f} nats; time to the reference's loss: {ratio}")


if __name__ == "__main__":
    main()
