import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from data_prep.shards import Dataset
from pipeline.inspection import example_texts
from tests.small_run import run


def rows_of(folder, split):
    """All rows of a split, read by pyarrow alone."""
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in sorted(folder.glob(f"{split}-*.arrow"))]
    return pa.concat_tables(tables).to_pylist()


def test_the_figures_are_those_of_the_shards(small_data):
    result = run("-m", "pipeline", "inspect", str(small_data / "data"), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    train, validation = rows_of(small_data / "data", "train"), rows_of(small_data / "data", "validation")
    assert found["examples"] == {"train": len(train), "validation": len(validation)}
    lengths = np.array([len(row["input_ids"]) for row in train])
    assert found["tokens"]["train"] == lengths.sum()
    assert sum(found["lengths"]["counts"]) == len(train)
    assert found["lengths"]["counts"][-1] == (lengths >= found["lengths"]["edges"][-2]).sum()
    assert found["sentence_labels"]["1"] == sum(row["sentence_label"] == 1 for row in train)
    assert 0 <= found["padding_fraction"] < 0.1


def test_the_table_names_drops_and_shows_examples(small_data):
    result = run("-m", "pipeline", "inspect", str(small_data / "data"), "--examples", "2", "--verify")
    assert result.returncode == 0, result.stderr
    assert "400 used of 400" in result.stdout
    assert result.stdout.count("[CLS]") == 2
    assert result.stdout.count("[label ") == 2
    assert "every file is as the manifest says" in result.stdout


def test_shown_examples_read_as_the_text_they_were_made_from(small_data):
    corpus = " ".join((small_data / "corpus.txt").read_text().lower().split())
    for text in example_texts(Dataset.open(small_data / "data"), 5):
        spans = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
        plain = "".join(part if style != "dim" else "." for part, style in spans if not part.startswith("→"))
        sentence = max((part.strip() for part in plain.split(".")), key=len)
        assert len(sentence) > 20
        assert sentence in corpus
        assert any("reverse" in str(span.style) for span in text.spans)


def test_the_copy_of_a_url_goes_where_cache_says(small_data, tmp_path):
    url = f"file://{small_data}/data"
    result = run("-m", "pipeline", "inspect", url, "--cache", str(tmp_path / "cache"), "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["folder"] == url, result.stderr
    (copy,) = (tmp_path / "cache").iterdir()
    assert f"copying {url} to {copy}" in result.stderr
    assert (copy / "manifest.json").exists() and any(copy.glob("train-*.arrow"))


@pytest.mark.parametrize("arguments", [["/nowhere"], ["altered", "--verify"]])
def test_what_is_no_whole_data_set_is_refused_in_one_line(small_data, tmp_path, arguments):
    altered = tmp_path / "altered"
    shutil.copytree(small_data / "data", altered)
    shard = next(altered.glob("train-*.arrow"))
    content = shard.read_bytes()
    shard.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    arguments = [str(altered) if argument == "altered" else argument for argument in arguments]
    result = run("-m", "pipeline", "inspect", *arguments)
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
