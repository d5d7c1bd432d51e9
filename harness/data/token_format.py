"""The contract of formats of token files, which other packages add to ``data.format``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.formats import TOKEN_FORMATS

if TYPE_CHECKING:
    from harness.config.data import DataConfig
    from harness.data.tokens import Limit, Tokens


@dataclass(frozen=True)
class Opening:
    """How the files of a split are opened.

    Attributes:
        data: the job's data.
        name: of all files, for errors.
        limit: of token ids.
        wait_for_all: a barrier over all ranks, for formats that build a token cache (``cache.open_cache``).
        is_builder: whether this rank builds it.
    """

    data: DataConfig
    name: str
    limit: Limit
    wait_for_all: Callable[[], None] | None
    is_builder: bool


@dataclass(frozen=True)
class TokenFormat:
    """Token files that other software writes."""

    endings: tuple[str, ...]
    """Endings of their names. In a folder these files are read, and an ending that no other format has tells
    the format."""
    open: Callable[[list[Path], Opening], list[Tokens]]
    """Returns the tokens of files, in their order; raises DataError for a damaged one. It need not check ids:
    they are checked when they are read."""
    recognizes: Callable[[Path], bool] = lambda file: False
    """Whether a file whose ending does not tell its format has this one. Formats are asked in the order of
    their names."""
    listed: Callable[[Path], list[Path]] = lambda folder: []
    """The files of a folder that says itself which ones they are; none for other folders."""
    companions: Mapping[str, str | None] = field(default_factory=dict)
    """Endings of files beside token files, and the ending of the token file that each stands for: with
    ``{".idx": ".bin"}``, PREFIX.idx and PREFIX name PREFIX.bin. None: the file is passed over."""
    reads: tuple[str, ...] = ()
    """Fields of ``data`` that it reads and other formats do not."""
    boundary: str = "eos"
    """The token at which documents are separated if files have no index (``data.boundaries``)."""
    tokenizer_of: Callable[[Path], str | None] = lambda file: None
    """The name of the tokenizer that made a file; None: it is not recorded."""


def token_formats() -> dict[str, TokenFormat]:
    """Return the formats of installed packages by name, sorted."""
    return {name: TOKEN_FORMATS[name] for name in TOKEN_FORMATS.plugins}


def companions() -> dict[str, str | None]:
    """Return the companions of all formats."""
    return {ending: owner for each in token_formats().values() for ending, owner in each.companions.items()}


def named_by_prefix(prefix: str) -> list[str]:
    """Return the paths of companions that a prefix of token files may mean."""
    return [prefix + ending for ending, owner in companions().items() if owner is not None]
