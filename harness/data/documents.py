"""Documents of a source: the protocol of sources, and the parts that can be read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from harness.config.data import DataConfig


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
        ...

    @property
    def reading(self) -> list[Any]:
        """How documents are read from files; JSON-serializable."""
        ...

    def contents(self, spans: Iterable[Span]) -> Any:
        """JSON-serializable; changes whenever the documents of the spans may have changed."""
        ...

    def spans(self, unit_bytes: int) -> Iterator[Span]:
        """Yield all of it in parts, of at most about ``unit_bytes`` where it can be cut."""
        ...

    def read(self, span: Span) -> Iterator[str | LongText]:
        """Yield the text of every document of a span, including empty ones."""
        ...

    def documents(self) -> Iterator[str]:
        """Yield every document's text, including empty ones."""
        ...


def cut(name: str, length: int, nbytes: int, unit_bytes: int) -> Iterator[Span]:
    """Cut ``length`` bytes, row groups or rows into spans of equal length and about ``unit_bytes``.

    Args:
        name: of the spans.
        length: bytes, row groups or rows.
        nbytes: size of all of them.
        unit_bytes: most bytes of a span of several rows.
    """
    step = max(1, length * unit_bytes // max(1, nbytes))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        yield Span(name, begin, end, nbytes * end // length - nbytes * begin // length)


def named(names: Iterable[object]) -> str:
    """List names in an error message."""
    return ", ".join(sorted(map(str, names))) or "none"


def describe(error: BaseException) -> str:
    """Type and message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
