"""Where a long text can be cut so that its parts encode to what the whole encodes to.

A tokenizer takes some 20 times a text's size in memory, and a corpus may be one file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE_CHARS = 1_000_000
_WINDOW_CHARS = 1_000
_TRIES = 64
# Tokenizers that split words first, as nearly all do, begin a new one here.
_NEW_LINE = re.compile(r"(?<=\n)(?=\S)")


def cut_where_encoding_does(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Yield consecutive parts of a text, of about ``PIECE_CHARS`` characters.

    A cut is made at the beginning of a line if the 1,000 characters on either side encode to the same ids
    apart and together. Where no such line is found, the rest is one part.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        place = _place_to_cut(text, start + PIECE_CHARS, encode)
        if place is None:
            break
        yield text[start:place]
        start = place
    yield text[start:]


def _place_to_cut(text: str, after: int, encode: Callable[[str], list[int]]) -> int | None:
    """Return the first place to cut after a position, of those that are tried."""
    for _, line in zip(range(_TRIES), _NEW_LINE.finditer(text, after), strict=False):
        place = line.start()
        before, behind = text[place - _WINDOW_CHARS : place], text[place : place + _WINDOW_CHARS]
        if encode(before) + encode(behind) == encode(before + behind):
            return place
    return None
