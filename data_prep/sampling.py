"""A bounded sample of documents for the vocabulary, the same whatever the units and the order of work.

The sample is the documents with the smallest keyed hashes, up to `vocab.sample_sentences` sentences. Every unit keeps
its own smallest; merging the units' files in the order of the hashes gives the sample of the whole.
"""

import heapq
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from configs.schema import DataConfig
from data_prep.corpus import Document
from data_prep.files import located
from data_prep.randomness import digest64
from data_prep.text import filter_reason, sentences_of

LINES_BYTES = 2**16
SIZE_BYTES = 24
"""More than the number of a file's bytes takes."""
SENTENCE_BYTES = 250
"""A generous guess at a sentence's share of the input."""


def sampled_documents(documents: Iterable[Document], data: DataConfig, seed: int, rate: float) -> list[tuple[int, str]]:
    """(hash, text) of the documents with the smallest hashes, ascending, each text once.

    Those whose hash is below `rate` of its range, and no more than the sample can need: its sentences are counted
    when it is merged, since splitting all that might be drawn would cost as much as the examples.
    """
    most = data.vocab.sample_sentences * SENTENCE_BYTES
    kept: dict[int, str] = {}
    characters = 0
    for document in documents:
        if document.problem:
            continue
        text = document.text.strip()
        key = digest64(seed, "sample", text)
        if not text or key in kept or key >= rate * 2**64 or filter_reason(text, data.filters):
            continue
        kept[key] = text
        characters += len(text)
        if characters > 2 * most:
            kept = dict(_smallest(kept, most))
            characters = sum(map(len, kept.values()))
    return list(_smallest(kept, most))


def _smallest(documents: dict[int, str], characters: int) -> Iterator[tuple[int, str]]:
    """Those with the smallest hashes that together have `characters`."""
    taken = 0
    for key in sorted(documents):
        if taken >= characters:
            return
        taken += len(documents[key])
        yield key, documents[key]


def sample_content(sample: list[tuple[int, str]]) -> str:
    """A unit's `sample` as its file holds it: how many bytes follow, then [hash, text] as JSON, a line each."""
    lines = "".join(json.dumps([key, text]) + "\n" for key, text in sample)
    return f"{len(lines)}\n{lines}"


def is_whole_sample(path: Path) -> bool:
    """Whether a unit's sample is there, as long as it was written."""
    try:
        with path.open("rb") as file:
            first = file.readline(SIZE_BYTES)
        return first.endswith(b"\n") and len(first) + int(first) == path.stat().st_size
    except (FileNotFoundError, ValueError):
        return False


def merged_sample(paths: Iterable[Path], data: DataConfig) -> Iterator[str]:
    """The sentences of the whole sample, from the units' files."""
    taken, last = 0, None
    for key, text in heapq.merge(*map(_lines, paths)):
        if key == last:
            continue
        if taken >= data.vocab.sample_sentences:
            return
        last = key
        sentences = sentences_of(text, data.language)
        taken += len(sentences)
        yield from sentences


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """A unit's sample; the file is open only while some of it is read, for there may be many thousand units."""
    place, offset = located(path), 0
    while True:
        # The files of fsspec have no limit to readlines.
        with place.open("rb") as raw, io.BufferedReader(raw) as file:
            file.seek(offset)
            offset = offset or len(file.readline())
            lines = file.readlines(LINES_BYTES)
        if not lines:
            return
        offset += sum(map(len, lines))
        for line in lines:
            key, text = json.loads(line.decode("utf-8", "surrogatepass"))
            yield key, text
