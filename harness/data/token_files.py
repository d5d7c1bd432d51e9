"""Data kind ``tokens``: token files that exist, read in place (``data.paths``, ``data.format``)."""

import os
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from harness.config.data import DataConfig, ValidationSet
from harness.config.registry import TOKEN_FORMATS
from harness.data.corpus import check_tokenizer, open_shards, read_manifest
from harness.data.documents import expand
from harness.data.loader import Loader, load_numbered
from harness.data.samples import PackedSamples, Reading
from harness.data.shards import MANIFEST
from harness.data.tokenizer import NoTokenizer, Tokenizer
from harness.data.tokens import (
    Concatenation,
    Delimited,
    Limit,
    Section,
    TokenFormat,
    Tokens,
    companions,
    named_by_prefix,
    size_of,
    token_formats,
)
from harness.util.errors import ConfigError, DataError
from harness.util.files import matching

_HELD_OUT_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|dev|test)(?:$|[^a-z])")
_SCANNED_FILES = 16
_SCANNED_TOKENS = 1 << 16


def load_tokens(reading: Reading) -> Loader:
    return load_numbered(reading, PackedSamples(open_token_files(reading), reading))


def open_token_files(reading: Reading) -> Tokens:
    """Open the tokens of a split.

    Validation has the files of ``data.validation_paths``, or the corpus' held-out documents, or the
    last ``data.validation_fraction`` of each file. The rank that builds caches also reads a sample
    of the tokens for ids outside the vocabulary, and checks checksums.
    """
    data = reading.data
    tokenizer = reading.tokenizer
    split = reading.split
    is_builder = reading.is_builder
    field, patterns = data.files_of(split)
    is_separate = field == "validation_paths" or isinstance(data, ValidationSet)
    files, format = find_token_files(patterns, field, data.format)
    typed = [each for each, reader in token_formats().items() if reader.needs_dtype]
    if data.dtype is not None and format not in typed:
        rule = f"is read only from {' and '.join(typed)} files, and {files[0]} is {format}"
        raise ConfigError("data.dtype", data.dtype, rule, "leave it out")
    name = f"data.{field}=[{', '.join(patterns)}], {split} tokens"
    limit = _limit(tokenizer, reading.model_vocab_size)
    usual = "eos"
    if format == "corpus":
        splits = {"train", "validation"} if is_separate else {split}
        parts, holds_out = _open_corpora(files, tokenizer, splits, check=is_builder)
        if holds_out and data.validation_fraction:
            rule = "the corpus has held-out documents of its own"
            raise ConfigError("data.validation_fraction", data.validation_fraction, rule, "0")
        is_separate |= holds_out
    else:
        foreign: TokenFormat = TOKEN_FORMATS[format]
        usual = foreign.boundary
        parts = [foreign.open(file, data, limit.vocab_size) for file in files]
        if is_builder and not isinstance(tokenizer, NoTokenizer):
            _warn_of_other_tokenizer(files[0], foreign, tokenizer)
    if split == "validation" and not is_separate and not data.validation_fraction:
        works = "data.validation_paths, or data.validation_fraction=0.01"
        raise ConfigError(
            "data.validation_fraction", 0, "no tokens are held out for validation", works
        )
    tokens = Concatenation(
        [_section(part, split, data.validation_fraction, limit) for part in parts], name
    )
    if is_builder:
        # The beginnings of some files; all other ids are checked when they are read.
        step = max(1, len(tokens.begins) // _SCANNED_FILES)
        for begin in tokens.begins[::step].tolist():
            tokens.read(begin, begin + _SCANNED_TOKENS)
    has_index = all(part.num_documents is not None for part in parts)
    if has_index and data.boundaries == "auto":
        return tokens
    return _with_boundaries(tokens, reading, usual)


def holds_out(data: DataConfig) -> bool:
    """Whether token files have tokens for validation; reads the manifests of corpora."""
    if data.validation_paths or data.validation_fraction:
        return True
    files, format = find_token_files(data.paths, "paths", data.format)
    return format == "corpus" and any(
        read_manifest(file).counts.tokens["validation"] for file in files
    )


def find_token_files(patterns: Sequence[str], field: str, format: str) -> tuple[list[Path], str]:
    """Find the files (for a corpus: folders) that match paths, globs, folders or prefixes.

    Returns:
        Sorted paths and their format.
    """
    found: set[Path] = set()
    for pattern in map(expand, patterns):
        matches = [*matching(pattern)] or chain.from_iterable(
            map(matching, named_by_prefix(pattern))
        )
        for match in matches:
            found.update(_files_of(Path(match), format))
    files = sorted(found)
    if not files:
        where = f"data.{field}=[{', '.join(patterns)}], seen from {os.getcwd()}"
        raise DataError(f"no token file matches {where}")
    for file in files:
        if not file.is_dir():
            size_of(file)
    if format != "auto":
        return files, format
    formats = {_format_of(file): file for file in reversed(files)}
    if len(formats) > 1:
        listed = ", ".join(f"{file} ({format})" for format, file in sorted(formats.items()))
        raise DataError(
            f"data.{field} has files of several formats: {listed}; would work: data.format, one of them"
        )
    return files, next(iter(formats))


def _warn_of_other_tokenizer(file: Path, format: TokenFormat, tokenizer: Tokenizer) -> None:
    name = format.tokenizer_of(file)
    path = str(tokenizer.config.path if tokenizer.config else None)
    if name and name.lower() not in path.lower():
        sys.stderr.write(
            f"WARNING {file} was made by the tokenizer {name}; tokenizer.path is {path}\n"
        )


def _files_of(path: Path, format: str) -> list[Path]:
    """The files of tokens that a path means: itself, its owner, or those in a folder."""
    if not path.is_dir():
        for ending, owner in companions().items():
            if path.name.endswith(ending):
                stem = path.name.removesuffix(ending)
                return [] if owner is None else [path.with_name(stem + owner)]
        return [path]
    if format in ("auto", "corpus"):
        corpora = _corpora_in(path)
        if corpora or format == "corpus":
            return corpora or [path]  # whose missing manifest is reported
    readers = [*token_formats().values()] if format == "auto" else [TOKEN_FORMATS[format]]
    endings: tuple[str, ...] = ()
    for reader in readers:
        endings += reader.endings
    files = sorted(
        file for file in path.rglob("[!.]*") if file.name.endswith(endings) and file.is_file()
    )
    held_out = [
        file for file in files if _HELD_OUT_NAME.search(str(file.relative_to(path)).lower())
    ]
    if held_out and len(held_out) < len(files):
        other = next(file for file in files if file not in held_out)
        raise DataError(
            f"{path} has files of several splits, such as {other.name} and {held_out[0].name}; "
            "would work: globs of one split in data.paths, and of the other in data.validation_paths"
        )
    return files


def corpora_of(data: DataConfig) -> list[Path]:
    """The folders among a job's files that are corpora, as far as they are here."""
    patterns = [*data.paths, *data.validation_paths] if data.may_be_corpus else []
    corpora = []
    for pattern in patterns:
        for match in matching(expand(pattern)):
            corpora += _corpora_in(Path(match))
    return corpora


def _corpora_in(folder: Path) -> list[Path]:
    return [
        path.parent for path in (folder / MANIFEST, *folder.glob(f"*/{MANIFEST}")) if path.is_file()
    ]


def _format_of(file: Path) -> str:
    if file.is_dir():
        return "corpus"
    formats = token_formats()
    by_ending = [name for name, each in formats.items() if file.name.endswith(each.endings)]
    if len(by_ending) == 1:
        return by_ending[0]
    for name in by_ending or formats:
        if formats[name].recognizes(file):
            return name
    works = ", ".join(name for name in TOKEN_FORMATS if name != "auto")
    raise DataError(
        f"{file}: the format of its tokens is unknown; would work: data.format, one of {works}, "
        "or a package that reads it (.ds: experiments/extensions)"
    )


def _open_corpora(
    folders: list[Path], tokenizer: Tokenizer, splits: set[str], *, check: bool
) -> tuple[list[Tokens], bool]:
    parts: list[Tokens] = []
    manifests = {folder: read_manifest(folder) for folder in folders}
    held_out = any(manifest.counts.tokens["validation"] for manifest in manifests.values())
    # Without held-out documents: the end of each shard of `train`.
    opened = sorted(splits) if held_out else ["train"]
    for folder, manifest in manifests.items():
        check_tokenizer(manifest, tokenizer, str(folder))
        for split in opened:
            if manifest.counts.tokens[split]:
                parts += open_shards(folder, split, check=check)
    return parts, held_out


def _section(part: Tokens, split: str, held_out: float, limit: Limit) -> Tokens:
    """Return all of a file, or what is left without its held-out end, or that end.

    It is cut where a document starts, if the file has an index.
    """
    if held_out == 0:
        return Section(part, 0, part.num_tokens, limit)
    cut = part.num_tokens - round(part.num_tokens * held_out)
    if part.num_documents is not None:
        starts = part.starts_between(cut, part.num_tokens)
        cut = int(starts[0]) if len(starts) else part.num_tokens
    begin, end = (0, cut) if split == "train" else (cut, part.num_tokens)
    return Section(part, begin, end, limit)


def _with_boundaries(tokens: Tokens, reading: Reading, usual: str) -> Tokens:
    """Return tokens with the document boundaries that ``data.boundaries`` selects; auto: the usual ones."""
    data = reading.data
    tokenizer = reading.tokenizer
    choice = usual if data.boundaries == "auto" else data.boundaries
    # GPT-2 has one token for both, its end of text, and files may begin documents with it.
    bos = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    token = {"bos": bos, "eos": tokenizer.eos_id, "none": None}[choice]
    if token is None and data.boundaries in ("bos", "eos"):
        rule = "the tokenizer has no such token"
        raise ConfigError(
            "data.boundaries", choice, rule, f"none, or tokenizer=none tokenizer.{choice}=ID"
        )
    if token is None and not data.attend_across_documents:
        rule = "the boundaries of documents are unknown: the files have no index, and no token separates them"
        works = "true, or data.boundaries=eos with a tokenizer that has eos"
        raise ConfigError("data.attend_across_documents", False, rule, works)
    delimited = Delimited(tokens, token=token, begins=choice == "bos")
    scanned = min(_SCANNED_TOKENS, tokens.num_tokens)
    warns = reading.is_builder and token is not None
    if warns and not len(delimited.starts_between(1, scanned)):
        sys.stderr.write(
            f"WARNING {tokens.name}: the first {scanned} tokens have no document boundary (id {token}); "
            "see data.boundaries\n"
        )
    return delimited


def _limit(tokenizer: Tokenizer, model_vocab_size: int) -> Limit:
    if isinstance(tokenizer, NoTokenizer):
        rule = f"model.vocab_size is {model_vocab_size}; would work: a larger one, or another data.dtype"
        return Limit(model_vocab_size, rule)
    rule = f"the tokenizer has {tokenizer.vocab_size} tokens; would work: the tokenizer that made the file"
    return Limit(tokenizer.vocab_size, f"{rule}, or tokenizer=none")
