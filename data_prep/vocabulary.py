"""The SentencePiece vocabulary: training it, checking it, and encoding whole documents with it.

Ids are ALBERT's: `<pad>` 0, `<unk>` 1, `[CLS]` 2, `[SEP]` 3, `[MASK]` 4 are inserted by id and never parsed from
text; eight user-defined symbols follow. Documents are encoded whole, which is faster than sentence by sentence:
pieces never cross white space, so sentence ends are found by counting the pieces that begin a word.
"""

import hashlib
import io
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece

from configs.schema import ConfigError, DataConfig
from data_prep.files import reached
from data_prep.text import MAX_WORD_CHARACTERS, WORD_SEPARATOR, normalization_rules, segments_of
from data_prep.words import WordIds

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
USER_DEFINED_SYMBOLS = ("(", ")", '"', "-", ".", "–", "£", "€")
FIRST_ORDINARY_ID = len(SPECIAL_PIECES)
BORDER_CHARACTERS = 16
"""More than any rule of normalisation takes at once."""
NO_NORMALIZATION = bytes([0x1A, 2, 0x12, 0])
"""Appended to a model it empties `normalizer_spec.precompiled_charsmap`: in protobuf the last of two values counts."""

TRAINING_THREADS = 4
"""Fixed, because the trained pieces depend on it."""
MAX_SENTENCE_BYTES = 4192
"""SentencePiece skips longer training lines."""
MAX_LINE_PART = 1000
"""Characters that are sure to fit in a training line."""
PART_CHARACTERS = 2**20
"""A longer document is encoded in parts, which bounds the memory."""
ENCODE_CHARACTERS = 50_000
"""Characters encoded at once: bounds the memory of the lattice, far above the cost of a call."""
UNSPACED_SCRIPTS = frozenset(
    ["CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"]
)


def train_vocabulary(sentences: Iterable[str], data: DataConfig, folder: Path) -> bytes:
    """The bytes of a `spiece.model` trained on `sentences`; `folder` holds a temporary file.

    Changes the working directory to `folder`, so that no path gets into the model: run it in a process of its own.
    Raises `ConfigError` where the corpus cannot carry `vocab.size`, naming the largest (or smallest) that works.
    """
    os.chdir(folder)
    rules = Path("normalization.tsv")
    rules.write_text(normalization_rules(data.lower_case, data.strip_accents), encoding="utf-8")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for sentence in sentences for line in _training_lines(sentence)),
            model_writer=model,
            model_type="unigram",
            vocab_size=data.vocab.size,
            character_coverage=data.vocab.character_coverage,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=-1,
            eos_id=-1,
            control_symbols=list(SPECIAL_PIECES[2:]),
            user_defined_symbols=list(USER_DEFINED_SYMBOLS),
            normalization_rule_tsv=str(rules),
            num_threads=TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(_training_failure(str(error), data.vocab.size)) from None
    finally:
        rules.unlink()
    return model.getvalue()


def _training_lines(sentence: str) -> Iterable[str]:
    """`sentence` without line breaks and NUL, in lines that SentencePiece does not skip for their length.

    A word longer than a line is cut if its script is written without spaces, else left out: no language has it.
    """
    line: list[str] = []
    room = MAX_SENTENCE_BYTES
    for word in sentence.replace("\0", "").split():
        parts = [word]
        if len(word) > MAX_LINE_PART and _is_unspaced(word[0]):
            parts = [word[begin : begin + MAX_LINE_PART] for begin in range(0, len(word), MAX_LINE_PART)]
        for part in parts:
            encoded = part.encode("utf-8", "replace")
            if len(encoded) >= MAX_SENTENCE_BYTES:
                continue
            if len(encoded) >= room:
                yield " ".join(line)
                line, room = [], MAX_SENTENCE_BYTES
            line.append(encoded.decode("utf-8"))
            room -= len(encoded) + 1
    if line:
        yield " ".join(line)


def _training_failure(message: str, size: int) -> str:
    too_high = re.search(r"Vocabulary size too high.*<= (\d+)", message)
    if too_high:
        largest = int(too_high[1])
        return f"data.vocab.size {size} is too large for this corpus: the largest that works is {largest}"
    too_low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if too_low:
        return (
            f"data.vocab.size {size} is too small for this corpus, whose characters alone need {too_low[1]}: "
            "raise it or lower data.vocab.character_coverage"
        )
    return f"SentencePiece could not train a vocabulary of {size} pieces (too little text?): {message}"


class EncodedDocument(NamedTuple):
    """`normalized`: the text as the model sees it, words parted by single spaces. `ids`: [tokens]. `ends`: int64
    [sentences], ascending, the index after each sentence's last token."""

    normalized: str
    ids: np.ndarray
    ends: np.ndarray


