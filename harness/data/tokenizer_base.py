"""What all tokenizers have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from harness.data.config import TokenizerConfig
from harness.data.long_text import split_long_text
from harness.errors import DataError

NUM_THREADS = 4  # enough to be fast, few enough not to slow down a node's other ranks
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Maps text to ids in ``range(vocab_size)`` and back.

    Text that looks like a special token is encoded as plain text, so that a document cannot contain its own
    end.
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

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, in parallel where that is faster."""
        ...

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        """Yield ``encode("".join(parts))`` in consecutive pieces, which needs less memory for a long text."""
        for piece in split_long_text(parts, self.encode):
            yield self.encode(piece)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; invalid UTF-8 and ids outside the vocabulary become U+FFFD."""
        ...


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
