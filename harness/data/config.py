"""Configuration of the data and the tokenizer: the `data` and `tokenizer` groups.

Validation needs no torch and opens no file. The loader checks the files and raises DataError.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from harness.config import execution, label, numerics
from harness.data.tiktoken_sets import SETS
from harness.errors import ConfigError

DATA_KINDS = ("local", "hub", "synthetic", "chat")
TRAIN_ON = ("all", "last")
LONG_CONVERSATIONS = ("drop", "cut")
ENCODING_ERRORS = ("strict", "replace", "skip")
FORMATS = ("auto", "text", "jsonl", "parquet")
TOKENIZER_KINDS = ("bytes", "sentencepiece", "tiktoken", "huggingface")
ASSET_PREFIX = "asset:"
ASSETS = Path(__file__).parent / "assets"

# Fields that only some kinds of source read. For another kind a value would have no effect, so it is refused.
_READ_ONLY_BY = {
    ("local", "chat"): ("paths", "exclude", "format", "encoding_errors", "validation_paths"),
    ("hub",): ("dataset", "subset", "split", "validation_split", "streaming", "data_files"),
    ("synthetic",): ("mask_fraction",),
    ("chat",): (
        "messages_field",
        "chat_template",
        "chat_template_options",
        "chat_date",
        "train_on",
        "long_conversations",
    ),
}


@dataclass(frozen=True)
class DataConfig:
    """Source of the documents, held-out documents, and packing into samples."""

    kind: str = numerics("local", choices=DATA_KINDS)
    """`local` (files), `hub` (a dataset of the `datasets` library), `synthetic` (random tokens) or `chat`
    (files of conversations, for supervised fine-tuning)."""

    paths: list[str] = numerics(factory=list)
    """local, chat: globs of the training files, relative to the working directory. `**` matches any depth;
    `{stdlib}` stands for the folder of the running interpreter's standard library."""

    exclude: list[str] = numerics(factory=list)
    """local, chat: globs of files to leave out, written like `paths`; one with a leading `**/` matches
    anywhere."""

    format: str = numerics("auto", choices=FORMATS)
    """local: `text` (one file is one document), `jsonl`, `parquet`, or `auto` (by extension: .jsonl
    and .json are jsonl, .parquet is parquet, everything else is text). Text and jsonl may be compressed: .gz,
    .bz2, .xz, .zst. chat: the same without `text`."""

    encoding_errors: str = numerics("strict", choices=ENCODING_ERRORS)
    """local, chat: handling of a text file or a line that is not UTF-8: `strict` ends the run with an error,
    `replace` substitutes U+FFFD for each wrong byte, `skip` leaves the document out. result.json has the
    number of such documents."""

    text_field: str = numerics("text", nonempty=True)
    """The field (jsonl) or column (parquet, hub) that holds a document's text."""

    validation_paths: list[str] = numerics(factory=list)
    """local, chat: globs of the validation files, written like `paths`."""

    validation_fraction: float = numerics(0.0, least=0, below=1)
    """Fraction of the documents held out for validation, in [0, 1), chosen by a hash of the index."""

    dataset: str | None = numerics(None)
    """hub: name of the dataset, a folder, or a loader such as `json` together with `data_files`."""

    subset: str | None = numerics(None)
    """hub: name of the dataset's configuration, e.g. `en`."""

    split: str = numerics("train")
    """hub: the split to train on."""

    validation_split: str | None = numerics(None)
    """hub: the split to validate on."""

    streaming: bool = numerics(False)
    """hub: read over the network while training instead of downloading and tokenizing first. Every row of
    the global batch then reads its own part of the dataset, in stored order."""

    data_files: list[str] = numerics(factory=list)
    """hub: files passed to the loader named by `dataset`; they make up the split `train`."""

    mask_fraction: float = numerics(0.0, least=0, most=0.5)
    """synthetic: mean fraction of masked labels, in [0, 0.5]. The fraction of a sample is uniform between 0
    and twice this, so samples have different numbers of valid labels; at least one label stays valid."""

    messages_field: str = numerics("messages", nonempty=True)
    """chat: the field (jsonl) or column (parquet) with the list of messages, each `role` and `content`, or
    ShareGPT's `from` and `value`. Tools are in the field `tools`."""

    chat_template: str | None = numerics(None)
    """chat: `chatml`, `plain`, or the path of a Jinja template. Null takes the template of the tokenizer's
    repository: chat_template.jinja or tokenizer_config.json."""

    chat_template_options: dict[str, Any] = numerics(factory=dict)
    """chat: more variables for the template, such as `enable_thinking: false`."""

    chat_date: str | None = numerics(None)
    """chat: today's date for templates that write it into the system prompt, such as 2026-01-31."""

    train_on: str = numerics("all", choices=TRAIN_ON)
    """chat: the turns of the assistant whose tokens are labels: `all`, or the `last` of each conversation."""

    long_conversations: str = numerics("drop", choices=LONG_CONVERSATIONS)
    """chat: handling of conversations longer than `training.seq_len`: `drop` leaves them out, `cut` keeps
    their first tokens. The log has their number."""

    mask_document_boundary: bool = numerics(True)
    """Mask the label at a document's last token, which is the next document's first token."""

    attend_across_documents: bool = numerics(True)
    """Let tokens attend to earlier documents in the same sample; false masks them out of attention. chat
    needs false."""

    shuffle: bool = numerics(True)
    """Read the packed samples in a random order, a different one in every epoch. Validation is never
    shuffled."""

    prefetch: int = execution(2, least=0)
    """Batches that are read, and copied to the device, ahead of the loop; 0 reads each when it is needed."""

    cache_dir: str = label("~/.cache/harness", nonempty=True)
    """Folder of the token caches; all ranks must see it."""

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other."""
        self._refuse_settings_of_other_kinds()
        if self.kind in ("local", "chat"):
            self._validate_files()
        if self.kind == "chat":
            self._validate_chat()
        elif self.kind == "hub":
            self._validate_hub()
        elif self.kind == "synthetic" and self.validation_fraction > 0:
            rule = "synthetic data has no documents to hold out; it generates separate validation samples"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, "0")
        if self.kind == "synthetic" and not self.attend_across_documents:
            rule = "synthetic data has no documents"
            raise ConfigError("data.attend_across_documents", False, rule, "true")

    def require_validation(self) -> None:
        """Check that there are documents for validation.

        Raises:
            ConfigError: there are none.
        """
        if (
            self.kind == "synthetic"
            or self.validation_paths
            or self.validation_split
            or self.validation_fraction
        ):
            return
        other = "data.validation_paths" if self.kind in ("local", "chat") else "data.validation_split"
        works = other if self.streaming else f"data.validation_fraction=0.02, or {other}"
        rule = "validation is enabled, but no documents are held out for it"
        raise ConfigError("data.validation_fraction", self.validation_fraction, rule, works)

    def _refuse_settings_of_other_kinds(self) -> None:
        default = DataConfig()
        for kinds, names in _READ_ONLY_BY.items():
            for name in names:
                value = getattr(self, name)
                if self.kind not in kinds and value != getattr(default, name):
                    rule = f"is read only by data.kind={' and '.join(kinds)}, and data.kind is {self.kind}"
                    raise ConfigError(f"data.{name}", value, rule, f"data.kind={kinds[0]}, or leave it out")

    def _validate_files(self) -> None:
        if not self.paths:
            rule = f"data.kind={self.kind} needs at least one file"
            works = "my_corpus/**/*.txt" if self.kind == "local" else "conversations.jsonl"
            raise ConfigError("data.paths", "[]", rule, f"'data.paths=[{works}]'")
        for name in ("paths", "exclude", "validation_paths"):
            if not all(getattr(self, name)):
                raise ConfigError(f"data.{name}", getattr(self, name), "an empty string is no glob")
        if self.validation_paths and self.validation_fraction > 0:
            rule = "validation comes either from data.validation_paths or from held-out documents, not both"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, "0")

    def _validate_chat(self) -> None:
        if self.format == "text":
            raise ConfigError(
                "data.format", "text", "a text file has no messages", ["auto", "jsonl", "parquet"]
            )
        for name, needed, rule in (
            ("attend_across_documents", False, "conversations do not attend to others in their sample"),
            ("mask_document_boundary", True, "no token predicts the beginning of another conversation"),
        ):
            if getattr(self, name) != needed:
                raise ConfigError(f"data.{name}", not needed, f"data.kind=chat: {rule}", str(needed).lower())
        if self.chat_date is not None:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                rule = "must be a date, as year, month and day"
                raise ConfigError("data.chat_date", self.chat_date, rule, "2026-01-31") from None

    def _validate_hub(self) -> None:
        if not self.dataset:
            raise ConfigError("data.dataset", self.dataset, "data.kind=hub needs a dataset", "allenai/c4")
        if self.dataset == "pandas":
            rule = "reads pickles, which can run any code"
            raise ConfigError("data.dataset", self.dataset, rule, "parquet, json, csv")
        if self.validation_split and self.validation_fraction > 0:
            rule = "validation comes either from data.validation_split or from held-out documents, not both"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, "0")
        if self.streaming and self.validation_fraction > 0:
            rule = "documents of a stream cannot be held out"
            raise ConfigError(
                "data.validation_fraction", self.validation_fraction, rule, "0 with data.validation_split set"
            )
        if self.streaming and self.shuffle:
            rule = "a streamed dataset is read in its stored order, so that it can resume exactly"
            raise ConfigError(
                "data.shuffle", self.shuffle, rule, "data.shuffle=false, or data.streaming=false"
            )


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: str = numerics("bytes", choices=TOKENIZER_KINDS)
    """`bytes` (UTF-8 bytes, needs no file), `sentencepiece`, `tiktoken` or `huggingface` (tokenizer.json)."""

    path: str | None = numerics(None)
    """sentencepiece, tiktoken, huggingface: the tokenizer's file, relative to the working directory;
    `asset:NAME` is a file that ships with the harness."""

    special: str = numerics("")
    """tiktoken: name of the set of special tokens and of the word-splitting pattern (`llama3`, `llama4`,
    `o200k_harmony`)."""

    bos: str | None = numerics(None)
    """huggingface: the token put before every document. Null takes bos_token of tokenizer_config.json, or of
    special_tokens_map.json, in the file's folder; '' puts none."""

    eos: str | None = numerics(None)
    """huggingface: the token put after every document, likewise. In repositories of chat models it is the
    token that ends a turn, which is seldom the one that ended documents in pretraining."""

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other; open no file."""
        if self.kind == "bytes" and self.path:
            raise ConfigError("tokenizer.path", self.path, "tokenizer.kind=bytes reads no file", "null")
        if self.kind != "bytes" and not self.path:
            works = f"the path of a {self.kind} file"
            raise ConfigError(
                "tokenizer.path", self.path, f"tokenizer.kind={self.kind} needs its file", works
            )
        if self.kind == "tiktoken" and self.special not in SETS:
            raise ConfigError("tokenizer.special", self.special or "''", "no such choice", SETS)
        if self.kind != "tiktoken" and self.special:
            raise ConfigError(
                "tokenizer.special", self.special, "is read only by tokenizer.kind=tiktoken", "''"
            )
        for name in ("bos", "eos"):
            token = getattr(self, name)
            if token is not None and self.kind != "huggingface":
                raise ConfigError(
                    f"tokenizer.{name}", token or "''", "is read only by tokenizer.kind=huggingface", "null"
                )
        if self.path and self.path.startswith(ASSET_PREFIX) and not self.file.is_file():
            shipped = sorted(f"{ASSET_PREFIX}{asset.name}" for asset in ASSETS.glob("*.model"))
            raise ConfigError("tokenizer.path", self.path, "no such file ships with the harness", shipped)

    @property
    def file(self) -> Path:
        """The tokenizer's file, with `asset:` and `~` resolved."""
        if self.path is None:
            raise ValueError(f"tokenizer.kind={self.kind} has no file")
        if self.path.startswith(ASSET_PREFIX):
            return ASSETS / self.path.removeprefix(ASSET_PREFIX)
        return Path(self.path).expanduser()
