"""Figures on validation examples, which do not depend on how the examples are dealt."""

from dataclasses import astuple

import numpy as np
import pytest
import torch

from configs.schema import load_config
from data_prep.shards import Dataset
from data_prep.vocabulary import Vocabulary
from tests.small_run import ROOT, small_overrides
from training.batches import Batches
from training.evaluate import summed_losses
from training.model import Albert, pretraining_losses


@pytest.fixture(scope="module")
def sums(small_data):
    """Sums over the validation examples, a tuple, as the ranks of a world would add them up."""
    dataset = Dataset.open(small_data / "data")
    vocabulary = Vocabulary.load(dataset.vocabulary_path)
    config = load_config(ROOT / "configs" / "demo.yaml", small_overrides(small_data))
    model = Albert(config.model, vocabulary.size).eval()
    model.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        # Far from uniform, so that sums of other examples would differ.
        for parameter in model.parameters():
            parameter.mul_(3)

    def losses(batch):
        logits = model(batch.input_ids, batch.token_type_ids, batch.lengths, batch.masked_positions)
        return pretraining_losses(logits[0], batch.mlm_labels, logits[1], batch.sentence_labels)

    def summed(world_size: int, micro_batch_tokens: int, size: int = 24, batches: int | None = None):
        parts = []
        for rank in range(world_size):
            split = dataset.split("validation")
            made = Batches(
                split, vocabulary.word_starts, config.data, 0, size, micro_batch_tokens, rank, world_size, fixed=True
            )
            parts.append(summed_losses(losses, made.one_pass(batches), torch.device("cpu")))
        assert len({part.examples for part in parts}) == 1
        return np.array([astuple(part)[:5] for part in parts]).sum(axis=0), parts[0].examples

    summed.rows = dataset.split("validation").rows
    return summed


def test_figures_are_the_same_on_any_world_size_and_micro_batch(sums):
    expected, examples = sums(1, 512)
    assert examples == sums.rows
    assert expected[2] > 5 * examples and 0 < expected[4] < examples
    for world_size, tokens in ((3, 512), (2, 128)):
        found, seen = sums(world_size, tokens)
        assert seen == examples
        assert found == pytest.approx(expected, rel=1e-5)
        # Counts are exact.
        assert found[[1, 2, 4]].tolist() == expected[[1, 2, 4]].tolist()


def test_figures_do_not_depend_on_the_batch_but_on_how_many_are_taken(sums):
    assert sums(1, 512, size=100)[0] == pytest.approx(sums(1, 512)[0], rel=1e-5)
    assert sums(3, 512, batches=2)[1] == 48
    assert sums(3, 512, batches=2)[0] == pytest.approx(sums(1, 512, batches=2)[0], rel=1e-5)
