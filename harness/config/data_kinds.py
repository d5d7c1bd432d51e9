"""Kinds of data: the fields of each, their rules, and its functions. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from harness.config.registry import TOKEN_FORMATS, Choices, Registry
from harness.util.errors import ConfigError, DataError

if TYPE_CHECKING:
    from harness.config.data import DataConfig, ValidationSet

Own = TypeVar("Own", bound="DataConfig")
TEXT_FORMATS = ("auto", "text", "jsonl", "parquet")
FORMATS = Choices(
    lambda: chain(TEXT_FORMATS, (name for name in TOKEN_FORMATS if name not in TEXT_FORMATS))
)
MIXTURE_FIELDS = ("kind", "sources", "weights", "epochs", "weight_changes")
"""Fields of the mixture itself; only ``kind`` is a field of its sources too."""
SHARED = (
    "mask_document_boundary",
    "attend_across_documents",
    "leave_out",
    "prefetch",
    "cache_dir",
    "tokenize_workers",
    "tokenize_limit_gib",
)
"""Fields that are set once for all sources. Each source has its own values of the others."""
NOT_OF_SETS = (
    *MIXTURE_FIELDS[1:],
    "validation_paths",
    "validation_split",
    "validation_fraction",
    "shuffle",
)
"""Fields without effect on a validation set, which is one source, has no other split, and keeps its order."""
STEP = "step"
"""In a change of weights, the key that does not name a source."""
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_OF_FILES = re.compile(r"\bdata\.(?=(paths|format|text_field|messages_field)\b)")
_EXAMPLE = "'data.sources={web: {kind: local, paths: [web/*.txt]}, code: {kind: local, paths: [code/*.py]}}'"


@dataclass(frozen=True)
class DataKind:
    """A kind of data. Functions are written ``module:function``, and imported when they are used.

    Attributes:
        source: returns the documents of a split, as a ``harness.data.documents.Source``, for a
            ``DataConfig`` and "train" or "validation". They are tokenized and held out
            (``data.validation_fraction``). Empty: there are no documents, or the architecture's
            ``Objective`` reads the batches itself.
        load: returns the loader of a ``harness.data.samples.Reading``; the default packs documents.
        tokenizer: returns the tokenizer of its documents, for a ``DataConfig`` and the job's
            tokenizer; empty: the job's.
        batches: what its batches hold: ``tokens``, or what another architecture takes.
        options: dataclass of ``data.options``; None: there are none.
        fields: fields of ``data`` that it reads and some other kind does not. If ``paths`` is among
            them, its data are files that must exist; if ``dataset`` is, a dataset of the hub.
        formats: values of ``data.format``, if it reads files.
        example: a path, for errors.
        holds_out: whether it has samples for validation without a field that says so.
        has_text: whether a sample is a part of texts.
        has_whole: whether samples hold whole conversations, which may not be cut.
        has_vocabulary: whether its ids are those of the job's tokenizer.
        check: raises ConfigError for a ``DataConfig`` with resolved options whose fields contradict
            each other; it opens no file.
        folders: returns the folders that the options of a ``DataConfig`` name: option -> folder,
            null for none.
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
        "harness.data.documents:LocalFiles",
        fields=(*_FILES, "exclude"),
        formats=TEXT_FORMATS,
        example="my_corpus/**/*.txt",
    ),
    "tokens": DataKind(
        load="harness.data.token_files:load_tokens",
        fields=(*_FILES, "dtype", "boundaries"),
        formats=TOKEN_FORMATS,
        example="corpus/web",
        has_text=False,
    ),
    "hub": DataKind(
        "harness.data.documents:HubTable",
        load="harness.data.streaming:load_hub",
        fields=("dataset", "subset", "split", "validation_split", "streaming", "data_files"),
    ),
    "chat": DataKind(
        "harness.data.chat:Conversations",
        load="harness.data.chat_packing:load_conversations",
        tokenizer="harness.data.chat:ConversationTokenizer",
        fields=(
            *_FILES,
            "exclude",
            "messages_field",
            "chat_template",
            "chat_template_options",
            "chat_date",
            "train_on",
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
        load="harness.data.kinds:load_mixture",
        fields=MIXTURE_FIELDS[1:],  # all but kind
        has_vocabulary=False,
        check=f"{__name__}:check_mixture",
    ),
}
DATA_KINDS: Registry[DataKind] = Registry(
    "data", _BUILTINS, field="data.kind", expects="harness.config.data_kinds:DataKind"
)
OWNED = set().union(*(kind.fields for kind in _BUILTINS.values()))
"""Fields that not all kinds read. For another kind a value would have no effect, so it is
refused."""
NEEDED = (("workers", "streaming"), ("shuffle_buffer", "streaming"), ("shuffle_buffer", "shuffle"))
"""Pairs of a field and the switch without which the field has no effect."""


