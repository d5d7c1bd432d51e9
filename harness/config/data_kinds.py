"""Kinds of data, the formats that each reads, and the fields that only some read. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from harness.config.formats import TOKEN_FORMATS
from harness.config.registry import Choices, Registry


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
        fields: fields of ``data`` that it reads and other kinds do not
            (``READ_ONLY_BY``). With ``paths`` they are files that must exist, with ``dataset``
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


WITHOUT_TEXT = ("tokens", "chat", "synthetic")
TEXT_FORMATS = ("auto", "text", "jsonl", "parquet")
FORMATS = Choices(lambda: chain(TEXT_FORMATS, TOKEN_FORMATS))
FORMATS_OF: dict[str, tuple[Iterable[str], str]] = {
    "local": (TEXT_FORMATS, "my_corpus/**/*.txt"),
    "tokens": (TOKEN_FORMATS, "corpus/web"),
    "chat": (("auto", "jsonl", "parquet"), "conversations.jsonl"),
}
"""Formats of the kinds that read files, and an example of a path."""

# Fields that only some kinds of source read. For another kind a value would have no effect, so it is refused.
READ_ONLY_BY = {
    ("local", "tokens", "chat"): ("format", "validation_paths", "paths"),
    ("local", "chat"): ("exclude", "encoding_errors"),
    ("tokens",): ("tokens_field", "dtype", "boundaries"),
    ("hub",): (
        "dataset",
        "subset",
        "split",
        "validation_split",
        "streaming",
        "data_files",
    ),
    ("chat",): (
        "messages_field",
        "chat_template",
        "chat_template_options",
        "chat_date",
        "train_on",
        "long_conversations",
    ),
    ("synthetic",): ("mask_fraction",),
    ("mixture",): ("sources", "weights", "epochs", "weight_changes"),
}
# Fields that only streams read.
READ_ONLY_BY_STREAMS = ("workers", "shuffle_buffer")


def kinds_reading(field: str) -> list[str]:
    """Kinds of other packages that read a field which only some kinds read."""
    return [name for name in DATA_KINDS.plugins if field in DATA_KINDS[name].fields]
