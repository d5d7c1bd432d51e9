"""Refuse to tokenize large sources inside of a job, where all ranks would wait for it."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.documents import Source
from harness.data.tokenizer_base import Tokenizer
from harness.util.errors import ConfigError, as_typed

_GIB = 2**30
_OPTIONS = {"text": "local_text", "jsonl": "local_jsonl", "parquet": "local_parquet"}


def require_small(source: Source, tokenizer: Tokenizer) -> None:
    """Check a source that is not tokenized yet.

    Raises:
        ConfigError: it is larger than data.tokenize_limit_gib.
        DataError: it cannot be read.
    """
    if not is_small(source):
        raise too_large(source, tokenizer.config)


def is_small(source: Source) -> bool:
    """Whether a source is within data.tokenize_limit_gib."""
    limit = source.config.tokenize_limit_gib
    return limit is None or _size(source) <= limit * _GIB


def _size(source: Source) -> int:
    return sum(span.nbytes for span in source.spans(sys.maxsize))


def too_large(source: Source, tokenizer: TokenizerConfig | None) -> ConfigError:
    """Return the error for a source that a job may not tokenize, with the command that does."""
    size = f"{_size(source) / _GIB:.3g} GiB"
    rule = f"{source.name} has {size} that are not tokenized, and all ranks would wait for them"
    limit = source.config.tokenize_limit_gib
    if source.config.kind == "chat":
        rule += "; harness tokenize does not read conversations"
        return ConfigError("data.tokenize_limit_gib", limit, rule, "null, which is no limit")
    command = ["harness", "tokenize", *_data_overrides(source.config)]
    command += [] if tokenizer is None else _tokenizer_overrides(tokenizer)
    works = (
        f"{shlex.join([*command, 'tokenize.target=corpus/NAME'])} and then data=tokens "
        "'data.paths=[corpus/NAME]', or data.tokenize_limit_gib=null"
    )
    return ConfigError("data.tokenize_limit_gib", limit, rule, works)


def _data_overrides(config: DataConfig) -> list[str]:
    """Overrides that select a source; the defaults are those of the files in conf/data."""
    if config.kind == "local":
        format = config.format if config.format in _OPTIONS else "text"
        option, like = _OPTIONS[format], DataConfig(format=format, validation_fraction=0.01)
        names: tuple[str, ...] = ("paths", "exclude", "format", "encoding_errors")
    else:
        option, like = (
            "c4",
            DataConfig(subset="en", streaming=True, validation_split="validation", shuffle=False),
        )
        names = ("dataset", "subset", "split", "data_files", "streaming", "validation_split", "shuffle")
    return [
        f"data={option}",
        *_differing("data", config, like, (*names, "text_field", "validation_fraction")),
    ]


def _tokenizer_overrides(config: TokenizerConfig) -> list[str]:
    like = TokenizerConfig(kind="", path="")
    return _differing("tokenizer", config, like, ("kind", "path", "special", "bos", "eos"))


def _differing(group: str, config: Any, like: Any, names: tuple[str, ...]) -> list[str]:
    return [
        f"{group}.{name}={as_typed(getattr(config, name))}"
        for name in names
        if getattr(config, name) != getattr(like, name)
    ]
