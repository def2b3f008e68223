"""From one document to its rows in the shards; from a shard's rows, gathered from everywhere, to the finished shard.

This is the whole content of data preparation, with no engine in it: the Beam job only says who calls what.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.schema import DataConfig
from data_prep.corpus import Document
from data_prep.masking import draw_masks
from data_prep.pairs import IN_ORDER, Cut, running_texts, sentence_pairs
from data_prep.ragged import concatenated_ranges
from data_prep.randomness import digest64, draws, uniforms
from data_prep.shards import shard_schema
from data_prep.text import filter_reason
from data_prep.vocabulary import CLS, SEP, UNK, EncodedDocument, Vocabulary

EXAMPLES_VERSION = 3
"""Raised when the same input and settings give other examples, or work on its way to them another layout: what older
code left is done anew."""
RANDOM_B = 1
"""NSP's label for a B from another document."""
ROW_TOKENS = 24
"""What a row holds in memory besides its ids, in the space of so many of them."""
ROWS_AT_ONCE = 4096
CHARACTERS_AT_ONCE = 2**19
BAD_SAMPLES = 5
BAD_SAMPLE_CHARACTERS = 80


TEXT_COUNTS = ("words", "tokens", "unknown_tokens", "truncated_tokens")
"""What is counted of documents: their first row holds it, but each its own truncated tokens, so that what is dropped
with duplicates is not counted."""


@dataclass
class Counts:
    """What became of documents; counts of separate pieces of work add up."""

    read: int = 0
    used: int = 0
    dropped: Counter = field(default_factory=Counter)
    bad_samples: list[dict] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        self.read += other.read
        self.used += other.used
        self.dropped.update(other.dropped)
        self.bad_samples = (self.bad_samples + other.bad_samples)[:BAD_SAMPLES]


def spill_schema(vocabulary_size: int) -> pa.Schema:
    """Columns of rows on their way to their shard: the shard's, `precedence` among rows of equal documents, and
    TEXT_COUNTS."""
    columns = [("precedence", pa.uint64()), *((name, pa.uint32()) for name in TEXT_COUNTS)]
    schema = shard_schema(vocabulary_size, static_masks=False)
    return pa.schema([*schema, *(pa.field(name, kind, nullable=False) for name, kind in columns)])


def shard_count(data: DataConfig) -> tuple[int, int]:
    """(train shards, validation shards): validation gets its share of `data.shards`, at least one."""
    return data.shards, max(1, round(data.shards * data.validation_fraction))


