import io
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from configs.schema import ConfigError, load_config
from data_prep.corpus import Document, read_documents
from data_prep.examples import ExampleMaker, finish_shard
from data_prep.files import write_whole
from data_prep.job import spill_unit
from data_prep.locks import locked
from data_prep.plan import Plan
from data_prep.prepare import finished_dataset, prepare
from data_prep.randomness import digest64
from data_prep.sampling import sample_content, sampled_documents
from data_prep.shards import Dataset
from data_prep.vocabulary import CLS, MASK, SEP, Vocabulary

DUPLICATES = 25
VOCABULARY_SIZE = 400


@pytest.fixture(scope="module")
def documents(pseudo_documents) -> list[str]:
    """Different documents and, scattered among them, repetitions of the first ones."""
    different = pseudo_documents(500, 20)
    repeated = different + different[:DUPLICATES]
    random.Random(1).shuffle(repeated)
    return repeated


@pytest.fixture(scope="module")
def folder(tmp_path_factory, documents) -> Path:
    """A folder with the documents in one file, in seven, and in lines of JSON of which two are broken."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "one.txt").write_text("\n\n".join(documents) + "\n\n\ufeff\n")
    lines = [json.dumps({"text": text}) for text in documents]
    (folder / "lines.jsonl").write_text("\n".join(["{broken", *lines, '{"other": 1}']))
    (folder / "seven").mkdir()
    for number in range(7):
        (folder / "seven" / f"{number}.txt").write_text(
            "\n\n".join(documents[number::7]) + ("\n\n\ufeff" if number == 3 else "")
        )
    return folder


@pytest.fixture(scope="module")
def configs(folder, write_config) -> dict[str, Path]:
    """Configurations by name; the sampled vocabularies see part of the sentences."""
    one = [{"kind": "text", "path": str(folder / "one.txt")}]
    lines = [{"kind": "jsonl", "path": str(folder / "lines.jsonl")}]
    seven = [{"kind": "text", "path": str(folder / "seven" / "*.txt")}]
    vocab = {"size": VOCABULARY_SIZE, "sample_sentences": 2000}
    given = {"model": str(folder / "first" / "spiece.model")}
    return {
        "first": write_config(folder, "first", inputs=one, vocab=vocab),
        "workers": write_config(folder, "workers", inputs=seven, vocab=vocab),
        "killed": write_config(folder, "killed", inputs=seven, vocab=vocab),
        "nsp": write_config(folder, "nsp", inputs=lines, vocab=given, sentence_objective="nsp"),
        "static": write_config(
            folder,
            "static",
            inputs=one,
            vocab=given,
            sentence_objective="none",
            deduplicate=False,
            masking={"mode": "static", "copies": 2},
            max_length=32,
        ),
    }


@pytest.fixture(scope="module")
def jobs(configs, data_prep, folder) -> dict[str, Future]:
    """The data folders made from the configurations, two jobs at a time."""

    def run(name: str, *options: str) -> Path:
        process = data_prep("--config", configs[name], *options)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        return folder / name

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, "first")
        workers = pool.submit(run, "workers", "--direct_running_mode=multi_processing", "--direct_num_workers=2")
        first.result()
        others = {name: pool.submit(run, name) for name in ("nsp", "static")}
    return {"first": first, "workers": workers, **others}


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def table_of(folder: Path, split: str) -> pa.Table:
    files = [entry["file"] for entry in manifest_of(folder)["shards"] if entry["split"] == split]
    return pa.concat_tables([pa.ipc.open_file(pa.memory_map(str(folder / file))).read_all() for file in files])


def test_a_data_folder_holds_what_its_manifest_says(jobs):
    folder = jobs["first"].result()
    manifest = manifest_of(folder)
    names = [f"train-{number:05d}-of-00003.arrow" for number in range(3)] + ["validation-00000-of-00001.arrow"]
    assert [entry["file"] for entry in manifest["shards"]] == names
    assert set(contents(folder)) == {*names, "spiece.model", "spiece.vocab", "manifest.json"}
    dataset = Dataset.open(folder)
    dataset.verify()
    tables = [table_of(folder, split) for split in ("train", "validation")]
    assert manifest["examples"] == sum(map(len, tables)) == sum(dataset.split(s).rows for s in ("train", "validation"))
    assert manifest["tokens"] == sum(len(row) for table in tables for row in table["input_ids"].to_pylist())
    assert manifest["vocabulary"]["size"] == VOCABULARY_SIZE and manifest["corpus"]["truncated_tokens"] > 0
    tokens = manifest["corpus"]["tokens"]
    assert tokens > 0 and manifest["corpus"]["words"] <= tokens


def test_workers_files_and_places_of_documents_do_not_show_in_the_shards(jobs):
    """One process reading one file, and two reading seven, that hold the documents in another order."""
    first, workers = (jobs[name].result() for name in ("first", "workers"))
    assert manifest_of(first)["shards"] == manifest_of(workers)["shards"]
    assert (first / "spiece.model").read_bytes() == (workers / "spiece.model").read_bytes()
    for key in ("documents", "corpus", "vocabulary", "examples", "tokens"):
        assert manifest_of(first)[key] == manifest_of(workers)[key]


def test_another_seed_gives_other_examples_of_the_same_documents(jobs, configs, documents):
    vocabulary = Vocabulary.load(jobs["first"].result() / "spiece.model")
    config = load_config(configs["first"])
    rows = []
    for seed in (1, 1, 2):
        maker = ExampleMaker(vocabulary, config.data, seed)
        for number, text in enumerate(documents[:50]):
            maker.add(Document(text, str(number)))
        taken = maker.take_rows().items()
        rows.append({shard: finish_shard([batch], vocabulary, config.data, seed).table for shard, batch in taken})
    same, again, other = rows
    assert same == again and same != other
    known, found = ({d for table in r.values() for d in table["document"].to_pylist()} for r in (same, other))
    assert known == found
    changed = load_config(configs["first"], ["seed=2"])
    assert finished_dataset(config) is not None and finished_dataset(changed) is None


def test_every_document_is_used_or_counted_as_dropped(jobs, documents):
    counted = manifest_of(jobs["first"].result())["documents"]
    assert counted["read"] == len(documents) + 1
    assert counted["dropped"] == {"duplicate": DUPLICATES, "empty": 1}
    assert counted["read"] == counted["used"] + sum(counted["dropped"].values())
    found = table_of(jobs["first"].result(), "train"), table_of(jobs["first"].result(), "validation")
    assert len({document for table in found for document in table["document"].to_pylist()}) == counted["used"]


def test_text_that_is_dropped_with_duplicates_is_not_counted(jobs, documents):
    manifest = manifest_of(jobs["first"].result())
    model = Vocabulary.load(jobs["first"].result() / "spiece.model")
    encoded = {found.normalized: found for found in model.encode_documents(documents, "en")}
    assert len(encoded) == len(documents) - DUPLICATES
    corpus = manifest["corpus"]
    assert corpus["words"] == sum(len(normalized.split(" ")) for normalized in encoded)
    assert corpus["tokens"] == sum(len(found.ids) for found in encoded.values())
    assert corpus["tokens"] - corpus["truncated_tokens"] == manifest["tokens"] - 3 * manifest["examples"]
    assert manifest["vocabulary"]["tokens_per_word"] == round(corpus["tokens"] / corpus["words"], 6)


def test_few_bad_records_are_counted_and_shown(jobs, documents):
    counted = manifest_of(jobs["nsp"].result())["documents"]
    assert counted["read"] == len(documents) + 2 and counted["used"] == len(documents) - DUPLICATES
    assert counted["dropped"] == {"broken_json": 1, "duplicate": DUPLICATES, "missing_field": 1}
    assert [sample["text"].strip() for sample in counted["bad_samples"]] == ["{broken", '{"other": 1}']
    assert counted["bad_samples"][0]["place"] == "lines.jsonl:0"


def test_repeated_documents_stay_without_deduplication(jobs, documents):
    counted = manifest_of(jobs["static"].result())["documents"]
    assert counted["dropped"] == {"empty": 1} and counted["used"] == len(documents)


def test_no_document_is_in_both_splits(jobs):
    for name in ("first", "static"):
        train, validation = (
            set(table_of(jobs[name].result(), s)["document"].to_pylist()) for s in ("train", "validation")
        )
        assert train and validation and not train & validation
        share = len(validation) / (len(train) + len(validation))
        assert share == pytest.approx(0.2, abs=4 * np.sqrt(0.2 * 0.8 / len(train | validation)))


def test_rows_are_ordered_without_regard_to_their_documents(jobs):
    table = table_of(jobs["first"].result(), "train")
    documents = table["document"].to_pylist()
    assert sum(a == b for a, b in pairwise(documents)) < 0.1 * len(documents)


@pytest.fixture(scope="module")
def encoded(jobs, documents) -> dict[int, list[int]]:
    """Ids of the different documents, by the identity under which examples know them."""
    vocabulary = Vocabulary.load(jobs["first"].result() / "spiece.model")
    found = {}
    for text in documents:
        ids = vocabulary.encode(text)
        found[digest64(vocabulary.normalize(text))] = ids
    return found


def segments_of(row: dict) -> tuple[list[int], list[int]]:
    ids, start = row["input_ids"], row["segment_b_start"]
    assert ids[0] == CLS and ids[-1] == SEP
    if start == len(ids):
        return ids[1:-1], []
    assert ids[start - 1] == SEP
    return ids[1 : start - 1], ids[start:-1]


def places(segment: list[int], ids: list[int]) -> list[int]:
    """Where `segment` stands in `ids`."""
    part, whole = ("".join(map(chr, numbers)) for numbers in (segment, ids))
    return [place for place in range(len(whole)) if whole.startswith(part, place)]


def test_sop_labels_tell_the_order_within_one_document(jobs, encoded):
    rows = table_of(jobs["first"].result(), "train").to_pylist()
    assert set(rows[0]) == {"input_ids", "segment_b_start", "sentence_label", "document", "chunk"}
    for row in rows:
        a, b = segments_of(row)
        assert a and b and len(row["input_ids"]) <= 64
        of_a, of_b = (places(segment, encoded[row["document"]]) for segment in (a, b))
        if row["sentence_label"] == 0:
            assert min(of_a) + len(a) <= max(of_b)
        else:
            assert min(of_b) + len(b) <= max(of_a)
    labels = [row["sentence_label"] for row in rows]
    assert set(labels) == {0, 1} and abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))


def test_nsp_labels_tell_strangers_from_successors(jobs, encoded):
    rows = [row for split in ("train", "validation") for row in table_of(jobs["nsp"].result(), split).to_pylist()]
    texts = {document: "".join(map(chr, ids)) for document, ids in encoded.items()}
    successors = 0
    for row in rows:
        a, b = segments_of(row)
        assert a and b and len(row["input_ids"]) <= 64
        own = encoded[row["document"]]
        assert places(a, own)
        if row["sentence_label"] == 0:
            assert min(places(a, own)) + len(a) <= max(places(b, own))
            successors += 1
        else:
            assert row["sentence_label"] == 1
            assert len(b) < 4 or not places(b, own)
            text = "".join(map(chr, b))
            assert any(text in ids for document, ids in texts.items() if document != row["document"])
    assert abs(successors / len(rows) - 0.5) < 4 * 0.5 / np.sqrt(len(rows))


def test_nsp_strangers_are_as_long_as_successors(jobs):
    lengths = {0: [], 1: []}
    for row in table_of(jobs["nsp"].result(), "train").to_pylist():
        lengths[row["sentence_label"]].append(len(row["input_ids"]))
    full = {label: np.mean(np.array(found) == 64) for label, found in lengths.items()}
    assert abs(full[0] - full[1]) < 4 * np.sqrt(0.25 / len(lengths[0]) + 0.25 / len(lengths[1]))
    means, errors = zip(
        *((np.mean(found), np.std(found) / np.sqrt(len(found))) for found in lengths.values()), strict=True
    )
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


def test_running_texts_with_static_masks_hold_each_example_per_copy(jobs, encoded):
    rows = table_of(jobs["static"].result(), "train").to_pylist()
    copies = Counter((row["document"], row["chunk"]) for row in rows)
    assert set(copies.values()) == {2}
    assert Counter(row["copy"] for row in rows) == {0: len(rows) // 2, 1: len(rows) // 2}
    masked_by_copy = {0: {}, 1: {}}
    changed = 0
    for row in rows:
        ids = row["input_ids"]
        assert row["sentence_label"] == -1 and segments_of(row)[1] == [] and 3 <= len(ids) <= 32
        assert MASK not in ids
        masked, labels, inputs = row["masked_positions"], row["masked_labels"], row["masked_inputs"]
        assert 1 <= len(masked) == len(labels) == len(inputs) <= max(1, round(0.15 * len(ids)))
        assert labels == [ids[place] for place in masked]
        assert masked == sorted(set(masked)) and masked[0] > 0 and masked[-1] < len(ids) - 1
        assert all(shown == MASK or shown >= 5 for shown in inputs)
        changed += sum(shown == MASK for shown in inputs)
        masked_by_copy[row["copy"]][row["document"], row["chunk"]] = masked
    total = sum(len(row["masked_positions"]) for row in rows)
    assert changed / total == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / total))
    same = sum(masked_by_copy[1][key] == masked for key, masked in masked_by_copy[0].items())
    assert same < 0.2 * len(masked_by_copy[0])


def test_running_texts_hold_every_token_of_every_document(jobs, documents):
    folder = jobs["static"].result()
    vocabulary = Vocabulary.load(folder / "spiece.model")
    parts: dict[int, dict[int, list[int]]] = {}
    for split in ("train", "validation"):
        for row in table_of(folder, split).to_pylist():
            parts.setdefault(row["document"], {})[row["chunk"]] = segments_of(row)[0]
    whole = Counter(tuple(chain(*(chunks[number] for number in range(len(chunks))))) for chunks in parts.values())
    assert whole == Counter(tuple(vocabulary.encode(text)) for text in documents)


def test_a_finished_folder_is_left_as_it_is(jobs, configs):
    folder = jobs["first"].result()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert finished_dataset(load_config(configs["first"])) is not None
    assert finished_dataset(load_config(configs["first"], ["data.max_length=32"])) is None
    assert finished_dataset(load_config(configs["first"], ["data.masking.ngram=1"])) is not None
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def kill_when(appeared, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not appeared():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_job_killed_twice_goes_on_to_the_same_bytes(configs, data_prep, folder, jobs):
    output = folder / "killed"
    process = data_prep("--config", configs["killed"])
    kill_when(lambda: any(output.glob(".work-*/spiece.model")), process)
    model = next(output.glob(".work-*/spiece.model"))
    written = model.stat().st_mtime_ns
    assert finished_dataset(load_config(configs["killed"])) is None
    process = data_prep("--config", configs["killed"])
    kill_when(lambda: any(output.glob(".work-*/units/*.json")), process)
    assert model.stat().st_mtime_ns == written
    process = data_prep("--config", configs["killed"])
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert contents(output) == contents(jobs["workers"].result())


def refused(process: subprocess.Popen) -> str:
    """The one line on stderr of a process that ends in a refusal."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    lines = [line for line in errors.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("error: ")]
    assert len(refusals) == 1 and lines[-1] == refusals[0]
    assert "Traceback" not in errors
    return refusals[0]


