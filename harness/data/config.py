"""Configuration of the data and the tokenizer: the `data` and `tokenizer` groups.

Validation needs no torch and opens no file. The loader checks the files and raises DataError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.config import execution, label, numerics
from harness.data.tiktoken_sets import SETS
from harness.errors import ConfigError

DATA_KINDS = ("local", "hub", "synthetic")
ENCODING_ERRORS = ("strict", "replace", "skip")
FORMATS = ("auto", "text", "jsonl", "parquet")
TOKENIZER_KINDS = ("bytes", "sentencepiece", "tiktoken", "huggingface")
ASSET_PREFIX = "asset:"
ASSETS = Path(__file__).parent / "assets"

# Fields that only one kind of source reads. For another kind a value would have no effect, so it is refused.
_READ_ONLY_BY = {
    "local": ("paths", "exclude", "format", "encoding_errors", "validation_paths"),
    "hub": ("dataset", "subset", "split", "validation_split", "streaming", "data_files"),
    "synthetic": ("mask_fraction",),
}
# Fields that only streams read.
_READ_ONLY_BY_STREAMS = ("workers", "shuffle_buffer")


@dataclass(frozen=True)
class DataConfig:
    """Source of the documents, held-out documents, and packing into samples."""

    kind: str = numerics("local", choices=DATA_KINDS)
    """`local` (files), `hub` (a dataset of the `datasets` library) or `synthetic` (random tokens)."""

    paths: list[str] = numerics(factory=list)
    """local: globs of the training files, relative to the working directory. `**` matches any depth;
    `{stdlib}` stands for the folder of the running interpreter's standard library."""

    exclude: list[str] = numerics(factory=list)
    """local: globs of files to leave out, written like `paths`; one with a leading `**/` matches anywhere."""

    format: str = numerics("auto", choices=FORMATS)
    """local: `text` (one file is one document), `jsonl`, `parquet`, or `auto` (by extension: .jsonl
    and .json are jsonl, .parquet is parquet, everything else is text). Text and jsonl may be compressed: .gz,
    .bz2, .xz, .zst."""

    encoding_errors: str = numerics("strict", choices=ENCODING_ERRORS)
    """local: handling of a text file or a line that is not UTF-8: `strict` ends the run with an error,
    `replace` substitutes U+FFFD for each wrong byte, `skip` leaves the document out. result.json has the
    number of such documents."""

    text_field: str = numerics("text", nonempty=True)
    """The field (jsonl) or column (parquet, hub) that holds a document's text."""

    validation_paths: list[str] = numerics(factory=list)
    """local: globs of the validation files, written like `paths`."""

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
    """hub: read over the network while training instead of downloading and tokenizing first. The shards of
    the dataset are dealt to the rows of the global batch."""

    workers: int = execution(1, least=0)
    """hub with streaming: processes of each rank that read and tokenize ahead, at most one for each of its
    rows of the global batch; 0 reads in the rank itself. The samples are the same."""

    shuffle_buffer: int = numerics(1000, least=1)
    """hub with streaming and shuffle: documents of a row that are shuffled together."""

    data_files: list[str] = numerics(factory=list)
    """hub: files passed to the loader named by `dataset`; they make up the split `train`."""

    mask_fraction: float = numerics(0.0, least=0, most=0.5)
    """synthetic: mean fraction of masked labels, in [0, 0.5]. The fraction of a sample is uniform between 0
    and twice this, so samples have different numbers of valid labels; at least one label stays valid."""

    mask_document_boundary: bool = numerics(True)
    """Mask the label at a document's last token, which is the next document's first token."""

    attend_across_documents: bool = numerics(True)
    """Let tokens attend to earlier documents in the same sample; false masks them out of attention."""

    shuffle: bool = numerics(True)
    """Read the packed samples in a random order, a different one in every epoch. In a stream, shuffle the
    shards and `shuffle_buffer` documents at a time instead. Validation is never shuffled."""

    prefetch: int = execution(2, least=0)
    """Batches that are read, and copied to the device, ahead of the loop; 0 reads each when it is needed."""

    cache_dir: str = label("~/.cache/harness", nonempty=True)
    """Folder of the token caches; all ranks must see it."""

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other."""
        self._refuse_settings_of_other_kinds()
        if self.kind == "local":
            self._validate_local()
        elif self.kind == "hub":
            self._validate_hub()
        elif self.validation_fraction > 0:
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
        other = "data.validation_paths" if self.kind == "local" else "data.validation_split"
        works = other if self.streaming else f"data.validation_fraction=0.02, or {other}"
        rule = "validation is enabled, but no documents are held out for it"
        raise ConfigError("data.validation_fraction", self.validation_fraction, rule, works)

    def _refuse_settings_of_other_kinds(self) -> None:
        default = DataConfig()
        for kind, names in _READ_ONLY_BY.items():
            for name in names:
                value = getattr(self, name)
                if kind != self.kind and value != getattr(default, name):
                    rule = f"is read only by data.kind={kind}, and data.kind is {self.kind}"
                    raise ConfigError(f"data.{name}", value, rule, f"data.kind={kind}, or leave it out")
        for name in _READ_ONLY_BY_STREAMS:
            value = getattr(self, name)
            if not self.streaming and value != getattr(default, name):
                rule, works = "is read only with data.streaming=true", "data.streaming=true, or leave it out"
                raise ConfigError(f"data.{name}", value, rule, works)
        if not self.shuffle and self.shuffle_buffer != default.shuffle_buffer:
            rule, works = "is read only with data.shuffle=true", "data.shuffle=true, or leave it out"
            raise ConfigError("data.shuffle_buffer", self.shuffle_buffer, rule, works)

    def _validate_local(self) -> None:
        if not self.paths:
            rule = "data.kind=local needs at least one file"
            raise ConfigError("data.paths", "[]", rule, "'data.paths=[my_corpus/**/*.txt]'")
        for name in ("paths", "exclude", "validation_paths"):
            if not all(getattr(self, name)):
                raise ConfigError(f"data.{name}", getattr(self, name), "an empty string is no glob")
        if self.validation_paths and self.validation_fraction > 0:
            rule = "validation comes either from data.validation_paths or from held-out documents, not both"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, "0")

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
