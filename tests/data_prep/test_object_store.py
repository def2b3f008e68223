"""A whole preparation, and training on it, in an S3 store: moto's server on this machine."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from configs.schema import ConfigError, InputConfig, load_config
from data_prep.corpus import list_sources, read_documents, split_units
from data_prep.files import located, write_whole
from data_prep.locks import locked
from data_prep.prepare import finished_dataset
from data_prep.shards import Dataset
from tests.ports import free_port, wait_for_port
from tests.small_run import run, settings

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def store() -> Iterator[s3fs.S3FileSystem]:
    """A store with an empty bucket `albert`, which this process and those it starts reach by their environment."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            wait_for_port(port)
            system = s3fs.S3FileSystem(use_listings_cache=False)
            system.mkdir("albert")
            yield system
        finally:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, pseudo_documents, store) -> Path:
    """Documents in two files, one compressed, on this machine and in the store."""
    folder = tmp_path_factory.mktemp("store")
    documents = pseudo_documents(300, 41)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "plain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents[:200]))
    lines = "\n".join(json.dumps({"text": text}) for text in documents[200:])
    (folder / "corpus" / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    store.put(str(folder / "corpus"), "albert/corpus", recursive=True)
    return folder


@pytest.fixture(scope="module")
def overrides(corpus) -> dict[str, str]:
    inputs = "[{kind: jsonl, path: 's3://albert/corpus/*.jsonl*'}]"
    return {"data__inputs": inputs, "data__output": "s3://albert/data", "data__cache": str(corpus / "cache")}


@pytest.fixture(scope="module")
def prepared(corpus, overrides) -> tuple[str, Path]:
    """(the URL of a data folder prepared in the store, a folder prepared from the same text on this machine)."""
    local = run(
        "-m", "data_prep", *settings(corpus, data__inputs=f"[{{kind: jsonl, path: '{corpus}/corpus/*.jsonl*'}}]")
    )
    assert local.returncode == 0, local.stderr
    remote = run("-m", "data_prep", *settings(corpus, **overrides))
    assert remote.returncode == 0, remote.stderr
    return overrides["data__output"], corpus / "data"


def test_a_store_holds_the_bytes_that_a_local_folder_holds(prepared, store):
    url, local = prepared
    names = {path.rpartition("/")[2] for path in store.ls("albert/data", detail=False)}
    assert names == {path.name for path in local.iterdir() if path.name != ".lock"}
    for name in names - {"manifest.json"}:
        assert store.cat_file(f"albert/data/{name}") == (local / name).read_bytes()
    here, there = json.loads((local / "manifest.json").read_text()), Dataset.open(url).manifest
    assert [entry["path"] for entry in there["inputs"]] == [
        f"s3://albert/corpus/{name}" for name in ("packed.jsonl.gz", "plain.jsonl")
    ]
    for part in ("shards", "vocabulary", "documents", "corpus"):
        assert here[part] == there[part]
    assert [entry["sha256"] for entry in here["inputs"]] == [entry["sha256"] for entry in there["inputs"]]


def test_a_finished_folder_in_a_store_is_found_until_an_input_changes(prepared, corpus, overrides, store):
    again = run("-m", "data_prep", *settings(corpus, **overrides))
    assert again.returncode == 0 and "nothing to do" in again.stderr
    given = settings(corpus, **overrides)
    config = load_config(given[1], given[3::2])
    assert finished_dataset(config) is not None
    former = store.cat_file("albert/corpus/plain.jsonl")
    try:
        store.pipe_file("albert/corpus/plain.jsonl", former.replace(b"a", b"e", 1))
        assert finished_dataset(config) is None
    finally:
        store.pipe_file("albert/corpus/plain.jsonl", former)
    assert finished_dataset(config) is not None


def test_an_object_that_changes_after_it_was_listed_is_named(store):
    for content in (b"two", b"three"):
        store.pipe_file("albert/changing/a.txt", b"one")
        (source,) = list_sources((InputConfig(kind="text", path="s3://albert/changing/*.txt"),))
        (unit,) = split_units([source])
        assert [document.text for document in read_documents(unit)] == ["one"]
        store.pipe_file("albert/changing/a.txt", content)
        for read in (lambda unit=unit: list(read_documents(unit)), source.sha256):
            with pytest.raises(OSError, match=r"s3://albert/changing/a\.txt changed while it was read"):
                read()


def test_training_reads_a_store_through_a_cache_that_it_checks(prepared, corpus, overrides, store):
    arguments = settings(corpus, **overrides, training__steps="2", training__warmup_steps="1")
    first = run("-m", "training.pretrain", *arguments)
    assert first.returncode == 0, first.stderr
    assert f"copying s3://albert/data to {corpus}/cache/" in first.stdout and "every node keeps a copy" in first.stdout
    copy = next((corpus / "cache").iterdir())
    shard = next(copy.glob("train-*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    resumed = run("-m", "training.pretrain", *arguments, "--set", "training.steps=3", "--extend")
    assert resumed.returncode == 0, resumed.stderr
    assert shard.read_bytes() == whole and " MB; every node" in resumed.stdout
    evaluated = run("-m", "pipeline", "evaluate", str(corpus / "run"), "--json")
    assert evaluated.returncode == 0 and json.loads(evaluated.stdout)["data"] == "s3://albert/data"
    name = f"albert/data/{shard.name}"
    try:
        store.pipe_file(name, whole[:-1] + bytes([whole[-1] ^ 1]))
        shutil.rmtree(corpus / "cache")
        refused = run("-m", "training.pretrain", *arguments, "--set", "training.steps=4", "--extend")
        assert refused.returncode == 2 and f"s3://{name} was altered" in refused.stderr.splitlines()[-1]
        assert "Traceback" not in refused.stderr
    finally:
        store.pipe_file(name, whole)


def test_what_a_store_lacks_is_refused_in_one_line(prepared, corpus, overrides):
    for changed, expected in [
        ({"data__inputs": "[{kind: text, path: 's3://albert/nothing/*'}]"}, "no file matches s3://albert/nothing/*"),
        ({"data__inputs": "[{kind: text, path: 's3://no-bucket/*'}]"}, "s3://no-bucket/*"),
        ({"data__output": "nowhere://x"}, "no file system is known for nowhere://"),
        ({"training__output": "s3://albert/run"}, "training.output: s3://albert/run is a URL"),
    ]:
        process = run("-m", "data_prep", *settings(corpus, **{**overrides, **changed}))
        lines = process.stderr.strip().splitlines()
        assert process.returncode == 2 and len(lines) == 1 and expected in lines[0], process.stderr


def test_a_folder_in_a_store_has_one_writer_at_a_time(store, monkeypatch):
    monkeypatch.setattr("data_prep.locks.RENEWAL_SECONDS", 0.5)
    monkeypatch.setattr("data_prep.locks.LEASE_SECONDS", 3.0)
    held = pytest.raises(ConfigError, match=f"is being written by process {os.getpid()} on")
    with locked("s3://albert/held"), held, locked("s3://albert/held"):
        pass
    assert not store.exists("albert/held/.lock")
    lease = {"host": "gone.example", "pid": 1, "token": "x", "renewal": 7}
    write_whole(located("s3://albert/held/.lock"), json.dumps(lease))
    with locked("s3://albert/held"):
        assert json.loads(store.cat_file("albert/held/.lock"))["pid"] == os.getpid()


def test_a_store_that_does_not_answer_is_refused_in_one_line(corpus, overrides, monkeypatch):
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    for changed in ({}, {"data__inputs": f"[{{kind: jsonl, path: '{corpus}/corpus/*.jsonl*'}}]"}):
        for module in ("data_prep", "training.pretrain"):
            process = run("-m", module, *settings(corpus, **{**overrides, **changed}))
            lines = process.stderr.strip().splitlines()
            assert process.returncode == 2 and len(lines) == 1, process.stderr
            assert lines[0].startswith("error: ") and "cannot be reached" in lines[0]