@pytest.fixture
def corpus(tmp_path, pseudo_documents) -> list[dict]:
    (tmp_path / "small.txt").write_text("\n\n".join(pseudo_documents(30, 21)))
    return [{"kind": "text", "path": str(tmp_path / "small.txt")}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "data.max_lenght=3"], "unknown key data.max_lenght (did you mean max_length?)"),
        (["--set", "data.inputs.0.path=nothing/*.txt"], "data.inputs.0.path: no file matches"),
        (
            ["--direct_num_worker_count=2"],
            "--direct_num_worker_count is neither an option of data_prep nor of Beam: did you mean",
        ),
        (["--runner=NoSuchRunner"], "--runner=NoSuchRunner cannot be used"),
        (["--direct_num_workers=two"], "Beam refuses its options: argument --direct_num_workers: invalid int value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--set", "data.vocab.model=absent.model"], "absent.model cannot be read"),
    ],
    ids=["unknown-key", "no-file", "misspelt-option", "unknown-runner", "bad-value", "stray-argument", "no-vocabulary"],
)
def test_what_cannot_be_done_is_refused_in_one_line(tmp_path, corpus, write_config, data_prep, arguments, expected):
    process = data_prep("--config", write_config(tmp_path, "refused", inputs=corpus), *arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("\n") == 1 and errors.startswith("error: ") and expected in errors
    assert not (tmp_path / "refused").exists()


def test_a_missing_config_is_refused_in_one_line(tmp_path, data_prep):
    process = data_prep("--config", tmp_path / "absent.yaml")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.count("\n") == 1 and "absent.yaml not found; presets: " in errors


def test_a_vocabulary_too_large_for_the_corpus_is_refused_and_the_samples_are_kept_for_another(
    tmp_path, write_config, data_prep, pseudo_documents
):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(pseudo_documents(30, number)))
    inputs = [{"kind": "text", "path": str(tmp_path / "*.txt")}]
    config = write_config(tmp_path, "refused", inputs=inputs, vocab={"size": 30_000})
    message = refused(data_prep("--config", config))
    assert "data.vocab.size 30000 is too large for this corpus: the largest that works is " in message
    assert not any((tmp_path / "refused").glob("[!.]*"))

    def samples() -> set[tuple[str, int]]:
        found = (tmp_path / "refused").glob(".work-pieces/samples/*.jsonl")
        return {(path.name, path.stat().st_mtime_ns) for path in found}

    first = samples()
    (tmp_path / "0.txt").write_text("\n\n".join(pseudo_documents(31, 2)))
    (tmp_path / "00.txt").write_text("\n\n".join(pseudo_documents(20, 3)))
    refused(data_prep("--config", config, "--set", "data.vocab.size=20000"))
    assert len(first) == 2 and len(samples()) == 3 and len(first & samples()) == 1


