"""Splitting of a long text into parts whose ids concatenate to the ids of the full text.

A tokenizer needs about 20 times a text's size in memory, and a corpus may be one file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE_CHARS = 1_000_000
_WINDOW_CHARS = 1_000
_TRIES = 64
# Nearly all tokenizers split a text into words first; a new word begins here.
_NEW_LINE = re.compile(r"(?<=\n)(?=\S)")


def split_long_text(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Yield consecutive parts of a text, of about ``PIECE_CHARS`` characters.

    A cut is made at the beginning of a line if the 1,000 characters on either side encode to the same ids
    separately and together. If no such line is found, the rest is one part.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        end = _find_cut(text, start + PIECE_CHARS, encode)
        if end is None:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _find_cut(text: str, first: int, encode: Callable[[str], list[int]]) -> int | None:
    """Return the first possible cut at or after ``first``; None if none of ``_TRIES`` lines can be cut."""
    for _, line in zip(range(_TRIES), _NEW_LINE.finditer(text, first), strict=False):
        cut = line.start()
        before, after = text[cut - _WINDOW_CHARS : cut], text[cut : cut + _WINDOW_CHARS]
        if encode(before) + encode(after) == encode(before + after):
            return cut
    return None
