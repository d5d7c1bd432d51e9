"""Configuration of the data and the tokenizer: the `data` and `tokenizer` groups.

Validation needs no torch and opens no file. The loader checks the files and raises DataError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.config import execution, label, numerics
from harness.data.mixture_config import check_mixture, require_validation_of_sources
from harness.data.tiktoken_sets import SETS
from harness.errors import ConfigError

DATA_KINDS = ("local", "hub", "synthetic", "mixture")
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
    "mixture": ("sources", "weights", "epochs", "weight_changes"),
}


@dataclass(frozen=True)
class DataConfig:
    """Source of the documents, held-out documents, and packing into samples."""

    kind: str = numerics("local", choices=DATA_KINDS)
    """`local` (files), `hub` (a dataset of the `datasets` library), `synthetic` (random tokens) or `mixture`
    (several of these)."""

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
    """hub: read over the network while training instead of downloading and tokenizing first. Every row of
    the global batch then reads its own part of the dataset, in stored order."""

    data_files: list[str] = numerics(factory=list)
    """hub: files passed to the loader named by `dataset`; they make up the split `train`."""

    mask_fraction: float = numerics(0.0, least=0, most=0.5)
    """synthetic: mean fraction of masked labels, in [0, 0.5]. The fraction of a sample is uniform between 0
    and twice this, so samples have different numbers of valid labels; at least one label stays valid."""

    sources: dict[str, DataConfig] = numerics(factory=dict)
    """mixture: the sources by name, each with the fields of `data`."""

    weights: dict[str, float] = numerics(factory=dict, least=0)
    """mixture: share of each source in the samples, by name. Only the ratio of the weights counts, so they
    can be numbers of tokens. A source that is not named has weight 0."""

    epochs: dict[str, float] = numerics(factory=dict, above=0)
    """mixture, instead of `weights`: epochs of each source, by name. The weight of a source is this times its
    samples per epoch, so only the ratio of the epochs counts."""

    weight_changes: list[dict[str, float]] = numerics(factory=list)
    """mixture: weights from later steps on, such as `[{step: 9000, web: 1, math: 3}]`."""

    mask_document_boundary: bool = numerics(True)
    """Mask the label at a document's last token, which is the next document's first token."""

    attend_across_documents: bool = numerics(True)
    """Let tokens attend to earlier documents in the same sample; false masks them out of attention."""

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
        if self.kind == "mixture":
            check_mixture(self)
        elif self.kind == "local":
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
        if self.kind == "mixture":
            return require_validation_of_sources(self)
        if self.holds_out:
            return
        other = "data.validation_paths" if self.kind == "local" else "data.validation_split"
        works = other if self.streaming else f"data.validation_fraction=0.02, or {other}"
        rule = "validation is enabled, but no documents are held out for it"
        raise ConfigError("data.validation_fraction", self.validation_fraction, rule, works)

    @property
    def holds_out(self) -> bool:
        """Whether there are samples for validation."""
        if self.kind == "mixture":
            return any(source.holds_out for source in self.sources.values())
        held_out = self.validation_paths or self.validation_split or self.validation_fraction
        return self.kind == "synthetic" or bool(held_out)

    @property
    def source_names(self) -> list[str]:
        """Names of a mixture's sources; the index of a source is its position here."""
        return sorted(self.sources)

    def _refuse_settings_of_other_kinds(self) -> None:
        default = DataConfig()
        for kind, names in _READ_ONLY_BY.items():
            for name in names:
                value = getattr(self, name)
                if kind != self.kind and value != getattr(default, name):
                    rule = f"is read only by data.kind={kind}, and data.kind is {self.kind}"
                    raise ConfigError(f"data.{name}", value, rule, f"data.kind={kind}, or leave it out")

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
