"""Configuration of the data and the tokenizer: the `data` and `tokenizer` groups.

Validation needs no torch and opens no file. The loader checks the files and raises DataError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from harness.config.data_kinds import (
    DATA_KINDS,
    FORMATS,
    check_dataset,
    check_effects,
    check_files,
    errors_of_source,
    resolve_each,
    source_config,
)
from harness.config.fields import (
    Switch,
    added_execution,
    added_numerics,
    execution,
    label,
    numerics,
)
from harness.config.registry import Registry, load_attribute
from harness.util import PACKAGE
from harness.util.errors import ConfigError

TRAIN_ON = ("all", "last")
TOKEN_DTYPES = ("uint16", "uint32", "int32", "int64")
BOUNDARIES = ("auto", "eos", "bos", "none")
TOKENIZER_KINDS = ("bytes", "sentencepiece", "tiktoken", "huggingface", "none")
ASSET_PREFIX = "asset:"
ASSETS = PACKAGE / "data" / "assets"
_SETS = "harness.data.tiktoken_sets"
SETS: Registry[Any] = Registry(
    "special",
    {"llama3": f"{_SETS}:LLAMA3"},
    field="tokenizer.special",
    expects=f"{_SETS}:SpecialSet",
)
"""Special tokens and patterns, which a tiktoken file does not contain."""


@dataclass(frozen=True)
class DataConfig:
    """Source of the documents, held-out documents, and packing into samples."""

    kind: str = numerics("local", choices=DATA_KINDS)
    """`local` (text files), `tokens` (token files), `hub` (a dataset of the `datasets` library),
    `chat` (files of conversations, for supervised fine-tuning), `synthetic` (random tokens) or
    `mixture` (several of these). Packages can add others."""
    options: dict[str, Any] = added_numerics(factory=dict)
    """Options of a kind that another package has added."""
    paths: list[str] = numerics(factory=list)
    """local, chat: globs of the training files, relative to the working directory. `**` matches any
    depth; `{stdlib}` stands for the folder of the running interpreter's standard library. tokens:
    also folders and prefixes (PREFIX.bin with PREFIX.idx)."""
    exclude: list[str] = numerics(factory=list)
    """local, chat: globs of files to leave out, written like `paths`; one with a leading `**/`
    matches anywhere."""
    format: str = numerics("auto", choices=FORMATS)
    """local: `text` (one file is one document), `jsonl`, `parquet`, or `auto` (by extension: .jsonl
    and .json are jsonl, .parquet is parquet, everything else is text). Text and jsonl may be
    compressed: .gz, .bz2, .xz, .zst. chat: the same without `text`. tokens: `corpus` (a folder of
    harness tokenize), the name of another software's format (listed in docs/howto/data.md), or
    `auto` (by name and first bytes)."""
    text_field: str = numerics("text", nonempty=True)
    """The field (jsonl) or column (parquet, hub) that holds a document's text."""
    dtype: str | None = added_numerics(None, choices=TOKEN_DTYPES)
    """tokens: type of the ids in files that do not record it. Null: uint16 if the tokenizer has at
    most 65,536 tokens, else uint32."""
    boundaries: str = added_numerics("auto", choices=BOUNDARIES)
    """tokens: boundaries of documents: `eos` (each document ends with this token), `bos` (each
    begins with it, or with eos if the tokenizer has no bos), `none` (unknown: no label is masked),
    or `auto`: the files' index; without one `bos` or `eos`, as the format has it."""
    validation_paths: list[str] = numerics(factory=list)
    """local, tokens, chat: globs of the validation files, written like `paths`."""
    validation_fraction: float = numerics(0.0, least=0, below=1)
    """Fraction of the documents held out for validation, in [0, 1), chosen by a hash of the index.
    tokens: the last documents of each file; a corpus that has held-out documents needs 0."""
    dataset: str | None = numerics(None)
    """hub: name of the dataset, a folder, or a loader such as `json` together with `data_files`."""
    subset: str | None = numerics(None)
    """hub: name of the dataset's configuration, e.g. `en`."""
    split: str = numerics("train")
    """hub: the split to train on."""
    validation_split: str | None = numerics(None)
    """hub: the split to validate on."""
    streaming: bool = numerics(False)
    """hub: read over the network while training instead of downloading and tokenizing first. The
    shards of the dataset are dealt to the rows of the global batch."""
    workers: int = added_execution(1, least=0)
    """hub with streaming: processes of each rank that read and tokenize ahead, at most one for each
    of its rows of the global batch; 0 reads in the rank itself. The samples are the same."""
    shuffle_buffer: int = added_numerics(1000, least=1)
    """hub with streaming and shuffle: documents of a row that are shuffled together."""
    data_files: list[str] = numerics(factory=list)
    """hub: files passed to the loader named by `dataset`; they make up the split `train`."""
    mask_fraction: float = numerics(0.0, least=0, most=0.5)
    """synthetic: mean fraction of masked labels, in [0, 0.5]. The fraction of a sample is uniform
    between 0 and twice this, so samples have different numbers of valid labels; at least one label
    stays valid."""
    messages_field: str = added_numerics("messages", nonempty=True)
    """chat: the field (jsonl) or column (parquet) with the list of messages, each `role` and
    `content`, or ShareGPT's `from` and `value`. Tools are in the field `tools`."""
    chat_template: str | None = added_numerics(None)
    """chat: `chatml`, `plain`, or the path of a Jinja template. Null takes the template of the
    tokenizer's repository: chat_template.jinja or tokenizer_config.json."""
    chat_template_options: dict[str, Any] = added_numerics(factory=dict)
    """chat: more variables for the template, such as `enable_thinking: false`."""
    chat_date: str | None = added_numerics(None)
    """chat: today's date for templates that write it into the system prompt, such as 2026-01-31."""
    train_on: str = added_numerics("all", choices=TRAIN_ON)
    """chat: the turns of the assistant whose tokens are labels: `all`, or the `last` of each
    conversation."""
    sources: dict[str, DataConfig] = added_numerics(factory=dict)
    """mixture: the sources by name, each with the fields of `data`."""
    weights: dict[str, float] = added_numerics(factory=dict, least=0)
    """mixture: share of each source in the samples, by name. Only the ratio of the weights counts,
    so they can be numbers of tokens. A source that is not named has weight 0."""
    epochs: dict[str, float] = added_numerics(factory=dict, above=0)
    """mixture, instead of `weights`: epochs of each source, by name. The weight of a source is this
    times its samples per epoch, so only the ratio of the epochs counts."""
    weight_changes: list[dict[str, float]] = added_numerics(factory=list)
    """mixture: weights from later steps on, such as `[{step: 9000, web: 1, math: 3}]`. The steps
    are those without any batch left out (`leave_out`, `debug.spikes=rewind`): weights belong to the
    data."""
    mask_document_boundary: bool = numerics(True)
    """Mask the label at a document's last token, which is the next document's first token."""
    attend_across_documents: bool = numerics(True)
    """Let tokens attend to earlier documents in the same sample; false masks them out of attention.
    chat needs false."""
    shuffle: bool = numerics(True)
    """Read the packed samples in a random order, a different one in every epoch. In a stream,
    shuffle the shards and `shuffle_buffer` documents at a time instead. Validation is never
    shuffled."""
    leave_out: list[int] = added_numerics(factory=list, least=1)
    """Numbers of batches that no step reads, from 1: those around a spike of the loss. Step k reads
    the k-th of the others. `checkpoint.allow_changed=[data.leave_out]` goes on from a checkpoint
    before them."""
    prefetch: int = execution(2, least=0)
    """Batches that are read, and copied to the device, ahead of the loop; 0 reads each when it is
    needed."""
    cache_dir: str = label("~/.cache/harness", written="folder")
    """Folder of the token caches; all ranks must see it."""
    tokenize_workers: int | None = label(None, least=1)
    """Processes that tokenize on the node of a job before it begins; null: one for each CPU that
    the node's first rank may use, at most 32."""
    tokenize_limit_gib: float | None = label(16.0, least=0)
    """Refuse a job that would have to tokenize more than this before it begins, while all ranks
    wait; `harness tokenize` prepares the data. In GiB of files, compressed or not; null: no
    limit."""

    def resolve(self) -> Self:
        """Return the data with the defaults of its options, also those of a mixture's sources."""
        options = DATA_KINDS.resolve_options(self.kind, self.options)
        return replace(self, options=options, sources=resolve_each("data.sources", self.sources))

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other."""
        kind = DATA_KINDS[self.kind]
        check_effects(self)
        if kind.check:
            load_attribute(kind.check)(self)
        if self.reads_files:
            check_files(self)
        if "dataset" in kind.fields:
            check_dataset(self)

    def require_validation(self) -> None:
        """Check that there are documents for validation."""
        if self.holds_out:
            return
        if self.sources:
            name = self.source_names[0]
            with errors_of_source(name):
                source_config(self, name).require_validation()
        other = "data.validation_paths" if self.reads_files else "data.validation_split"
        works = other if self.streaming else f"data.validation_fraction=0.02, or {other}"
        rule = "validation is enabled, but no documents are held out for it"
        raise ConfigError("data.validation_fraction", self.validation_fraction, rule, works)

    @property
    def holds_out(self) -> bool:
        """Whether there are samples for validation; of a corpus that is known when it is opened."""
        if self.sources:
            return any(source.holds_out for source in self.sources.values())
        held_out = self.validation_paths or self.validation_split or self.validation_fraction
        return DATA_KINDS[self.kind].holds_out or self.may_be_corpus or bool(held_out)

    def files_of(self, split: str) -> tuple[str, list[str]]:
        """The field with the globs of "train" or "validation", and the globs.

        Where validation has files or a split of its own, ``validation_fraction`` is 0.
        """
        own = split == "validation" and bool(self.validation_paths)
        field = "validation_paths" if own else "paths"
        return field, getattr(self, field)

    def split_of(self, split: str) -> str:
        """The dataset's split for "train" or "validation"."""
        return (
            self.validation_split if split == "validation" and self.validation_split else self.split
        )

    @property
    def may_be_corpus(self) -> bool:
        """Whether files may be folders of ``harness tokenize``."""
        return "corpus" in DATA_KINDS[self.kind].formats and self.format in ("auto", "corpus")

    @property
    def reads_files(self) -> bool:
        """Whether the kind reads ``paths``."""
        return "paths" in DATA_KINDS[self.kind].fields

    @property
    def has_text(self) -> bool:
        """Whether a sample is a part of texts."""
        kind = DATA_KINDS[self.kind]
        return kind.has_text and kind.batches == "tokens"

    @property
    def kinds(self) -> set[str]:
        """The kind, and those of a mixture's sources."""
        return {self.kind, *(source.kind for source in self.sources.values())}

    @property
    def source_names(self) -> list[str]:
        """Names of a mixture's sources; the index of a source is its position here."""
        return sorted(self.sources)


