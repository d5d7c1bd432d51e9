"""A corpus: the folder that ``harness tokenize`` writes, with token caches as shards and a manifest.

    corpus/web/manifest.json     tokenizer, counts, source files, checksums; written last
    corpus/web/shard-00000/      a token cache (``cache.py``): a contiguous range of the source's documents

The documents of a split are those of its shards, one shard after the other, whatever the number of shards.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from harness.config.fields import from_dict
from harness.data.cache import TokenizedSplit, open_split
from harness.data.cache_check import META, SPLITS, DamagedCache, check_contents, read_meta
from harness.data.shards.manifest import MANIFEST, load_manifest
from harness.data.tokenizer import Tokenizer
from harness.util.errors import ConfigError, DataError
from harness.util.files import is_file_name


@dataclass(frozen=True)
class Counts:
    """Tokens and documents of each split, without empty documents."""

    tokens: dict[str, int]
    documents: dict[str, int]
    damaged: int = 0
    """Documents that were not UTF-8, and were repaired or left out by data.encoding_errors."""


@dataclass(frozen=True)
class Shard:
    """A shard of a corpus.

    Attributes:
        folder: its name in the corpus.
        counts: its tokens and documents.
        meta_xxh3_64: checksum of its ``meta.json``, which has the checksums of its other files.
    """

    folder: str
    counts: Counts
    meta_xxh3_64: str


@dataclass(frozen=True)
class Manifest:
    """Description of a corpus.

    Attributes:
        version: of the format.
        tokenizer: name, fingerprint, vocab_size, bos_id and eos_id.
        source: name of the source, and its files with path and size.
        held_out: fraction of documents in the split ``validation``.
        counts: tokens and documents of all shards.
        shards: in the order of their documents.
        key: hash of everything that determines the content, shards included.
    """

    version: int
    tokenizer: dict[str, Any]
    source: dict[str, Any]
    held_out: float
    counts: Counts
    shards: list[Shard]
    key: str

    @property
    def vocab_size(self) -> int:
        """Number of the tokenizer's tokens; every id is smaller."""
        return int(self.tokenizer["vocab_size"])


def read_manifest(folder: Path) -> Manifest:
    """Read a corpus' manifest.

    Raises:
        DataError: there is none, it is damaged, or a later version wrote it.
    """
    plain = load_manifest(folder, "tokenize", "corpus")
    try:
        shards = [from_dict(Shard, shard) for shard in plain["shards"]]
        manifest: Manifest = from_dict(Manifest, {**plain, "shards": []})
        _check_plain(manifest, shards)
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    return dataclasses.replace(manifest, shards=shards)


def _check_plain(manifest: Manifest, shards: list[Shard]) -> None:
    """Raise ValueError for names outside of the corpus and for numbers that cannot be."""
    for name in (shard.folder for shard in shards):
        if not is_file_name(name):
            raise ValueError(f"{name!r} is no name of a folder in it")
    vocab_size = manifest.tokenizer["vocab_size"]
    if type(vocab_size) is not int or not 0 < vocab_size <= 2**32 or not manifest.tokenizer["fingerprint"]:
        raise ValueError("tokenizer")
    counted = [manifest.counts, *(shard.counts for shard in shards)]
    for split in SPLITS:
        for kind in ("tokens", "documents"):
            counts = [getattr(each, kind)[split] for each in counted]
            if any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
                raise ValueError(f"counts of {kind}")
            if counts[0] != sum(counts[1:]):
                raise ValueError(f"{counts[0]} {kind}, and its shards have {sum(counts[1:])}")


def describe_shard(folder: Path, counts: Counts) -> Shard:
    """Return the manifest's entry of a complete shard."""
    return Shard(folder.name, counts, xxhash.xxh3_64_hexdigest((folder / META).read_bytes()))


def open_shards(folder: Path, split: str, *, check: bool = True) -> list[TokenizedSplit]:
    """Open the shards of a corpus that have documents of a split, in order.

    Args:
        folder: the corpus.
        split: ``train`` or ``validation``.
        check: compare checksums, as when a token cache is opened (``cache_check.py``); sizes are always
            compared. One rank of a node is enough.

    Raises:
        DataError: the corpus is not complete or damaged, or no documents are in the split.
    """
    manifest = read_manifest(folder)
    if not manifest.counts.tokens[split]:
        works = "harness tokenize with data.validation_fraction=0.01" if split == "validation" else ""
        raise DataError(f"{folder} has no {split} documents{works and f'; would work: {works}'}")
    opened = []
    for shard in manifest.shards:
        path = folder / shard.folder
        try:
            if check:
                _check(path, shard, split)
            part = open_split(path, split, f"{path}, {split} documents")
        except DamagedCache as error:
            raise DataError(
                f"{path} is damaged: {error}; would work: remove {folder / MANIFEST} and {path}, then the "
                "harness tokenize command of this corpus"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        if len(part.tokens) != shard.counts.tokens[split]:
            raise DataError(
                f"{path} has {len(part.tokens)} {split} tokens, and {MANIFEST} says "
                f"{shard.counts.tokens[split]}"
            )
        if len(part.tokens):
            opened.append(part)
    return opened


def _check(folder: Path, shard: Shard, split: str) -> None:
    meta = read_meta(folder)
    if xxhash.xxh3_64_hexdigest((folder / META).read_bytes()) != shard.meta_xxh3_64:
        raise DamagedCache(f"{META} does not have the checksum in {MANIFEST}")
    check_contents(folder, meta, split)


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, name: str) -> None:
    """Check that a job's tokenizer is the corpus' one.

    Args:
        manifest: of the corpus.
        tokenizer: of the job.
        name: field and value of the corpus, for the error.

    Raises:
        DataError: another tokenizer wrote the corpus.
    """
    found = manifest.tokenizer
    if found["fingerprint"] != tokenizer.fingerprint:
        raise DataError(
            f"{name}: was tokenized by {found['name']} ({found['vocab_size']} tokens), and the job has "
            f"another tokenizer ({tokenizer.vocab_size} tokens); would work: the same tokenizer"
        )
