"""Sources of documents: local files and datasets.

A source has an ``identity`` (everything that determines its documents, for the cache key) and yields its
documents in a fixed order, including empty ones, so that a document's index is stable.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from harness.data.config import DataConfig
from harness.errors import DataError

_ROWS_PER_READ = 256
_DAMAGED_FILE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Source(Protocol):
    """Documents in a fixed order."""

    name: str
    """Name for error messages: the field and its value."""
    damaged: int
    """Documents so far that were not UTF-8, and were repaired or left out by data.encoding_errors."""

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever the documents may have changed."""
        ...

    def documents(self) -> Iterator[str]:
        """Yield every document's text, including empty ones."""
        ...


def source_of(config: DataConfig, split: str) -> tuple[Source, float]:
    """Return the source of ``split`` ("train" or "validation"), and its held-out fraction.

    Raises:
        ConfigError: the split is "validation" and no documents are held out for it.
    """
    validating = split == "validation"
    if validating:
        config.require_validation()
    if config.kind == "local":
        if validating and config.validation_paths:
            return LocalFiles(config, "validation_paths"), 0.0
        return LocalFiles(config, "paths"), config.validation_fraction
    if validating and config.validation_split:
        return HubTable(config, config.validation_split), 0.0
    return HubTable(config, config.split), config.validation_fraction


