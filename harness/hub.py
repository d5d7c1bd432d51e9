"""A repository's files, brought from the Hugging Face hub by huggingface_hub's client.

The client finds the token and the hub (HF_TOKEN or a login; HF_ENDPOINT), knows its errors and repeats what
breaks off. What it does not do across processes is done here: a file that was interrupted goes on where it
stopped, and every file is compared with the checksum that the hub gives for it.

What was brought stands in ``download.json``; a file that is as it stands there is not read again. Parts of
files lie in ``.download``.
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
_WORKERS = 4  # files at once; more only share the same line
_BLOCK = 1 << 22  # bytes read at once for a checksum
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "the same command goes on from where it stopped"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        name: path in the repository.
        size: bytes.
        checksum: ``sha256:...`` of the content, or ``git:...``, git's name of the blob (SHA-1).
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
        files: all of them, by name.
    """

    name: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class _Brought:
    """A file as it was when it had been brought."""

    checksum: str
    size: int
    mtime_ns: int


def look_up(repo: str, revision: str) -> Repository:
    """Asks the hub what a repository holds.

    Raises:
        UserError: there is no such repository or revision, or no access to it.
        MachineError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or []:
        checksum = f"sha256:{each.lfs.sha256}" if each.lfs else f"git:{each.blob_id}"
        if each.size is None or checksum == "git:None":
            raise MachineError(
                f"{_endpoint()} does not say how large {each.rfilename} is, or what its checksum is"
            )
        files.append(RemoteFile(each.rfilename, each.size, checksum))
    return Repository(repo, cast(str, info.sha), tuple(files))


def fetch(repository: Repository, files: list[RemoteFile], target: Path) -> list[RemoteFile]:
    """Brings files into a folder, under their names in the repository, unless they are there.

    Args:
        repository: where they are.
        files: which of its files.
        target: the folder; made where it is missing.

    Returns:
        the files that were not there.

    Raises:
        UserError: no access, or something else is in their place.
        MachineError: the hub cannot be reached, what came is damaged, or the disk is full.
    """
    with _disk(target):
        (target / PARTS).mkdir(parents=True, exist_ok=True)
        try:
            held = lock(target / PARTS / "lock", create=True)
        except Held:
            raise UserError(f"{target}: another download is writing to this folder") from None
    try:
        record = _read_record(target, repository.name)
        missing = [file for file in files if not _is_there(target, file, record)]
        _require_space(target, missing)
        with _disk(target):
            _write_record(target, repository, record)
        if missing:
            _fetch_all(repository, missing, target, record)
    finally:
        if held is not None:
            held.close()
    return missing


def _fetch_all(
    repository: Repository, files: list[RemoteFile], target: Path, record: dict[str, _Brought]
) -> None:
    from huggingface_hub.utils import disable_progress_bars

    from harness.checkpoint.progress import progress

    disable_progress_bars()  # of a single file; ours is of all
    stop, mutex = threading.Event(), threading.Lock()
    with progress(sum(file.size - _part_size(target, file) for file in files)) as tell:

        def advance(nbytes: int) -> None:
            with mutex:
                tell(nbytes)

        def bring(file: RemoteFile) -> None:
            brought = _bring(repository, file, target, advance, stop)
            with mutex, _disk(target):
                record[file.name] = brought
                _write_record(target, repository, record)

        with ThreadPoolExecutor(_WORKERS) as pool:
            running = [pool.submit(bring, file) for file in files]
            try:
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
            finally:
                # After an error or ^C the others end at their next bytes.
                if not all(each.done() for each in running):
                    stop.set()
                    pool.shutdown(wait=True, cancel_futures=True)
        failed = [each.exception() for each in done if each.exception() is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
            assert error is not None
            raise error


def _bring(
    repository: Repository,
    file: RemoteFile,
    target: Path,
    advance: Callable[[int], None],
    stop: threading.Event,
) -> _Brought:
    """Brings one file whole, or leaves a part to go on from."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    place, part = target / file.name, _part(target, file)
    have = _part_size(target, file)
    with _disk(part):
        stream = part.open("r+b" if have else "wb")
        stream.seek(have)
    with stream:
        if have < file.size:
            with _hub_errors(repository.name, repository.commit):
                http_get(
                    hf_hub_url(repository.name, file.name, revision=repository.commit),
                    cast(Any, _Watched(stream, part, advance, stop)),
                    resume_size=have,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                )
    with _disk(part):
        if not _is(part, file):
            part.unlink()
            raise MachineError(
                f"{file.name}: what came is not what the hub has; the same command brings it anew"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, place)
        return _as_it_is(place, file)


