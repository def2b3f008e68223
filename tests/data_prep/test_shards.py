import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest

from configs.schema import ConfigError
from data_prep.shards import FORMAT, Dataset, Split, shard_schema, write_shard


def random_table(rows: int, seed: int, vocabulary_size: int = 1000, static_masks: bool = False) -> pa.Table:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, vocabulary_size, size=rng.integers(2, 30)).tolist() for _ in range(rows)]
    columns = {
        "input_ids": ids,
        "segment_b_start": [int(rng.integers(1, len(row) + 1)) for row in ids],
        "sentence_label": rng.integers(-1, 2, size=rows).tolist(),
        "document": rng.integers(0, 2**64, size=rows, dtype=np.uint64).tolist(),
        "chunk": rng.integers(0, 2**32, size=rows).tolist(),
    }
    if static_masks:
        positions = [
            sorted(rng.choice(len(row), size=rng.integers(0, len(row)), replace=False).tolist()) for row in ids
        ]
        columns["masked_positions"] = positions
        columns["masked_labels"] = [
            [row[place] for place in places] for row, places in zip(ids, positions, strict=True)
        ]
        columns["masked_inputs"] = [[4] * len(places) for places in positions]
        columns["copy"] = rng.integers(0, 3, size=rows).tolist()
    return pa.table(columns, schema=shard_schema(vocabulary_size, static_masks))


def written_in_batches(path, table: pa.Table, rows_per_batch: int) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows_per_batch):
            writer.write_batch(batch)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """(paths, table of all rows) of shards of several record batches; one shard is empty."""
    folder = tmp_path_factory.mktemp("shards")
    tables = [random_table(rows, seed, static_masks=True) for seed, rows in enumerate((500, 0, 1, 333))]
    paths = [folder / f"{number}.arrow" for number in range(len(tables))]
    for path, table, size in zip(paths, tables, (64, 10, 10, 100), strict=True):
        written_in_batches(path, table, size)
    return paths, pa.concat_tables(tables).combine_chunks()


def test_a_written_shard_reads_back_as_it_was(tmp_path):
    for size, dtype in ((1000, pa.uint16()), (65_535, pa.uint16()), (65_536, pa.int32())):
        table = random_table(100, 1, vocabulary_size=size)
        write_shard(tmp_path / "x.arrow", table)
        with pa.memory_map(str(tmp_path / "x.arrow")) as file:
            read = pa.ipc.open_file(file).read_all()
        assert read.equals(table) and read.schema == table.schema
        assert read.schema.field("input_ids").type.value_type == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]


def test_the_same_rows_give_the_same_bytes_however_they_are_chunked(tmp_path):
    table = random_table(40_000, 2)
    chunked = pa.concat_tables([table.slice(0, 7), table.slice(7, 20_000), table.slice(20_007)])
    write_shard(tmp_path / "a.arrow", table)
    write_shard(tmp_path / "b.arrow", chunked)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_a_shard_that_cannot_be_written_leaves_the_former_one(tmp_path):
    path = tmp_path / "x.arrow"
    write_shard(path, random_table(5, 3))
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_shard(path, None)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["x.arrow"]


def test_taken_rows_are_those_pyarrow_reads(shards):
    paths, table = shards
    split = Split(paths)
    assert split.rows == len(table) and split.static_masks
    rng = np.random.default_rng(4)
    for count in (0, 1, 7, 2000):
        indices = rng.integers(0, len(table), size=count)
        expected = table.take(pa.array(indices))
        rows = split.take(indices)
        lists = {
            name: expected[name].to_pylist()
            for name in ("input_ids", "masked_positions", "masked_labels", "masked_inputs")
        }
        flat = {name: [item for row in values for item in row] for name, values in lists.items()}
        assert rows.input_ids.tolist() == flat["input_ids"]
        assert rows.lengths.tolist() == split.lengths(indices).tolist() == list(map(len, lists["input_ids"]))
        assert rows.segment_b_start.tolist() == expected["segment_b_start"].to_pylist()
        assert rows.sentence_label.tolist() == expected["sentence_label"].to_pylist()
        for name in ("masked_positions", "masked_labels", "masked_inputs"):
            assert rows.static_masks[name].tolist() == flat[name]
        assert rows.static_masks["counts"].tolist() == list(map(len, lists["masked_positions"]))
        documents, chunks = expected["document"].to_pylist(), expected["chunk"].to_pylist()
        assert split.identities(indices) == list(zip(documents, chunks, strict=True))