def check_effects(data: DataConfig) -> None:
    """Raise ConfigError for a value that has no effect on data of this kind."""
    kind = DATA_KINDS[data.kind]
    given = _given(data)
    for name, value in given.items():
        if name in OWNED and name not in kind.fields:
            readers = [other for other in DATA_KINDS if name in DATA_KINDS[other].fields]
            rule = f"has no effect with data.kind={data.kind}; only data.kind={' or '.join(readers)} uses it"
            raise ConfigError(
                f"data.{name}", value, rule, f"data.kind={readers[0]}, or leave it out"
            )
    for name, switch in NEEDED:
        if name in given and not getattr(data, switch):
            rule = f"has no effect without data.{switch}=true"
            works = f"data.{switch}=true, or leave it out"
            raise ConfigError(f"data.{name}", given[name], rule, works)


def _given(data: DataConfig) -> dict[str, Any]:
    """The fields that do not have their defaults."""
    default = type(data)()
    return {name: value for name, value in vars(data).items() if value != getattr(default, name)}


def check_files(data: DataConfig) -> None:
    """Raise ConfigError for files that are missing or contradict each other."""
    kind = DATA_KINDS[data.kind]
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


def check_dataset(data: DataConfig) -> None:
    """Raise ConfigError if the dataset is missing or not allowed, or if validation is set twice."""
    if not data.dataset:
        rule = f"data.kind={data.kind} needs a dataset"
        raise ConfigError("data.dataset", data.dataset, rule, "allenai/c4")
    if data.dataset == "pandas":
        rule = "reads pickles, which can run any code"
        raise ConfigError("data.dataset", data.dataset, rule, "parquet, json, csv")
    if data.validation_fraction > 0 and (data.validation_split or data.streaming):
        rule = "documents of a stream cannot be held out"
        works = "0 with data.validation_split set"
        if data.validation_split:
            rule = "validation comes either from data.validation_split or from held-out documents, not both"
            works = "0"
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, works)


def check_chat(data: DataConfig) -> None:
    """Raise ConfigError if conversations of a sample would see each other, or if chat_date is no date."""
    for name, fixed, rule in (
        ("attend_across_documents", False, "conversations do not attend to others in their sample"),
        ("mask_document_boundary", True, "no token predicts the beginning of another conversation"),
    ):
        if getattr(data, name) != fixed:
            raise ConfigError(
                f"data.{name}", not fixed, f"data.kind=chat: {rule}", str(fixed).lower()
            )
    if data.chat_date is not None:
        try:
            date.fromisoformat(data.chat_date)
        except ValueError:
            rule = "must be a date, as year, month and day"
            raise ConfigError("data.chat_date", data.chat_date, rule, "2026-01-31") from None


def check_synthetic(data: DataConfig) -> None:
    """Raise ConfigError for fields that have no effect on data without documents."""
    if data.validation_fraction > 0:
        rule = (
            "synthetic data has no documents to hold out; it generates separate validation samples"
        )
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, "0")
    if not data.attend_across_documents:
        raise ConfigError(
            "data.attend_across_documents", False, "synthetic data has no documents", "true"
        )


