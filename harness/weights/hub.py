"""Download a repository's files from the Hugging Face hub with ``huggingface_hub.snapshot_download``.

The library finds the token and the hub (HF_TOKEN or a login; HF_ENDPOINT), transfers files in parallel,
resumes broken connections, and records each file's checksum and time in ``.cache/huggingface``. Added here:
other files are not overwritten, every new file is compared with the hub's checksum, and errors are one line.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.util.encoding import parse_object
from harness.util.errors import DISK_FULL, ConfigError, MachineError, UserError

RECORD = "download.json"  # the repository and commit of a folder's files
_WORKERS = 4  # files at once; more would share the same bandwidth
_ABANDONED_SECONDS = 600.0  # since the last write to a partial file
_AGAIN = "the same command downloads the missing files"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, with its path there and its size in bytes."""

    name: str
    size: int
    etag: str
    """SHA-256 of the content of a large file; of others git's hash of the blob (SHA-1)."""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, named by its full hash, with all files."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]


def look_up(repo: str, revision: str) -> Repository:
    """Ask the hub for the files of a repository."""
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or []:
        etag = each.lfs.sha256 if each.lfs else each.blob_id
        if each.size is None or etag is None:
            raise MachineError(f"{_endpoint()} does not give the size or the checksum of {each.rfilename}")
        files.append(RemoteFile(each.rfilename, each.size, etag))
    return Repository(repo, cast(str, info.sha), tuple(files))


def fetch(repository: Repository, files: list[RemoteFile], target: Path) -> list[RemoteFile]:
    """Download files into a folder, under their names in the repository; return those that were missing."""
    with _disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        _refuse_other_repository(target, repository.name)
        missing = [file for file in files if not _is_there(target, file, repository.commit)]
        needed, free = sum(file.size for file in missing), shutil.disk_usage(target).free
        if free < needed:
            rule = f"needs {needed / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left"
            raise MachineError(f"{target}: {rule}")
        record = json.dumps({"repo": repository.name, "commit": repository.commit}, indent=2)
        (target / RECORD).write_text(record + "\n", encoding="utf-8")
        if missing:
            _download(repository, missing, target)
            _compare(missing, target)
    return missing


def _refuse_other_repository(target: Path, repo: str) -> None:
    if not (target / RECORD).exists():
        return
    try:
        owner = parse_object((target / RECORD).read_bytes())["repo"]
    except (ValueError, KeyError) as error:
        raise UserError(f"{target / RECORD}: cannot be read; would work: removing it") from error
    if owner != repo:
        raise ConfigError("to", target, f"holds files of {owner}", "another folder")


def _is_there(target: Path, file: RemoteFile, commit: str) -> bool:
    """Whether a file exists with the hub's content; an unchanged older download may be replaced."""
    # Private in huggingface_hub 0.34 to 2.4: there is no other access to its records.
    from huggingface_hub._local_folder import read_download_metadata, write_download_metadata

    path = target / file.name
    if not path.exists():
        return False
    known = read_download_metadata(target, file.name)  # None: not downloaded, or changed since
    if known is not None and known.etag != file.etag:
        return False
    # The library does not notice a change within a second of the download.
    if path.is_file() and path.stat().st_size == file.size:
        if known is not None:
            return True
        if _matches(path, file):
            write_download_metadata(target, file.name, commit, file.etag)
            return True
    raise UserError(
        f"{path}: already exists and differs from the hub's; "
        "would work: another folder in to=, or removing the file"
    )


