import bz2
import gzip
import hashlib
import io
import json
import os
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import ConfigError, InputConfig
from data_prep import corpus
from data_prep.corpus import Document, Unit, list_sources, read_documents, split_units


def source_of(path: Path, **settings):
    (source,) = list_sources((InputConfig(**{"kind": "text", "path": str(path), **settings}),))
    return source


def documents_of(path: Path, **settings) -> list[Document]:
    return [document for unit in split_units([source_of(path, **settings)]) for document in read_documents(unit)]


def texts_of(path: Path, **settings) -> list[str]:
    return [document.text for document in documents_of(path, **settings)]


def plain_blocks(content: bytes) -> list[tuple[str, int]]:
    """(text, offset) of the runs of lines that are not blank."""
    found, block, begin, offset = [], b"", 0, 0
    for line in [*lines_of(content), b"\n"]:
        if line.strip():
            if not block:
                begin = offset
            block += line
        elif block:
            found.append((block.removeprefix(b"\xef\xbb\xbf").decode().replace("\r\n", "\n"), begin))
            block = b""
        offset += len(line)
    return found


def lines_of(content: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def read_in_units(path: Path, cuts: list[int], **settings) -> list[Document]:
    source = source_of(path, **settings)
    edges = [0, *sorted(cuts), source.bytes]
    units = [Unit(source, begin, end, end - begin) for begin, end in pairwise(edges) if end > begin]
    return [document for unit in units for document in read_documents(unit)]


line = st.sampled_from([b"a", b"bc d", b"", b" ", b"\t \r", b"e\r", b"\xc3\xa9", b"long line of text"])


@given(
    st.lists(line, max_size=25),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=6),
    st.integers(1, 9),
)
@example([b"a"], False, False, [1], 1)
@example([b"a", b"", b"bc d"], True, True, [2, 3, 4], 2)
@settings(max_examples=1000, deadline=None)
def test_text_blocks_do_not_depend_on_the_units(tmp_path_factory, lines, final_newline, mark, cuts, read_bytes):
    content = (b"\xef\xbb\xbf" if mark else b"") + b"\n".join(lines) + (b"\n" if final_newline and lines else b"")
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "READ_BYTES", read_bytes)
        found = read_in_units(path, [cut for cut in cuts if cut < len(content)])
    assert [(document.text, document.place) for document in found] == [
        (text, f"blocks.txt:{begin}") for text, begin in plain_blocks(content)
    ]


def test_every_cut_into_single_bytes_gives_the_same_blocks(tmp_path):
    content = b"one\ntwo\n\n \n\nthree\r\n\r\nfour\n\t\nfive"
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert read_in_units(path, list(range(1, len(content)))) == documents_of(path)
    assert texts_of(path) == ["one\ntwo\n", "three\n", "four\n", "five"]


@given(
    st.lists(st.sampled_from(['{"text": "a"}', "", " ", '{"text": "\u00e9\\n\\nb"}', "{broken"]), max_size=15),
    st.lists(st.integers(0, 150)),
)
@settings(max_examples=300, deadline=None)
def test_json_lines_do_not_depend_on_the_units(tmp_path_factory, lines, cuts):
    content = "\n".join(lines).encode()
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    found = read_in_units(path, [cut for cut in cuts if cut < len(content)], kind="jsonl")
    expected = []
    for text in filter(str.strip, lines):
        expected.append((text, "broken_json") if text == "{broken" else (json.loads(text)["text"].rstrip("\n"), None))
    assert [(document.text.rstrip("\n"), document.problem) for document in found] == expected


def test_windows_line_ends_and_a_byte_order_mark_are_dropped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree")
    assert texts_of(path) == ["one\ntwo\n", "three"]


def test_a_file_can_be_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert texts_of(path, document_per="file") == ["one\n\ntwo\n"]


