"""What a prepared data set holds: counts, distributions, and a few examples to read."""

import sys
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.schema import CACHE, DataConfig, TrainingConfig, absolute_path
from data_prep.shards import Dataset, Split
from data_prep.vocabulary import SEP, Vocabulary
from training.batches import Batches, RankBatch, deal, global_batch, padded_length

HISTOGRAM_BINS = 8
PADDING_BATCHES = 4
ROWS_AT_ONCE = 65536
BAR_WIDTH = 40


def dataset_summary(dataset: Dataset, training: TrainingConfig | None = None) -> dict:
    """Counts and distributions of `dataset`, JSON-serialisable; padding is that of `training`'s batches (default:
    the published batch of 4096)."""
    manifest = dataset.manifest
    corpus, data = manifest["corpus"], manifest["config"]
    train = dataset.split("train")
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *_lengths(train)])
    labels = sum((np.bincount(found + 1, minlength=3) for found in _labels(train)), np.zeros(3, dtype=np.int64))
    counts, edges = np.histogram(lengths, bins=HISTOGRAM_BINS, range=(0, data["max_length"]))
    training = training or TrainingConfig(output="")
    return {
        "folder": dataset.origin,
        "digest": dataset.digest,
        "documents": {key: manifest["documents"][key] for key in ("read", "used", "dropped")},
        "examples": {split: _sum(manifest, split, "rows") for split in ("train", "validation")},
        "tokens": {split: _sum(manifest, split, "tokens") for split in ("train", "validation")},
        "lengths": {"counts": counts.tolist(), "edges": edges.round().astype(int).tolist()},
        "sentence_labels": {name: int(count) for name, count in zip(("none", "0", "1"), labels, strict=True) if count},
        "vocabulary_size": manifest["vocabulary"]["size"],
        "unknown_fraction": manifest["vocabulary"]["unknown_fraction"],
        "tokens_per_word": manifest["vocabulary"]["tokens_per_word"],
        "truncated_fraction": corpus["truncated_tokens"] / max(1, corpus["tokens"]),
        "padding_fraction": _padding_fraction(lengths, training) if len(lengths) else 0.0,
        "global_batch_size": training.global_batch_size,
        "micro_batch_tokens": training.micro_batch_tokens,
    }


def print_dataset(dataset: Dataset, summary: dict, examples: int, console: Console) -> None:
    """Print `summary` as a table, then some `examples` with their masks and the border of A and B in colour."""
    documents = summary["documents"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("data set", f"{summary['folder']}  ({summary['digest'][:12]})")
    table.add_row("documents", f"{documents['used']:,} used of {documents['read']:,}")
    for reason, count in documents["dropped"].items():
        table.add_row("  dropped", f"{count:,} {reason}")
    for split, count in summary["examples"].items():
        table.add_row(f"{split} examples", f"{count:,} of {summary['tokens'][split]:,} tokens")
    labels = {"none": "without a label", "0": "label 0", "1": "label 1"}
    counted = summary["sentence_labels"]
    balance = ", ".join(f"{count / sum(counted.values()):.1%} {labels[name]}" for name, count in counted.items())
    table.add_row("sentence labels", balance)
    table.add_row("vocabulary", f"{summary['vocabulary_size']:,} pieces, {summary['tokens_per_word']:.3f} a word")
    table.add_row("unknown tokens", f"{summary['unknown_fraction']:.4%}")
    table.add_row("truncated tokens", f"{summary['truncated_fraction']:.2%}")
    batch = (
        f"global batches of {summary['global_batch_size']:,}, micro-batches of {summary['micro_batch_tokens']:,} tokens"
    )
    table.add_row("padding", f"{summary['padding_fraction']:.2%} in {batch}")
    console.print(table)
    console.print("\nlengths of train examples")
    counts, edges = summary["lengths"]["counts"], summary["lengths"]["edges"]
    for count, begin, end in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(BAR_WIDTH * count / max(1, *counts))
        console.print(f"  {begin:>5} to {end:>5}  {count:>10,}  {bar}")
    if examples:
        console.print("\nexamples: [green]A[/], [blue]B[/], [reverse]masked[/] (what the model is shown beneath)")
        for text in example_texts(dataset, examples):
            console.print(text, soft_wrap=True)


def example_texts(dataset: Dataset, count: int) -> list[Text]:
    """The first `count` examples of global batch 0, as words with masks and segments in colour."""
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    data = DataConfig.model_validate({**dataset.manifest["config"], "output": ""})
    split = dataset.split("train")
    count = min(count, split.rows)
    batches = Batches(split, vocabulary.word_starts, data, 0, count, count * data.max_length, 0, 1)
    return _rows(batches.epoch_batch(0), vocabulary)


def _rows(batch: RankBatch, vocabulary: Vocabulary) -> list[Text]:
    texts = []
    for micro_batch in batch.micro_batches:
        width = micro_batch.input_ids.shape[1]
        original = dict(zip(micro_batch.masked_positions.tolist(), micro_batch.mlm_labels.tolist(), strict=True))
        for row, ids in enumerate(micro_batch.input_ids.tolist()):
            length = width if micro_batch.lengths is None else int(micro_batch.lengths[row])
            label = int(micro_batch.sentence_labels[row])
            text = Text(f"\n[label {label}] " if label >= 0 else "\n")
            in_b = False
            for column, shown in enumerate(ids[:length]):
                position = row * width + column
                piece = vocabulary.pieces[original.get(position, shown)].replace("▁", " ")
                if position in original:
                    text.append(piece, style="reverse " + ("blue" if in_b else "green"))
                    if vocabulary.pieces[shown] != "[MASK]":
                        text.append(f"→{vocabulary.pieces[shown].replace('▁', '')}", style="dim")
                else:
                    text.append(piece, style="dim" if shown < 4 else "blue" if in_b else "green")
                in_b = in_b or shown == SEP
            texts.append(text)
    return texts


def _lengths(split: Split):
    for begin in range(0, split.rows, ROWS_AT_ONCE):
        yield split.lengths(np.arange(begin, min(begin + ROWS_AT_ONCE, split.rows)))


def _labels(split: Split):
    for begin in range(0, split.rows, ROWS_AT_ONCE):
        yield split.take(np.arange(begin, min(begin + ROWS_AT_ONCE, split.rows))).sentence_label


def _sum(manifest: dict, split: str, key: str) -> int:
    return sum(shard[key] for shard in manifest["shards"] if shard["split"] == split)


def _padding_fraction(lengths: np.ndarray, training: TrainingConfig) -> float:
    """The share of padding in some global batches, as one process would be dealt them."""
    real = padded = 0
    for number in range(PADDING_BATCHES):
        indices, _ = global_batch(0, number, training.global_batch_size, len(lengths))
        chosen = lengths[indices]
        groups = [group for step in deal(chosen, 1, training.micro_batch_tokens) for group in step]
        real += int(chosen.sum())
        padded += sum(len(group) * padded_length(chosen[group]) for group in groups)
    return 1 - real / padded


def open_dataset(folder: str, verify: bool, cache: str = CACHE) -> Dataset:
    """The data set in `folder`, or if that is a URL its copy in the folder `cache`; every file digested if `verify`.

    Raises `ConfigError`.
    """
    dataset = Dataset.open(folder)
    copy = dataset.at_hand(absolute_path(cache), partial(print, file=sys.stderr), check=verify)
    if verify and copy is dataset:
        dataset.verify()
    return copy