def test_more_tokens_than_a_shard_holds_are_refused_by_its_name(tmp_path, corpus, jobs, write_config, monkeypatch):
    monkeypatch.setattr("data_prep.shards.MOST_TOKENS", 100)
    given = {"model": str(jobs["first"].result() / "spiece.model")}
    config = load_config(write_config(tmp_path, "refused", inputs=corpus, vocab=given, shards=1))
    expected = (
        r"train-00000-of-00001.arrow would hold [\d,]+ tokens or more before duplicates are removed, "
        r"a shard takes 100: raise data.shards \(1\)"
    )
    with pytest.raises(ConfigError, match=expected):
        prepare(config, [], Console(file=io.StringIO()))


def test_a_bad_file_is_refused_by_name_though_the_log_of_its_worker_has_no_room(
    tmp_path, jobs, write_config, data_prep
):
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    inputs = [{"kind": "jsonl", "path": str(tmp_path / "bad.jsonl.gz")}]
    vocabulary = {"model": str(jobs["first"].result() / "spiece.model")}
    config = write_config(tmp_path, "refused", inputs=inputs, vocab=vocabulary)
    work = Plan.make(load_config(config)).work
    work.mkdir(parents=True)
    (work / "examples.log").symlink_to("/dev/full")
    options = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
    assert "bad.jsonl.gz cannot be read" in refused(data_prep("--config", config, *options))
    assert not any((tmp_path / "refused").glob("[!.]*"))


