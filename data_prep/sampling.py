"""A bounded sample of documents for the vocabulary, the same whatever the units and the order of work.

The sample is the documents with the smallest keyed hashes, up to `vocab.sample_sentences` sentences. Every unit keeps
its own smallest; merging the units' files in the order of the hashes gives the sample of the whole.
"""

import heapq
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from configs.schema import DataConfig
from data_prep.corpus import Document
from data_prep.files import located
from data_prep.randomness import digest64
from data_prep.text import filter_reason, sentences_of


def sampled_documents(
    documents: Iterable[Document], data: DataConfig, seed: int, rate: float
) -> list[tuple[int, list[str]]]:
    """(hash, sentences) of the documents with the smallest hashes, ascending, each text once."""
    kept: dict[int, list[str]] = {}
    sentences = 0
    for document in documents:
        if document.problem:
            continue
        text = document.text.strip()
        key = digest64(seed, "sample", text)
        if not text or key in kept or key >= rate * 2**64 or filter_reason(text, data.filters):
            continue
        kept[key] = sentences_of(text, data.language)
        sentences += len(kept[key])
        if sentences > 2 * data.vocab.sample_sentences:
            kept = dict(_smallest(sorted(kept.items()), data.vocab.sample_sentences))
            sentences = sum(len(found) for found in kept.values())
    return list(_smallest(sorted(kept.items()), data.vocab.sample_sentences))


def merged_sample(paths: Iterable[Path], sample_sentences: int) -> Iterator[str]:
    """The sentences of the whole sample, from the units' files (lines of JSON: [hash, sentences])."""
    files = [_lines(path) for path in paths]
    for _, sentences in _smallest(heapq.merge(*files), sample_sentences):
        yield from sentences


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    with located(path).open(encoding="utf-8", errors="surrogatepass") as file:
        for line in file:
            key, sentences = json.loads(line)
            yield key, sentences


def _smallest(documents: Iterable[tuple[int, list[str]]], sample_sentences: int) -> Iterator[tuple[int, list[str]]]:
    """The first of `documents` (ascending, repeats dropped) that together have `sample_sentences` sentences."""
    taken, last = 0, None
    for key, sentences in documents:
        if key == last:
            continue
        if taken >= sample_sentences:
            return
        last = key
        taken += len(sentences)
        yield key, sentences
