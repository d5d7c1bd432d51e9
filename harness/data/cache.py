"""The token cache: documents that the job itself tokenizes, stored as a corpus with one shard.

Its folder, ``<cache_dir>/corpus-<key>``, is named by a hash of everything that determines its
content, so it is never stale and never modified. A damaged cache is rebuilt.
"""

import shutil
import sys
from pathlib import Path

from harness.data.corpus import CorpusWriter, TokenizedSplit, content_key, open_shard, read_manifest
from harness.data.documents import Source, source_of, tokenizer_of
from harness.data.samples import Reading
from harness.data.shards import MANIFEST, UNFINISHED
from harness.data.tokenizer import Tokenizer
from harness.util.errors import ConfigError, DataError, MachineError
from harness.util.store import Damaged, only_builder, remove_abandoned, remove_folder

UNIT_MIB = 16.0
# How long the finished units of a cache that nobody continues are kept.
_KEPT_SECONDS = 7 * 86400.0
_GIB = 2**30


def open_documents(reading: Reading) -> TokenizedSplit:
    """Open the tokens of a loader's source; the builder tokenizes it first if there is no cache.

    If no documents are held out, either split has all of them.

    Raises:
        ConfigError: the source is larger than data.tokenize_limit_gib, and there is no cache.
        DataError: the source cannot be read or holds no text, or the builder's cache is not visible
            here.
    """
    source, held_out = source_of(reading.data, reading.split)
    tokenizer = tokenizer_of(reading.data, reading.tokenizer)
    name = f"{source.name}, {reading.split} documents"
    stored_split = reading.split if held_out > 0 else "train"
    if reading.is_builder:
        folder = cache_folder(source, tokenizer, held_out)
        for other in folder.parent.glob(f"corpus-*/{UNFINISHED}"):
            if not (other.parent / MANIFEST).exists():
                remove_abandoned(other.parent, other, _KEPT_SECONDS)
        if (folder / MANIFEST).exists():
            try:
                _open(folder, stored_split, name, check=True)
            except Damaged as error:
                sys.stderr.write(
                    f"WARNING token cache {folder} is damaged and is rebuilt: {error}\n"
                )
                remove_folder(folder)
            except OSError as error:
                raise DataError(f"token cache {folder} cannot be read: {error.strerror}") from error
        if not (folder / MANIFEST).exists():
            if not is_small(source):
                raise too_large(source)
            _build(folder, source, tokenizer, held_out)
    if reading.wait_for_all is not None:
        reading.wait_for_all()
    folder = cache_folder(source, tokenizer, held_out)
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"token cache {folder} is not visible to this rank; "
            "data.cache_dir must be a folder that all ranks share"
        )
    try:
        return _open(folder, stored_split, name, check=False)
    except Damaged as error:
        raise DataError(f"token cache {folder} is damaged: {error}; remove the folder") from None


def cache_folder(source: Source, tokenizer: Tokenizer, held_out: float) -> Path:
    """Folder of a source's token cache, which is complete if it has a manifest."""
    return (
        Path(source.config.cache_dir).expanduser()
        / f"corpus-{content_key(source, tokenizer, held_out)[:24]}"
    )


def _open(folder: Path, split: str, name: str, *, check: bool) -> TokenizedSplit:
    try:
        (shard,) = read_manifest(folder).shards
    except (DataError, ValueError) as error:
        raise Damaged(str(error)) from None
    return open_shard(folder, shard, split, name, check=check)


def _build(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    """Write the cache, or wait for another process that does.

    Finished units survive this process, unless the source or the disk must change.
    """
    try:
        (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write to {folder.parent}: {error.strerror}"
        ) from error
    try:
        with only_builder(folder / UNFINISHED, (folder / MANIFEST).exists) as building:
            if building is None:
                return
            try:
                writer = CorpusWriter(
                    folder, source, tokenizer, held_out, unit_mib=UNIT_MIB, shards=1
                )
                writer.write_all(source.config.tokenize_workers)
            except (DataError, OSError):
                shutil.rmtree(folder, ignore_errors=True)
                raise
            building.is_useless = True
    except OSError as error:
        raise MachineError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error


def is_small(source: Source) -> bool:
    """Whether a source is within data.tokenize_limit_gib; all ranks of a job wait while it is tokenized."""
    limit = source.config.tokenize_limit_gib
    return limit is None or _size(source) <= limit * _GIB


def _size(source: Source) -> int:
    return sum(span.nbytes for span in source.spans(sys.maxsize))


def too_large(source: Source) -> ConfigError:
    """Return the error for a source that a job may not tokenize, with what does."""
    size = f"{_size(source) / _GIB:.3g} GiB"
    rule = f"{source.name} has {size} that are not tokenized, and all ranks would wait for them"
    limit = source.config.tokenize_limit_gib
    if not source.config.has_text:
        rule += "; harness tokenize does not read conversations"
        return ConfigError("data.tokenize_limit_gib", limit, rule, "null, which is no limit")
    works = (
        "harness tokenize with the same groups data and tokenizer and tokenize.target=corpus/NAME, then "
        "data=tokens 'data.paths=[corpus/NAME]', or data.tokenize_limit_gib=null"
    )
    return ConfigError("data.tokenize_limit_gib", limit, rule, works)
