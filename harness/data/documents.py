"""Documents of a source: sources, parts that can be read one by one, and files of text and rows."""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from harness.config.data import DataConfig
from harness.util.errors import DataError

ROWS_PER_READ = 256
_BLOCK_BYTES = 1 << 20
LONGEST_LINE = 100_000_000
"""Bytes of a line of JSON; a longer one is no document, and would fill the memory."""


@dataclass(frozen=True)
class Span:
    """A part of a source.

    Attributes:
        name: the file, or the name of a table.
        begin: first byte of a text file, row group of a parquet file, or row of a table.
        end: after the last one; None: to the end.
        nbytes: size in the source, for the progress.
    """

    name: str
    begin: int
    end: int | None
    nbytes: int


class LongText:
    """A document that is too long to be in memory, nonempty.

    Args:
        parts: returns the consecutive parts of the text.
    """

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self.parts = parts


class Source(Protocol):
    """Documents in a fixed order."""

    config: DataConfig
    name: str
    """Name for error messages: the field and its value."""
    without_tokens: str
    """What to say of a source without a token."""
    damaged: int
    """Documents so far that were not UTF-8, and were repaired or left out by data.encoding_errors."""

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever the documents may have changed."""

    @property
    def reading(self) -> list[Any]:
        """How documents are read from files; JSON-serializable."""

    def contents(self, spans: Iterable[Span]) -> Any:
        """JSON-serializable; changes whenever the documents of the spans may have changed."""

    def spans(self, unit_bytes: int) -> Iterator[Span]:
        """Yield all of it in parts, of at most about ``unit_bytes`` where it can be cut."""

    def read(self, span: Span) -> Iterator[str | LongText]:
        """Yield the text of every document of a span, including empty ones."""

    def documents(self) -> Iterator[str]:
        """Yield every document's text, including empty ones."""
        for span in self.spans(sys.maxsize):
            for text in self.read(span):
                yield text if isinstance(text, str) else "".join(text.parts())


def cut(name: str, length: int, nbytes: int, unit_bytes: int) -> Iterator[Span]:
    """Cut ``length`` bytes, row groups or rows into spans of equal length and about ``unit_bytes``.

    Args:
        unit_bytes: most bytes of a span of several rows.
    """
    step = max(1, length * unit_bytes // max(1, nbytes))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        yield Span(name, begin, end, nbytes * end // length - nbytes * begin // length)


def list_names(names: Iterable[object]) -> str:
    """List names in an error message."""
    return ", ".join(sorted(map(str, names))) or "none"


def describe(error: BaseException) -> str:
    """Type and message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def format_of(file: Path) -> str:
    name = file.stem if file.suffix in COMPRESSIONS else file.name
    if name.endswith((".jsonl", ".json")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def open_file(file: Path) -> IO[bytes]:
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
    with open_file(file) as content:
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
    with open_file(file) as content:
        while block := content.read(_BLOCK_BYTES):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)


def row_groups(file: Path) -> int:
    """Number of row groups of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file).num_row_groups
    except ValueError as error:  # pyarrow.ArrowInvalid, or UnicodeDecodeError in the footer
        raise DataError(f"{file}: not a readable parquet file ({describe(error)})") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {describe(error)}") from error


def read_columns(
    file: Path, span: Span, required: str, *optional: str, setting: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a span of a parquet file: a required column, and those optional ones that exist.

    Args:
        setting: the field of the job that names the required column, for the error.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if required not in names:
                raise DataError(f"{file}: no column {required!r} among {list_names(names)}; set {setting}")
            columns = [required, *(name for name in optional if name in names)]
            groups = None if span.end is None else list(range(span.begin, span.end))
            for batch in table.iter_batches(batch_size=ROWS_PER_READ, row_groups=groups, columns=columns):
                yield from batch.to_pylist()
    except ValueError as error:  # pyarrow.ArrowInvalid, or UnicodeDecodeError in the footer
        raise DataError(f"{file}: not a readable parquet file ({describe(error)})") from error
