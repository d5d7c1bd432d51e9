"""The verb ``download``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compose.composer import option_values
from harness.compose.verb import Verb
from harness.config.fields import check_rules, label
from harness.config.job import from_dict
from harness.config.model import ModelConfig
from harness.config.texts import validate_texts
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, UserError
from harness.util.tables import plural
from harness.weights.config_json import CONFIG, check_hf_config, model_from_config, read_object

if TYPE_CHECKING:
    from harness.weights.hub import RemoteFile, Repository

HELP = """`harness download`: download a published model's files from the Hugging Face hub.

    harness download repo=Qwen/Qwen3-8B what=tokenizer
    harness download repo=Qwen/Qwen3-8B                all files that training needs

Files go to `assets/hf/<repo>`, where conf/tokenizer expects them; existing files are not downloaded again.
"""

ASSETS = Path("assets/hf")

# File names by kind. For weights, the first pattern with a match is used: some repositories hold the same
# weights a second time under other names.
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
    "weights": ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors", "consolidated.*.pth"),
}
_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
        if not _REPO.fullmatch(self.repo):
            within = re.fullmatch(r"(?:https?://)?[\w.-]*huggingface\.co/([\w.-]+/[\w.-]+).*", self.repo)
            raise ConfigError("repo", self.repo, "not a valid name", within[1] if within else "owner/name")
        kinds = self.kinds if isinstance(self.what, str | list) else []
        if not kinds or not all(isinstance(kind, str) and kind in PATTERNS for kind in kinds):
            given = f"[{','.join(map(str, self.what))}]" if isinstance(self.what, list) else self.what
            works = f"one or a list of {', '.join(PATTERNS)}"
            raise ConfigError("what", given, "no such files", works)
        if not self.revision:
            raise ConfigError("revision", "''", "must be given", "main")


def choose(job: DownloadJob, repository: Repository) -> list[RemoteFile]:
    """Select the files of the repository to download."""
    by_kind = {kind: _of_kind(kind, repository) for kind in PATTERNS}
    for kind in job.kinds:
        # A model of one file needs no index.
        if not by_kind[kind] and not (kind == "index" and by_kind["weights"]):
            there = [other for other in PATTERNS if by_kind[other]]
            works = f"what=[{','.join(there)}]" if there else "a repository with safetensors"
            raise UserError(f"what={kind}: {job.repo} has no such files; would work: {works}")
    wanted = set(job.kinds)
    chosen = [file for kind in PATTERNS if kind in wanted for file in by_kind[kind]]
    if "tokenizer" in wanted and "config" not in wanted:
        # transformers finds the tokenizer's class in config.json, and we find the family.
        chosen += [file for file in by_kind["config"] if file.name == "config.json"]
    return chosen


def _of_kind(kind: str, repository: Repository) -> list[RemoteFile]:
    found = []
    for pattern in PATTERNS[kind]:
        # A pattern without a folder matches top-level files only.
        named = [file for file in repository.files if file.name.count("/") == pattern.count("/")]
        found += [file for file in named if fnmatchcase(file.name, pattern)]
        if found and kind == "weights":
            break
    return found


def download(job: DownloadJob, overrides: list[str]) -> int:
    """Download the files; print their folder and the next commands; return the exit code."""
    from harness.weights.hub import fetch, look_up

    job.validate()
    assert job.repo is not None
    repository = look_up(job.repo, job.revision)
    files = choose(job, repository)
    new = fetch(repository, files, job.folder)
    nbytes, existing = sum(file.size for file in new), len(files) - len(new)
    downloaded = f"{plural(len(new), 'file')}, {nbytes / 1e9:.3f} GB downloaded"
    downloaded += f", {existing} already there" if existing else ""
    _print(f"{job.repo} at {repository.commit[:12]}: {downloaded}: {job.folder}")
    for line in next_commands(job):
        _print(line)
    return EXIT_OK


def next_commands(job: DownloadJob) -> list[str]:
    """The commands to run next with the files in the folder."""
    folder, file = job.folder, job.folder / CONFIG
    config = read_object(file) if file.is_file() else {}
    tokenizer = _tokenizer_overrides(folder, config)
    if "weights" not in job.kinds:
        return [_command("train", *tokenizer)] if "tokenizer" in job.kinds and tokenizer else []
    model = _model_overrides(folder, config)
    target = f"{folder}-dcp/step-0"
    lines = [
        _command("convert", *model, f"convert.source={folder}", f"convert.target={target}"),
        _command("train", *model, *tokenizer, f"checkpoint.initial_load_path={target}"),
    ]
    if model == ["model=NAME"]:
        lines.append("note: no option of conf/model describes this model; write conf/model/NAME.yaml first")
    return lines


def _command(verb: str, *overrides: str) -> str:
    return f"next: {shlex.join(['harness', verb, *overrides])}"


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
    options = option_values("tokenizer")
    for option, values in options.items():
        path = Path(values.get("path") or "")
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return [f"tokenizer={option}"]
    file = folder / "tokenizer.json"
    if not file.is_file():
        return []
    # Options are named like transformers' families, by prefix: qwen3_moe has the tokenizer qwen3.
    family = str(config.get("model_type", ""))
    ours = [
        name
        for name, values in options.items()
        if values["kind"] == "huggingface" and family.startswith(name)
    ]
    chosen = f"tokenizer={max(ours, key=len)}" if ours else "tokenizer.kind=huggingface"
    return [chosen, f"tokenizer.path={file}"]


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end_at_once() -> None:
    """End on a signal without an exception, because huggingface_hub would wait for the files in transfer."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: os._exit(EXIT_INTERRUPTED))


VERB = Verb("download", download, help=HELP, job=DownloadJob, prepare=_end_at_once)