def test_bytes_that_are_no_unicode_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nb\xffd\n\ngood again\n")
    assert [(document.problem, document.place) for document in documents_of(path)] == [
        (None, "a.txt:0"),
        ("invalid_utf8", "a.txt:6"),
        (None, "a.txt:11"),
    ]


def test_bad_json_lines_are_named_and_the_others_read(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        '{"body": "one"}',
        '{"body": ',
        "[1]",
        '{"text": "x"}',
        '{"body": 5}',
        '{"body": null}',
        "[" * 100_000,
        '{"body": "half \\ud800 pair"}',
        '{"body": "pair \\ud83d\\ude00"}',
        '{"body": ""}',
    ]
    path.write_text("\ufeff" + "\n".join(lines))
    found = documents_of(path, kind="jsonl", text_field="body")
    assert [document.problem for document in found] == [
        None,
        "broken_json",
        "missing_field",
        "missing_field",
        "missing_field",
        "missing_field",
        "broken_json",
        "invalid_unicode",
        None,
        None,
    ]
    assert [document.text for document in found if not document.problem] == ["one", "pair \U0001f600", ""]
    for document in found:
        document.text.encode()


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_compressed_files_are_read_like_plain_ones(tmp_path, suffix, compress):
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(1000))
    plain, packed = tmp_path / "a.jsonl", tmp_path / f"a.jsonl.{suffix}"
    plain.write_text(lines)
    packed.write_bytes(compress(lines.encode()))
    assert texts_of(packed, kind="jsonl") == texts_of(plain, kind="jsonl")
    text = tmp_path / f"a.txt.{suffix}"
    text.write_bytes(compress(b"one\n\ntwo"))
    assert texts_of(text) == ["one\n", "two"]


def test_a_broken_compressed_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20])
    with pytest.raises(OSError, match=r"a\.jsonl\.gz cannot be read"):
        documents_of(path, kind="jsonl")


def test_parquet_columns_are_read_row_by_row(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"document {number}" for number in range(700)] + [None]
    pq.write_table(pa.table({"id": range(701), "body": texts}), path, row_group_size=100)
    found = documents_of(path, kind="parquet", text_field="body")
    assert [document.text for document in found[:-1]] == texts[:-1]
    assert found[-1].problem == "missing_field" and found[5].place == "a.parquet:5"


def test_a_parquet_file_without_the_column_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(OSError, match=r"a\.parquet cannot be read: it has no column text \(its columns: body\)"):
        documents_of(path, kind="parquet")
    path.write_bytes(b"no parquet")
    with pytest.raises(OSError, match=r"a\.parquet cannot be read"):
        documents_of(path, kind="parquet")


def test_wikiextractor_articles_are_documents(tmp_path):
    (tmp_path / "AA").mkdir()
    path = tmp_path / "AA" / "wiki_00"
    path.write_text(
        '<doc id="1" url="u" title="One">\nOne\n\nFirst article.\n\n</doc>\nstray\n'
        '<doc id="2" url="u" title="Two">\nTwo\n<not a doc>\n</doc>\n<doc id="3" title="Cut">\nunfinished\n'
    )
    found = documents_of(tmp_path / "**" / "wiki_*", kind="wikiextractor")
    assert [document.text for document in found[:2]] == ["One\n\nFirst article.\n\n", "Two\n<not a doc>\n"]
    assert [(document.text, document.problem) for document in found[2:]] == [("unfinished\n", "unclosed_article")]
    assert found[0].place == "AA/wiki_00:0"


