"""Plain text work that knows nothing of vocabularies: paragraphs, sentences, filters, normalisation rules.

Normalisation itself happens inside `spiece.model`: `normalization_rules` writes the table that SentencePiece
compiles into it, so whoever holds the model alone gets the same ids from raw text whose runs without white space are
below MAX_WORD_CHARACTERS.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

import sentencex

from configs.schema import FiltersConfig

PARAGRAPH_BREAK = re.compile(r"\n[^\S\n]*\n")
SPLIT_CHARACTERS = 2000
"""Characters handed to the sentence splitter at once: its cost grows with the square of its input."""
MAX_WORD_CHARACTERS = 20_000
"""A run without white space is cut after about so many characters, whatever the script."""
WORD_SEPARATOR = "▁"
ZERO_WIDTH_JOINERS = "‌‍"


def sentences_of(text: str, language: str) -> list[str]:
    """The sentences of `text`, stripped, in order; paragraphs (blank lines) always end one.

    A sentence that ends in an ASCII character ends before white space, so that names like `nx.Graph` stay whole. One
    of more than SPLIT_CHARACTERS is cut at white space; a run without any is cut after at least MAX_WORD_CHARACTERS,
    and less than SPLIT_CHARACTERS beyond. The time is linear in the length of `text`.
    """
    return [sentence.strip() for sentence in segments_of(text, language)]


def segments_of(text: str, language: str) -> list[str]:
    """`sentences_of` as they stand in `text`: what parts two of them is white space at the end of the first or the
    beginning of the second, and nothing in scripts that put none between sentences."""
    segments: list[str] = []
    for paragraph in PARAGRAPH_BREAK.split(text):
        for segment in _segments_of_paragraph(paragraph, language):
            if segment.strip():
                segments.append(segment)
            elif segments:
                segments[-1] += segment
        if segments:
            segments[-1] += "\n"
    return segments


def _segments_of_paragraph(paragraph: str, language: str) -> Iterator[str]:
    begin, unfinished = 0, ""
    while begin < len(paragraph):
        end, inside_word = _piece_end(paragraph, begin)
        found = _split(paragraph[begin:end], language)
        if len(found) > 1 and end < len(paragraph):
            # The last sentence may go on beyond the piece: the next piece begins with it.
            end -= len(found.pop())
            inside_word = False
        found[0] = unfinished + found[0]
        unfinished = found.pop() if inside_word and len(found[-1].strip()) < MAX_WORD_CHARACTERS else ""
        yield from found
        begin = end
    yield unfinished


def _piece_end(paragraph: str, begin: int) -> tuple[int, bool]:
    """(end, whether it falls inside a word) of the piece of `paragraph` from `begin`: at most SPLIT_CHARACTERS.

    It falls at the last line break, else at the last white space, else anywhere.
    """
    limit = begin + SPLIT_CHARACTERS
    if limit >= len(paragraph):
        return len(paragraph), False
    cut = paragraph.rfind("\n", begin + 1, limit)
    if cut < 0:
        cut = next((place for place in range(limit - 1, begin, -1) if paragraph[place].isspace()), limit)
    return cut, cut == limit


def _split(piece: str, language: str) -> list[str]:
    """The sentences of `piece` as they stand, white space and all."""
    sentences, unfinished = [], ""
    for segment in sentencex.segment(language, piece):
        unfinished += segment
        if segment[-1:].isspace() or not segment[-1:].isascii():
            sentences.append(unfinished)
            unfinished = ""
    return [*sentences, unfinished] if unfinished else sentences


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
