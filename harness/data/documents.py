"""Documents of a source: local files and datasets, and parts of them that can be read one by one.

A source has an ``identity`` (everything that determines its documents, for the cache key) and
yields its documents in a fixed order, including empty ones, so that a document's index is stable.
Several processes may read its spans: sources are picklable.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Protocol

from harness.config.data import DataConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.registry import load_attribute
from harness.data.tokenizer import Tokenizer
from harness.util.encoding import parse_object
from harness.util.errors import ConfigError, DataError
from harness.util.files import matching

ROWS_PER_READ = 256
_BLOCK_BYTES = 1 << 20
_PART_BYTES = 1 << 24
LONG_FILE_BYTES = 1 << 26
"""A text file of as many bytes or more is read in parts."""
LONGEST_LINE = 100_000_000
"""Bytes of a line of JSON; a longer one is no document, and would fill the memory."""
EMPTY = "holds no text: every document is empty"
_DAMAGED_FILE = (OSError, EOFError, zlib.error, lzma.LZMAError)


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
    """The text of a file that may not fit into memory, in parts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        """About the number of characters; of a compressed file at least ``LONG_FILE_BYTES``."""
        return max(LONG_FILE_BYTES, self._file.stat().st_size)

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        with _readable(self._file), open_file(self._file) as content:
            is_last = False
            while not is_last:
                block = content.read(_PART_BYTES)
                is_last = len(block) < _PART_BYTES
                # A character that the last block has cut waits in the decoder.
                begin = position - len(decoder.getstate()[0])
                position += len(block)
                yield _decoded(
                    block, str(self._file), begin, partial(decoder.decode, final=is_last)
                )


class Source(Protocol):
    """Documents in a fixed order."""

    config: DataConfig
    name: str
    """Name for error messages: the field and its value."""
    without_tokens: str
    """What to say of a source without a token."""

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

    def documents(self) -> Iterator[str | LongText]:
        """Yield every document's text, including empty ones."""
        for span in self.spans(sys.maxsize):
            yield from self.read(span)


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


# Not .jl, which is Julia too: JSON in it is recognized by its first line.
_JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".ldjson", ".ndjsonl")
_ONE_A_LINE = "one object on each line"
# An array of objects, on one line or on several.
_ARRAY = re.compile(rb"\s*\[\s*\{\s*\"")


def _refuse_json(file: Path, beginning: bytes) -> None:
    """Refuse a file that is not named as JSON and begins with a line of an object, or an array of them."""
    beginning = beginning.removeprefix(codecs.BOM_UTF8)
    first_line = beginning.lstrip().partition(b"\n")[0]
    is_object = False
    if first_line.startswith(b"{"):
        with contextlib.suppress(ValueError):
            is_object = bool(parse_object(first_line))
    if is_object or _ARRAY.match(beginning):
        works = "data.format=jsonl" if is_object else f"data.format=jsonl with {_ONE_A_LINE}"
        rule = "its first line is a JSON object" if is_object else "it is a JSON array"
        raise DataError(
            f"{file}: {rule}, not text; would work: {works}, or data.format=text for its text"
        )


def format_of(file: Path) -> str:
    name = file.stem if file.suffix in COMPRESSIONS else file.name
    if name.lower().endswith(_JSON_LINES):
        return "jsonl"
    return "parquet" if name.lower().endswith(".parquet") else "text"


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
                raise DataError(
                    f"{file}: no column {required!r} among {list_names(names)}; set {setting}"
                )
            columns = [required, *(name for name in optional if name in names)]
            groups = None if span.end is None else list(range(span.begin, span.end))
            for batch in table.iter_batches(
                batch_size=ROWS_PER_READ, row_groups=groups, columns=columns
            ):
                yield from batch.to_pylist()
    except ValueError as error:  # pyarrow.ArrowInvalid, or UnicodeDecodeError in the footer
        raise DataError(f"{file}: not a readable parquet file ({describe(error)})") from error


def source_of(config: DataConfig, split: str) -> tuple[Source, float]:
    """Return the source of ``split`` ("train" or "validation"), and its held-out fraction.

    Raises:
        ConfigError: the split is "validation" and no documents are held out for it, or the data is
            a mixture.
    """
    if config.sources:
        rule = "has several sources"
        raise ConfigError("data.kind", config.kind, rule, "the fields of one of data.sources")
    if split == "validation":
        config.require_validation()
    source: Source = load_attribute(DATA_KINDS[config.kind].source)(config, split)
    return source, config.validation_fraction