def test_a_second_start_is_refused_while_the_first_holds_the_folder(tmp_path, corpus, write_config, data_prep):
    config = write_config(tmp_path, "held", inputs=corpus)
    with locked(tmp_path / "held"):
        message = refused(data_prep("--config", config))
        assert f"held is being written by process {os.getpid()}" in message
        assert [path.name for path in (tmp_path / "held").iterdir()] == [".lock"]
    assert not (tmp_path / "held").exists()


def test_too_many_bad_records_are_refused_and_then_allowed_with_another_file_without_doing_the_work_again(
    tmp_path, jobs, write_config, data_prep, pseudo_documents
):
    lines = [json.dumps({"text": text}) for text in pseudo_documents(50, 22)]
    lines[7:9] = ["{broken", '{"other": 1}']
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    settings = {
        "inputs": [{"kind": "jsonl", "path": str(tmp_path / "*.jsonl")}],
        "vocab": {"model": str(jobs["first"].result() / "spiece.model")},
    }
    config = write_config(tmp_path, "refused", **settings)
    message = refused(data_prep("--config", config))
    assert "2 of 50 documents are unreadable" in message and "(broken_json)" in message and "(missing_field)" in message
    (report,) = (tmp_path / "refused").glob(".work-pieces/units/*.json")
    report.write_text(report.read_text().replace('"kind": "broken_json"', '"kind": "as it was found"'))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": pseudo_documents(1, 23)[0]}))
    allowed = data_prep("--config", config, "--set", "data.max_bad_fraction=0.04")
    straight = data_prep("--config", write_config(tmp_path, "straight", **settings, max_bad_fraction=0.5))
    for process in (allowed, straight):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    found, expected = (contents(tmp_path / name) for name in ("refused", "straight"))
    manifest = found.pop("manifest.json").replace(b"as it was found", b"broken_json")
    assert manifest == expected.pop("manifest.json") and found == expected
    assert finished_dataset(load_config(config, ["data.max_bad_fraction=0.04"])) is not None
    with pytest.raises(ConfigError, match="2 of 51 documents are unreadable"):
        finished_dataset(load_config(config))


