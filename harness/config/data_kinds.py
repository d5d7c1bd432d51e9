"""Kinds of data, the formats that each reads, and the fields that only some read. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from harness.config.formats import TOKEN_FORMATS
from harness.config.pictures import PICTURE_FORMATS, PICTURE_KINDS
from harness.config.registry import Choices, Registry


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


SYNTHETIC = ("synthetic", "latents_synthetic")
WITHOUT_TEXT = ("tokens", "chat", "synthetic", *PICTURE_KINDS)
TEXT_FORMATS = ("auto", "text", "jsonl", "parquet")
FORMATS = Choices(lambda: chain(TEXT_FORMATS, PICTURE_FORMATS, TOKEN_FORMATS))
FORMATS_OF: dict[str, tuple[Iterable[str], str]] = {
    "local": (TEXT_FORMATS, "my_corpus/**/*.txt"),
    "tokens": (TOKEN_FORMATS, "corpus/web"),
    "chat": (("auto", "jsonl", "parquet"), "conversations.jsonl"),
    "pictures": (PICTURE_FORMATS, "photos/**/*.jpg"),
    "latents": (("auto",), "latents/photos"),
}
"""Formats of the kinds that read files, and an example of a path."""

# Fields that only some kinds of source read. For another kind a value would have no effect, so it is refused.
READ_ONLY_BY = {
    ("local", "tokens", "chat", "pictures"): ("format", "validation_paths"),
    ("local", "tokens", "chat", "pictures", "latents"): ("paths",),
    ("local", "chat", "pictures"): ("exclude",),
    ("local", "chat"): ("encoding_errors",),
    ("tokens",): ("tokens_field", "dtype", "boundaries"),
    ("hub", "hub_pictures"): (
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
