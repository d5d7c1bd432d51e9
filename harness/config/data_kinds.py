"""Kinds of data: the fields that each reads, their rules, and its functions. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import TYPE_CHECKING

from harness.config.registry import TOKEN_FORMATS, Choices, Registry
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.config.data import DataConfig

TEXT_FORMATS = ("auto", "text", "jsonl", "parquet")
FORMATS = Choices(lambda: chain(TEXT_FORMATS, TOKEN_FORMATS))


@dataclass(frozen=True)
class DataKind:
    """A kind of data. Functions are written ``module:function``, and imported when they are used.

    Attributes:
        source: returns the documents of a split, as a ``harness.data.documents.Source``, for a ``DataConfig``
            and "train" or "validation". They are tokenized and held out (``data.validation_fraction``).
            Empty: there are no documents, or the architecture's ``Objective`` reads the batches itself.
        load: returns the loader of a ``harness.data.loader.Reading``; the default packs documents.
        tokenizer: returns the tokenizer of its documents, for a ``DataConfig`` and the job's tokenizer;
            empty: the job's.
        batches: what its batches hold: ``tokens``, or what another architecture takes.
        options: dataclass of ``data.options``; None: there are none.
        fields: fields of ``data`` that it reads and some other kind does not. With ``paths`` they are files
            that must exist, with ``dataset`` a dataset of the hub.
        formats: values of ``data.format``, if it reads files.
        example: of a path, for errors.
        holds_out: whether it has samples for validation without a field that says so.
        has_text: whether a sample is a part of texts.
        has_whole: whether samples hold whole conversations, which may not be cut.
        has_vocabulary: whether its ids are those of the job's tokenizer.
        check: raises ConfigError for a ``DataConfig`` with resolved options whose fields contradict each
            other; it opens no file.
        folders: returns the folders which the options of a ``DataConfig`` name, by option; null for none.
    """

    source: str = ""
    load: str = "harness.data.loader:load_documents"
    tokenizer: str = ""
    batches: str = "tokens"
    options: type | None = None
    fields: tuple[str, ...] = ()
    formats: Iterable[str] = ("auto",)
    example: str = ""
    holds_out: bool = False
    has_text: bool = True
    has_whole: bool = False
    has_vocabulary: bool = True
    check: str = ""
    folders: str = ""


_FILES = ("paths", "validation_paths", "format")
_BUILTINS = {
    "local": DataKind(
        "harness.data.documents:LocalFiles.of_split",
        fields=(*_FILES, "exclude", "encoding_errors"),
        formats=TEXT_FORMATS,
        example="my_corpus/**/*.txt",
    ),
    "tokens": DataKind(
        load="harness.data.token_files:load_tokens",
        fields=(*_FILES, "tokens_field", "dtype", "boundaries"),
        formats=TOKEN_FORMATS,
        example="corpus/web",
        has_text=False,
    ),
    "hub": DataKind(
        "harness.data.documents:HubTable.of_split",
        load="harness.data.streaming:load_hub",
        fields=("dataset", "subset", "split", "validation_split", "streaming", "data_files"),
    ),
    "chat": DataKind(
        "harness.data.chat:Conversations.of_split",
        load="harness.data.chat:load_conversations",
        tokenizer="harness.data.chat:ConversationTokenizer.of_job",
        fields=(
            *(*_FILES, "exclude", "encoding_errors", "messages_field", "chat_template"),
            *("chat_template_options", "chat_date", "train_on", "long_conversations"),
        ),
        formats=("auto", "jsonl", "parquet"),
        example="conversations.jsonl",
        has_text=False,
        has_whole=True,
        check=f"{__name__}:check_chat",
    ),
    "synthetic": DataKind(
        load="harness.data.loader:load_synthetic",
        fields=("mask_fraction",),
        holds_out=True,
        has_text=False,
        has_vocabulary=False,
        check=f"{__name__}:check_synthetic",
    ),
    "mixture": DataKind(
        load="harness.data.mixture:load_mixture",
        fields=("sources", "weights", "epochs", "weight_changes"),
        has_vocabulary=False,
        check="harness.config.mixture:check_mixture",
    ),
}
DATA_KINDS: Registry[DataKind] = Registry(
    "data", _BUILTINS, field="data.kind", expects="harness.config.data_kinds:DataKind"
)
OWNED = {name for kind in _BUILTINS.values() for name in kind.fields}
"""Fields that not all kinds read. For another kind a value would have no effect, so it is refused."""
OF_STREAMS = ("workers", "shuffle_buffer")
"""Fields that only streams read."""


def check_effects(data: DataConfig) -> None:
    """Raise ConfigError for a value that has no effect on data of this kind."""
    kind, default = DATA_KINDS[data.kind], type(data)()
    for name in (name for name in vars(data) if name in OWNED and name not in kind.fields):
        value = getattr(data, name)
        if value != getattr(default, name):
            readers = [other for other in DATA_KINDS if name in DATA_KINDS[other].fields]
            rule = f"has no effect with data.kind={data.kind}; only data.kind={' or '.join(readers)} uses it"
            raise ConfigError(f"data.{name}", value, rule, f"data.kind={readers[0]}, or leave it out")
    for name in OF_STREAMS:
        value = getattr(data, name)
        if not data.streaming and value != getattr(default, name):
            rule, works = "has no effect without data.streaming=true", "data.streaming=true, or leave it out"
            raise ConfigError(f"data.{name}", value, rule, works)
    if not data.shuffle and data.shuffle_buffer != default.shuffle_buffer:
        rule, works = "has no effect without data.shuffle=true", "data.shuffle=true, or leave it out"
        raise ConfigError("data.shuffle_buffer", data.shuffle_buffer, rule, works)


def check_inputs(data: DataConfig) -> None:
    """Raise ConfigError for files or a dataset that are missing or contradict each other."""
    kind = DATA_KINDS[data.kind]
    if "paths" in kind.fields:
        _check_files(data, kind)
    if "dataset" in kind.fields:
        _check_hub(data)


def _check_files(data: DataConfig, kind: DataKind) -> None:
    if not data.paths:
        rule = f"data.kind={data.kind} needs at least one file"
        raise ConfigError("data.paths", "[]", rule, f"'data.paths=[{kind.example}]'")
    if data.format not in kind.formats:
        rule = f"is no format of data.kind={data.kind}"
        raise ConfigError("data.format", data.format, rule, kind.formats)
    for name in ("paths", "exclude", "validation_paths"):
        if not all(getattr(data, name)):
            raise ConfigError(f"data.{name}", getattr(data, name), "an empty string is no glob")
    if data.validation_paths and data.validation_fraction > 0:
        rule = "validation comes either from data.validation_paths or from held-out documents, not both"
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, "0")


def _check_hub(data: DataConfig) -> None:
    if not data.dataset:
        rule = f"data.kind={data.kind} needs a dataset"
        raise ConfigError("data.dataset", data.dataset, rule, "allenai/c4")
    if data.dataset == "pandas":
        rule = "reads pickles, which can run any code"
        raise ConfigError("data.dataset", data.dataset, rule, "parquet, json, csv")
    if data.validation_fraction > 0 and (data.validation_split or data.streaming):
        rule = "validation comes either from data.validation_split or from held-out documents, not both"
        if not data.validation_split:
            rule = "documents of a stream cannot be held out"
        works = "0" if data.validation_split else "0 with data.validation_split set"
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, works)


def check_chat(data: DataConfig) -> None:
    """Raise ConfigError for samples in which conversations see each other, and for a date that is none."""
    for name, needed, rule in (
        ("attend_across_documents", False, "conversations do not attend to others in their sample"),
        ("mask_document_boundary", True, "no token predicts the beginning of another conversation"),
    ):
        if getattr(data, name) != needed:
            raise ConfigError(f"data.{name}", not needed, f"data.kind=chat: {rule}", str(needed).lower())
    if data.chat_date is not None:
        try:
            date.fromisoformat(data.chat_date)
        except ValueError:
            rule = "must be a date, as year, month and day"
            raise ConfigError("data.chat_date", data.chat_date, rule, "2026-01-31") from None


def check_synthetic(data: DataConfig) -> None:
    """Raise ConfigError for fields that have no effect on data without documents."""
    if data.validation_fraction > 0:
        rule = "synthetic data has no documents to hold out; it generates separate validation samples"
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, "0")
    if not data.attend_across_documents:
        raise ConfigError("data.attend_across_documents", False, "synthetic data has no documents", "true")