class Vocabulary:
    """A `spiece.model` in use: encoding, word starts, identity."""

    def __init__(self, model: bytes, source: str = "spiece.model"):
        """Check that `model` has ALBERT's ids; raises `ConfigError` naming `source` if it cannot be used."""
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ConfigError(f"{source} is not a SentencePiece model") from None
        self.size = self._processor.get_piece_size()
        for index, piece in enumerate(SPECIAL_PIECES):
            found = self._processor.id_to_piece(index) if index < self.size else "nothing"
            if found != piece:
                raise ConfigError(
                    f"{source} has {found} at id {index} where ALBERT has {piece}: not an ALBERT vocabulary"
                )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Vocabulary":
        try:
            with reached(path).open("rb") as file:
                return cls(file.read(), source=str(path))
        except OSError as error:
            raise ConfigError(f"vocabulary {path} cannot be read: {error.strerror or error}") from None

    @cached_property
    def digest(self) -> str:
        """sha256 of the model's bytes."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def id_dtype(self) -> type[np.integer]:
        return np.uint16 if self.size <= 65535 else np.int32

    @cached_property
    def pieces(self) -> list[str]:
        return [self._processor.id_to_piece(index) for index in range(self.size)]

    @cached_property
    def _begins_with_separator(self) -> np.ndarray:
        return np.array([piece.startswith(WORD_SEPARATOR) for piece in self.pieces])

    @cached_property
    def word_starts(self) -> np.ndarray:
        """uint8 [size], for whole-word masking: 1 where a piece starts a word, 2 for the bare separator, else 0.

        A word starts at `▁`, at a digit, at a lone mark, and at every piece of a script written without spaces;
        what follows a bare separator belongs to its word.
        """
        starts = np.array([_starts_word(piece) for piece in self.pieces], dtype=np.uint8)
        starts[[index for index, piece in enumerate(self.pieces) if piece == WORD_SEPARATOR]] = 2
        return starts

    def listing(self) -> str:
        """SentencePiece's `.vocab` file: a piece and its score a line."""
        scores = (self._processor.get_score(index) for index in range(self.size))
        return "".join(f"{piece}\t{score:g}\n" for piece, score in zip(self.pieces, scores, strict=True))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text.replace("\0", ""))

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(index) for index in ids])

    def normalize(self, text: str) -> str:
        """`text` as the model sees it, words parted by single spaces."""
        return self._processor.normalize(text.replace("\0", "")).replace(WORD_SEPARATOR, " ").strip()

    @cached_property
    def _pieces_keep_within_words(self) -> bool:
        """Whether a text's ids are those of its words: no piece crosses white space, a lone separator is a piece."""
        crosses = any(WORD_SEPARATOR in piece[1:] for piece in self.pieces)
        return self._parts_words and not crosses and WORD_SEPARATOR in self.pieces

    @cached_property
    def _parts_words(self) -> bool:
        """Whether every word of a normalised text begins with a separator."""
        return self._processor.normalize(" a  b ") == f"{WORD_SEPARATOR}a{WORD_SEPARATOR}b"

    @cached_property
    def _piece_characters(self) -> np.ndarray:
        """int64 [size]: how many characters of the text a piece stands for, where it stands for itself."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    @cached_property
    def _stands_for_itself(self) -> np.ndarray:
        """bool [size]: whether a piece is the text it stands for; neither unknown characters nor bytes of one are."""
        model = self._processor
        return np.array([not (model.is_unknown(index) or model.is_byte(index)) for index in range(self.size)])

    @cached_property
    def _as_it_stands(self) -> sentencepiece.SentencePieceProcessor:
        """The model for words that are normalised already: twice is not the same, what is dropped may part quotes."""
        return sentencepiece.SentencePieceProcessor(model_proto=self.model + NO_NORMALIZATION)

    @cached_property
    def _word_ids(self) -> WordIds:
        as_it_stands = self._as_it_stands
        return WordIds(lambda words: as_it_stands.encode(words, num_threads=1), self.pieces, self.id_dtype)

    def encode_document(self, text: str, language: str) -> "EncodedDocument":
        return self.encode_documents([text], language)[0]

    def encode_documents(self, texts: list[str], language: str) -> "list[EncodedDocument]":
        """Each text with the ids that `encode` gives for it; many at once take less time.

        But for rounding: SentencePiece sums scores in float32 from the beginning of a text, we word by word, and about
        one word in a million has two ways to be parted whose scores are that close.
        Runs of more than MAX_WORD_CHARACTERS without white space are parted at sentence ends, or anywhere. A sentence
        end inside a piece goes behind it. Sentences that normalise to nothing are left out.
        """
        if not texts:
            return []
        parts: list[list[str]] = []
        counts = []
        for text in texts:
            found = _parts(segments_of(text.replace("\0", ""), language), PART_CHARACTERS)
            parts += found
            counts.append(len(found))
        if len(parts) > len(texts):
            # A document that is longer than many others together takes its turn in parts.
            encoded = [self._encode_segments([part])[0] for part in parts]
        else:
            encoded = self._encode_segments(parts)
        borders = pairwise(accumulate(counts, initial=0))
        return [_joined(encoded[begin:end]) for begin, end in borders]

    def _encode_segments(self, segments: list[list[str]]) -> "list[EncodedDocument]":
        documents = self._normalized(segments)
        if not self._pieces_keep_within_words:
            return [self._encoded_whole(document) for document in documents]
        if any(2 * WORD_SEPARATOR in document.text for document in documents):
            # An empty word: one document is encoded whole, and not those that came with it.
            if len(documents) == 1:
                return [self._encoded_whole(documents[0])]
            return [self._encode_segments([document])[0] for document in segments]
        words = "".join(document.text for document in documents).split(WORD_SEPARATOR)[1:]
        found = self._word_ids.of(words)
        text_ends = np.cumsum([len(document.text) for document in documents])
        text_begins = (0, *text_ends[:-1])
        sentence_ends = np.concatenate(
            [begin + document.sentence_ends for begin, document in zip(text_begins, documents, strict=True)]
        )
        ends = self._sentence_ends(found.ids, found.counts, found.characters + 1, sentence_ends, words)
        word_borders = np.concatenate(([0], np.searchsorted(np.cumsum(found.characters + 1), text_ends, side="right")))
        token_borders = np.concatenate(([0], np.cumsum(found.counts)))[word_borders]
        ambiguous = np.concatenate(([0], np.cumsum(found.ambiguous)))[word_borders]
        end_borders = np.searchsorted(ends, token_borders, side="right").tolist()
        encoded = []
        for number, (document, (begin, end)) in enumerate(
            zip(documents, pairwise(token_borders.tolist()), strict=True)
        ):
            if ambiguous[number + 1] > ambiguous[number]:
                encoded.append(self._encoded_whole(document))
            else:
                own_ends = ends[end_borders[number] : end_borders[number + 1]] - begin
                encoded.append(EncodedDocument(_spaced(document.text), found.ids[begin:end], own_ends))
        return encoded

    def _normalized(self, documents: list[list[str]]) -> "list[NormalizedDocument]":
        """Documents of segments, normalised; what white space does not part stays together."""
        segments = [segment for document in documents for segment in document]
        all_normal = iter(self._processor.normalize(segments))
        found = []
        for document in documents:
            raw: list[str] = []
            text: list[str] = []
            ends: list[int] = []
            length = word_begin = 0
            parted = True
            for segment, normal in zip(document, all_normal, strict=False):
                parted = parted or segment[0].isspace()
                if not normal.strip(WORD_SEPARATOR):
                    parted = parted or any(map(str.isspace, segment))
                    continue
                follows_space, parted = parted, segment[-1].isspace()
                if not follows_space and self._parts_words and length + len(normal) - word_begin <= MAX_WORD_CHARACTERS:
                    # Marks at the border may belong together.
                    border = raw[-1][-BORDER_CHARACTERS:], segment[:BORDER_CHARACTERS]
                    left, right, both = self._processor.normalize([*border, "".join(border)])
                    if both == left + right[1:]:
                        raw[-1] += segment
                        text[-1] += normal[1:]
                        length += len(normal) - 1
                        ends.append(length)
                        continue
                word_begin = length
                raw.append(segment)
                text.append(normal)
                length += len(normal)
                ends.append(length)
            found.append(NormalizedDocument(raw, text, "".join(text), np.array(ends, dtype=np.int64)))
        return found

    def _sentence_ends(
        self, ids: np.ndarray, counts: np.ndarray, lengths: np.ndarray, sentence_ends: np.ndarray, words: list[str]
    ) -> np.ndarray:
        """int64, ascending: the index after each sentence's last token.

        `counts`: tokens of each of `words`, `lengths`: its characters with the separator, `sentence_ends`: in
        characters.
        """
        word_ends = np.cumsum(lengths)
        token_ends = np.cumsum(counts)
        word_numbers = np.searchsorted(word_ends, sentence_ends)
        ends = token_ends[word_numbers]
        within_words = np.flatnonzero(word_ends[word_numbers] != sentence_ends)
        for word, places in groupby(within_words, key=word_numbers.__getitem__):
            first = token_ends[word] - counts[word]
            reached = self._characters_reached(words[word], ids[first : token_ends[word]])
            for place in places:
                within = sentence_ends[place] - (word_ends[word] - lengths[word])
                ends[place] = min(first + np.searchsorted(reached, within) + 1, token_ends[word])
        return np.unique(ends)

    def _characters_reached(self, word: str, ids: np.ndarray) -> np.ndarray:
        """int64: how many characters of the separator and `word` are past after each of its pieces `ids`."""
        if not self._stands_for_itself[ids].all():
            offsets = self._as_it_stands.encode(word, out_type="offset_mapping")["offsets"]
            if len(offsets) == len(ids):
                return 1 + np.array([end for _, end in offsets], dtype=np.int64)
        return np.cumsum(self._piece_characters[ids])

    def _encoded_whole(self, document: "NormalizedDocument") -> "EncodedDocument":
        """A document encoded in parts of about ENCODE_CHARACTERS."""
        ids = [np.empty(0, dtype=self.id_dtype)]
        ends = [np.empty(0, dtype=np.int64)]
        total = begin = 0
        for first, last in _groups(document.raw, ENCODE_CHARACTERS):
            normal = "".join(document.parts[first:last])
            inside = document.sentence_ends[np.searchsorted(document.sentence_ends, begin, side="right") :] - begin
            inside = inside[inside <= len(normal)]
            group_ids, group_ends = self._encoded_group(
                document.raw[first:last], document.parts[first:last], normal, inside
            )
            ids.append(group_ids)
            ends.append(total + group_ends)
            total += len(group_ids)
            begin += len(normal)
        return EncodedDocument(_spaced(document.text), np.concatenate(ids), np.concatenate(ends))

    def _encoded_group(
        self, raw: list[str], parts: list[str], normal: str, sentence_ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, sentence ends) of texts parted by white space, whose normal forms `parts` are joined in `normal`."""
        ids = np.array(self._processor.encode(" ".join(raw)), dtype=self.id_dtype)
        starts = np.flatnonzero(self._begins_with_separator[ids])
        words = normal.split(WORD_SEPARATOR)[1:]
        if self._parts_words and len(starts) == len(words):
            lengths = np.array([len(word) + 1 for word in words], dtype=np.int64)
            return ids, self._sentence_ends(ids, np.diff(starts, append=len(ids)), lengths, sentence_ends, words)
        apart = self._processor.encode(raw, num_threads=1)
        ids = np.array([index for part in apart for index in part], dtype=self.id_dtype)
        return ids, np.cumsum([len(part) for part in apart])