MODULE = '''raise RuntimeError("imported")
"""not a docstring"""


class Thing:
    """A thing.

    >>> Thing()
    <Thing>

    Heading
    -------
    More about it.
    """

    async def first(self):
        """First method."""

        def inner():
            "Inner function."


def nothing():
    pass
'''


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "explosive_package"
    (root / "below").mkdir(parents=True)
    (root / "__init__.py").write_text('"""The package."""\nraise RuntimeError("imported")\n')
    (root / "below" / "module.py").write_text(MODULE)
    (root / "broken.py").write_text("def (:\n")
    (root / "empty.py").write_text("x = 1\n")
    (root / "half.py").write_text('"""Half a pair: \\ud800"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    return root


def test_docstrings_are_read_without_importing_the_package(package):
    (source,) = list_sources((InputConfig(kind="docstrings", path="explosive_package"),))
    found = {document.place: document for unit in split_units([source]) for document in read_documents(unit)}
    assert "explosive_package" not in sys.modules
    assert found["explosive_package/__init__.py:0"].text == "The package."
    expected = "A thing.\n\nHeading\nMore about it.\n\nFirst method.\n\nInner function."
    assert found["explosive_package/below/module.py:0"].text == expected
    assert found["explosive_package/broken.py:0"].problem == "syntax_error"
    assert found["explosive_package/half.py:0"].problem == "invalid_unicode"
    assert len(found) == 4


def test_docstrings_do_not_depend_on_the_units():
    (source,) = list_sources((InputConfig(kind="docstrings", path="_pytest"),))
    whole = [document for unit in split_units([source]) for document in read_documents(unit)]
    count = len(source.modules)
    single = [Unit(source, number, number + 1, 1) for number in range(count)]
    assert [document for unit in single for document in read_documents(unit)] == whole
    assert len(whole) > 30 and not any(document.problem for document in whole)


@pytest.mark.parametrize("name", ["no_such_package_here", "os", "networkx.algorithms", "not a name"])
def test_packages_that_cannot_be_read_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"data\.inputs\.1\.path: {name.split()[0]} is not an installed"):
        list_sources((InputConfig(kind="docstrings", path="networkx"), InputConfig(kind="docstrings", path=name)))


def test_a_glob_without_matches_is_refused_by_name(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match=r"data\.inputs\.0\.path: no file matches .*/\*\.txt$"):
        list_sources((InputConfig(kind="text", path=str(tmp_path / "*.txt")),))


def test_names_of_files_do_not_depend_on_where_the_corpus_lies(tmp_path):
    names = []
    for folder in ("here", "there/deeper"):
        (tmp_path / folder / "a" / "b").mkdir(parents=True)
        (tmp_path / folder / "a" / "b" / "x.txt").write_text("text")
        names.append(
            [source.name for source in list_sources((InputConfig(kind="text", path=f"{tmp_path}/{folder}/**/*.txt"),))]
        )
    assert names == [["a/b/x.txt"]] * 2


def test_identity_of_a_file_follows_its_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = source_of(path)
    assert source_of(path).identity == before.identity
    assert before.sha256() == hashlib.sha256(b"one").hexdigest()
    path.write_text("three")
    assert source_of(path).identity != before.identity


