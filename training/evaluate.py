"""What is said of a model on the validation examples, and the unigram model it is measured against."""

import math
from collections.abc import Iterable

import numpy as np

from data_prep.shards import Split
from data_prep.vocabulary import CLS, SEP
from training.batches import RankBatch
from training.engine import LossSums


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