class ExampleMaker:
    """Turns documents into rows, kept until `take_rows`; shards are numbered train first, then validation.

    Documents are worked on many at a time, for numpy takes about as long for one as for a hundred. `tokens` is the
    memory that the kept rows hold, in the space of so many ids: call `take_rows` when it is large. `examples` counts
    all rows made so far.
    """

    def __init__(self, vocabulary: Vocabulary, data: DataConfig, seed: int):
        self._vocabulary = vocabulary
        self._data = data
        self._seed = seed
        self._schema = spill_schema(vocabulary.size)
        self._train_shards, self._validation_shards = shard_count(data)
        self._begins_word = vocabulary.word_starts != 0
        self._counts = Counts()
        self.examples = 0
        self._start_documents()
        self._start_rows()

    def _start_documents(self) -> None:
        self._documents: list[Document] = []
        self._characters = 0

    def _start_rows(self) -> None:
        self._ids: list[np.ndarray] = []
        self._rows: list[tuple[np.ndarray, ...]] = []
        self.tokens = 0

    @property
    def counts(self) -> Counts:
        """What became of the documents added so far."""
        self._make_rows()
        return self._counts

    def add(self, document: Document) -> None:
        """Make the examples of `document`, or count why there are none."""
        self._counts.read += 1
        reason = document.problem or filter_reason(document.text, self._data.filters)
        if reason is None:
            self._documents.append(document)
            self._characters += len(document.text)
            if self._characters >= CHARACTERS_AT_ONCE:
                self._make_rows()
            return
        self._counts.dropped[reason] += 1
        if document.problem and len(self._counts.bad_samples) < BAD_SAMPLES:
            sample = {"place": document.place, "kind": document.problem, "text": document.text[:BAD_SAMPLE_CHARACTERS]}
            self._counts.bad_samples.append(sample)

    def _make_rows(self) -> None:
        """Turn the documents that wait into rows."""
        data, counts = self._data, self._counts
        encoded = self._vocabulary.encode_documents([document.text for document in self._documents], data.language)
        both = [(document, found) for document, found in zip(self._documents, encoded, strict=True) if len(found.ids)]
        if len(encoded) > len(both):
            counts.dropped["empty"] += len(encoded) - len(both)
        self._start_documents()
        if not both:
            return
        encoded = [found for _, found in both]
        identities = [
            digest64(found.normalized) if data.deduplicate else digest64(found.normalized, document.place)
            for document, found in both
        ]
        cut = self._cut(encoded, [digest64(self._seed, "pairs", identity) for identity in identities])
        used = int(np.count_nonzero(cut.counts))
        counts.used += used
        if used < len(both):
            counts.dropped["single_word"] += len(both) - used
        if used:
            self._lay_out_rows(encoded, cut, identities)

    def _cut(self, documents: list[EncodedDocument], keys: list[int]) -> Cut:
        data = self._data
        ends = [document.ends for document in documents]
        keys = np.array(keys, dtype=np.uint64)
        if data.sentence_objective == "none":
            return running_texts(ends, keys, data.max_length - 2, data.short_probability)

        def word_begins(number: int) -> np.ndarray:
            return np.flatnonzero(self._begins_word[documents[number].ids])

        swap = data.sentence_objective == "sop"
        return sentence_pairs(ends, word_begins, keys, data.max_length - 3, data.short_probability, swap)

    def _lay_out_rows(self, documents: list[EncodedDocument], cut: Cut, identities: list[int]) -> None:
        """Keep the rows of documents: `[CLS] A [SEP] B [SEP]`, or `[CLS] A [SEP]` where B is empty."""
        ids = [document.ids for document in documents]
        sizes = np.array([len(part) for part in ids])
        cls, sep = sizes.sum(), sizes.sum() + 1
        source = np.concatenate((*ids, np.array([CLS, SEP], dtype=ids[0].dtype)))
        ranges = cut.ranges + np.repeat(np.cumsum(sizes) - sizes, cut.counts)[:, None]
        begins, sizes = ranges[:, ::2], np.diff(ranges)[:, ::2]
        has_b = sizes[:, 1] > 0
        lengths = sizes.sum(axis=1) + 2 + has_b
        parts = np.insert(begins, [0, 1, 2], [cls, sep, sep], axis=1)
        part_sizes = np.insert(sizes, [0, 1, 2], 1, axis=1)
        part_sizes[:, 4] = has_b
        for first in range(0, len(lengths), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            self._ids.append(source[concatenated_ranges(parts[some].ravel(), part_sizes[some].ravel())])
        chunks = concatenated_ranges(0, cut.counts).astype(np.uint32)

        def in_first_row(values: list[int]) -> np.ndarray:
            return np.where(chunks == 0, np.repeat(values, cut.counts), 0).astype(np.uint32)

        columns = (
            lengths.astype(np.int32),
            np.where(has_b, 2 + sizes[:, 0], lengths).astype(np.uint16),
            cut.labels,
            np.repeat(np.array(identities, dtype=np.uint64), cut.counts),
            chunks,
            np.repeat(_precedences(documents, cut.counts), cut.counts),
            in_first_row([document.normalized.count(" ") + 1 for document in documents]),
            in_first_row([len(document.ids) for document in documents]),
            in_first_row([int(np.count_nonzero(document.ids == UNK)) for document in documents]),
            cut.truncated.astype(np.uint32),
        )
        self._rows.append(columns)
        self.examples += len(lengths)
        self.tokens += int(lengths.sum()) + len(lengths) * ROW_TOKENS

    def take_rows(self) -> dict[int, pa.RecordBatch]:
        """The rows made so far by shard number, in the shards' schema; starts anew."""
        self._make_rows()
        if not self._rows:
            return {}
        lengths, *others = map(np.concatenate, zip(*self._rows, strict=True))
        values = np.concatenate(self._ids)
        self._start_rows()
        columns = [_flat_lists(values, lengths, self._schema.field(0).type), *map(pa.array, others)]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        shards = self._shards_of(batch["document"].to_numpy(), batch["chunk"].to_numpy())
        order = np.argsort(shards, kind="stable")
        found, firsts = np.unique(shards[order], return_index=True)
        return {
            int(shard): batch.take(pa.array(places))
            for shard, places in zip(found, np.split(order, firsts[1:]), strict=True)
        }

    def _shards_of(self, documents: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        places = _places(documents, chunks)
        validation = uniforms(documents, 0) < self._data.validation_fraction
        train_shard = places % np.uint64(self._train_shards)
        validation_shard = np.uint64(self._train_shards) + places % np.uint64(self._validation_shards)
        return np.where(validation, validation_shard, train_shard).astype(np.int64)


def _precedences(documents: list[EncodedDocument], counts: np.ndarray) -> np.ndarray:
    """uint64 [documents]: which of several documents of the same normalised text is kept, the one with the highest.

    Paragraph breaks and capitals that normalisation takes away may have ended other sentences, so that their rows
    differ. The most rows come first: wherever any of them has a row, the one that is kept has one too.
    """
    digests = [digest64(document.ends.tobytes()) >> 32 for document in documents]
    return (counts.astype(np.uint64) << np.uint64(32)) | np.array(digests, dtype=np.uint64)


@dataclass(frozen=True)
class FinishedShard:
    """`text_counts`: sums of TEXT_COUNTS over the documents whose first row is here, and all rows here."""

    table: pa.Table
    tokens: int
    duplicate_documents: int
    text_counts: dict[str, int]


def finish_shard(batches: list[pa.RecordBatch], vocabulary: Vocabulary, data: DataConfig, seed: int) -> FinishedShard:
    """All rows of one shard, in any order, as its final table: ordered by a hash, duplicates gone, NSP's strangers
    and static masks drawn."""
    table = pa.Table.from_batches(batches, schema=spill_schema(vocabulary.size))
    documents, chunks = table["document"].to_numpy(), table["chunk"].to_numpy()
    order = np.lexsort((~table["precedence"].to_numpy(), chunks, documents, _places(documents, chunks)))
    documents, chunks = documents[order], chunks[order]
    repeated = np.zeros(len(order), dtype=bool)
    repeated[1:] = (documents[1:] == documents[:-1]) & (chunks[1:] == chunks[:-1])
    table = table.take(pa.array(order[~repeated])).combine_chunks()
    text_counts = {name: pc.sum(table[name]).as_py() or 0 for name in TEXT_COUNTS}
    table = table.drop_columns(["precedence", *TEXT_COUNTS])
    if data.sentence_objective == "nsp":
        table = _with_strangers(table, seed)
    if data.masking.mode == "static":
        table = _with_static_masks(table, vocabulary, data, seed)
    tokens = pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 0
    return FinishedShard(table, tokens, int((chunks[repeated] == 0).sum()), text_counts)


def _places(documents: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """uint64: where among all examples one stands, a hash of (document, chunk)."""
    return draws(draws(documents, 1), chunks)


def _ragged(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(values, offsets) of a list column of a table of at most one chunk."""
    column = table[name].combine_chunks()
    return column.values.to_numpy(), column.offsets.to_numpy()


def _with_strangers(table: pa.Table, seed: int) -> pa.Table:
    """NSP: with probability 1/2 an example's B becomes that of another document, of the same length, and its label 1.

    The stranger is the next row of another document in order of B's length, cut to that length at one end by a fair
    coin, so that lengths do not tell the label; where none is longer it is the next shorter one.
    """
    values, offsets = _ragged(table, "input_ids")
    starts = table["segment_b_start"].to_numpy().astype(np.int64)
    documents, chunks = table["document"].to_numpy(), table["chunk"].to_numpy()
    if len(table) and (documents == documents[0]).all():
        return table
    keys = draws(documents, digest64(seed, "nsp"))
    stranger = uniforms(keys, 2 * chunks.astype(np.int64)) < 0.5
    at_front = uniforms(keys, 2 * chunks.astype(np.int64) + 1) < 0.5
    sizes = np.diff(offsets) - starts - 1
    order = np.argsort(sizes, kind="stable")
    rows: list[np.ndarray] = [np.array([])] * len(table)
    labels = np.where(stranger, RANDOM_B, IN_ORDER).astype(np.int8)
    neighbours = _nearest_of_another_document(documents[order])
    for row, other in zip(order, order[neighbours], strict=True):
        begin, end = offsets[row], offsets[row + 1]
        if not stranger[row]:
            rows[row] = values[begin:end]
            continue
        excess = max(0, sizes[other] - sizes[row])
        first = offsets[other] + starts[other] + (excess if at_front[row] else 0)
        b = values[first : first + min(sizes[other], sizes[row])]
        rows[row] = np.concatenate((values[begin : begin + starts[row]], b, values[end - 1 : end]))
    lengths = np.array([len(row) for row in rows])
    table = _with_column(table, "input_ids", _lists(rows, lengths, table.schema.field("input_ids").type))
    return _with_column(table, "sentence_label", pa.array(labels))


def _nearest_of_another_document(documents: np.ndarray) -> np.ndarray:
    """int64: for each place the next place of another document, or if there is none the last one before."""
    changes = np.flatnonzero(documents[1:] != documents[:-1])
    places = np.arange(len(documents))
    run = np.searchsorted(changes, places)
    after = np.append(changes + 1, -1)[run]
    before = np.append(-1, changes)[run]
    return np.where(after >= 0, after, before)


def _with_static_masks(table: pa.Table, vocabulary: Vocabulary, data: DataConfig, seed: int) -> pa.Table:
    """Every example `masking.copies` times, each time masked differently."""
    schema = shard_schema(vocabulary.size, static_masks=True)
    copies = []
    values, offsets = _ragged(table, "input_ids")
    lengths = np.diff(offsets)
    padded = np.zeros((len(table), int(lengths.max(initial=2))), dtype=values.dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = values[offsets[0] : offsets[-1]]
    documents, chunks = table["document"].to_numpy(), table["chunk"].to_numpy()
    for copy in range(data.masking.copies):
        keys = draws(draws(documents, digest64(seed, "masks", copy)), chunks)
        masks = draw_masks(
            padded, lengths, table["segment_b_start"].to_numpy(), keys, vocabulary.word_starts, data.masking
        )
        counts = np.bincount(masks.rows, minlength=len(table))
        columns = [
            *table.columns,
            _flat_lists(masks.columns, counts, schema.field("masked_positions").type),
            _flat_lists(masks.labels, counts, schema.field("masked_labels").type),
            _flat_lists(masks.inputs, counts, schema.field("masked_inputs").type),
            pa.array(np.full(len(table), copy, dtype=np.uint16)),
        ]
        copies.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(copies).combine_chunks()


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    position = table.schema.get_field_index(name)
    return table.set_column(position, table.schema.field(position), column)


def _lists(rows: list[np.ndarray], lengths: np.ndarray, kind: pa.ListType) -> pa.ListArray:
    return _flat_lists(np.concatenate(rows) if rows else np.array([]), lengths, kind)


def _flat_lists(values: np.ndarray, lengths: np.ndarray, kind: pa.ListType) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    flat = pa.array(values.astype(kind.value_type.to_pandas_dtype()))
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind)