def tokenizer_of(config: DataConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer of a source's documents; ``tokenizer`` is the job's."""
    function = DATA_KINDS[config.kind].tokenizer
    return load_attribute(function)(config, tokenizer) if function else tokenizer


class LocalFiles(Source):
    """Documents of local files, in the order of the sorted paths."""

    without_tokens = EMPTY

    def __init__(self, config: DataConfig, split: str) -> None:
        self.config = config
        field, self._patterns = config.files_of(split)
        self.name = f"data.{field}=[{', '.join(self._patterns)}]"

    @cached_property
    def files(self) -> list[Path]:
        found = find_files(self._patterns, self.config.exclude)
        if not found:
            raise DataError(f"no file matches {self.name}, seen from {os.getcwd()}{self._hint()}")
        return found

    def _hint(self) -> str:
        for pattern in self._patterns:
            folder = Path(expand(pattern))
            if _is_saved(folder):
                overrides = f"data=c4 data.dataset={folder} data.subset=null"
                return f"; {pattern} is a dataset saved to disk, write {overrides}"
        return folder_hint(self._patterns)

    @property
    def identity(self) -> Any:
        return ["local", file_stats(self.files), *self.reading]

    @property
    def reading(self) -> list[Any]:
        return [self.config.format, self.config.text_field]

    def contents(self, spans: Iterable[Span]) -> Any:
        spans = list(spans)
        stats = file_stats(Path(span.name) for span in spans)
        return [[*stat, span.begin, span.end] for stat, span in zip(stats, spans, strict=True)]

    def spans(self, unit_bytes: int) -> Iterator[Span]:
        for file in self.files:
            size = file.stat().st_size
            format = self.format_of(file)
            if size <= unit_bytes or file.suffix in COMPRESSIONS or format == "text":
                yield Span(str(file), 0, None, size)
            elif format == "jsonl":
                yield from cut(str(file), size, size, unit_bytes)
            else:
                yield from cut(str(file), row_groups(file), size, unit_bytes)

    def read(self, span: Span) -> Iterator[str | LongText]:
        file = Path(span.name)
        with _readable(file):
            format = self.format_of(file)
            if format == "jsonl":
                yield from self.read_jsonl(file, span)
            elif format == "parquet":
                yield from self.read_parquet(file, span)
            else:
                # bytes, not text mode: newlines stay as they are
                with open_file(file) as content:
                    text = content.read(LONG_FILE_BYTES)
                if self.config.format == "auto":
                    _refuse_json(file, text)
                is_long = len(text) == LONG_FILE_BYTES
                yield LongText(file) if is_long else _decoded(text, str(file))

    def format_of(self, file: Path) -> str:
        return self.config.format if self.config.format != "auto" else format_of(file)

    def document_of(self, row: dict[str, Any], where: str) -> str:
        """The document of a row of JSON or parquet; ``where`` is its position for error messages."""
        return text_of_row(row, self.config.text_field, where)

    def read_parquet(self, file: Path, span: Span) -> Iterator[str]:
        for row in read_columns(file, span, self.config.text_field, setting="data.text_field"):
            yield self.document_of(row, str(file))

    def read_jsonl(self, file: Path, span: Span) -> Iterator[str]:
        """Yield the document of each line that begins in a span."""
        with open_file(file) as lines:
            if span.begin:  # seek the first line that begins there or later
                lines.seek(span.begin - 1)
                while (part := lines.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
                    pass
            offset = lines.tell() if span.begin else 0
            after = f" after byte {offset}" if offset else ""
            for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE + 1), b"")):
                if span.end is not None and offset >= span.end:
                    return
                where = f"{file}, line {number + 1}{after}"
                start = offset
                offset += len(line)
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{where}: has more than {LONGEST_LINE} bytes; would work: shorter documents"
                    )
                if start == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                    start = offset - len(line)
                if line.strip():
                    text = _decoded(line, where, start)
                    try:
                        row = parse_object(text)
                    except ValueError as error:
                        works = f"would work: {_ONE_A_LINE}"
                        raise DataError(f"{where}: not a JSON object ({error}); {works}") from error
                    yield self.document_of(row, where)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise DataError where a file cannot be read."""
    try:
        yield
    except _DAMAGED_FILE as error:
        raise DataError(f"{file} cannot be read: {describe(error)}") from error


def _decoded(
    content: bytes, where: str, start: int = 0, decode: Callable[[bytes], str] = bytes.decode
) -> str:
    """Decode a document, or a part, that begins at byte ``start`` of the file."""
    try:
        return decode(content)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 at byte {start + error.start}{' of the file' if start else ''}; would "
            "work: a file in UTF-8; iconv -c -f utf-8 -t utf-8 leaves out what is not"
        ) from error