class _Stopped(Exception):
    """Another file failed, or the user does not want any more."""


class _Watched:
    """A file that tells what is written, says what the disk refuses, and stops when asked to."""

    def __init__(
        self, stream: IO[bytes], place: Path, advance: Callable[[int], None], stop: threading.Event
    ) -> None:
        self._stream, self._place, self._advance, self._stop = stream, place, advance, stop

    def write(self, content: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        with _disk(self._place):
            written = self._stream.write(content)
            self._stream.flush()
        self._advance(written)
        return written

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        # The hub sends the file from its beginning, whatever part of it was asked for.
        before = os.fstat(self._stream.fileno()).st_size
        after = self._stream.truncate(size)
        self._advance(after - before)
        return after


# -- what is there ----


def _part(target: Path, file: RemoteFile) -> Path:
    """Where a file grows; another content of the same name grows elsewhere."""
    return target / PARTS / f"{file.name.replace('/', '--')}.{file.checksum[-16:]}"


def _part_size(target: Path, file: RemoteFile) -> int:
    """Bytes of a file that an interrupted download left."""
    part = _part(target, file)
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= file.size else 0


def _is_there(target: Path, file: RemoteFile, record: dict[str, _Brought]) -> bool:
    """Whether a file is what it is on the hub; one that was brought and is as it was may be replaced.

    Raises:
        UserError: something else is in its place.
    """
    place = target / file.name
    if not place.exists():
        return False
    known = record.get(file.name)
    if known is not None and known == _as_it_is(place, RemoteFile(file.name, known.size, known.checksum)):
        return known.checksum == file.checksum
    if place.is_file():
        with _disk(place):
            if _is(place, file):
                record[file.name] = _as_it_is(place, file)
                return True
    raise UserError(
        f"{place}: is there already, and is not the hub's; would work: another folder in to=, or without it"
    )


def _as_it_is(place: Path, file: RemoteFile) -> _Brought:
    facts = place.stat()
    return _Brought(file.checksum, facts.st_size, facts.st_mtime_ns)


def _is(path: Path, file: RemoteFile) -> bool:
    """Whether a file's content is the hub's."""
    if path.stat().st_size != file.size:
        return False
    kind, _, expected = file.checksum.partition(":")
    # git names a blob by this hash of its length and content (git-scm.com/book, "Git Objects").
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == expected


def _read_record(target: Path, repo: str) -> dict[str, _Brought]:
    path = target / RECORD
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: _Brought(**facts) for name, facts in content["files"].items()}
        owner = content["repo"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read; would work: without it") from error
    if owner != repo:
        raise ConfigError("to", target, f"holds files of {owner}", "another folder")
    return files


def _write_record(target: Path, repository: Repository, record: dict[str, _Brought]) -> None:
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
def _disk(place: Path) -> Iterator[None]:
    """Says on one line what the file system refused."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise MachineError(
                f"{place}: the disk is full, or a quota is; with more space {_AGAIN}"
            ) from error
        raise UserError(f"{place}: cannot be written: {error.strerror or error}") from error


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Says on one line what the hub, or the way to it, refused."""
    from huggingface_hub import errors

    # The base of what the client's HTTP library raises: requests.HTTPError in huggingface_hub 0.x, whose
    # other errors are OSErrors, and httpx.HTTPError, which all of its errors are, in later ones.
    library_error = cast("type[Exception]", errors.HfHubHTTPError.__mro__[1])
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise UserError(
            "HF_HUB_OFFLINE=1 forbids to ask the hub; would work: HF_HUB_OFFLINE=0, "
            "or the files from a machine that may ask it"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(repo, revision, error) from error
    except errors.HFValidationError as error:
        raise ConfigError("repo", repo, "is no name", "owner/name") from error
    except (library_error, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        again = f"once there is a connection {_AGAIN}"
        raise MachineError(f"no whole answer from {_endpoint()}: {reason}; {again}") from error


def _refusal(repo: str, revision: str, error: Any) -> Exception:
    """What an answer of the hub means."""
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
    said = " ".join((error.server_message or "").split())
    answer = f"HTTP {status}" + (f" ({said})" if said else "")
    if status == 401:
        rule = f"the hub does not take your token (HF_TOKEN, or your login): {answer}"
        return UserError(f"{rule}; would work: a token of {tokens}, or none")
    if status == 403:
        return ConfigError("repo", repo, f"your token may not read it: {answer}", f"one of {tokens} that may")
    return MachineError(f"{_endpoint()}: {answer}; {_AGAIN}")
