"""Kinds of data: those that the loader reads itself, and those of other packages. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.registry import Registry


@dataclass(frozen=True)
class DataKind:
    """A kind of data.

    Attributes:
        source: for kinds of other packages: ``module:function`` that returns the documents of a split, as a
            ``harness.data.documents.Source``, for a ``DataConfig`` and "train" or "validation". They are
            tokenized and held out (``data.validation_fraction``) like those of local files. Empty for batches
            that the architecture's ``Objective`` reads itself.
        batches: what its batches hold: ``tokens``, or what another architecture takes.
        options: dataclass of ``data.options``; None: there are none.
        fields: fields of ``data`` that it reads of those that only some kinds read
            (``harness.config.kind_fields``). With ``paths`` they are files that must exist, with ``dataset``
            a dataset of the hub.
        example: of a path, for errors.
        holds_out: whether it has samples for validation without a field that says so.
        check: ``module:function`` that raises ConfigError for a ``DataConfig`` with resolved options whose
            fields contradict each other; it opens no file.
        folders: ``module:function`` that returns the folders which the options of a ``DataConfig`` name, by
            option; null for none.
    """

    source: str = ""
    batches: str = "tokens"
    options: type | None = None
    fields: tuple[str, ...] = ()
    example: str = ""
    holds_out: bool = False
    check: str = ""
    folders: str = ""


DATA_KINDS: Registry[DataKind] = Registry(
    "data",
    dict.fromkeys(("local", "tokens", "hub", "chat", "synthetic", "mixture"), DataKind()),
    field="data.kind",
    expects="harness.config.data_kinds:DataKind",
)
"""Kinds of data."""


def kinds_reading(field: str) -> list[str]:
    """Kinds of other packages that read a field which only some kinds read."""
    return [name for name in DATA_KINDS.plugins if field in DATA_KINDS[name].fields]
