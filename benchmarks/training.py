"""Speed of training, each figure as a ratio against a reference measured in the same run.

    python benchmarks/training.py [--device cuda] [--rows 4] [--repeats 5] [--skip-processes] [--folder DIR]

ALBERT-base in bf16 on examples of 512 tokens from docstrings of installed packages. The reference is Hugging Face's
`AlbertForPreTraining` with SDPA under bf16 autocast, which is what a straightforward script trains. Measurements of the
two take turns, and medians are compared.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# This file has the name of the package that it measures.
sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.hugging_face import hugging_face_inputs, hugging_face_model, plainly_collated
from benchmarks.processes import ROOT, prepare, set_options
from configs.schema import Config, load_config
from data_prep.masking import draw_masks
from data_prep.randomness import uniforms
from data_prep.shards import Dataset, Split
from data_prep.vocabulary import PAD, Vocabulary
from training.batches import Batches, MicroBatch
from training.lamb import Lamb, parameter_groups
from training.model import Albert, pretraining_losses
from training.partition import all_reduced
from training.tracking import read_metrics

LENGTH = 512
VOCABULARY_SIZE = 20_000
"""Of the prepared examples: their text carries no more."""
MODEL_VOCABULARY_SIZE = 30_000
"""ALBERT's."""
GLOBAL_BATCH_SIZE = 4096
MASKING_ROWS = 4096
MICRO_BATCHES_TIMED = 3
EXCHANGES = 200


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        config = _prepared(folder, arguments.rows)
        dataset = Dataset.open(config.data.output)
        vocabulary = Vocabulary.load(dataset.vocabulary_path)
        bench = Bench(config, dataset.split("train"), vocabulary, device, arguments.rows, arguments.repeats)
        bench.same_batch()
        bench.real_tokens()
        bench.share_of_matmul_rate()
        bench.preparation()
        bench.rest_of_a_step(folder)
        if not arguments.skip_processes:
            bench.norms(folder)
            _compare_processes(config, folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4, help="examples of 512 tokens in a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-processes", action="store_true", help="do not compare two processes with one")
    parser.add_argument("--folder", help="keep the prepared examples here")
    return parser.parse_args()


def _prepared(folder: Path, rows: int) -> Config:
    overrides = [
        f"data.output={folder}/data",
        "data.inputs=[{kind: docstrings, path: scipy networkx pandas sklearn}]",
        f"data.vocab.size={VOCABULARY_SIZE}",
        "data.shards=4",
        f"training.output={folder}/run",
        f"training.micro_batch_tokens={rows * LENGTH}",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
    ]
    prepare("configs/base.yaml", overrides)
    return load_config(ROOT / "configs" / "base.yaml", overrides)


