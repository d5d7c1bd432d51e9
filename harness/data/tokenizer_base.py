"""What all tokenizers have in common, and cuts of long texts that do not change their ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from harness.config.data import TokenizerConfig
from harness.util.errors import DataError

NUM_THREADS = 4  # enough to be fast, few enough not to slow down a node's other ranks
# A tokenizer needs about 20 times a text's size in memory, and a corpus may be one file.
PIECE_CHARS = 1_000_000
_WINDOW_CHARS = 1_000
_TRIES = 64
# Nearly all tokenizers split a text into words first; a new word begins here.
_NEW_LINE = re.compile(r"(?<=\n)(?=\S)")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Marked(NamedTuple):
    """A text with special tokens, encoded: the ids, and the range of characters of each."""

    ids: list[int]
    ranges: Sequence[tuple[int, int]]


class Tokenizer(Protocol):
    """Maps text to ids in ``range(vocab_size)`` and back.

    Text that looks like a special token is encoded as plain text, so that a document cannot contain its own
    end; but not in prompts.
    """

    vocab_size: int
    bos_id: int | None
    """Id put before every document, or None."""
    eos_id: int | None
    """Id put after every document, or None."""
    fingerprint: str
    """Hash of everything that determines how text is encoded."""
    config: TokenizerConfig | None = None
    """What ``build_tokenizer`` built it from, so that another process can build the same one."""
    num_threads: int = NUM_THREADS
    """Threads of ``encode_batch``."""
    special_ids: Mapping[str, int] = MappingProxyType({})
    """Ids of the special tokens, by their text."""
    file: Path | None = None
    """The tokenizer's file, if it has one."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text in which special tokens have their own ids, as in transformers."""
        parts = split_special(text, self.special_ids)
        return [id for part, own in parts for id in ([own] if own is not None else self.encode(part))]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, in parallel where that is faster."""

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        """Yield ``encode("".join(parts))`` in consecutive pieces, which needs less memory for a long text."""
        for piece in split_long_text(parts, self.encode):
            yield self.encode(piece)

    def encode_marked(self, texts: Sequence[str]) -> list[Marked]:
        """Encode the texts of chat templates, in which special tokens have their own ids.

        Raises:
            DataError: the tokenizer changes a text before it is encoded, so that its ids have no characters.
        """
        return [_marked(text, self) for text in texts]

    def num_bytes(self, ids: list[int]) -> list[int]:
        """Numbers of UTF-8 bytes of ids that are not special."""
        raise DataError(f"{type(self).__name__} encodes no conversations")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; invalid UTF-8 and ids outside the vocabulary become U+FFFD."""


def split_special(text: str, special_ids: Mapping[str, int]) -> list[tuple[str, int | None]]:
    """Cut a text into special tokens, each with its id, and what is between them, with None."""
    special = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
    parts = re.split(f"({special})", text) if special else [text]
    return [(part, special_ids[part] if index % 2 else None) for index, part in enumerate(parts) if part]


def _marked(text: str, tokenizer: Tokenizer) -> Marked:
    ids: list[int] = []
    widths: list[int] = []
    for part, own in split_special(text, tokenizer.special_ids):
        length = len(part.encode())
        part_ids = [own] if own is not None else tokenizer.encode(part)
        part_widths = [length] if own is not None else tokenizer.num_bytes(part_ids)
        if sum(part_widths) != length:
            rule = "the tokenizer changes the text of a conversation, so that its ids have no characters"
            raise DataError(f"{rule}; would work: tokenizer.kind=huggingface with its tokenizer.json")
        ids += part_ids
        widths += part_widths
    # A character belongs to every id that has one of its bytes.
    first_bytes = np.cumsum([0, *(len(character.encode()) for character in text)])
    ends = np.cumsum(widths, dtype=np.int64)
    begins = np.searchsorted(first_bytes, ends - widths, side="right") - 1
    return Marked(ids, list(zip(begins.tolist(), np.searchsorted(first_bytes, ends).tolist(), strict=True)))


def decode_known(ids: Sequence[int], vocabulary: Container[int], decode: Callable[[list[int]], str]) -> str:
    """Decode ids; those outside the vocabulary (a model's vocabulary may be padded) become U+FFFD."""
    parts = []
    for known, group in groupby((int(i) for i in ids), key=lambda i: i in vocabulary):
        group_ids = list(group)
        parts.append(decode(group_ids) if known else _UNKNOWN * len(group_ids))
    return "".join(parts)


def read_tokenizer(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DataError(f"tokenizer file {file}: {reason}; set tokenizer.path to the file") from error
    if not content.strip():
        raise DataError(f"tokenizer file {file} is empty")
    return content


def fingerprint_of(kind: str, content: bytes) -> str:
    return f"{kind}/{hashlib.sha256(content).hexdigest()}"


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
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        return taken

    def take_all(self) -> str:
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
