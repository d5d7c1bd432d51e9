"""Columns of token lists: Arrow files are read in place, Parquet files through the token cache.

A row is a document. Values of a list column are one array in an Arrow file, which is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.data import DataConfig
from harness.contrib.formats.token_formats import smallest_dtype
from harness.data.cache import open_cache
from harness.data.corpus import TokenizedSplit
from harness.data.documents import LocalFiles, Span, file_stats, list_names, read_columns
from harness.data.tokenizer import Tokenizer
from harness.data.tokens import Concatenation, Limit, Opening, TokenFormat, Tokens
from harness.util.encoding import read_object
from harness.util.errors import DataError
from harness.util.files import is_file_name

_FILE_MAGIC = b"ARROW1"
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder of ``save_to_disk`` (`datasets`); empty for other folders."""
    try:
        if (folder / _SAVED_SPLITS).is_file():
            splits = read_object(folder / _SAVED_SPLITS, DataError)["splits"]
            raise DataError(
                f"{folder} has the splits {', '.join(splits)}; would work: the folder of one, "
                f"{folder / splits[0]}"
            )
        if not (folder / _SAVED).is_file():
            return []
        names = [
            file["filename"] for file in read_object(folder / _SAVED, DataError)["_data_files"]
        ]
        if others := [name for name in names if not is_file_name(name)]:
            raise ValueError(f"{others[0]!r} is no name of a file in it")
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{folder}: its {_SAVED} or {_SAVED_SPLITS} is damaged: {error!r}"
        ) from error


def open_arrow(file: Path, field: str) -> list[TokenizedSplit]:
    """Open an Arrow file, stream or feather file: a part for each record batch."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(file)) as content:
            mapped = content.read_buffer()
        is_file = bytes(mapped[: len(_FILE_MAGIC)]) == _FILE_MAGIC
        # `datasets` writes streams.
        reader = ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
        index = reader.schema.names.index(_field_of(reader.schema, field, file))
        parts = [_part_of(file, field, batch, index) for batch in _batches_of(reader)]
    except (
        OSError,
        ValueError,
        pyarrow.ArrowException,
    ) as error:  # ValueError: names that are not UTF-8
        reason = " ".join(str(error).split())
        raise DataError(f"{file}: is no readable Arrow file ({reason})") from error
    first = mapped.address
    last = mapped.address + mapped.size
    for part in parts:
        if len(part.tokens) and not first <= part.tokens.ctypes.data < last:
            rule = "is compressed, so it cannot be read in place"
            raise DataError(
                f"{file}: {rule}; would work: a Parquet file, or Arrow without compression"
            )
    return parts


def _batches_of(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _part_of(file: Path, field: str, batch: Any, index: int) -> TokenizedSplit:
    """Return the lists in a column of a record batch: their values, and the offset of each list."""
    import pyarrow

    batch.validate()  # its buffers may be shorter than it says
    column = batch.column(index)
    column.validate(full=True)  # reads the offsets of its lists: 4 or 8 bytes of each, and no value
    flat = column.flatten()  # without null rows
    if flat.null_count:
        raise DataError(f"{file}: column {field!r} has null among its token ids")
    values = flat.to_numpy()
    if pyarrow.types.is_fixed_size_list(column.type):
        starts = np.arange(0, len(values), column.type.list_size)
    elif column.null_count:
        lengths = column.value_lengths().fill_null(0).to_numpy()
        starts = np.cumsum(lengths) - lengths
    else:
        offsets = column.offsets.to_numpy()
        starts = offsets[:-1] - offsets[0] if len(offsets) and offsets[0] else offsets[:-1]
    return TokenizedSplit(values, starts, str(file))


class TokenLists(LocalFiles):
    """Rows of Parquet files, as documents of token ids for the token cache."""

    def __init__(self, config: DataConfig, files: list[Path], name: str, limit: Limit) -> None:
        # Without a limit of size: nothing is tokenized.
        super().__init__(replace(config, format="parquet", tokenize_limit_gib=None), "train")
        self.files = files
        self.name = name
        self._limit = limit

    @property
    def identity(self) -> Any:
        return [*self.reading, file_stats(self.files)]

    @property
    def reading(self) -> list[Any]:
        return ["tokens", self.config.tokens_field]

    def read_parquet(self, file: Path, span: Span) -> Iterator[Any]:
        """Yield the token ids of each row; none for a null row."""
        field = self.config.tokens_field
        for number, row in enumerate(read_columns(file, span, field, setting="data.tokens_field")):
            ids = np.asarray(row[field] or [0])
            if ids.dtype.kind not in "iu" or ids.ndim != 1:
                raise DataError(f"{file}: row {number} of column {field!r} is no list of token ids")
            self._limit.check(ids, f"{file}, row {number}", 0)
            yield row[field] or []


class Ids(Tokenizer):
    """Passes documents through that are lists of ids already, for the token cache."""

    bos_id = eos_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = f"ids/{smallest_dtype(vocab_size)}"

    def encode(self, text: Any) -> list[int]:
        return text

    def encode_batch(self, texts: Sequence[Any]) -> list[list[int]]:
        return list(texts)

    def encode_in_pieces(self, text: Any) -> Iterator[list[int]]:
        yield text

    def decode(self, ids: Sequence[int]) -> str:
        raise TypeError(f"{len(ids)} ids have no text")


def open_parquet(files: list[Path], opening: Opening) -> list[Tokens]:
    """Open the token cache of Parquet files; build it if it does not exist."""
    tokens = open_cache(
        TokenLists(opening.data, files, opening.name, opening.limit),
        Ids(opening.limit.vocab_size),
        split="train",
        held_out=0.0,
        wait_for_all=opening.wait_for_all,
        is_builder=opening.is_builder,
    )
    return [tokens]


def _field_of(schema: Any, field: str, file: Path) -> str:
    """Return ``field`` if it is a column of token lists."""
    from pyarrow import types

    if field not in schema.names:
        known = list_names(schema.names)
        raise DataError(f"{file}: no column {field!r} among {known}; set data.tokens_field")
    kind = schema.field(field).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise DataError(
            f"{file}: column {field!r} has values of type {kind}; token ids are lists of integers"
        )
    return field


ARROW = TokenFormat(
    endings=(".arrow",),
    listed=saved_files,
    reads=("tokens_field",),
    open=lambda files, opening: [
        Concatenation(open_arrow(file, opening.data.tokens_field), str(file)) for file in files
    ],
)
PARQUET = TokenFormat(endings=(".parquet",), reads=("tokens_field",), open=open_parquet)
