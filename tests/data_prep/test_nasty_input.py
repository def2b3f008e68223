"""Hostile files through reading and example making, in this process."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import InputConfig
from data_prep.corpus import Document, list_sources, read_documents, split_units
from data_prep.examples import Counts, ExampleMaker
from data_prep.vocabulary import CLS, MASK, PAD, SEP

RIGHT_TO_LEFT = "مرحبا بالعالم. שלום עולם, מה שלומך? \u202bda\u202c do\u200f."
EMOJI = "👩\u200d👩\u200d👧\u200d👦 da 👍🏽 do 🇩🇪🇫🇷. ❤️ be ☃\ufe0f 1️⃣!"
COMBINING = "e\u0301a\u0308\u0323 \u0301 x\u0489. Z" + "\u0300" * 500 + " do."
SPECIALS = "[MASK] da [CLS] do [SEP]. <pad> be <unk> x[MASK]y \u2581 \u2581[MASK]\u2581. <s> </s>"
CONTROLS = "da\x01\x02do \x1b[31mba\x7f. \x85\u2028\u2029 Be\x0b\x0cde."


class Run(NamedTuple):
    counts: Counts
    rows: list[dict]


@pytest.fixture(scope="module")
def run(vocabulary, data_config) -> Callable[..., Run]:
    """Takes all documents of the files at a path through an `ExampleMaker`, whose books must balance."""

    def documents(path: Path, **source) -> list[Document]:
        sources = list_sources((InputConfig(**{"kind": "text", "path": str(path), **source}),))
        return [document for unit in split_units(sources) for document in read_documents(unit)]

    def through(path: Path, data: dict | None = None, **source) -> Run:
        maker = ExampleMaker(vocabulary, data_config(max_length=32, **(data or {})), seed=1)
        found = documents(path, **source)
        for document in found:
            maker.add(document)
        counts = maker.counts
        assert counts.read == len(found) == counts.used + counts.dropped.total()
        rows = [row for batch in maker.take_rows().values() for row in batch.to_pylist()]
        assert len({row["document"] for row in rows}) <= counts.used
        for row in rows:
            ids, start = row["input_ids"], row["segment_b_start"]
            specials = {place: piece for place, piece in enumerate(ids) if piece in (PAD, CLS, SEP, MASK)}
            assert specials == {0: CLS, start - 1: SEP, len(ids) - 1: SEP}
        return Run(counts, rows)

    return through


@pytest.mark.parametrize(
    ("content", "used", "dropped"),
    [
        (b"", 0, {}),
        (b" \n\t\n\r\n \n", 0, {}),
        (b"\xef\xbb\xbf", 0, {"empty": 1}),
        (b"da", 0, {"single_word": 1}),
        (b"Da do.", 1, {}),
        (b"da be do", 1, {}),
        (b"Da do. Be de", 1, {}),
        (b"Da do. Be de\r\nDa do.\r\n\r\nBa be.\r\n", 2, {}),
        (b"\xef\xbb\xbfDa do. Be de.\n", 1, {}),
        (b"Da do.\n\nB\xffe de.\n\nBa \xc3", 1, {"invalid_utf8": 2}),
        (b"\xed\xa0\x80 da do", 0, {"invalid_utf8": 1}),
        ("Da do.".encode("utf-16"), 0, {"invalid_utf8": 1}),
        (b"\0", 0, {"empty": 1}),
        (b"D\0a do.\0 \0Be de.\0", 1, {}),
        (b"\x01\x02\n\n\xe2\x80\x8b\n", 0, {"empty": 2}),
        ("\u3000\u00a0\n\nda\n".encode(), 0, {"empty": 1, "single_word": 1}),
        (RIGHT_TO_LEFT.encode(), 1, {}),
        (EMOJI.encode(), 1, {}),
        (COMBINING.encode(), 1, {}),
        ("\u0301\u0301\n\n".encode(), 0, {"empty": 1}),
        (SPECIALS.encode(), 1, {}),
        (CONTROLS.encode(), 1, {}),
        (b"[MASK]\n\n<pad>\n\n[CLS] [SEP]", 3, {}),
        (b"Da do. Be de. " * 20_000, 1, {}),
        (b"dabedo" * 50_000, 1, {}),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
@pytest.mark.parametrize("objective", ["sop", "none"])
def test_documents_of_nasty_text_files_are_used_or_dropped_by_reason(run, tmp_path, objective, content, used, dropped):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    counts = run(path, {"sentence_objective": objective}).counts
    if objective == "none":
        used, dropped = used + dropped.get("single_word", 0), {k: n for k, n in dropped.items() if k != "single_word"}
    assert (counts.used, dict(counts.dropped)) == (used, dropped)


@pytest.mark.parametrize("text", [RIGHT_TO_LEFT, EMOJI, COMBINING, SPECIALS, CONTROLS])
def test_nasty_text_means_the_same_in_every_kind_of_file(run, tmp_path, text):
    text = text.replace("\r", "")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    found = [
        run(tmp_path / "a.jsonl", kind="jsonl").rows,
        run(tmp_path / "a.parquet", kind="parquet").rows,
        run(tmp_path / "a.txt", document_per="file").rows,
        run(tmp_path / "a.txt.gz", document_per="file").rows,
    ]
    assert found[0] and found == [found[0]] * 4


def test_broken_json_lines_are_dropped_and_shown(run, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "Da do. Be de."}',
        b'{"text": "Da do',
        b"",
        b'{"body": "Da do. Be de."}',
        b'{"text": ["Da do."]}',
        b'{"text": "\xff Da do."}',
        b'{"text": "\\ud800 Da do."}',
        b'{"text": "\\u0000"}',
        b'{"text": ""}',
        b'\xef\xbb\xbf{"text": "Da do. Ba be."}',
        b"null",
        b'{"text": "Ba do. Be ba."}',
    ]
    path.write_bytes(b"\r\n".join(lines))
    counts = run(path, kind="jsonl").counts
    assert counts.read == 11 and counts.used == 3
    assert counts.dropped == {
        "broken_json": 2,
        "missing_field": 3,
        "invalid_unicode": 1,
        "empty": 2,
    }
    assert counts.bad_samples[0]["place"] == f"a.jsonl:{len(lines[0]) + 2}"


def test_rows_of_parquet_without_text_are_dropped(run, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Da do. Be de.", None, "", "da", " \n "]}), path)
    counts = run(path, kind="parquet").counts
    assert counts.used == 1 and counts.dropped == {"missing_field": 1, "empty": 2, "single_word": 1}


@pytest.mark.parametrize(
    ("name", "content", "source"),
    [
        ("a.txt.gz", gzip.compress(b"Da do. Be de.\n" * 10_000)[:-15], {}),
        ("a.txt.gz", b"\x1f\x8b\x08\x00", {}),
        ("a.txt.gz", b"Da do. Be de.", {}),
        ("a.jsonl.bz2", b"BZh9 no", {"kind": "jsonl"}),
        ("a.txt.zst", b"no", {"document_per": "file"}),
        ("a.parquet", b"", {"kind": "parquet"}),
        ("a.parquet", b"PAR1 no PAR1", {"kind": "parquet"}),
    ],
)
def test_files_that_are_broken_are_named(run, tmp_path, name, content, source):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(OSError, match=f"{name} cannot be read"):
        run(path, **source)


def test_a_parquet_file_without_the_column_or_cut_short_is_named(run, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["Da do."]}), path)
    with pytest.raises(OSError, match=r"a\.parquet cannot be read: it has no column text"):
        run(path, kind="parquet")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(OSError, match=r"a\.parquet cannot be read"):
        run(path, kind="parquet", text_field="body")


nasty_text = st.text(
    st.sampled_from([*"aeido .!?\n\t'`\"", *"\0\x01\x85\u00a0\u0301\u200b\u200d\u2028\u202e\u2581\ufeff\uff07東。ש👩"])
    | st.characters(codec="utf-8"),
    max_size=80,
)


@given(st.lists(nasty_text | st.sampled_from(["[MASK]", "<pad> [CLS]", "[SEP]", "<unk>"]), min_size=1, max_size=6))
@example(["\u2581"])
@example(["'\u200b'", "a`\0`"])
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("objective", ["sop", "none"])
def test_any_text_is_used_or_dropped_without_words(run, tmp_path_factory, vocabulary, objective, texts):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    counts = run(path, {"sentence_objective": objective}, kind="jsonl").counts
    reasons = Counter()
    for text in texts:
        words = vocabulary.normalize(text).split()
        reasons["empty" if not words else "single" if len(words) == 1 else "used"] += 1
    assert counts.read == len(texts) and set(counts.dropped) <= {"empty", "single_word"}
    assert counts.dropped["empty"] == reasons["empty"]
    if objective == "none":
        assert counts.used == len(texts) - reasons["empty"]
    assert counts.dropped["single_word"] <= reasons["single"]


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_documents_or_problems(run, tmp_path_factory, content, whole):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(content)
    counts = run(path, document_per="file" if whole else "block").counts
    assert set(counts.dropped) <= {"empty", "single_word", "invalid_utf8"}