class LocalFiles:
    """Documents of local files, in the order of the sorted paths."""

    def __init__(self, config: DataConfig, field: str) -> None:
        self._config = config
        self._patterns: list[str] = getattr(config, field)
        self.damaged = 0
        self.name = f"data.{field}=[{', '.join(self._patterns)}]"

    @cached_property
    def files(self) -> list[Path]:
        """The matching files.

        Raises:
            DataError: no file matches.
        """
        found = find_files(self._patterns, self._config.exclude)
        if not found:
            raise DataError(f"no file matches {self.name}, seen from {os.getcwd()}{self._hint()}")
        return found

    def _hint(self) -> str:
        """Return what to write instead, if a pattern is a folder."""
        for pattern in self._patterns:
            folder = Path(expand(pattern))
            if _is_saved(folder):
                overrides = f"data=c4 data.dataset={folder} data.subset=null"
                return f"; {pattern} is a dataset saved to disk, write {overrides}"
            if os.path.isdir(folder):
                return f"; {pattern} is a folder, write {pattern.rstrip('/')}/**/*"
        return ""

    @property
    def identity(self) -> Any:
        stats = [(str(file), file.stat()) for file in self.files]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        identity = ["local", files, self._config.format, self._config.text_field]
        errors = self._config.encoding_errors
        return identity if errors == "strict" else [*identity, errors]

    def documents(self) -> Iterator[str]:
        for file in self.files:
            try:
                yield from self._read(file)
            except _DAMAGED_FILE as error:
                raise DataError(f"{file} cannot be read: {_one_line(error)}") from error

    def _read(self, file: Path) -> Iterator[str]:
        format = self._config.format if self._config.format != "auto" else format_of(file)
        if format == "jsonl":
            return self.read_jsonl(file)
        if format == "parquet":
            return self.read_parquet(file)
        return self._read_text(file)

    def document_of(self, row: dict[str, Any], where: str) -> str:
        """The document of a row of JSON or parquet; ``where`` is its position for error messages."""
        return _text_of_row(row, self._config.text_field, where)

    def _read_text(self, file: Path) -> Iterator[str]:
        # bytes, not text mode: newlines stay as they are
        with _opened(file) as content:
            yield self._decoded(content.read(), str(file))

    def read_jsonl(self, file: Path) -> Iterator[str]:
        """Yield the document of each line."""
        with _opened(file) as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                where, start = f"{file}, line {number}", offset
                offset += len(line)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                    start = offset - len(line)
                if line.strip():
                    text = self._decoded(line, where, start)
                    yield self.document_of(_row_of_line(text, where), where) if text else ""

    def read_parquet(self, file: Path) -> Iterator[str]:
        """Yield the document of each row."""
        for row in read_columns(file, self._config.text_field, setting="data.text_field"):
            yield self.document_of(row, str(file))

    def _decoded(self, content: bytes, where: str, start: int = 0) -> str:
        """Decode a document; return an empty string if it is not UTF-8 and skipped."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._config.encoding_errors == "strict":
                position = f"byte {start + error.start}" + (" of the file" if start else "")
                raise DataError(
                    f"{where}: not UTF-8 at {position}; would work: data.encoding_errors=replace or skip"
                ) from error
        self.damaged += 1
        return content.decode("utf-8", "replace") if self._config.encoding_errors == "replace" else ""


def find_files(patterns: list[str], exclude: list[str]) -> list[Path]:
    """Files that match one of the globs ``patterns`` and none of ``exclude``, each once, sorted."""
    excluded = [_glob_to_regex(expand(pattern)) for pattern in exclude]
    found = {
        os.path.abspath(name) for pattern in patterns for name in glob.iglob(expand(pattern), recursive=True)
    }
    kept = (name for name in found if not any(regex.fullmatch(name) for regex in excluded))
    return sorted(Path(name) for name in kept if os.path.isfile(name))


def expand(pattern: str) -> str:
    """``pattern`` as an absolute glob; one that begins with ``**/`` matches anywhere and is not changed."""
    pattern = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
    if pattern.startswith("**/"):
        return pattern
    return os.path.abspath(os.path.expanduser(pattern))


def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    """A regular expression for complete paths; as in ``glob``, only ``**`` matches slashes."""
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts), re.DOTALL)


def format_of(file: Path) -> str:
    name = file.stem if file.suffix in _COMPRESSIONS else file.name
    if name.endswith((".jsonl", ".json")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _opened(file: Path) -> IO[bytes]:
    """Open a file to read its bytes, decompressed as its extension says."""
    return _COMPRESSIONS.get(file.suffix, open)(file, "rb")


def _open_zstd(file: Path, mode: str) -> IO[bytes]:
    """Open a file of zstd frames; reading a truncated file raises an error."""
    import pyarrow

    # pyarrow's input streams read bytes, but not lines.
    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


_COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def _row_of_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object")
    return row


def _text_of_row(row: dict[str, Any], field: str, where: str) -> str:
    """Text of a row; null is an empty document."""
    if field not in row:
        raise DataError(f"{where}: no field {field!r} among {_named(row)}; set data.text_field")
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} holds {type(text).__name__}, not text")
    try:
        text.encode("utf-8")  # JSON can spell half a surrogate pair, which no tokenizer can read
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} holds half a surrogate pair at character {error.start}"
        ) from error
    return text


def read_columns(file: Path, required: str, *optional: str, setting: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with a required column and those optional columns that exist.

    Args:
        setting: the field of the job that names the required column, for the error.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if required not in names:
                raise DataError(f"{file}: no column {required!r} among {_named(names)}; set {setting}")
            columns = [required, *(name for name in optional if name in names)]
            for batch in table.iter_batches(batch_size=_ROWS_PER_READ, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a readable parquet file ({_one_line(error)})") from error


class HubTable:
    """Documents of one split of a dataset, downloaded (or found locally) by the `datasets` library."""

    def __init__(self, config: DataConfig, split: str) -> None:
        self._config = config
        self._split = split
        self.name = f"data.dataset={config.dataset}, split {split}"
        self.damaged = 0

    @cached_property
    def _table(self) -> Any:
        return open_dataset(self._config, self._split)

    @property
    def identity(self) -> Any:
        files = [Path(entry["filename"]) for entry in self._table.cache_files]
        stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        # A table in memory has no files; its fingerprint identifies its content.
        content = stats or self._table._fingerprint
        return [
            "hub",
            content,
            self._config.dataset,
            self._config.subset,
            self._split,
            self._config.text_field,
        ]

    def documents(self) -> Iterator[str]:
        require_column(self._table, self._config.text_field, self.name)
        table = self._table.select_columns([self._config.text_field])
        for batch in table.iter(batch_size=_ROWS_PER_READ):
            for text in batch[self._config.text_field]:
                yield _text_of_row({self._config.text_field: text}, self._config.text_field, self.name)


def open_dataset(config: DataConfig, split: str) -> Any:
    """Load one split with ``datasets``: an IterableDataset with ``data.streaming``, else a Dataset.

    Raises:
        DataError: no such dataset, subset or split, or the hub cannot be reached.
    """
    import datasets

    try:
        if config.dataset and _is_saved(Path(config.dataset)):
            return _saved_split(config, split)
        return datasets.load_dataset(
            config.dataset,
            config.subset,
            split=split,
            streaming=config.streaming,
            data_files=config.data_files or None,
        )
    except DataError:
        raise
    # The library, the hub's client, the network and file readers raise many types of errors; to the user all
    # mean that the dataset cannot be opened.
    except Exception as error:
        which = f"{config.dataset}/{config.subset}" if config.subset else config.dataset
        raise DataError(f"dataset {which}, split {split}: cannot be opened: {_one_line(error)}") from error


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of `datasets` wrote the folder."""
    return any(os.path.isfile(folder / name) for name in ("dataset_dict.json", "state.json"))


def _saved_split(config: DataConfig, split: str) -> Any:
    """Return a split of a dataset that was saved to disk; one saved without splits has ``train`` only."""
    import datasets

    if config.subset:
        raise DataError(
            f"dataset {config.dataset} was saved to disk and has no subsets; set data.subset=null"
        )
    saved = datasets.load_from_disk(str(config.dataset))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if split not in splits:
        raise DataError(f"dataset {config.dataset} has no split {split} among {_named(splits)}")
    return splits[split].to_iterable_dataset() if config.streaming else splits[split]


def require_column(dataset: Any, field: str, name: str) -> None:
    """Raise DataError if the columns of ``dataset`` are known and do not include ``field``."""
    columns = dataset.column_names
    if columns is not None and field not in columns:
        raise DataError(f"{name}: no column {field!r} among {_named(columns)}; set data.text_field")


def text_of_example(example: dict[str, Any], field: str, name: str) -> str:
    """Text of a streamed example; null is an empty document."""
    return _text_of_row(example, field, name)


def _named(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