def test_pieces_that_were_damaged_are_made_again_and_leftovers_removed(tmp_path, jobs, folder, write_config, data_prep):
    vocabulary = str(jobs["first"].result() / "spiece.model")
    inputs = [{"kind": "text", "path": str(folder / "seven" / "*.txt")}]
    settings = {"inputs": inputs, "vocab": {"model": vocabulary}, "shards": 1}
    configs = {name: write_config(tmp_path, name, **settings) for name in ("damaged", "straight")}
    plan = Plan.make(load_config(configs["damaged"]))
    write_whole(plan.vocabulary, Path(vocabulary).read_bytes())
    plan.save()
    for unit in range(len(plan.units)):
        write_whole(plan.unit_report(unit), json.dumps(spill_unit(plan, unit)))
    plan.spill(0, 0).unlink()
    plan.spill(1, 0).write_bytes(plan.spill(1, 0).read_bytes()[:-8])
    plan.unit_report(2).write_text('{"counts": {"re')
    write_whole(plan.source_report(0), "")
    for process in [data_prep("--config", config) for config in configs.values()]:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert contents(tmp_path / "damaged") == contents(tmp_path / "straight")
    for leftover in (plan.pieces / "units" / "left.json", plan.work / "plan.pickle"):
        write_whole(leftover, "{}")
    _, errors = data_prep("--config", configs["damaged"]).communicate(timeout=60)
    assert "nothing to do" in errors
    assert not list((tmp_path / "damaged").glob(".work*"))