def _parts(segments: list[str], characters: int) -> list[list[str]]:
    """`segments` in parts of little more than `characters`, which end where white space follows; at least one part."""
    parts, size = [[]], 0
    for segment in segments:
        if size > characters and (parts[-1][-1][-1].isspace() or segment[0].isspace()):
            parts.append([])
            size = 0
        parts[-1].append(segment)
        size += len(segment)
    return parts


def _joined(parts: "list[EncodedDocument]") -> "EncodedDocument":
    if len(parts) == 1:
        return parts[0]
    offsets = accumulate((len(part.ids) for part in parts[:-1]), initial=0)
    return EncodedDocument(
        " ".join(part.normalized for part in parts if part.normalized),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([offset + part.ends for offset, part in zip(offsets, parts, strict=True)]),
    )


class NormalizedDocument(NamedTuple):
    """`raw`: texts that white space parts, one or several sentences each. `parts`: their normal forms. `text`: those
    joined. `sentence_ends`: int64, ascending, in characters of `text`."""

    raw: list[str]
    parts: list[str]
    text: str
    sentence_ends: np.ndarray


def _spaced(normalized: str) -> str:
    return normalized.replace(WORD_SEPARATOR, " ").strip()


def _groups(texts: list[str], characters: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of consecutive texts of at most about `characters` together."""
    first, size = 0, 0
    for index, text in enumerate(texts):
        if size and size + len(text) > characters:
            yield first, index
            first, size = index, 0
        size += len(text)
    if texts:
        yield first, len(texts)


def _starts_word(piece: str) -> bool:
    if piece.startswith(WORD_SEPARATOR) or piece == SPECIAL_PIECES[UNK]:
        return True
    if len(piece) == 1 and not piece.isalnum():
        return True
    return any(character.isdigit() or _is_unspaced(character) for character in piece)


def _is_unspaced(character: str) -> bool:
    """Whether `character` is a letter of a script written without spaces between words."""
    return ord(character) > 0x0E00 and unicodedata.name(character, "").split(" ")[0].split("-")[0] in UNSPACED_SCRIPTS
