"""Kinds of data: those that the loader reads itself, and those of other packages. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.pictures import PICTURE_KINDS
from harness.config.registry import Registry


@dataclass(frozen=True)
class DataKind:
    """A kind of data.

    Attributes:
        source: for kinds of other packages: ``module:function`` that returns the documents of a split, as a
            ``harness.data.documents.Source``, for a ``DataConfig`` and "train" or "validation". They are
            tokenized and held out (``data.validation_fraction``) like those of local files.
        batches: what its batches hold: ``tokens``, or what another architecture takes.
        options: dataclass of ``data.options``; None: there are none.
    """

    source: str = ""
    batches: str = "tokens"
    options: type | None = None


DATA_KINDS: Registry[DataKind] = Registry(
    "data",
    dict.fromkeys(("local", "tokens", "hub", "chat", "synthetic", "mixture"), DataKind())
    | dict.fromkeys(PICTURE_KINDS, DataKind(batches="images")),
    field="data.kind",
    expects="harness.config.data_kinds:DataKind",
)
"""Kinds of data."""
