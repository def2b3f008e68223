import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataConfig
from data_prep.shards import Dataset
from data_prep.vocabulary import CLS, MASK, SEP, Vocabulary
from training.batches import Batches, deal, exchange_segments, global_batch, padded_length


@pytest.fixture(scope="module")
def dataset(small_data):
    return Dataset.open(small_data / "data")


@pytest.fixture(scope="module")
def make_batches(dataset):
    """Batches of the small data set for (rank, world_size), with settings over those of its preparation."""
    vocabulary = Vocabulary.load(dataset.vocabulary_path)

    def make(rank=0, world_size=1, split="train", size=24, micro_batch_tokens=512, seed=0, fixed=False, **settings):
        data = DataConfig.model_validate({**dataset.manifest["config"], "output": "unused", **settings})
        return Batches(
            dataset.split(split), vocabulary.word_starts, data, seed, size, micro_batch_tokens, rank, world_size, fixed
        )

    return make


def restored(micro_batch) -> list[tuple]:
    """Per example of a micro-batch: its ids with the masks undone, its masked columns, its label."""
    if not micro_batch.masked_positions.numel():
        return []
    ids = micro_batch.input_ids.numpy().copy()
    ids.reshape(-1)[micro_batch.masked_positions.numpy()] = micro_batch.mlm_labels.numpy()
    width = ids.shape[1]
    lengths = micro_batch.lengths.numpy() if micro_batch.lengths is not None else np.full(len(ids), width)
    columns = [[] for _ in ids]
    for position in micro_batch.masked_positions.tolist():
        columns[position // width].append(position % width)
    return [
        (tuple(row[:length].tolist()), tuple(masked), int(label))
        for row, length, masked, label in zip(ids, lengths, columns, micro_batch.sentence_labels, strict=True)
    ]


def examples_of(parts) -> list[tuple]:
    return sorted(row for part in parts for micro_batch in part.micro_batches for row in restored(micro_batch))


def test_a_global_batch_is_the_same_examples_masks_and_order_however_it_is_dealt(make_batches):
    for number in (0, 7, 1000):
        whole = examples_of([make_batches().epoch_batch(number)])
        assert len(whole) == 24
        for world_size, tokens in ((2, 512), (3, 64), (5, 256)):
            parts = [
                make_batches(rank, world_size, micro_batch_tokens=tokens).epoch_batch(number)
                for rank in range(world_size)
            ]
            assert examples_of(parts) == whole
            assert len({len(part.micro_batches) for part in parts}) == 1
            assert len({(part.examples, part.tokens, part.padded_tokens) for part in parts}) == 1
            assert sum(part.masked for part in parts) == sum(len(masked) for _, masked, _ in whole)
            for micro_batch in (micro_batch for part in parts for micro_batch in part.micro_batches):
                most = max((len(masked) for _, masked, _ in restored(micro_batch)), default=0)
                assert micro_batch.most_masked == most


def test_an_epoch_holds_every_example_once_and_epochs_differ(dataset):
    rows = dataset.split("train").rows
    stream = [global_batch(seed=3, number=number, size=17, rows=rows) for number in range(3 * rows // 17 + 1)]
    indices = np.concatenate([found for found, _ in stream])
    epochs = np.concatenate([found for _, found in stream])
    for epoch in range(3):
        assert sorted(indices[epochs == epoch]) == list(range(rows))
    assert (indices[:rows] != indices[rows : 2 * rows]).any()
    other_seed, _ = global_batch(seed=4, number=0, size=rows, rows=rows)
    assert (other_seed != indices[:rows]).any()


def test_a_batch_far_away_is_found_at_once_and_may_span_epochs(dataset):
    indices, epochs = global_batch(seed=0, number=10**9, size=4096, rows=1000)
    assert len(indices) == 4096
    assert len(np.unique(epochs)) == 5


def test_masks_and_pair_order_are_drawn_anew_each_epoch(make_batches, dataset):
    rows = dataset.split("train").rows
    first, second = (
        {frozenset(ids): (ids, masked, label) for ids, masked, label in examples_of([batch])}
        for batch in (make_batches(size=rows).epoch_batch(number) for number in (0, 1))
    )
    shared = [(first[key], second[key]) for key in first if key in second]
    assert len(shared) > 0.9 * len(first)
    assert np.mean([a[1] != b[1] for a, b in shared]) > 0.9
    exchanged = np.mean([a[2] != b[2] for a, b in shared])
    assert abs(exchanged - 0.5) < 4 * np.sqrt(0.25 / len(shared))
    assert all((a[0] == b[0]) == (a[2] == b[2]) for a, b in shared)


def test_fixed_batches_pass_over_the_split_once_with_the_same_masks_each_time(make_batches, dataset):
    def one_pass(world_size):
        return [
            part
            for rank in range(world_size)
            for part in make_batches(rank, world_size, split="validation", fixed=True).one_pass()
        ]

    first = examples_of(one_pass(1))
    assert len(first) == dataset.split("validation").rows
    assert examples_of(one_pass(1)) == first
    assert examples_of(one_pass(3)) == first


def test_stored_order_is_kept_without_resampling(make_batches, dataset):
    split = dataset.split("train")
    rows = split.take(np.arange(split.rows))
    offsets = np.concatenate(([0], np.cumsum(rows.lengths)))
    stored = sorted(
        (tuple(rows.input_ids[begin:end].tolist()), int(label))
        for begin, end, label in zip(offsets[:-1], offsets[1:], rows.sentence_label, strict=True)
    )
    batch = make_batches(size=split.rows, resample_order=False).epoch_batch(0)
    assert sorted((ids, label) for ids, _, label in examples_of([batch])) == stored


@given(
    lengths=st.lists(st.integers(3, 512), min_size=1, max_size=200),
    world_size=st.integers(1, 5),
    tokens=st.integers(512, 4096),
)
def test_dealing_loses_and_doubles_nothing_and_keeps_the_budget(lengths, world_size, tokens):
    lengths = np.array(lengths)
    steps = deal(lengths, world_size, tokens)
    assert all(len(step) == world_size for step in steps)
    groups = [group for step in steps for group in step]
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert all(len(group) * padded_length(lengths[group]) <= tokens for group in groups if len(group) > 1)


def test_padding_is_small_in_a_large_batch():
    generator = np.random.default_rng(0)
    lengths = np.where(
        generator.random(4096) < 0.1, generator.integers(5, 512, 4096), generator.integers(480, 513, 4096)
    )
    groups = [group for step in deal(lengths, 8, 16384) for group in step]
    padded = [len(group) * padded_length(lengths[group]) for group in groups]
    assert 1 - lengths.sum() / sum(padded) < 0.03
    assert max(padded) < 1.1 * np.mean(padded)


def test_a_rank_without_examples_still_takes_its_steps(make_batches):
    parts = [make_batches(rank, world_size=5, size=2).epoch_batch(0) for rank in range(5)]
    assert [len(part.micro_batches) for part in parts] == [1] * 5
    empty = [part for part in parts if part.masked == 0]
    assert len(empty) == 3
    for part in empty:
        assert part.micro_batches[0].sentence_labels.tolist() == [-1]
        assert part.micro_batches[0].masked_positions.numel() == 0


def test_exchanging_segments_equals_rebuilding_the_row():
    generator = np.random.default_rng(0)
    rows, width = 300, 40
    ids = np.zeros((rows, width), dtype=np.uint16)
    expected, lengths, starts = ids.copy(), np.zeros(rows, int), np.zeros(rows, int)
    for row in range(rows):
        a, b = (generator.integers(5, 300, generator.integers(1, 18)).tolist() for _ in range(2))
        lengths[row], starts[row] = len(a) + len(b) + 3, len(a) + 2
        ids[row, : lengths[row]] = [CLS, *a, SEP, *b, SEP]
        expected[row, : lengths[row]] = [CLS, *b, SEP, *a, SEP]
    exchanged = generator.random(rows) < 0.5
    found, new_starts = exchange_segments(ids, lengths, starts, exchanged)
    assert (found == np.where(exchanged[:, None], expected, ids)).all()
    assert (new_starts == np.where(exchanged, lengths - starts + 1, starts)).all()
    assert (found[np.arange(rows), new_starts - 1] == SEP).all()


def test_token_types_mark_segment_b_and_not_the_padding(make_batches):
    for micro_batch in make_batches().epoch_batch(0).micro_batches:
        for (ids, _, _), types in zip(restored(micro_batch), micro_batch.token_type_ids.tolist(), strict=True):
            border = ids.index(SEP) + 1
            assert types == [0] * border + [1] * (len(ids) - border) + [0] * (len(types) - len(ids))


def test_most_masked_tokens_are_shown_as_the_mask(make_batches):
    batch = make_batches(size=500).epoch_batch(0)
    shown = np.concatenate(
        [part.input_ids.numpy().reshape(-1)[part.masked_positions.numpy()] for part in batch.micro_batches]
    )
    assert abs(np.mean(shown == MASK) - 0.8) < 0.03


def test_prefetched_batches_are_those_made_directly_and_errors_come_through(make_batches):
    batches = make_batches()
    ahead = list(batches.prefetched(3, 8))
    direct = [batches.epoch_batch(number) for number in range(3, 8)]
    assert [examples_of([batch]) for batch in ahead] == [examples_of([batch]) for batch in direct]

    def broken(number):
        raise RuntimeError("disk gone")

    batches.epoch_batch = broken
    with pytest.raises(RuntimeError, match="disk gone"):
        next(batches.prefetched(0, 5))