def file_stats(files: Iterable[Path]) -> list[list[Any]]:
    """Path, size and modification time of each file."""
    stats = [(str(file), file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def find_files(patterns: list[str], exclude: list[str]) -> list[Path]:
    """Files that match one of the globs ``patterns`` and none of ``exclude``, each once, sorted."""
    found: set[str] = set()
    for pattern in patterns:
        found |= set(map(os.path.abspath, matching(expand(pattern))))
    for pattern in exclude:
        excluded = _glob_to_regex(expand(pattern))
        found = {name for name in found if not excluded.fullmatch(name)}
    return sorted(Path(name) for name in found if os.path.isfile(name))


def folder_hint(patterns: list[str]) -> str:
    """What to write instead of the first pattern that is a folder."""
    folders = (pattern for pattern in patterns if os.path.isdir(expand(pattern)))
    return next(
        (f"; {folder} is a folder, write {folder.rstrip('/')}/**/*" for folder in folders), ""
    )


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


def text_of_row(row: dict[str, Any], field: str, where: str) -> str:
    """Text of a row; null is an empty document."""
    if field not in row:
        raise DataError(f"{where}: no field {field!r} among {list_names(row)}; set data.text_field")
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


class HubTable(Source):
    """Documents of one split of a dataset, downloaded (or found locally) by the `datasets` library."""

    without_tokens = EMPTY

    def __init__(self, config: DataConfig, split: str) -> None:
        self.config = config
        self._split = config.split_of(split)
        self.name = f"data.dataset={config.dataset}, split {self._split}"

    @cached_property
    def _table(self) -> Any:
        return open_dataset(self.config, self._split)

    @property
    def identity(self) -> Any:
        stats = file_stats(Path(entry["filename"]) for entry in self._table.cache_files)
        # A table in memory has no files; its fingerprint identifies its content.
        content = stats or self._table._fingerprint
        config = self.config
        return ["hub", content, config.dataset, config.subset, self._split, config.text_field]

    @property
    def reading(self) -> list[Any]:
        return [self.identity]

    def contents(self, spans: Iterable[Span]) -> Any:
        return [[span.begin, span.end] for span in spans]

    def spans(self, unit_bytes: int) -> Iterator[Span]:
        require_column(self._table, self.config.text_field, self.name)
        return cut(self.name, len(self._table), self._table.data.nbytes, unit_bytes)

    def read(self, span: Span) -> Iterator[str]:
        table = self._table.select_columns([self.config.text_field])
        table = table.select(range(span.begin, len(table) if span.end is None else span.end))
        for batch in table.iter(batch_size=ROWS_PER_READ):
            for text in batch[self.config.text_field]:
                yield text_of_row({self.config.text_field: text}, self.config.text_field, self.name)


def open_dataset(config: DataConfig, split: str) -> Any:
    """Load one split with ``datasets``: an IterableDataset with ``data.streaming``, else a Dataset."""
    import datasets

    try:
        if config.dataset and _is_saved(Path(config.dataset)):
            return _saved_split(config, split)
        files = config.data_files or None
        streaming = config.streaming
        return datasets.load_dataset(
            config.dataset, config.subset, split=split, streaming=streaming, data_files=files
        )
    except DataError:
        raise
    # The library, the hub's client, the network and file readers raise many types of errors; to the
    # user all mean that the dataset cannot be opened.
    except Exception as error:
        which = f"{config.dataset}/{config.subset}" if config.subset else config.dataset
        raise DataError(
            f"dataset {which}, split {split}: cannot be opened: {describe(error)}"
        ) from error


def _is_saved(folder: Path) -> bool:
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
        raise DataError(f"dataset {config.dataset} has no split {split} among {list_names(splits)}")
    return splits[split].to_iterable_dataset() if config.streaming else splits[split]


def require_column(dataset: Any, field: str, name: str) -> None:
    """Raise DataError if the columns of ``dataset`` are known and do not include ``field``."""
    columns = dataset.column_names
    if columns is not None and field not in columns:
        raise DataError(
            f"{name}: no column {field!r} among {list_names(columns)}; set data.text_field"
        )
