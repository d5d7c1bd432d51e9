"""Rows of parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.data.documents import Span, describe, named
from harness.util.errors import DataError

_ROWS_PER_READ = 256


def row_groups(file: Path) -> int:
    """Number of row groups of a parquet file.

    Raises:
        DataError: it cannot be read.
    """
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
                raise DataError(f"{file}: no column {required!r} among {named(names)}; set {setting}")
            columns = [required, *(name for name in optional if name in names)]
            groups = None if span.end is None else list(range(span.begin, span.end))
            for batch in table.iter_batches(batch_size=_ROWS_PER_READ, row_groups=groups, columns=columns):
                yield from batch.to_pylist()
    except ValueError as error:  # pyarrow.ArrowInvalid, or UnicodeDecodeError in the footer
        raise DataError(f"{file}: not a readable parquet file ({describe(error)})") from error