def check_mixture(data: DataConfig) -> None:
    """Raise ConfigError for sources or weights that contradict each other."""
    if not data.sources:
        raise ConfigError("data.sources", "{}", "data.kind=mixture needs named sources", _EXAMPLE)
    _check_named("data.sources", data.sources)
    for name, source in data.sources.items():
        if source.kind in DATA_KINDS and DATA_KINDS[source.kind].batches != "tokens":
            rule = "samples of a mixture are tokens"
            works = "data.kind without a mixture"
            raise ConfigError(f"data.sources.{name}.kind", source.kind, rule, works)
    for name, value in _given(data).items():
        if name not in (*MIXTURE_FIELDS, *SHARED):
            rule = "is a field of each source"
            raise ConfigError(f"data.{name}", value, rule, f"data.sources.NAME.{name}")
    for name in data.source_names:
        with errors_of_source(name):
            source_config(data, name).validate()
    _check_weights(data)


def check_sets(data: DataConfig, sets: Mapping[str, ValidationSet]) -> None:
    """Raise ConfigError for validation sets that contradict themselves or the job's data."""
    _check_named("validation.sets", sets)
    for name, own in sets.items():
        if name in data.sources:
            rule = (
                f"is one of data.sources too, and validation_loss.{name} would be the loss of both"
            )
            raise ConfigError("validation.sets", name, rule, f"{name}_set")
        for field, value in _given(own).items():
            if field in NOT_OF_SETS:
                rule = (
                    "has no effect: a set is one source, of which all documents are read in order"
                )
                works = "leave it out"
                raise ConfigError(f"validation.sets.{name}.{field}", value, rule, works)
        with errors_of_set(name):
            with_shared(data, own).validate()


def _check_named(place: str, configs: Mapping[str, DataConfig]) -> None:
    """Check the names of sources or sets, and the fields that none of them may have."""
    for name, config in sorted(configs.items()):
        if not _NAME.fullmatch(name) or name == STEP:
            rule = f"a name has letters, digits, _ and -, begins with a letter, and is not {STEP}"
            raise ConfigError(place, name, rule, "web")
        field = f"{place}.{name}"
        if config.kind == "mixture":
            rule = "cannot be a mixture itself"
            raise ConfigError(f"{field}.kind", "mixture", rule, "its sources beside the others")
        for shared, value in _given(config).items():
            if shared in SHARED:
                rule = f"is set once, for all of {place}"
                raise ConfigError(f"{field}.{shared}", value, rule, f"data.{shared}")


def source_config(data: DataConfig, name: str) -> DataConfig:
    """Return the config of a source, with the fields that all sources share."""
    return with_shared(data, data.sources[name])


def with_shared(data: DataConfig, own: Own) -> Own:
    """Return the config of a source or a set with the fields that are set once, in ``data``."""
    shared = {field: getattr(data, field) for field in SHARED}
    return dataclasses.replace(own, **shared)


def sources_of(data: DataConfig) -> list[tuple[DataConfig, AbstractContextManager[None]]]:
    """Return each source, and a context manager that names its fields in errors."""
    if not data.sources:
        return [(data, nullcontext())]
    return [(source_config(data, name), errors_of_source(name)) for name in data.source_names]


def resolve_each(place: str, configs: Mapping[str, Own]) -> dict[str, Own]:
    """Return the resolved configs of sources or sets; ``place`` is the field that has them."""
    resolved = {}
    for name, config in configs.items():
        with errors_of(f"{place}.{name}"):
            resolved[name] = config.resolve()
    return resolved


def errors_of_source(name: str) -> AbstractContextManager[None]:
    """Context manager that names the source in errors, and its fields: ``data.sources.<name>.paths``."""
    return errors_of(f"data.sources.{name}")


def errors_of_set(name: str) -> AbstractContextManager[None]:
    """The same for a validation set: ``validation.sets.<name>.paths``."""
    return errors_of(f"validation.sets.{name}")


@contextmanager
def errors_of(place: str) -> Iterator[None]:
    """Context manager that names a source or a set in errors, and its fields: ``<place>.paths``."""
    # Fields that are set once keep their names.
    own_field = re.compile(rf"\bdata\.(?!{'|'.join(SHARED)})")
    try:
        yield
    except ConfigError as error:
        field = own_field.sub(f"{place}.", error.field)
        # ``data=`` chooses a file of conf/data for the whole job; a source has only its kind.
        works = own_field.sub(f"{place}.", error.works.replace("data=", "data.kind="))
        rule = error.rule if field.startswith(place) else f"{place}: {error.rule}"
        raise ConfigError(field, error.value, rule, works) from error
    except DataError as error:
        message = _OF_FILES.sub(f"{place}.", str(error))
        raise DataError(f"{place}: {message}") from error


