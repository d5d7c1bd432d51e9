"""Tokens as one sequence: parts in any number of files, read in place.

A part is a file, an Arrow batch, or a split of a token cache. Offsets count tokens, from 0.
``TokenFormat`` is the contract of formats of files, which other packages add to ``data.format``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from harness.config.registry import TOKEN_FORMATS
from harness.util.errors import DataError
from harness.util.files import require_regular

if TYPE_CHECKING:
    from harness.config.data import DataConfig


class Tokens(Protocol):
    """Concatenated documents."""

    @property
    def name(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_documents(self) -> int | None:
        """Number of documents; None if their boundaries are unknown."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens from ``begin`` to ``end`` (exclusive), int64."""

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        """Return the offsets in [begin, end) at which documents start, int64, ascending; empty if unknown."""


@dataclass(frozen=True)
class Limit:
    """Upper limit of token ids.

    Attributes:
        rule: the rule that a larger id breaks, and what would work, for the error.
    """

    vocab_size: int
    rule: str

    def check(self, ids: np.ndarray, name: str, first: int) -> None:
        """Raise DataError for an id outside the vocabulary; ``first`` is the offset of ``ids``."""
        if len(ids) == 0 or (int(ids.max()) < self.vocab_size and int(ids.min()) >= 0):
            return
        index = int(np.argmax((ids >= self.vocab_size) | (ids < 0)))
        raise DataError(f"{name}: token {first + index} has id {ids[index]}, but {self.rule}")


class Concatenation:
    """Parts, one after the other."""

    def __init__(self, parts: Sequence[Tokens], name: str) -> None:
        self.name = name
        self._parts = [part for part in parts if part.num_tokens]
        self._begins = np.array(
            [0, *accumulate(part.num_tokens for part in self._parts)], dtype=np.int64
        )

    @property
    def begins(self) -> np.ndarray:
        return self._begins[:-1]

    @property
    def num_tokens(self) -> int:
        return int(self._begins[-1])

    @property
    def num_documents(self) -> int | None:
        counts = [part.num_documents for part in self._parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def read(self, begin: int, end: int) -> np.ndarray:
        pieces = [np.empty(0, dtype=np.int64)]
        for part, _, first, last in self._cut(begin, end):
            pieces.append(part.read(first, last))
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        pieces = [np.empty(0, dtype=np.int64)]
        for part, offset, first, last in self._cut(begin, end):
            pieces.append(part.starts_between(first, last) + offset)
        return np.concatenate(pieces)

    def _cut(self, begin: int, end: int) -> list[tuple[Tokens, int, int, int]]:
        """Cut a range into parts: each with its offset, and begin and end within the part."""
        cut = []
        index = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < min(end, self.num_tokens):
            offset = int(self._begins[index])
            stop = min(end, int(self._begins[index + 1]))
            cut.append((self._parts[index], offset, begin - offset, stop - offset))
            begin = stop
            index += 1
        return cut


@dataclass(frozen=True)
class Section:
    """The tokens of a part from ``first`` to ``last`` (exclusive); ids are checked when they are read."""

    part: Tokens
    first: int
    last: int
    limit: Limit

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def num_tokens(self) -> int:
        return self.last - self.first

    @property
    def num_documents(self) -> int | None:
        known = self.part.num_documents is not None
        return len(self.starts_between(0, self.num_tokens)) if known else None

    def read(self, begin: int, end: int) -> np.ndarray:
        ids = self.part.read(self.first + begin, self.first + end)
        self.limit.check(ids, self.name, self.first + begin)
        return ids

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        begin = self.first + begin
        end = self.first + end
        starts = self.part.starts_between(begin, end)
        # Readers search the index, and do not check all of a long one.
        if len(starts) and (starts[0] < begin or starts[-1] >= end or np.any(np.diff(starts) < 0)):
            raise DataError(
                f"{self.name}: the starts of its documents near token {begin} are not ascending"
            )
        return starts - self.first


@dataclass(frozen=True)
class Delimited:
    """Tokens whose documents begin or end with a certain token, or whose boundaries are unknown.

    Boundaries are found in the tokens that are read, so no file is scanned.

    Args:
        token: the id; None if boundaries are unknown.
        begins: whether documents begin with the token, instead of ending with it.
    """

    tokens: Tokens
    token: int | None
    begins: bool
    num_documents = None

    @property
    def name(self) -> str:
        return self.tokens.name

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.tokens.read(begin, end)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        if self.token is None:
            return np.empty(0, dtype=np.int64)
        if self.begins:
            return np.flatnonzero(self.read(begin, end) == self.token) + begin
        before = max(begin - 1, 0)
        starts = np.flatnonzero(self.read(before, end - 1) == self.token) + before + 1
        return starts if begin else np.concatenate([[0], starts])


def size_of(file: Path) -> int:
    """Return the size of a file."""
    try:
        return require_regular(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error


def map_file(name: str, dtype: str, skip: int, count: int) -> np.ndarray:
    """Map ``count`` values of a file, after ``skip`` bytes.

    Uses pyarrow, because numpy's maps keep their files open, and a process may often open 1,024
    files only.
    """
    import pyarrow

    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    try:
        with pyarrow.memory_map(name) as content:
            return np.frombuffer(content.read_buffer(), dtype, count, skip)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


@dataclass(frozen=True)
class TokenFormat:
    """Token files that other software writes."""

    endings: tuple[str, ...]
    """Endings of their names. In a folder these files are read, and an ending that no other format
    has tells the format."""
    open: Callable[[Path, DataConfig, int], Tokens]
    """Returns the tokens of a file, given the size of the vocabulary; raises DataError for a
    damaged file. Ids are checked when they are read."""
    recognizes: Callable[[Path], bool] = lambda file: False
    """Whether a file whose ending does not tell its format has this one. Formats are asked in the
    order of their names."""
    companions: Mapping[str, str | None] = field(default_factory=dict)
    """Endings of files beside token files, and the ending of the token file that each stands for:
    with ``{".idx": ".bin"}``, PREFIX.idx and PREFIX name PREFIX.bin. None: the file is passed
    over."""
    needs_dtype: bool = False
    """Whether ``data.dtype`` may say the type of the ids, because a file does not."""
    boundary: str = "eos"
    """The token at which documents are separated if files have no index (``data.boundaries``)."""
    tokenizer_of: Callable[[Path], str | None] = lambda file: None
    """The name of the tokenizer that made a file; None: it is not recorded."""


def token_formats() -> dict[str, TokenFormat]:
    return {name: TOKEN_FORMATS[name] for name in TOKEN_FORMATS.plugins}


def companions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for format in token_formats().values():
        found |= format.companions
    return found


def named_by_prefix(prefix: str) -> list[str]:
    """Return the paths of companions that a prefix of token files may mean."""
    return [prefix + ending for ending, owner in companions().items() if owner is not None]
