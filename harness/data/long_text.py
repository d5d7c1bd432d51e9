"""Splitting of a long text into parts whose ids concatenate to the ids of the full text.

A tokenizer needs about 20 times a text's size in memory, and a corpus may be one file. The text comes in
consecutive parts of any length, of which only the next few million characters are in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

PIECE_CHARS = 1_000_000
_WINDOW_CHARS = 1_000
_TRIES = 64
# Nearly all tokenizers split a text into words first; a new word begins here.
_NEW_LINE = re.compile(r"(?<=\n)(?=\S)")


def split_long_text(parts: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Yield consecutive parts of a text, of about ``PIECE_CHARS`` characters.

    A cut is made at the beginning of a line if the 1,000 characters on either side encode to the same ids
    separately and together. If no such line is found, the rest is one part.
    """
    buffer = _Buffer(parts)
    while buffer.fill(2 * PIECE_CHARS + 1):
        end = _find_cut(buffer, encode)
        if end is None:
            break
        yield buffer.take(end)
    yield buffer.take_all()


def in_pieces(parts: Iterable[str], num_chars: int) -> Iterator[str]:
    """Yield the same text in parts of ``num_chars`` characters; the last one may be shorter."""
    buffer = _Buffer(parts)
    while buffer.fill(num_chars):
        yield buffer.take(num_chars)
    if buffer.text:
        yield buffer.text


class _Buffer:
    """The next characters of a text that comes in parts."""

    def __init__(self, parts: Iterable[str]) -> None:
        self.text, self._parts = "", iter(parts)

    def fill(self, num_chars: int) -> bool:
        """Read until the buffer has at least ``num_chars``; return whether the text has as many."""
        read, length = [self.text], len(self.text)
        while length < num_chars and (part := next(self._parts, None)) is not None:
            read.append(part)
            length += len(part)
        self.text = "".join(read)
        return length >= num_chars

    def take(self, num_chars: int) -> str:
        """Remove the first characters, and return them."""
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        return taken

    def take_all(self) -> str:
        """Return the rest of the text."""
        return "".join([self.text, *self._parts])


def _find_cut(buffer: _Buffer, encode: Callable[[str], list[int]]) -> int | None:
    """Return the first possible cut after ``PIECE_CHARS``; None if none of ``_TRIES`` lines can be cut."""
    first, tries = PIECE_CHARS, 0
    while tries < _TRIES:
        line = _NEW_LINE.search(buffer.text, first)
        length = len(buffer.text)
        if line is None or line.start() + _WINDOW_CHARS > length:
            # The window may continue in parts that are not read yet.
            buffer.fill(2 * length)
            if len(buffer.text) > length:
                continue
        if line is None:
            return None
        cut = line.start()
        before, after = buffer.text[cut - _WINDOW_CHARS : cut], buffer.text[cut : cut + _WINDOW_CHARS]
        if encode(before) + encode(after) == encode(before + after):
            return cut
        first, tries = cut + 1, tries + 1
    return None