def _download(repository: Repository, files: list[RemoteFile], target: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    bars: list[Any] = []

    class Bar(tqdm):
        """A progress bar that is removed at the end; snapshot_download leaves some of its bars open."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": not sys.stderr.isatty(), "leave": False})
            bars.append(self)

    # A process that was killed leaves the files that it was writing; their random names are not used again.
    for partial in (target / ".cache").rglob("*.????????.incomplete"):
        if time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
            partial.unlink(missing_ok=True)
    try:
        with _hub_errors(repository.name, repository.commit):
            snapshot_download(
                repository.name,
                revision=repository.commit,
                local_dir=target,
                allow_patterns=[glob.escape(file.name) for file in files],
                max_workers=_WORKERS,
                tqdm_class=Bar,
            )
    finally:
        for bar in reversed(bars):
            bar.close()


def _compare(files: list[RemoteFile], target: Path) -> None:
    """Compare downloaded files with the hub's checksums; remove those that differ."""
    # If the hub stops answering, snapshot_download only warns when the folder is not empty.
    for file in files:
        if not (target / file.name).is_file():
            raise MachineError(f"{_endpoint()} did not send {file.name}; {_AGAIN}")
    with ThreadPoolExecutor(_WORKERS) as pool:
        intact = list(pool.map(lambda file: _matches(target / file.name, file), files))
    damaged = [file.name for file, right in zip(files, intact, strict=True) if not right]
    for name in damaged:
        (target / name).unlink()
    if damaged:
        rule = "the download does not have the hub's checksum"
        raise MachineError(f"{', '.join(damaged)}: {rule}; the same command downloads it again")


def _matches(path: Path, file: RemoteFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    # git hashes a blob's length and content (git-scm.com/book, "Git Objects").
    is_blob = len(file.etag) == hashlib.sha1().digest_size * 2
    digest = hashlib.sha1(b"blob %d\0" % file.size) if is_blob else hashlib.sha256()
    with path.open("rb") as stream:
        hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest() == file.etag


# -- errors ----


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = error.filename or target
        if error.errno in DISK_FULL:
            rule = f"the disk is full, or a quota is; with more space {_AGAIN}"
            raise MachineError(f"{path}: {rule}") from error
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    from huggingface_hub import errors

    # The HTTP library's base error: requests.HTTPError in huggingface_hub 0.x (requests' other errors are
    # OSErrors), and httpx.HTTPError, the base of all httpx errors, in later versions.
    library_error = cast("type[Exception]", errors.HfHubHTTPError.__mro__[1])
    try:
        yield
    except (library_error, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OSError) and (error.errno in DISK_FULL or error.filename):
            raise  # an error of the file system
        raise _hub_error(error, repo, revision) from error


def _hub_error(error: BaseException, repo: str, revision: str) -> Exception:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _hub_error(error.__cause__, repo, revision)  # the hub stopped answering after the listing
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            "HF_HUB_OFFLINE=1 forbids access to the hub; would work: HF_HUB_OFFLINE=0, "
            "or copying the files from a machine with access"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigError("repo", repo, "not a valid name", "owner/name")
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return _refusal(repo, revision, error)
    reason = " ".join(str(error).split()) or type(error).__name__
    if os.strerror(errno.ENOSPC) in reason:  # hf_xet's errors have no errno
        return OSError(errno.ENOSPC, reason)
    return MachineError(
        f"no complete answer from {_endpoint()}: {reason}; once there is a connection {_AGAIN}"
    )


def _refusal(repo: str, revision: str, error: Any) -> Exception:
    from huggingface_hub import errors

    page, message = f"{_endpoint()}/{repo}", " ".join((error.server_message or "").split())
    answer = f"HTTP {error.response.status_code}" + (f" ({message})" if message else "")
    if isinstance(error, errors.RevisionNotFoundError):
        rule = f"{repo} has no such branch, tag or commit"
        return ConfigError("revision", revision, rule, f"one of {page}/commits")
    if error.response.status_code in (401, 403, 404):
        login = f"a token of {_endpoint()}/settings/tokens in HF_TOKEN, or hf auth login"
        works = f"a name from {_endpoint()}/models; for a gated one, access from {page}, and {login}"
        return ConfigError("repo", repo, f"the hub answers {answer}", works)
    return MachineError(f"{_endpoint()}: {answer}; {_AGAIN}")
