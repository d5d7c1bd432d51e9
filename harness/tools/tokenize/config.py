"""Configuration of ``harness tokenize``."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.data import DataConfig
from harness.config.fields import label, part
from harness.config.job import Job
from harness.util.errors import ConfigError

SOURCES = ("local", "hub")


@dataclass(frozen=True)
class TokenizeConfig:
    """Target and parts of a corpus."""

    target: str | None = label(None, written="folder", works="corpus/NAME")
    """Folder of the corpus, which `data=tokens` reads. An unfinished one of the same source is continued."""

    workers: int | None = label(None, least=1)
    """Number of processes, on SLURM of each task; null: one for each CPU that this process may use, at most
    32, and on SLURM 8."""

    shards: int | None = label(None, least=1)
    """Number of parts of the corpus, each a folder; on SLURM one task each. The stream of documents does not
    depend on it. Null: one for each 16 GiB of source."""

    unit_mib: float = label(16.0, above=0)
    """MiB of source that a process tokenizes at a time; unfinished units are repeated after a kill."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of source in a unit."""
        return max(1, int(self.unit_mib * 2**20))

    def validate(self, data: DataConfig) -> None:
        """Raise ConfigError for a missing target, or data without documents to tokenize."""
        if self.target is None:
            raise ConfigError("tokenize.target", self.target, "must be given", "corpus/NAME")
        if data.kind not in SOURCES:
            rule = {
                "chat": "conversations are tokenized by the job",
                "mixture": "a corpus has one source",
                "tokens": "is tokenized",
            }.get(data.kind, "has no documents to tokenize")
            raise ConfigError("data.kind", data.kind, rule, "data=local_jsonl, local_parquet, local_text")
        if data.streaming:
            works = "data.streaming=false data.shuffle=true, which downloads the dataset"
            raise ConfigError("data.streaming", True, "a stream cannot be cut into units", works)
        if data.validation_paths:
            rule = "a corpus has one source"
            works = "data.validation_fraction, or a second corpus with these files as data.paths"
            raise ConfigError("data.validation_paths", data.validation_paths, rule, works)


@dataclass(frozen=True)
class TokenizeJob(Job):
    """A job's data and tokenizer, and the corpus to write."""

    feeds_model = False

    tokenize: TokenizeConfig = part(TokenizeConfig)
    """Target and parts."""
