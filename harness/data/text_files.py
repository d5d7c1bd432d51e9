"""Bytes of text files: compressed files, lines from the middle on, and files that are too long for memory."""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

_BLOCK_BYTES = 1 << 20
LONGEST_LINE = 100_000_000
"""Bytes of a line of JSON; a longer one is no document, and would fill the memory."""


def format_of(file: Path) -> str:
    name = file.stem if file.suffix in COMPRESSIONS else file.name
    if name.endswith((".jsonl", ".json")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def opened(file: Path) -> IO[bytes]:
    """Open a file to read its bytes, decompressed as its extension says."""
    return COMPRESSIONS.get(file.suffix, open)(file, "rb")


def _open_zstd(file: Path, mode: str) -> IO[bytes]:
    """Open a file of zstd frames; reading a truncated file raises an error."""
    import pyarrow

    # pyarrow's input streams read bytes, but not lines.
    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


class Line(NamedTuple):
    """A line in an error message; its number in the file is counted when the message is made."""

    file: Path
    begin: int
    number: int

    def __str__(self) -> str:
        return f"{self.file}, line {_lines_before(self.file, self.begin) + self.number + 1}"


@functools.cache
def _lines_before(file: Path, begin: int) -> int:
    """Number of lines of an uncompressed file that begin before a byte."""
    if not begin:
        return 0
    lines, position = 1, 0
    with file.open("rb") as content:
        # A newline at begin - 1 ends a line; the next one begins at `begin`.
        while position < begin - 1 and (block := content.read(min(_BLOCK_BYTES, begin - 1 - position))):
            lines += block.count(b"\n")
            position += len(block)
    return lines


def skip_to_line(lines: IO[bytes], begin: int) -> int:
    """Seek the first line that begins at or after a byte; return its offset."""
    lines.seek(begin - 1)
    while (part := lines.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass
    return lines.tell()


def find_damage(file: Path) -> int | None:
    """Return the first byte of a file that is not UTF-8, as ``bytes.decode`` reports it; None without one."""
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(file) as content:
        try:
            while block := content.read(_BLOCK_BYTES):
                position += len(block)
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return position - len(error.object) + error.start
    return None


def read_in_parts(file: Path, errors: str) -> Iterator[str]:
    """Yield the text of a file in parts; ``errors`` is the decoder's: ``strict`` or ``replace``."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    with opened(file) as content:
        while block := content.read(_BLOCK_BYTES):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)