def write_texts(path: Path, count: int) -> None:
    """A file of `count` documents "one"."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": ["one"] * count}), path)
    else:
        content = b'{"text": "one"}\n' * count if "jsonl" in path.name else b"one\n\n" * count
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize(
    ("name", "kind"), [("a.txt", "text"), ("a.txt.gz", "text"), ("a.jsonl", "jsonl"), ("a.parquet", "parquet")]
)
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_file_that_changes_after_it_was_listed_is_named(tmp_path, name, kind, when):
    path = tmp_path / name
    write_texts(path, 1000)
    (unit,) = split_units([source_of(path, kind=kind)])
    documents = iter(read_documents(unit))
    if when == "while":
        assert next(documents).text.strip() == "one"
    write_texts(path, 999)
    for read in (lambda: list(documents), unit.source.sha256):
        with pytest.raises(OSError, match=rf"{name} changed while it was read: run the same command again"):
            read()


def test_a_file_that_was_replaced_by_one_of_its_size_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = source_of(path)
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1))
    with pytest.raises(OSError, match="changed while it was read"):
        list(read_documents(split_units([source])[0]))
    path.unlink()
    with pytest.raises(OSError, match=r"a\.txt cannot be read: .*No such file"):
        source.sha256()


def test_units_cover_a_file_without_overlap(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    large = replace(source_of(path), bytes=100 * 2**20 + 7)
    units = split_units([large])
    assert len(units) > 1
    assert [unit.begin for unit in units] == [0, *(unit.end for unit in units[:-1])]
    assert units[-1].end == large.bytes == sum(unit.bytes for unit in units)
    assert len({unit.identity for unit in units}) == len(units)


def test_a_file_is_parted_alike_beside_another_that_was_added(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("x\n")
    first, second = (source_of(tmp_path / name) for name in "ab")
    large = replace(first, bytes=600 * 2**20)
    alone = [unit.identity for unit in split_units([large])]
    beside = [unit.identity for unit in split_units([replace(second, bytes=70 * 2**20), large])]
    assert 128 <= len(alone) <= 256 and set(alone) < set(beside)


def test_parquet_rows_that_are_no_unicode_are_named(tmp_path):
    texts = pa.array([b"one", b"\xff\xfe", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    found = documents_of(tmp_path / "a.parquet", kind="parquet")
    assert [document.problem for document in found] == [None, "invalid_utf8", None]
    assert [document.text for document in found][::2] == ["one", "three"]


def test_files_of_one_name_in_two_inputs_are_told_apart(tmp_path):
    inputs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text("same")
        inputs.append(InputConfig(kind="text", path=str(tmp_path / name / "*.txt")))
    assert len({source.name for source in list_sources(tuple(inputs))}) == 2


def test_text_without_blank_lines_is_read_about_once(tmp_path, monkeypatch):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a sentence of some words.\n" * 4000)
    monkeypatch.setattr(corpus, "READ_BYTES", 1000)
    read = 0

    class Counted(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal read
            content = super().read(size)
            read += len(content)
            return content

    monkeypatch.setattr(corpus, "opened", lambda place: Counted(place))
    found = read_in_units(path, [*range(10_000, 100_000, 10_000)])
    assert len(found) == 1 and read < 3 * path.stat().st_size


@pytest.mark.parametrize("blank", ["\n", " \n", "\t\t\r\n"])
@pytest.mark.parametrize("end", ["", "Last.\n"])
def test_a_huge_gap_takes_linear_time_and_parts_documents(tmp_path, blank, end):
    taken = []
    for size in (300_000, 1_200_000):
        (tmp_path / "gap.txt").write_text("First.\n" + blank * (size // len(blank)) + end)
        begin = time.process_time()
        units = split_units(list_sources((InputConfig(kind="text", path=str(tmp_path / "gap.txt")),)))
        texts = [document.text.strip() for unit in units for document in read_documents(unit)]
        taken.append(time.process_time() - begin)
        assert texts == ["First.", *([end.strip()] if end else [])]
    assert taken[1] < 0.5 + 10 * taken[0]


def test_a_file_whose_name_is_no_utf8_is_refused_by_name(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("A text.\n")
    with pytest.raises(ConfigError, match=r"data.inputs.0.path: the name of b'.*/caf\\xe9.txt' is not UTF-8: rename"):
        list_sources((InputConfig(kind="text", path=str(tmp_path / "*.txt")),))


def test_equal_paths_below_different_folders_are_told_apart(tmp_path):
    for name in ("a/x.txt", "a/1/x.txt", "b/x.txt", "c/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("The same.\n")
    patterns = ["a/**/*.txt", "b/*.txt", "c/*.txt"]
    inputs = [InputConfig(kind="text", path=str(tmp_path / pattern)) for pattern in patterns]
    inputs += [InputConfig(kind="docstrings", path="yaml yaml"), InputConfig(kind="docstrings", path="yaml")]
    units = split_units(list_sources(tuple(inputs)))
    places = [document.place for unit in units for document in read_documents(unit)]
    assert len(places) > 7 and len(set(places)) == len(places)
    assert len({unit.identity for unit in units}) == len(units)
