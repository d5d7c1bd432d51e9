"""``harness tokenize``: tokenize a source into a corpus, which training reads with ``data=tokens``.

    harness tokenize data=local_jsonl 'data.paths=[web/*.jsonl]' tokenize.target=corpus/web
    harness tokenize ... tokenizer=llama3 tokenize.workers=16
    harness tokenize ... cluster=slurm tokenize.shards=32      one task of an array for each shard

The same command continues after a kill. The corpus does not depend on the number of processes and tasks.
"""

from __future__ import annotations

from dataclasses import asdict

from harness.compose.verb import Result, Verb
from harness.data.corpus import Manifest, read_manifest
from harness.data.shards.here import write_here
from harness.data.shards.manifest import MANIFEST
from harness.data.sources import source_of
from harness.data.tokenizer import build_tokenizer
from harness.data.units import bytes_of
from harness.tools.tokenize.config import TokenizeJob
from harness.tools.tokenize.writer import CorpusWriter
from harness.train.process import launched_ranks
from harness.util.errors import ConfigError, UserError

WORKERS = 8
"""Default processes of a task of a SLURM array."""


def tokenize(job: TokenizeJob, overrides: list[str]) -> int | Result:
    """Write a corpus, continue an unfinished one, or submit SLURM jobs that do."""
    if launched_ranks() is not None:
        raise UserError("harness tokenize starts its processes itself; start it without torchrun")
    job.tokenize.validate(job.data)
    writer = writer_of(job)
    done = _complete_corpus(job, writer)
    if done is not None:
        return _result(writer, done, f"{writer.target} is complete")
    writer.check_target()
    if job.cluster.kind == "slurm":
        from harness.launch.shard_array import submit

        workers = job.tokenize.workers or job.cluster.cpus_per_rank or WORKERS
        return submit(job, writer, "harness.tools.tokenize.task", workers)
    return _tokenize_here(job, writer)


def _tokenize_here(job: TokenizeJob, writer: CorpusWriter) -> Result:
    megabytes = sum(bytes_of(writer.missing(shard)) for shard in range(len(writer.shards))) / 1e6
    seconds = write_here(writer, job.tokenize.workers)
    rate = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s"
    return _result(writer, read_manifest(writer.target), f"{writer.target}: {rate}", seconds)


def writer_of(job: TokenizeJob) -> CorpusWriter:
    """Return the writer of a job's corpus.

    Raises:
        DataError: the source or the tokenizer cannot be read.
    """
    source, held_out = source_of(job.data, "train")
    return CorpusWriter(job.tokenize, source, build_tokenizer(job.tokenizer), held_out)


def _complete_corpus(job: TokenizeJob, writer: CorpusWriter) -> Manifest | None:
    """Return the manifest if the corpus is complete.

    Raises:
        ConfigError: the target is a corpus of another source, tokenizer or number of shards.
    """
    if not (writer.target / MANIFEST).exists():
        return None
    manifest = read_manifest(writer.target)
    if manifest.key != writer.key:
        rule = f"is a corpus of {manifest.source['name']} by {manifest.tokenizer['name']}, not of this job"
        if manifest.source["name"] == writer.source_name:
            rule = "is a corpus of these files before they changed, or with another tokenizer or data field"
        raise ConfigError("tokenize.target", job.tokenize.target, rule, "another folder, or remove this one")
    if job.tokenize.shards not in (None, len(manifest.shards)):
        rule = f"{writer.target} is complete with {len(manifest.shards)} shards"
        raise ConfigError("tokenize.shards", job.tokenize.shards, rule, f"null, {len(manifest.shards)}")
    return manifest


def _result(writer: CorpusWriter, manifest: Manifest, title: str, seconds: float = 0.0) -> Result:
    counts = manifest.counts
    shown = [
        f"{split} {counts.tokens[split]:,} tokens in {counts.documents[split]:,} documents"
        for split in counts.tokens
        if counts.tokens[split]
    ]
    damaged = [f"{counts.damaged:,} damaged documents"] if counts.damaged else []
    text = "; ".join([*shown, *damaged, f"shards: {len(manifest.shards)}"])
    data = {
        "target": str(writer.target),
        **asdict(counts),
        "shards": len(manifest.shards),
        "seconds": seconds,
    }
    command = f"next: python -m harness.train data=tokens 'data.paths=[{writer.target}]'"
    return Result(data, f"{title}\n{text}\n{command}\n")


VERB = Verb("tokenize", tokenize, job=TokenizeJob, has_json=True)
