"""The verb ``download``: ``huggingface_hub.snapshot_download``, and the commands to type next.

The hub's client finds the token (HF_TOKEN or a login) and the hub (HF_ENDPOINT), transfers files in
parallel, goes on where it was interrupted, and keeps the commit and checksum of each file in
``.cache/huggingface``.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.compose.composer import option_values
from harness.compose.verb import Verb
from harness.config.fields import check_rules, label
from harness.config.job import from_dict
from harness.config.model import ModelConfig
from harness.config.texts import validate_texts
from harness.util.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    MachineError,
    UserError,
)
from harness.util.words import plural
from harness.weights.config_json import CONFIG, check_hf_config, model_from_config, read_object

HELP = """`harness download`: download a published model's files from the Hugging Face hub.

    harness download repo=Qwen/Qwen3-8B what=tokenizer
    harness download repo=Qwen/Qwen3-8B                all files that training needs

Files go to `assets/hf/<repo>`, where conf/tokenizer expects them; existing files are not downloaded again.
"""

ASSETS = Path("assets/hf")

# File names by kind. For weights, the first pattern with a match is used: some repositories hold
# the same weights a second time under other names.
PATTERNS = {
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
        "original/tokenizer.model",
    ),
    "config": ("config.json", "generation_config.json", "params.json"),
    "index": ("model.safetensors.index.json",),
    "weights": (
        "model.safetensors",
        "model-*-of-*.safetensors",
        "*.safetensors",
        "consolidated.*.pth",
    ),
}
_AGAIN = "the same command downloads the missing files"


@dataclass
class DownloadJob:
    """Files to download, and the folder for them."""

    repo: str | None = label(None)
    """Name of the repository on the hub, ``owner/name``."""
    what: Any = label(factory=lambda: list(PATTERNS))
    """One or a list of ``tokenizer``, ``config``, ``index`` (of weights in several files) and ``weights``
    (safetensors; if there are none, Meta's consolidated files)."""
    revision: str = label("main")
    """Branch, tag or commit."""
    to: str | None = label(None, written="folder", works="a folder")
    """Folder to download to; null is assets/hf/<repo>."""

    def resolve(self, launched_ranks: int | None = None) -> DownloadJob:
        """Check the texts and the folder; return the job."""
        validate_texts(self)
        check_rules(self)
        return self

    @property
    def kinds(self) -> list[str]:
        """``what`` as a list."""
        return [self.what] if isinstance(self.what, str) else list(self.what)

    @property
    def folder(self) -> Path:
        """Folder that the files are written to."""
        return Path(self.to).expanduser() if self.to else ASSETS / str(self.repo)

    def validate(self) -> None:
        """Check every field without contacting the hub."""
        if not self.repo:
            raise ConfigError("repo", self.repo, "must be given", "Qwen/Qwen3-8B")
        if not self.revision:
            raise ConfigError("revision", "''", "must be given", "main")
        if (
            not isinstance(self.what, str | list)
            or not self.what
            or any(kind not in list(PATTERNS) for kind in self.kinds)
        ):
            raise ConfigError(
                "what", self.what, "no such files", f"one or a list of {', '.join(PATTERNS)}"
            )


def choose(job: DownloadJob, names: list[str]) -> list[str]:
    """Select the files to download among those of the repository."""
    by_kind: dict[str, list[str]] = {}
    for kind, patterns in PATTERNS.items():
        found = by_kind[kind] = []
        for pattern in patterns:
            if found and kind == "weights":
                break
            # A pattern without a folder matches top-level files only.
            level = [name for name in names if name.count("/") == pattern.count("/")]
            found += fnmatch.filter(level, pattern)
    chosen: list[str] = []
    for kind, found in by_kind.items():
        if kind not in job.kinds:
            continue
        # A model of one file needs no index.
        if not found and not (kind == "index" and by_kind["weights"]):
            there = [other for other in PATTERNS if by_kind[other]]
            works = f"what=[{','.join(there)}]" if there else "a repository with safetensors"
            raise UserError(f"what={kind}: {job.repo} has no such files; would work: {works}")
        chosen += found
    if "tokenizer" in job.kinds and CONFIG in names and CONFIG not in chosen:
        # transformers finds the tokenizer's class in config.json, and we find the family.
        chosen.append(CONFIG)
    return chosen


def download(job: DownloadJob, overrides: list[str]) -> int:
    """Download the files; print their folder and the next commands; return the exit code."""
    from huggingface_hub import HfApi, snapshot_download

    # Private in huggingface_hub 0.34 to 2.4. None: the client did not write the file, or it changed
    # since.
    from huggingface_hub._local_folder import read_download_metadata
    from huggingface_hub.utils import disable_progress_bars

    job.validate()
    repo = cast(str, job.repo)
    folder = job.folder
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _hub_errors(job):
        info = HfApi().model_info(repo, revision=job.revision)
        commit = cast(str, info.sha)
        names = choose(job, [file.rfilename for file in info.siblings or []])
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / name
            if path.exists() and read_download_metadata(folder, name) is None:
                works = "another folder in to=, or removing the file"
                raise UserError(f"{path}: is not the hub's, or has changed; would work: {works}")
        patterns = [glob.escape(name) for name in names]
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=patterns)
        for name in names:
            # If the hub stops answering and the folder is not empty, the client only warns.
            if not (folder / name).is_file():
                raise MachineError(f"{name}: the hub stopped answering; {_AGAIN}")
    size = sum((folder / name).stat().st_size for name in names) / 1e9
    lines = [f"{repo} at {commit[:12]}: {plural(len(names), 'file')}, {size:.3f} GB: {folder}"]
    sys.stdout.write("".join(f"{line}\n" for line in lines + next_commands(job)))
    return EXIT_OK


