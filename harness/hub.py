"""Download a repository's files from the Hugging Face hub with huggingface_hub's client.

The client finds the token and the hub (HF_TOKEN or a login; HF_ENDPOINT), defines the errors and retries
broken connections. Added here: an interrupted file is resumed by the next process, and every file is compared
with the hub's checksum.

``download.json`` records the downloaded files; a file that matches its record is not read again. Partial
files are in ``.download``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from harness.errors import ConfigError, MachineError, UserError
from harness.locks import Held, lock

RECORD, PARTS = "download.json", ".download"
_WORKERS = 4  # files at once; more would share the same bandwidth
_BLOCK = 1 << 22  # bytes read at once for a checksum
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESUMES = "the same command resumes where it stopped"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        name: path in the repository.
        size: bytes.
        checksum: ``sha256:...`` of the content, or ``git:...``, git's hash of the blob (SHA-1).
    """

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Repository:
    """A repository at one commit.

    Attributes:
        name: ``owner/name``.
        commit: the full hash.
        files: all files.
    """

    name: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class _FileRecord:
    """A downloaded file, as recorded in ``download.json``."""

    checksum: str
    size: int
    mtime_ns: int


def look_up(repo: str, revision: str) -> Repository:
    """Ask the hub for the files of a repository.

    Raises:
        UserError: the repository or revision does not exist, or the token has no access.
        MachineError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or []:
        checksum = f"sha256:{each.lfs.sha256}" if each.lfs else f"git:{each.blob_id}"
        if each.size is None or checksum == "git:None":
            raise MachineError(f"{_endpoint()} does not give the size or the checksum of {each.rfilename}")
        files.append(RemoteFile(each.rfilename, each.size, checksum))
    return Repository(repo, cast(str, info.sha), tuple(files))


def fetch(repository: Repository, files: list[RemoteFile], target: Path) -> list[RemoteFile]:
    """Download files into a folder, under their names in the repository; skip files that exist.

    Args:
        repository: the repository.
        files: the files to download.
        target: the folder; created if missing.

    Returns:
        The files that were downloaded.

    Raises:
        UserError: no access, or another file has the same path.
        MachineError: the hub cannot be reached, a file is damaged, or the disk is full.
    """
    with _disk_errors(target):
        (target / PARTS).mkdir(parents=True, exist_ok=True)
        try:
            lock_file = lock(target / PARTS / "lock", create=True)
        except Held:
            raise UserError(f"{target}: another download is writing to this folder") from None
    try:
        record = _read_record(target, repository.name)
        missing = [file for file in files if not _is_there(target, file, record)]
        _require_space(target, missing)
        with _disk_errors(target):
            _write_record(target, repository, record)
        if missing:
            _fetch_all(repository, missing, target, record)
    finally:
        if lock_file is not None:
            lock_file.close()
    return missing


def _fetch_all(
    repository: Repository, files: list[RemoteFile], target: Path, record: dict[str, _FileRecord]
) -> None:
    from huggingface_hub.utils import disable_progress_bars

    from harness.checkpoint.progress import progress

    disable_progress_bars()  # one per file; ours covers all files
    stop, mutex = threading.Event(), threading.Lock()
    with progress(sum(file.size - _part_size(target, file) for file in files)) as advance_bar:

        def advance(nbytes: int) -> None:
            with mutex:
                advance_bar(nbytes)

        def download(file: RemoteFile) -> None:
            entry = _download(repository, file, target, advance, stop)
            with mutex, _disk_errors(target):
                record[file.name] = entry
                _write_record(target, repository, record)

        with ThreadPoolExecutor(_WORKERS) as pool:
            running = [pool.submit(download, file) for file in files]
            try:
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
            finally:
                # After an error or ^C, the other threads stop at their next write.
                if not all(each.done() for each in running):
                    stop.set()
                    pool.shutdown(wait=True, cancel_futures=True)
        failed = [each.exception() for each in done if each.exception() is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
            assert error is not None
            raise error


def _download(
    repository: Repository,
    file: RemoteFile,
    target: Path,
    advance: Callable[[int], None],
    stop: threading.Event,
) -> _FileRecord:
    """Download one file, resuming from its partial file; on failure the partial file stays."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path, part = target / file.name, _part(target, file)
    have = _part_size(target, file)
    with _disk_errors(part):
        stream = part.open("r+b" if have else "wb")
        stream.seek(have)
    with stream:
        if have < file.size:
            with _hub_errors(repository.name, repository.commit):
                http_get(
                    hf_hub_url(repository.name, file.name, revision=repository.commit),
                    cast(Any, _ProgressFile(stream, part, advance, stop)),
                    resume_size=have,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                )
    with _disk_errors(part):
        if not _matches(part, file):
            part.unlink()
            raise MachineError(
                f"{file.name}: the download does not have the hub's checksum; "
                "the same command downloads it again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)
        return _record_of(path, file)


class _Stopped(Exception):
    """The download was cancelled: another file failed, or the user pressed ^C."""


class _ProgressFile:
    """A file that reports written bytes and disk errors, and raises ``_Stopped`` once ``stop`` is set."""

    def __init__(
        self, stream: IO[bytes], path: Path, advance: Callable[[int], None], stop: threading.Event
    ) -> None:
        self._stream, self._path, self._advance, self._stop = stream, path, advance, stop

    def write(self, content: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        with _disk_errors(self._path):
            written = self._stream.write(content)
            self._stream.flush()
        self._advance(written)
        return written

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        # http_get truncates if the hub ignores the requested range and sends the file from its beginning.
        before = os.fstat(self._stream.fileno()).st_size
        after = self._stream.truncate(size)
        self._advance(after - before)
        return after


# -- files on disk ----


def _part(target: Path, file: RemoteFile) -> Path:
    """Path of a partial file; it contains the checksum, so that another version gets another path."""
    return target / PARTS / f"{file.name.replace('/', '--')}.{file.checksum[-16:]}"


def _part_size(target: Path, file: RemoteFile) -> int:
    """Size in bytes of the partial file of an interrupted download."""
    part = _part(target, file)
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= file.size else 0


def _is_there(target: Path, file: RemoteFile, record: dict[str, _FileRecord]) -> bool:
    """Whether a file exists with the hub's content; an unchanged older download may be replaced.

    Raises:
        UserError: another file has the same path.
    """
    path = target / file.name
    if not path.exists():
        return False
    known = record.get(file.name)
    if known is not None and known == _record_of(path, RemoteFile(file.name, known.size, known.checksum)):
        return known.checksum == file.checksum
    if path.is_file():
        with _disk_errors(path):
            if _matches(path, file):
                record[file.name] = _record_of(path, file)
                return True
    raise UserError(
        f"{path}: already exists and differs from the hub's; "
        "would work: another folder in to=, or removing the file"
    )


def _record_of(path: Path, file: RemoteFile) -> _FileRecord:
    facts = path.stat()
    return _FileRecord(file.checksum, facts.st_size, facts.st_mtime_ns)


def _matches(path: Path, file: RemoteFile) -> bool:
    """Whether a file has the hub's size and checksum."""
    if path.stat().st_size != file.size:
        return False
    kind, _, expected = file.checksum.partition(":")
    # git hashes a blob's length and content (git-scm.com/book, "Git Objects").
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == expected


def _read_record(target: Path, repo: str) -> dict[str, _FileRecord]:
    path = target / RECORD
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: _FileRecord(**facts) for name, facts in content["files"].items()}
        owner = content["repo"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read; would work: removing it") from error
    if owner != repo:
        raise ConfigError("to", target, f"holds files of {owner}", "another folder")
    return files


def _write_record(target: Path, repository: Repository, record: dict[str, _FileRecord]) -> None:
    content = {
        "repo": repository.name,
        "commit": repository.commit,
        "files": {name: asdict(record[name]) for name in sorted(record)},
    }
    written = target / PARTS / RECORD
    written.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(written, target / RECORD)


def _require_space(target: Path, files: list[RemoteFile]) -> None:
    needed = sum(file.size - _part_size(target, file) for file in files)
    free = shutil.disk_usage(target).free
    if free < needed:
        raise MachineError(
            f"{target}: needs {needed / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left"
        )


# -- errors ----


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one-line errors."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise MachineError(
                f"{path}: the disk is full, or a quota is; with more space {_RESUMES}"
            ) from error
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub and the network into one-line errors."""
    from huggingface_hub import errors

    # The HTTP library's base error: requests.HTTPError in huggingface_hub 0.x (requests' other errors are
    # OSErrors), and httpx.HTTPError, the base of all httpx errors, in later versions.
    library_error = cast("type[Exception]", errors.HfHubHTTPError.__mro__[1])
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise UserError(
            "HF_HUB_OFFLINE=1 forbids access to the hub; would work: HF_HUB_OFFLINE=0, "
            "or copying the files from a machine with access"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(repo, revision, error) from error
    except errors.HFValidationError as error:
        raise ConfigError("repo", repo, "not a valid name", "owner/name") from error
    except (library_error, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        again = f"once there is a connection {_RESUMES}"
        raise MachineError(f"no complete answer from {_endpoint()}: {reason}; {again}") from error


def _refusal(repo: str, revision: str, error: Any) -> Exception:
    """The one-line error for an HTTP error of the hub."""
    from huggingface_hub import errors, get_token

    page, tokens = f"{_endpoint()}/{repo}", f"{_endpoint()}/settings/tokens"
    has_token = get_token() is not None
    status = error.response.status_code
    login = f"export HF_TOKEN=hf_... with a token of {tokens}, or hf auth login"
    if isinstance(error, errors.GatedRepoError):
        if has_token:
            rule = "is gated, and the account of your token (HF_TOKEN, or your login) has no access"
            return ConfigError("repo", repo, rule, f"ask for it at {page} and wait for the answer")
        rule = "is gated, and there is no token"
        return ConfigError("repo", repo, rule, f"ask for access at {page}, then {login}")
    if isinstance(error, errors.DisabledRepoError):
        return ConfigError("repo", repo, "is disabled by the hub")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            "revision", revision, f"{repo} has no such branch, tag or commit", f"one of {page}/commits"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        rule = "no such repository, or a private one" + (" that your token may not read" if has_token else "")
        works = f"a name from {_endpoint()}/models" + ("" if has_token else f"; for a private one, {login}")
        return ConfigError("repo", repo, rule, works)
    message = " ".join((error.server_message or "").split())
    answer = f"HTTP {status}" + (f" ({message})" if message else "")
    if status == 401:
        rule = f"the hub rejects your token (HF_TOKEN, or your login): {answer}"
        return UserError(f"{rule}; would work: a token of {tokens}, or none")
    if status == 403:
        return ConfigError("repo", repo, f"your token may not read it: {answer}", f"one of {tokens} that may")
    return MachineError(f"{_endpoint()}: {answer}; {_RESUMES}")
