"""The verb ``tokenize``."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.compose.verb import Result, Verb
from harness.config.data import DataConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.fields import label, part
from harness.config.job import Job
from harness.data.corpus import CorpusWriter, Manifest, open_shards, read_manifest
from harness.data.documents import source_of
from harness.data.shards import MANIFEST, write_here
from harness.data.tokenizer import build_tokenizer
from harness.data.tokenizing import bytes_of
from harness.util.errors import ConfigError
from harness.util.words import plural

HELP = """`harness tokenize`: tokenize a source into a corpus, which training reads with `data=tokens`.

    harness tokenize data=local_jsonl 'data.paths=[web/*.jsonl]' tokenize.target=corpus/web
    harness tokenize ... tokenizer=llama3 tokenize.workers=16
    harness tokenize ... cluster=slurm tokenize.shards=32      one task of an array for each shard

The same command continues after a kill. The corpus does not depend on the number of processes and tasks.
"""

WORKERS = 8
"""Default processes of a task of a SLURM array."""

LOOKED_AT = 10_000_000
"""Tokens of a corpus that are looked at for unknown ones."""
LAYOUT = "a\n\n  b"


@dataclass(frozen=True)
class TokenizeConfig:
    """Target and parts of a corpus."""

    target: str | None = label(None, written="folder", works="corpus/NAME")
    """Folder of the corpus, which `data=tokens` reads. An unfinished one of the same source is
    continued."""
    workers: int | None = label(None, least=1)
    """Number of processes, on SLURM of each task; null: one for each CPU that this process may use,
    at most 32, and on SLURM 8."""
    shards: int | None = label(None, least=1)
    """Number of parts of the corpus, each a folder; on SLURM one task each. The stream of documents
    does not depend on it. Null: one for each 16 GiB of source."""
    unit_mib: float = label(16.0, above=0)
    """MiB of source that a process tokenizes at a time; unfinished units are repeated after a
    kill."""

    def validate(self, data: DataConfig) -> None:
        """Raise ConfigError for a missing target, or data without documents to tokenize."""
        if self.target is None:
            raise ConfigError("tokenize.target", self.target, "must be given", "corpus/NAME")
        if not DATA_KINDS[data.kind].source or not data.has_text:
            rule = "is no source of texts, which harness tokenize reads"
            raise ConfigError(
                "data.kind", data.kind, rule, "data=local_jsonl, local_parquet, local_text"
            )
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


def tokenize(job: TokenizeJob, overrides: list[str]) -> int | Result:
    """Write a corpus, continue an unfinished one, or submit SLURM jobs that do."""
    job.tokenize.validate(job.data)
    writer = writer_of(job)
    done = _complete_corpus(job, writer)
    if done is not None:
        return _result(writer, done, f"{writer.target} is complete")
    writer.check_target()
    if job.cluster.kind == "slurm":
        from harness.launch.shards import submit

        workers = job.tokenize.workers or job.cluster.cpus_per_rank or WORKERS
        return submit(job, writer, "harness.tools.tokenize", workers)
    megabytes = sum(bytes_of(writer.missing(shard)) for shard in range(len(writer.shards))) / 1e6
    seconds = write_here(writer, job.tokenize.workers)
    rate = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s"
    return _result(writer, read_manifest(writer.target), f"{writer.target}: {rate}", seconds)


def writer_of(job: TokenizeJob) -> CorpusWriter:
    """Return the writer of a job's corpus."""
    source, held_out = source_of(job.data, "train")
    config = job.tokenize
    assert config.target is not None, "checked by validate"
    target = Path(config.target).expanduser()
    tokenizer = build_tokenizer(job.tokenizer)
    return CorpusWriter(
        target, source, tokenizer, held_out, unit_mib=config.unit_mib, shards=config.shards
    )


def _complete_corpus(job: TokenizeJob, writer: CorpusWriter) -> Manifest | None:
    """Return the manifest if the corpus is complete."""
    if not (writer.target / MANIFEST).exists():
        return None
    manifest = read_manifest(writer.target)
    if manifest.key != writer.key:
        rule = f"is a corpus of {manifest.source['name']} by {manifest.tokenizer['name']}, not of this job"
        if manifest.source["name"] == writer.source_name:
            rule = "is a corpus of these files before they changed, or with another tokenizer or data field"
        raise ConfigError(
            "tokenize.target", job.tokenize.target, rule, "another folder, or remove this one"
        )
    if job.tokenize.shards not in (None, len(manifest.shards)):
        rule = f"{writer.target} is complete with {plural(len(manifest.shards), 'shard')}"
        raise ConfigError(
            "tokenize.shards", job.tokenize.shards, rule, f"null, {len(manifest.shards)}"
        )
    return manifest


def _result(writer: CorpusWriter, manifest: Manifest, title: str, seconds: float = 0.0) -> Result:
    counts = manifest.counts
    shown = [
        f"{split} {plural(counts.tokens[split], 'token')} in {plural(counts.documents[split], 'document')}"
        for split in counts.tokens
        if counts.tokens[split]
    ]
    text = "; ".join([*shown, f"shards: {len(manifest.shards)}"])
    data = {
        "target": str(writer.target),
        **asdict(counts),
        "shards": len(manifest.shards),
        "seconds": seconds,
    }
    remarks = "".join(f"note: {each}\n" for each in _losses(writer))
    command = f"next: harness train data=tokens 'data.paths=[{writer.target}]'"
    return Result(data, f"{title}\n{text}\n{remarks}{command}\n")


def _losses(writer: CorpusWriter) -> Iterator[str]:
    """Yield notes on losses: characters without a token, and a changed layout."""
    tokenizer = writer.tokenizer
    if tokenizer.unknown_id is not None and read_manifest(writer.target).counts.tokens["train"]:
        shards = open_shards(writer.target, "train", check=False)
        ids = np.concatenate([shard.tokens[:LOOKED_AT] for shard in shards])[:LOOKED_AT]
        unknown = np.count_nonzero(ids == tokenizer.unknown_id) / len(ids)
        if unknown:
            works = "a tokenizer with byte pieces (byte_fallback)"
            yield f"{unknown:.2%} of the ids are unknown ({len(ids):,} looked at); would work: {works}"
    if LAYOUT not in (read := tokenizer.decode(tokenizer.encode(LAYOUT))):
        yield f"the tokenizer does not keep line breaks or spaces: {LAYOUT!r} is read back as {read!r}"


VERB = Verb("tokenize", tokenize, help=HELP, job=TokenizeJob, has_json=True, is_alone=True)

if __name__ == "__main__":  # a task of a SLURM array
    from harness.launch.shards import run_task

    run_task("harness.tools.tokenize", TokenizeJob, writer_of)