@contextmanager
def _hub_errors(job: DownloadJob) -> Iterator[None]:
    """Turn errors of the hub's client into one line each."""
    from huggingface_hub import constants, errors

    # The HTTP library's base error: requests' in huggingface_hub 0.x, httpx's in later versions.
    http_error = cast("type[Exception]", errors.HfHubHTTPError.__mro__[1])
    hub = constants.ENDPOINT
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError("repo", job.repo, "not a valid name", "owner/name") from error
    except errors.RevisionNotFoundError as error:
        rule = f"{job.repo} has no such branch, tag or commit"
        works = f"one of {hub}/{job.repo}/commits"
        raise ConfigError("revision", job.revision, rule, works) from error
    except errors.OfflineModeIsEnabled as error:
        works = "HF_HUB_OFFLINE=0, or copying the files from a machine with access"
        raise UserError(
            f"HF_HUB_OFFLINE=1 forbids access to the hub; would work: {works}"
        ) from error
    except (http_error, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        response = getattr(error, "response", None)
        if response is not None and response.status_code in (401, 403, 404):
            said = getattr(error, "server_message", None) or "no access"
            login = f"a token of {hub}/settings/tokens in HF_TOKEN, or hf auth login"
            works = f"a name from {hub}/models; for a gated one, access from {hub}/{job.repo}, and {login}"
            raise ConfigError("repo", job.repo, f"the hub says: {said}", works) from error
        if getattr(error, "filename", None):
            raise  # an error of a file
        raise MachineError(
            f"{hub}: {reason}; once there is a connection and space {_AGAIN}"
        ) from error


def next_commands(job: DownloadJob) -> list[str]:
    """The commands to run next with the files in the folder."""
    folder = job.folder
    file = folder / CONFIG
    config = read_object(file) if file.is_file() else {}
    tokenizer = _tokenizer_overrides(folder, config)
    commands = [["train", *tokenizer]] if tokenizer else []
    notes = []
    if "weights" in job.kinds:
        model = _model_overrides(folder, config)
        target = f"{folder}-dcp/step-0"
        commands = [
            ["convert", *model, f"convert.source={folder}", f"convert.target={target}"],
            ["train", *model, *tokenizer, f"checkpoint.initial_load_path={target}"],
        ]
        if model == ["model=NAME"]:
            missing = (
                "no option of conf/model describes this model; write conf/model/NAME.yaml first"
            )
            notes.append(f"note: {missing}")
    return [*(f"next: {shlex.join(['harness', *words])}" for words in commands), *notes]


def _model_overrides(folder: Path, config: dict[str, Any]) -> list[str]:
    """Overrides with the option of conf/model that a config.json describes, or else with the file itself."""
    for option, values in option_values("model").items() if config else ():
        with suppress(UserError):  # another model
            check_hf_config(from_dict(ModelConfig, values), config)
            return [f"model={option}"]
    with suppress(UserError):  # of no supported family
        model_from_config(str(folder))
        return ["model=from_config", f"model.path={folder}"]
    return ["model=NAME"]


def _tokenizer_overrides(folder: Path, config: dict[str, Any]) -> list[str]:
    """Overrides that select the folder's tokenizer: an option of conf/tokenizer, and a path if it differs."""
    file = folder / "tokenizer.json"
    chosen = "tokenizer.kind=huggingface"
    for option, values in sorted(option_values("tokenizer").items()):
        path = Path(values.get("path") or "")
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return [f"tokenizer={option}"]
        # Options are named like transformers' families, by prefix: qwen3_moe has the tokenizer
        # qwen3.
        family = str(config.get("model_type"))
        if values["kind"] == "huggingface" and family.startswith(option):
            chosen = f"tokenizer={option}"  # in order, so that the longest name is the last
    return [chosen, f"tokenizer.path={file}"] if file.is_file() else []


def _end_at_once() -> None:
    """End on a signal without an exception, because the hub's client would wait for the files in transfer."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: os._exit(EXIT_INTERRUPTED))


VERB = Verb("download", download, help=HELP, job=DownloadJob, prepare=_end_at_once)
