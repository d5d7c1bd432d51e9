"""Check the inputs of a job before it costs anything: files, vocabulary, how much would be tokenized."""

import functools
import glob
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import is_url
from harness.compose.length import note
from harness.config.data import ASSET_PREFIX, DataConfig, TokenizerConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.job import Job
from harness.config.registry import load_attribute
from harness.config.training import OBSERVERS
from harness.util.errors import ConfigError, DataError
from harness.util.files import matching

_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/scratch/local")


def require_inputs(job: Job) -> None:
    """Check that a job's data, tokenizer and initial weights exist, as far as this machine can tell.

    Paths that only the nodes of a cluster can see are listed in a note.
    """
    unseen: list[str] = []

    def is_seen(field: str, path: str) -> bool:
        """Whether the ranks see the same files here; note the path if not."""
        if job.cluster.is_here or _is_visible(path):
            return True
        unseen.append(f"{field}={path}")
        return False

    def is_missing(field: str, path: str) -> bool:
        return not os.path.exists(path) and is_seen(field, path)

    for data, errors in job.inputs:
        with errors:
            named = DATA_KINDS[data.kind].folders
            for name, folder in (load_attribute(named)(data) if named else {}).items():
                option = f"data.options.{name}"
                if folder and is_missing(option, os.path.expanduser(folder)):
                    rule = "there is no such folder"
                    raise ConfigError(option, folder, rule, "the model's folder")
            _require_files(data, is_seen)
    tokenizer = job.tokenizer.path
    is_file = tokenizer and not tokenizer.startswith(ASSET_PREFIX)
    if is_file and is_missing("tokenizer.path", str(job.tokenizer.file)):
        _, found, repo = str(tokenizer).partition("assets/hf/")
        works = (
            f"harness download repo={'/'.join(repo.split('/')[:2])} what=tokenizer, or "
            if found
            else ""
        )
        raise ConfigError(
            "tokenizer.path", tokenizer, "there is no such file", f"{works}a tokenizer file"
        )
    # Files of other fields were imported when the job was composed.
    for name in job.training.observers:
        if OBSERVERS.file(name):
            OBSERVERS[name]
    initial = job.checkpoint.initial_load_path
    field = "checkpoint.initial_load_path"
    if initial and not is_url(initial) and is_missing(field, initial.removeprefix("file://")):
        works = "a checkpoint, a run folder, or safetensors with checkpoint.initial_load_in_hf=true"
        raise ConfigError(field, initial, "there is no such folder", works)
    if unseen:
        note(f"not checked, because nodes may see other files: {', '.join(unseen)}")


def _require_files(data: DataConfig, is_seen: Callable[[str, str], bool]) -> None:
    for name in ("paths", "validation_paths") if data.reads_files else ():
        patterns = tuple(getattr(data, name))
        if "corpus" in DATA_KINDS[data.kind].formats and not _matches_any(patterns):
            from harness.data.tokens import named_by_prefix

            for prefix in patterns:
                patterns += tuple(named_by_prefix(prefix))
        if not patterns or _matches_any(patterns):
            continue
        if all(is_seen(f"data.{name}", _without_wildcards(each)) for each in _expanded(patterns)):
            rule = f"no file matches, seen from {os.getcwd()}"
            raise ConfigError(
                f"data.{name}", f"[{','.join(getattr(data, name))}]", rule, "files that exist"
            )


def require_vocabulary(job: Job) -> None:
    """Check that the job's tokenizer fits into its model's vocabulary, if the tokenizer's file exists here.

    Also check that its corpora that are here have this tokenizer, and conversations a chat
    template.
    """
    if job.cluster.is_here and job.tokenizer.has_file:
        from harness.data.tokenizer import read_tokenizer

        read_tokenizer(job.tokenizer.file)
    kinds = [DATA_KINDS[kind] for kind in job.kinds_of_data]
    if any(kind.has_vocabulary and kind.batches == "tokens" for kind in kinds):
        from harness.data.corpus import check_tokenizer, read_manifest
        from harness.data.documents import tokenizer_of
        from harness.data.token_files import corpora_of
        from harness.data.tokenizer import check_vocab_size

        tokenizer = job.tokenizer
        if tokenizer.has_file and not tokenizer.file.is_file():
            return
        check_vocab_size(_built(tokenizer).vocab_size, job.model.vocab_size)
        for source, errors in job.inputs:
            with errors:
                if DATA_KINDS[source.kind].tokenizer:
                    tokenizer_of(source, _built(tokenizer))
                for corpus in corpora_of(source):
                    check_tokenizer(read_manifest(corpus), _built(tokenizer), str(corpus))


@functools.cache
def _built(config: TokenizerConfig) -> Any:
    from harness.data.tokenizer import build_tokenizer

    return build_tokenizer(config)


def require_tokenized(job: Job, passed: set[str] | None = None) -> None:
    """Check that a job need not tokenize more than data.tokenize_limit_gib, as far as this machine can tell.

    Datasets of the hub are checked by the ranks, when their size is known.
    """
    if not job.cluster.is_here and not _is_visible(os.path.expanduser(job.data.cache_dir)):
        return
    for data, errors in job.inputs:
        source = repr((data, job.tokenizer, job.validation.interval > 0))
        if DATA_KINDS[data.kind].source and data.reads_files and source not in (passed or ()):
            with errors:
                _require_tokenized(data, job)
        if passed is not None:
            passed.add(source)


def _require_tokenized(data: DataConfig, job: Job) -> None:
    from harness.data.cache import cache_folder, is_small, too_large
    from harness.data.documents import source_of, tokenizer_of
    from harness.data.shards import MANIFEST

    for split in (
        "train",
        *(("validation",) if data.validation_paths and job.validation.interval else ()),
    ):
        source, held_out = source_of(data, split)
        try:
            if is_small(source):
                continue
            tokenizer = tokenizer_of(data, _built(job.tokenizer))
            folder = cache_folder(source, tokenizer, held_out)
        except DataError:  # the ranks may see other files
            continue
        if not (folder / MANIFEST).exists():
            raise too_large(source)


@functools.cache
def _matches_any(patterns: tuple[str, ...]) -> bool:
    return any(next(matching(path), None) is not None for path in _expanded(patterns))


def _expanded(patterns: Sequence[str]) -> list[str]:
    from harness.data.documents import expand

    return [expand(each) for each in patterns]


def _without_wildcards(pattern: str) -> str:
    parts = Path(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(Path(*parts[:fixed])) if fixed else "."


def _is_visible(path: str) -> bool:
    """Whether a path would be the same on a node: its folder exists here and is not for temporary files."""
    absolute = os.path.abspath(path)
    node_local = (*_NODE_LOCAL, tempfile.gettempdir())
    return os.path.isdir(os.path.dirname(absolute)) and not any(
        absolute == folder or absolute.startswith(f"{folder}/") for folder in node_local
    )