def test_rows_without_static_masks_say_so(tmp_path):
    write_shard(tmp_path / "x.arrow", random_table(20, 5))
    split = Split([tmp_path / "x.arrow"])
    assert not split.static_masks and split.take(np.array([3])).static_masks is None


@pytest.fixture
def dataset(tmp_path):
    """A data folder of two shards and a vocabulary, with a manifest written here."""
    (tmp_path / "spiece.model").write_bytes(b"model")
    for number, split in enumerate(("train", "validation")):
        write_shard(tmp_path / f"{split}.arrow", random_table(50, number))

    def entry(name: str) -> dict:
        content = (tmp_path / name).read_bytes()
        return {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    manifest = {
        "format": FORMAT,
        "vocabulary": {"size": 1000, "bytes": 5, "digest": entry("spiece.model")["sha256"]},
        "shards": [
            {"split": split, "rows": 50, "tokens": 500, **entry(f"{split}.arrow")} for split in ("train", "validation")
        ],
        "fingerprint": "f",
        "config": {"max_length": 64},
        "documents": {"read": 1, "used": 1, "dropped": {}, "bad_samples": []},
        "corpus": {"words": 1, "tokens": 1, "truncated_tokens": 0},
        "inputs": [{"path": "x", "bytes": 1, "sha256": "0"}],
        "examples": 100,
        "tokens": 1000,
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_a_whole_dataset_opens_and_verifies(dataset):
    opened = Dataset.open(dataset)
    opened.verify()
    assert opened.vocabulary_size == 1000
    assert [opened.split(name).rows for name in ("train", "validation")] == [50, 50]
    assert (
        opened.split("train").take(np.arange(3)).lengths.tolist()
        != opened.split("validation").take(np.arange(3)).lengths.tolist()
    )


def test_a_short_or_missing_shard_is_named(dataset):
    shard = dataset / "validation.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(
        ConfigError, match=rf"validation\.arrow has {len(content) - 1} bytes, the manifest says {len(content)}"
    ):
        Dataset.open(dataset)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"validation\.arrow is missing"):
        Dataset.open(dataset)


@pytest.mark.parametrize("name", ["train.arrow", "spiece.model"])
def test_an_altered_file_is_named(dataset, name):
    content = bytearray((dataset / name).read_bytes())
    content[len(content) // 2] ^= 1
    (dataset / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} was altered"):
        Dataset.open(dataset).verify()


def test_what_is_no_shard_is_named_when_it_is_first_used(dataset):
    for content in (b"x" * 100, (dataset / "train.arrow").read_bytes()[:-100] + bytes(100), b""):
        (dataset / "train.arrow").write_bytes(content)
        with pytest.raises(ConfigError, match=r"train\.arrow cannot be read \(.*\): prepare the data again"):
            Split([dataset / "train.arrow"])


def test_a_folder_without_a_usable_manifest_is_no_dataset(dataset):
    manifest = json.loads((dataset / "manifest.json").read_text())
    (dataset / "manifest.json").write_text(json.dumps({**manifest, "format": FORMAT + 1}))
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        Dataset.open(dataset)
    no_counts = {**manifest, "documents": {"dropped": {}, "bad_samples": []}}
    for content in [[], {}, "x", *({**manifest, key: 5} for key in ("shards", "vocabulary", "config")), no_counts]:
        (dataset / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=r"manifest\.json (is no manifest|lacks what a manifest holds)"):
            Dataset.open(dataset)
    (dataset / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        Dataset.open(dataset)
    (dataset / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no prepared data in .* run python -m data_prep first"):
        Dataset.open(dataset)


def test_the_digest_names_the_content_of_the_manifest(dataset):
    before = Dataset.open(dataset)
    manifest = dict(reversed(before.manifest.items()))
    assert Dataset(dataset, manifest).digest == before.digest
    assert Dataset(dataset, {**manifest, "seed": 1}).digest != before.digest
