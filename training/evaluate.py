"""What is said of a model on the validation examples, and the unigram model it is measured against."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from data_prep.shards import Split
from data_prep.vocabulary import CLS, SEP
from training.batches import MicroBatch, RankBatch
from training.model import PretrainingLosses


@dataclass(frozen=True)
class LossSums:
    """Sums over a global batch: losses in nats, right guesses, and what they are sums over."""

    mlm_loss: float
    mlm_correct: float
    masked: int
    sentence_loss: float
    sentence_correct: float
    examples: int

    @property
    def mean_mlm_loss(self) -> float:
        return self.mlm_loss / max(1, self.masked)

    @property
    def mean_sentence_loss(self) -> float:
        return self.sentence_loss / max(1, self.examples)


@torch.no_grad()
def summed_losses(
    losses: Callable[[MicroBatch], PretrainingLosses], batches: Iterable[RankBatch], device: torch.device
) -> LossSums:
    """`losses` summed over this rank's `batches` and, where there are several, over the ranks."""
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    examples = 0
    for batch in batches:
        examples += batch.examples
        sums[4] += batch.masked
        for micro_batch in batch.micro_batches:
            sums[:4] += torch.stack(losses(micro_batch)).double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    mlm_loss, mlm_correct, sentence_loss, sentence_correct, masked = sums.tolist()
    return LossSums(mlm_loss, mlm_correct, int(masked), sentence_loss, sentence_correct, examples)


def validation_metrics(sums: LossSums, sentence_objective: str) -> dict[str, float]:
    """Metrics of one evaluation by their names in MLflow: losses in nats a token or a pair, accuracies with their
    binomial standard errors."""
    accuracy = sums.mlm_correct / max(1, sums.masked)
    metrics = {
        "validation/mlm_loss": sums.mean_mlm_loss,
        "validation/mlm_accuracy": accuracy,
        "validation/mlm_accuracy_standard_error": standard_error(accuracy, sums.masked),
    }
    if sentence_objective != "none":
        accuracy = sums.sentence_correct / max(1, sums.examples)
        metrics |= {
            f"validation/{sentence_objective}_loss": sums.mean_sentence_loss,
            f"validation/{sentence_objective}_accuracy": accuracy,
            f"validation/{sentence_objective}_accuracy_standard_error": standard_error(accuracy, sums.examples),
        }
    return metrics


def standard_error(fraction: float, count: int) -> float:
    """The binomial standard error of a `fraction` of `count` trials."""
    return math.sqrt(fraction * (1 - fraction) / max(1, count))


def unigram_cross_entropy(train: Split, batches: Iterable[RankBatch], vocabulary_size: int) -> float:
    """Nats a masked token of `batches` under the frequencies of the training tokens, plus one each.

    `[CLS]` and `[SEP]`, which are never predicted, are left out. `batches` are those of a world of one.
    """
    counts = train.token_counts(vocabulary_size)
    counts[[CLS, SEP]] = 0
    nats = -np.log((counts + 1) / (counts + 1).sum())
    masked = total = 0
    for batch in batches:
        for micro_batch in batch.micro_batches:
            labels = micro_batch.mlm_labels.numpy()
            total += float(nats[labels].sum())
            masked += len(labels)
    return total / max(1, masked)