@dataclass(frozen=True)
class ValidationSet(DataConfig):
    """Data of which all documents are held out: those of ``paths``, or of ``split``."""

    @property
    def holds_out(self) -> bool:
        return True


TIKTOKEN = Switch("tokenizer.kind", on="tiktoken")
NAMING = ("huggingface", "none")
NAMES = Switch("tokenizer.kind", "tokenizer.kind=huggingface", NAMING.__contains__)


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: str = numerics("bytes", choices=TOKENIZER_KINDS)
    """`bytes` (UTF-8 bytes, needs no file), `sentencepiece`, `tiktoken`, `huggingface`
    (tokenizer.json), or `none` (token files of which only the ids are known; it cannot encode or
    decode)."""
    path: str | None = numerics(None)
    """sentencepiece, tiktoken, huggingface: the tokenizer's file, relative to the working
    directory; `asset:NAME` is a file that ships with the harness."""
    special: str = numerics("", needs=TIKTOKEN)
    """tiktoken: name of the set of special tokens and of the word-splitting pattern (`llama3`).
    Packages can add others; Llama 4 and GPT-OSS have a tokenizer.json."""
    bos: str | None = numerics(None, needs=NAMES)
    """huggingface: the token put before every document. Null takes bos_token of
    tokenizer_config.json, or of special_tokens_map.json, in the file's folder; '' puts none. none:
    id of the token that begins documents."""
    eos: str | None = numerics(None, needs=NAMES)
    """huggingface: the token put after every document, likewise. In repositories of chat models it
    is the token that ends a turn, which is seldom the one that ended documents in pretraining.
    none: id of the token that ends documents."""

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other; open no file."""
        if not self.has_file and self.path:
            raise ConfigError(
                "tokenizer.path", self.path, f"tokenizer.kind={self.kind} reads no file", "null"
            )
        if self.has_file and not self.path:
            works = f"the path of a {self.kind} file"
            raise ConfigError(
                "tokenizer.path", self.path, f"tokenizer.kind={self.kind} needs its file", works
            )
        if self.kind == "tiktoken" and self.special not in SETS:
            raise ConfigError("tokenizer.special", self.special or "''", "no such choice", SETS)
        for name in ("bos", "eos"):
            token = getattr(self, name)
            if token and self.kind == "none" and not token.isdecimal():
                rule = "must be a token id, because tokenizer.kind=none has no names of tokens"
                raise ConfigError(f"tokenizer.{name}", token, rule, "an id, such as 50256")
        if self.path and self.path.startswith(ASSET_PREFIX) and not self.file.is_file():
            shipped = sorted(f"{ASSET_PREFIX}{asset.name}" for asset in ASSETS.glob("*.model"))
            raise ConfigError(
                "tokenizer.path", self.path, "no such file ships with the harness", shipped
            )

    @property
    def has_file(self) -> bool:
        """Whether the tokenizer is read from a file."""
        return self.kind not in ("bytes", "none")

    @property
    def file(self) -> Path:
        """The tokenizer's file, with `asset:` and `~` resolved."""
        if self.path is None:
            raise ValueError(f"tokenizer.kind={self.kind} has no file")
        if self.path.startswith(ASSET_PREFIX):
            return ASSETS / self.path.removeprefix(ASSET_PREFIX)
        return Path(self.path).expanduser()
