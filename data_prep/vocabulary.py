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
from pathlib import Path

import numpy as np
import sentencepiece

from configs.schema import ConfigError, DataConfig
from data_prep.files import opened
from data_prep.text import WORD_SEPARATOR, normalization_rules, sentences_of

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
USER_DEFINED_SYMBOLS = ("(", ")", '"', "-", ".", "–", "£", "€")
FIRST_ORDINARY_ID = len(SPECIAL_PIECES)

TRAINING_THREADS = 4
"""Fixed, because the trained pieces depend on it."""
MAX_SENTENCE_BYTES = 4192
"""SentencePiece skips longer training lines."""
MAX_LINE_PART = 1000
"""Characters that are sure to fit in a training line."""
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
            with opened(path) as file:
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

    def encode_document(self, text: str, language: str) -> tuple[str, np.ndarray, np.ndarray]:
        """`text` as (normalised text, ids, sentence ends).

        ids is [tokens] in `id_dtype`; sentence ends is int64 [sentences], ascending, each the index after a
        sentence's last token. Sentences that normalise to nothing are left out.
        """
        ids = [np.empty(0, dtype=self.id_dtype)]
        ends = [np.empty(0, dtype=np.int64)]
        normalized: list[str] = []
        total = 0
        for raw in _groups(sentences_of(text.replace("\0", ""), language), ENCODE_CHARACTERS):
            # Normalising twice is not the same: what is dropped may part two quotes.
            both = zip(raw, self._processor.normalize(raw), strict=True)
            both = [(sentence, normal) for sentence, normal in both if normal.strip(WORD_SEPARATOR)]
            if both:
                group_ids, group_ends = self._encode_sentences(*map(list, zip(*both, strict=True)))
                ids.append(group_ids)
                ends.append(total + group_ends)
                normalized += [normal for _, normal in both]
                total += len(group_ids)
        normalized_text = "".join(normalized).replace(WORD_SEPARATOR, " ").strip()
        return normalized_text, np.concatenate(ids), np.concatenate(ends)

    def _encode_sentences(self, raw: list[str], normal: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, sentence ends) of sentences and their normalised forms, none of them empty."""
        ids = np.array(self._processor.encode(" ".join(raw)), dtype=self.id_dtype)
        words = np.cumsum([sentence.count(WORD_SEPARATOR) for sentence in normal])
        starts = np.flatnonzero(self._begins_with_separator[ids])
        if len(starts) == words[-1]:
            return ids, np.append(starts[words[:-1]], len(ids))
        apart = self._processor.encode(raw, num_threads=1)
        ids = np.array([index for sentence in apart for index in sentence], dtype=self.id_dtype)
        return ids, np.cumsum([len(sentence) for sentence in apart])


def _groups(sentences: list[str], characters: int) -> Iterator[list[str]]:
    """Consecutive sentences of at most about `characters` together."""
    first, size = 0, 0
    for index, sentence in enumerate(sentences):
        if size and size + len(sentence) > characters:
            yield sentences[first:index]
            first, size = index, 0
        size += len(sentence)
    if sentences:
        yield sentences[first:]


def _starts_word(piece: str) -> bool:
    if piece.startswith(WORD_SEPARATOR) or piece == SPECIAL_PIECES[UNK]:
        return True
    if len(piece) == 1 and not piece.isalnum():
        return True
    return any(character.isdigit() or _is_unspaced(character) for character in piece)


def _is_unspaced(character: str) -> bool:
    """Whether `character` is a letter of a script written without spaces between words."""
    return ord(character) > 0x0E00 and unicodedata.name(character, "").split(" ")[0].split("-")[0] in UNSPACED_SCRIPTS