def test_what_was_damaged_in_an_interrupted_job_is_made_again(tmp_path, folder, write_config, data_prep, jobs):
    vocab = {"size": VOCABULARY_SIZE, "sample_sentences": 2000}
    inputs = [{"kind": "text", "path": str(folder / "seven" / "*.txt")}]
    config = write_config(tmp_path, "interrupted", inputs=inputs, vocab=vocab)
    plan = Plan.make(load_config(config))
    plan.save()
    for unit in range(len(plan.units)):
        documents = sampled_documents(read_documents(plan.units[unit]), plan.data, plan.seed, plan.sampling_rate)
        write_whole(plan.sample(unit), sample_content(documents)[: None if unit % 2 else -9])
    model = (jobs["first"].result() / "spiece.model").read_bytes()
    write_whole(plan.vocabulary, model[:2000])
    for number in range(len(plan.shard_splits)):
        write_whole(plan.shard(number), "short")
        write_whole(plan.shard_report(number), '{"bytes": 500}' if number else '{"by')
    _, errors = data_prep("--config", config).communicate(timeout=60)
    assert "vocabulary 400" in errors
    assert contents(tmp_path / "interrupted") == contents(jobs["workers"].result())


def test_an_altered_shard_is_made_again_by_the_same_command_and_foreign_files_stay(
    tmp_path, write_config, data_prep, pseudo_documents
):
    (tmp_path / "corpus.txt").write_text("\n\n".join(pseudo_documents(150, 3)))
    config = write_config(
        tmp_path, "repaired", inputs=[{"kind": "text", "path": str(tmp_path / "corpus.txt")}], vocab={"size": 400}
    )
    foreign = ("corpus.arrow", "train.arrow", "notes.tmp")
    leftovers = ("train-00003-of-00004.arrow", ".manifest.json.0123456789ab.tmp")
    for name in foreign + leftovers:
        write_whole(tmp_path / "repaired" / name, name)
    assert data_prep("--config", config).wait() == 0
    assert all((tmp_path / "repaired" / name).read_text() == name for name in foreign)
    assert not any((tmp_path / "repaired" / name).exists() for name in leftovers)
    shard = next((tmp_path / "repaired").glob("train-*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    assert data_prep("--config", config).wait() == 0
    assert shard.read_bytes() == whole