def weights_by_step(
    data: DataConfig, samples_per_epoch: Mapping[str, int | None]
) -> list[tuple[int, dict[str, Fraction]]]:
    """Return the first step of each set of weights, from 1, and the share of every source.

    Args:
        samples_per_epoch: samples per epoch of each source; None if unknown.
    """
    if not data.epochs:
        shares = [(1, _shares(data, data.weights))]
        for change in data.weight_changes:
            shares.append((int(change[STEP]), _shares(data, _without_step(change))))
        return shares
    weights = {}
    for name, epochs in data.epochs.items():
        samples = samples_per_epoch[name]
        if samples is None:
            rule = f"the number of samples of data.sources.{name} is unknown"
            raise ConfigError(f"data.epochs.{name}", epochs, rule, "data.weights")
        weights[name] = Fraction(str(epochs)) * samples
    return [(1, _shares(data, weights))]


def _shares(data: DataConfig, weights: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    # The decimal number that the user typed: 1/10 for 0.1.
    exact = {name: Fraction(str(weights.get(name, 0))) for name in data.source_names}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def _without_step(change: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in change.items() if name != STEP}


def _check_weights(data: DataConfig) -> None:
    if bool(data.weights) == bool(data.epochs):
        rule = "data.kind=mixture needs either data.weights or data.epochs"
        works = ", ".join(f"{name}: 1" for name in data.source_names)
        raise ConfigError("data.weights", data.weights or "{}", rule, f"'data.weights={{{works}}}'")
    if data.epochs and data.weight_changes:
        rule = "changes weights, and data.epochs is given instead"
        raise ConfigError("data.weight_changes", data.weight_changes, rule, "data.weights")
    _check_sources_exist(data, "data.weights", data.weights)
    _check_sources_exist(data, "data.epochs", data.epochs)
    if data.epochs:
        for name in data.source_names:
            if name not in data.epochs:
                raise ConfigError(
                    "data.epochs", data.epochs, f"has no source {name}", f"data.epochs.{name}=1"
                )
            source = data.sources[name]
            if not DATA_KINDS[source.kind].has_vocabulary or source.streaming:
                rule = f"the number of samples of data.sources.{name} is unknown"
                raise ConfigError(f"data.epochs.{name}", data.epochs[name], rule, "data.weights")
    _check_changes(data)
    given = [data.epochs or data.weights, *data.weight_changes]
    for weights in given:
        if not any(weight > 0 for name, weight in weights.items() if name != STEP):
            field = "data.weights" if weights is given[0] else "data.weight_changes"
            raise ConfigError(field, weights, "at least one weight must be above 0")
    for name in data.source_names:
        if not any(weights.get(name, 0) > 0 for weights in given):
            rule = f"has no weight above 0 for data.sources.{name}"
            raise ConfigError("data.weights", data.weights, rule, f"data.weights.{name}=0.1")


def _check_changes(data: DataConfig) -> None:
    previous = 1.0
    for change in data.weight_changes:
        step = change.get(STEP, 0.0)
        if not float(step).is_integer() or step <= previous:
            rule = f"each change needs a whole number `{STEP}` above {int(previous)}, the step before it"
            works = "[{step: 9000, web: 1}]"
            raise ConfigError("data.weight_changes", data.weight_changes, rule, works)
        previous = step
        _check_sources_exist(data, "data.weight_changes", _without_step(change))
        for name, weight in change.items():
            if weight < 0:
                raise ConfigError(f"data.weight_changes.{name}", weight, "must be at least 0")


def _check_sources_exist(data: DataConfig, field: str, weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if name not in data.sources:
            close = difflib.get_close_matches(name, data.source_names, n=1)
            works = close[0] if close else ", ".join(data.source_names)
            raise ConfigError(f"{field}.{name}", weight, "data.sources has no such source", works)
