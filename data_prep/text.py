"""Plain text work that knows nothing of vocabularies: paragraphs, sentences, filters, normalisation rules.

Normalisation itself happens inside `spiece.model`: `normalization_rules` writes the table that SentencePiece
compiles into it, so whoever holds the model alone gets the same ids from raw text.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

import sentencex

from configs.schema import FiltersConfig

PARAGRAPH_BREAK = re.compile(r"\n[^\S\n]*\n")
MAX_SENTENCE_PIECE = 2000
"""Characters handed to the sentence splitter at once: its cost grows with the square of its input."""
WORD_SEPARATOR = "▁"
ZERO_WIDTH_JOINERS = "‌‍"


def sentences_of(text: str, language: str) -> list[str]:
    """The sentences of `text`, stripped, in order; paragraphs (blank lines) always end one.

    A sentence that ends in an ASCII character ends before white space, so that names like `nx.Graph` stay whole.
    """
    sentences = []
    for paragraph in PARAGRAPH_BREAK.split(text):
        for piece in _pieces(paragraph):
            unfinished = ""
            for segment in sentencex.segment(language, piece):
                unfinished += segment
                if segment[-1:].isspace() or not segment[-1:].isascii():
                    sentences.append(unfinished.strip())
                    unfinished = ""
            sentences.append(unfinished.strip())
    return [sentence for sentence in sentences if sentence]


def _pieces(paragraph: str) -> Iterator[str]:
    """`paragraph` in pieces of at most MAX_SENTENCE_PIECE characters, cut at white space where there is any."""
    begin = 0
    while len(paragraph) - begin > MAX_SENTENCE_PIECE:
        limit = begin + MAX_SENTENCE_PIECE
        cut = paragraph.rfind("\n", begin + 1, limit)
        if cut < 0:
            cut = paragraph.rfind(" ", begin + 1, limit)
        if cut < 0:
            cut = limit
        yield paragraph[begin:cut]
        begin = cut
    yield paragraph[begin:]


def filter_reason(text: str, filters: FiltersConfig) -> str | None:
    """The name of the filter that drops a document of this `text`, or None if it passes."""
    if filters.min_words is not None and len(text.split(None, filters.min_words)) < filters.min_words:
        return "min_words"
    if filters.max_nonletter_fraction is not None:
        visible = "".join(text.split())
        nonletters = sum(not character.isalpha() for character in visible)
        if nonletters > filters.max_nonletter_fraction * len(visible):
            return "max_nonletter_fraction"
    return None


def normalization_rules(lower_case: bool, strip_accents: bool) -> str:
    """SentencePiece's `normalization_rule_tsv`: `source code points <tab> target code points`, in hexadecimal.

    Per code point: white space and U+2581 become a space, control and format characters nothing (but for the
    zero-width joiners, which spell words in some scripts), the rest NFKD, without combining marks, lower-cased, NFC.
    The quote pairs `` and '' become ". There is no rule for U+0000, which the table cannot hold.
    """
    lines = ["60 60\t22", "27 27\t22"]
    for code_point in range(1, sys.maxunicode + 1):
        character = chr(code_point)
        target = _normalized(character, lower_case, strip_accents)
        if target != character:
            lines.append(f"{code_point:X}\t" + " ".join(f"{ord(part):X}" for part in target))
    return "\n".join(lines) + "\n"


def _normalized(character: str, lower_case: bool, strip_accents: bool) -> str:
    category = unicodedata.category(character)
    if category in ("Cs", "Co", "Cn"):
        return character
    if character.isspace() or character == WORD_SEPARATOR:
        return " "
    if category in ("Cc", "Cf"):
        return character if character in ZERO_WIDTH_JOINERS else ""
    result = _decomposed(character, strip_accents)
    if lower_case:
        result = _decomposed(result.lower(), strip_accents)
    return unicodedata.normalize("NFC", result).replace(WORD_SEPARATOR, " ")


def _decomposed(text: str, strip_accents: bool) -> str:
    text = unicodedata.normalize("NFKD", text)
    if strip_accents:
        text = "".join(part for part in text if unicodedata.category(part)[0] != "M")
    return text