@dataclass
class Bench:
    config: Config
    split: Split
    vocabulary: Vocabulary
    device: torch.device
    rows: int
    repeats: int

    def __post_init__(self):
        self.ours = Albert(self.config.model, MODEL_VOCABULARY_SIZE)
        self.ours.initialise(torch.Generator().manual_seed(0))
        self.ours.to(self.device, torch.bfloat16).train()
        if self.device.type == "cuda":
            for part in (*self.ours.attention, *self.ours.feed_forward):
                part.compile(dynamic=True)
        self.theirs = hugging_face_model(self.config, MODEL_VOCABULARY_SIZE).to(self.device).train()

    def same_batch(self) -> None:
        """Forward and backward on one padded batch of the loader's."""
        (batch,) = self._loader(self.rows).epoch_batch(0).micro_batches
        given = hugging_face_inputs(batch, self.device)
        batch = batch.to(self.device)
        ours, theirs = self._medians(lambda: self._train_ours(batch), lambda: self._train_theirs(given))
        self.seconds_per_token = ours / batch.input_ids.numel()
        print(
            f"forward + backward of {tuple(batch.input_ids.shape)}: {ours:.3f} s, Hugging Face {theirs:.3f} s; "
            f"{theirs / ours:.2f} times as fast (to reach 1.25)"
        )

    def real_tokens(self) -> None:
        """Unpadded tokens a second, preparation included: the loader's batches, and random ones padded to their
        longest."""
        whole = self._loader(GLOBAL_BATCH_SIZE if self.split.rows > GLOBAL_BATCH_SIZE else self.split.rows)
        batch = whole.epoch_batch(0)
        print(f"padding in global batches: {1 - batch.tokens / batch.padded_tokens:.2%} (at most 3 %)")
        step = -(-len(batch.micro_batches) // MICRO_BATCHES_TIMED)
        chosen = batch.micro_batches[step // 2 :: step]
        generator = np.random.default_rng(0)
        order = generator.permutation(self.split.rows)
        random_batches = [order[begin : begin + self.rows] for begin in range(0, len(chosen) * self.rows, self.rows)]
        our_tokens = sum(int((micro.input_ids != PAD).sum()) for micro in chosen)
        their_tokens = sum(int(self.split.lengths(indices).sum()) for indices in random_batches)

        def ours() -> None:
            for micro in chosen:
                self._train_ours(micro.to(self.device))

        def theirs() -> None:
            for indices in random_batches:
                self._train_theirs(plainly_collated(self.split, indices, self.vocabulary.size, self.device))

        our_seconds, their_seconds = self._medians(ours, theirs)
        ours_rate, theirs_rate = our_tokens / our_seconds, their_tokens / their_seconds
        print(
            f"real tokens a second: {ours_rate:,.0f}, Hugging Face {theirs_rate:,.0f}; "
            f"{ours_rate / theirs_rate:.2f} times (to reach 1.5)"
        )

    def share_of_matmul_rate(self) -> None:
        """FLOP/s of the model's matrix products over the rate of the same products alone."""
        tokens, model = self.rows * LENGTH, self.config.model
        size, inner = model.hidden_size, model.intermediate_size
        shapes = [(size, 3 * size), (size, size), (size, inner), (inner, size)]
        rates = []
        for _ in range(self.repeats):
            seconds, flops = 0.0, 0
            for before, after in shapes:
                left = torch.randn(tokens, before, dtype=torch.bfloat16, device=self.device)
                weight = torch.randn(after, before, dtype=torch.bfloat16, device=self.device)
                gradient = torch.randn(tokens, after, dtype=torch.bfloat16, device=self.device)
                products = (
                    lambda left=left, weight=weight: left @ weight.T,
                    lambda gradient=gradient, weight=weight: gradient @ weight,
                    lambda gradient=gradient, left=left: gradient.T @ left,
                )
                for product in products:
                    product()
                    seconds += self._seconds(product)
                    flops += 2 * tokens * before * after
            rates.append(flops / seconds)
        rate = statistics.median(rates)
        (batch,) = self._loader(self.rows).epoch_batch(0).micro_batches
        batch = batch.to(self.device)
        seconds = statistics.median(self._seconds(lambda: self._train_ours(batch)) for _ in range(self.repeats))
        done = training_flops(self.config, MODEL_VOCABULARY_SIZE, batch) / seconds
        print(
            f"model FLOP/s: {done / 1e9:,.0f} G of the {rate / 1e9:,.0f} G of its matrix products alone: "
            f"{done / rate:.2f} (to reach 0.70)"
        )

    def preparation(self) -> None:
        """Tokens a second that one core masks, and that it makes batches of."""
        indices = np.arange(MASKING_ROWS) % self.split.rows
        taken = self.split.take(indices)
        padded = np.zeros((MASKING_ROWS, LENGTH), dtype=taken.input_ids.dtype)
        padded[np.arange(LENGTH) < taken.lengths[:, None]] = taken.input_ids
        keys = (uniforms(0, indices) * 2**63).astype(np.uint64)
        begin = time.process_time()
        draw_masks(
            padded, taken.lengths, taken.segment_b_start, keys, self.vocabulary.word_starts, self.config.data.masking
        )
        masking = taken.lengths.sum() / (time.process_time() - begin)
        loader = self._loader(MASKING_ROWS)
        begin = time.process_time()
        batch = loader.epoch_batch(0)
        whole = batch.tokens / (time.process_time() - begin)
        print(f"masking {masking / 1e6:.1f}, whole batches {whole / 1e6:.1f} million tokens a core-second (to reach 2)")

    def rest_of_a_step(self, folder: Path) -> None:
        """One optimizer step and one checkpoint, in shares of a global step of 4,096 examples."""
        from training.checkpoint import CheckpointWriter

        model = Albert(self.config.model, MODEL_VOCABULARY_SIZE).to(self.device)
        model.initialise(torch.Generator(self.device).manual_seed(0))
        optimizer = Lamb(parameter_groups(model, self.config.training.optimizer, 1e-3))
        optimizer.create_state()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        lamb = statistics.median(self._seconds(optimizer.step) for _ in range(self.repeats))
        weights = {name: parameter.detach().float().cpu() for name, parameter in model.named_parameters()}
        moments = {f"{name}.{moment}": torch.zeros_like(weights[name]) for name in weights for moment in ("m", "v")}
        writer = CheckpointWriter(folder / "checkpoints", keep=1)
        begin = time.perf_counter()
        writer.write(1, weights, moments, {})
        writer.wait()
        written = time.perf_counter() - begin
        step = self.seconds_per_token * LENGTH * GLOBAL_BATCH_SIZE
        print(
            f"of a global step of {GLOBAL_BATCH_SIZE:,} examples ({step:,.0f} s): LAMB {lamb / step:.3%}, "
            f"writing a checkpoint (in the background) {written / step:.3%}"
        )

    def norms(self, folder: Path) -> None:
        """The exchange of norms between two processes, in shares of the smallest and of a large step."""
        matrices = sum(parameter.ndim > 1 for parameter in self.ours.parameters())
        measured = folder / "norms"
        arguments = (matrices, f"file://{folder}/meeting", measured)
        torch.multiprocessing.start_processes(_exchange_norms, arguments, nprocs=2, start_method="spawn")
        seconds = float(measured.read_text())
        token = self.seconds_per_token * LENGTH
        print(
            f"exchange of the norms of {matrices} tensors: {seconds * 1e3:.2f} ms, {seconds / (token * self.rows):.3%} "
            f"of a step of one micro-batch, {seconds / (token * GLOBAL_BATCH_SIZE):.5%} of one of "
            f"{GLOBAL_BATCH_SIZE:,} examples (at most 1 %)"
        )

    def _loader(self, global_batch_size: int) -> Batches:
        return Batches(
            self.split,
            self.vocabulary.word_starts,
            self.config.data,
            0,
            global_batch_size,
            max(self.rows * LENGTH, LENGTH),
            0,
            1,
        )

    def _train_ours(self, batch: MicroBatch) -> None:
        self.ours.zero_grad()
        mlm, sentence = self.ours(
            batch.input_ids,
            batch.token_type_ids,
            batch.lengths,
            batch.masked_positions,
            most_masked=batch.most_masked,
        )
        losses = pretraining_losses(mlm, batch.mlm_labels, sentence, batch.sentence_labels)
        masked, rows = max(1, len(batch.mlm_labels)), len(batch.sentence_labels)
        (losses.mlm_loss / masked + losses.sentence_loss / rows).backward()

    def _train_theirs(self, given: dict) -> None:
        self.theirs.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.theirs(**given).loss
        loss.backward()

    def _medians(self, first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
        first(), second()
        pairs = [(self._seconds(first), self._seconds(second)) for _ in range(self.repeats)]
        return tuple(statistics.median(times) for times in zip(*pairs, strict=True))

    def _seconds(self, work: Callable[[], object]) -> float:
        self._synchronize()
        begin = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def training_flops(config: Config, vocabulary_size: int, batch: MicroBatch) -> int:
    """Floating-point operations of the matrix products that `Albert` does forward and backward, padding included."""
    model = config.model
    size, inner, embedding = model.hidden_size, model.intermediate_size, model.embedding_size
    rows, length = batch.input_ids.shape
    tokens, masked = rows * length, len(batch.masked_positions)
    query_and_output = size * (2 * size + 2 * length)
    key_and_value = 2 * size * size
    feed_forward = 2 * size * inner
    products = (model.num_hidden_layers - 1) * tokens * (query_and_output + key_and_value + feed_forward)
    # In the last layer only what the heads read makes queries and passes through the feed-forward network.
    products += (
        rows * (batch.most_masked + 1) * query_and_output + tokens * key_and_value + (masked + rows) * feed_forward
    )
    products += tokens * embedding * size + masked * embedding * (size + vocabulary_size) + rows * size * size
    return 3 * 2 * products


def _exchange_norms(rank: int, matrices: int, meeting: str, measured: Path) -> None:
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    squares = [torch.ones(()) for _ in range(2 * matrices)]
    times = []
    for _ in range(EXCHANGES):
        dist.barrier()
        begin = time.perf_counter()
        all_reduced(squares)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        measured.write_text(str(statistics.median(times)))
    dist.destroy_process_group()


def _compare_processes(config: Config, folder: Path) -> None:
    """Tokens a second of two processes under ZeRO 1 over those of one with all cores."""
    one, two = (_trained_rate(config, folder / f"run-{processes}", processes) for processes in (1, 2))
    print(f"two processes {two:,.0f} tokens a second, one {one:,.0f}: {two / one:.2f} (to reach 0.9)")


def _trained_rate(config: Config, output: Path, processes: int) -> float:
    shutil.rmtree(output, ignore_errors=True)
    overrides = [
        f"training.output={output}",
        "training.global_batch_size=32",
        "training.stop_after=4",
        "training.learning_rate=0.0001",
        "training.evaluate.batches=1",
        f"training.micro_batch_tokens={config.training.micro_batch_tokens}",
        f"tracking.uri={config.tracking.uri}",
        f"data.output={config.data.output}",
        "data.inputs=[{kind: docstrings, path: scipy networkx pandas sklearn}]",
        f"data.vocab.size={VOCABULARY_SIZE}",
        "data.shards=4",
    ]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes)]
    command += ["--module", "training.pretrain", "--config", "configs/base.yaml"]
    subprocess.run([*command, *set_options(overrides)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    # The first step warms up.
    found = [line["speed/tokens_per_second"] for line in read_metrics(output)][1:]
    return statistics.harmonic_mean(found)


if __name__ == "__main__":
    main()
