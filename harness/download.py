"""``python -m harness.download``: a published model's files, brought from the Hugging Face hub.

    python -m harness.download repo=Qwen/Qwen3-8B what=tokenizer

They go to ``assets/hf/<repo>``, where conf/tokenizer looks for them; what is there is not brought again.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.app import run_verb
from harness.compose import option_values
from harness.config import label
from harness.errors import EXIT_OK, ConfigError, UserError
from harness.job import from_dict
from harness.model.config import ModelConfig
from harness.model.from_config import model_from_config
from harness.model.huggingface import check_hf_config
from harness.text import validate_texts

if TYPE_CHECKING:
    from harness.hub import RemoteFile, Repository

ASSETS = Path("assets/hf")

# Names of files by kind. Weights are those of the first line that a repository has any of: beside
# transformers' names, publishers keep the same weights under others.
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
    """What is brought, and where to."""

    repo: str | None = label(None)
    """Name of the repository on the hub, ``owner/name``."""

    what: Any = label(factory=lambda: list(PATTERNS))
    """One or a list of ``tokenizer``, ``config``, ``index`` (of weights in several files) and ``weights``
    (safetensors, or Meta's consolidated files where there are none)."""

    revision: str = label("main")
    """Branch, tag or commit."""

    to: str | None = label(None)
    """Folder to bring them to; null is assets/hf/<repo>."""

    def resolve(self, launched_ranks: int | None = None) -> DownloadJob:
        """Checks its texts; returns itself."""
        validate_texts(self)
        return self

    @property
    def kinds(self) -> list[str]:
        """The kinds of ``what``."""
        return [self.what] if isinstance(self.what, str) else list(self.what)

    @property
    def folder(self) -> Path:
        """Where the files go."""
        return Path(self.to).expanduser() if self.to else ASSETS / str(self.repo)

    def validate(self) -> None:
        """Checks every field without asking the hub.

        Raises:
            ConfigError: a field has a value that its rule forbids.
        """
        if not self.repo:
            raise ConfigError("repo", self.repo, "must be given", "Qwen/Qwen3-8B")
        if not _REPO.fullmatch(self.repo):
            within = re.fullmatch(r"(?:https?://)?[\w.-]*huggingface\.co/([\w.-]+/[\w.-]+).*", self.repo)
            raise ConfigError("repo", self.repo, "is no name", within[1] if within else "owner/name")
        kinds = self.kinds if isinstance(self.what, str | list) else []
        if not kinds or not all(isinstance(kind, str) and kind in PATTERNS for kind in kinds):
            said = ",".join(map(str, self.what)) if isinstance(self.what, list) else self.what
            works = f"one or a list of {', '.join(PATTERNS)}"
            raise ConfigError(
                "what", f"[{said}]" if isinstance(self.what, list) else said, "no such files", works
            )
        if not self.revision:
            raise ConfigError("revision", "''", "must be given", "main")
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError("to", self.to, "is a file", "a folder")


def choose(job: DownloadJob, repository: Repository) -> list[RemoteFile]:
    """The files of the repository that are wanted.

    Raises:
        UserError: there are none of a kind.
    """
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
        # By it transformers finds a tokenizer's class, and we the family.
        chosen += [file for file in by_kind["config"] if file.name == "config.json"]
    return chosen


def _of_kind(kind: str, repository: Repository) -> list[RemoteFile]:
    found = []
    for pattern in PATTERNS[kind]:
        # A pattern without a folder means the files at the top.
        found += [
            file
            for file in repository.files
            if fnmatchcase(file.name, pattern) and file.name.count("/") == pattern.count("/")
        ]
        if found and kind == "weights":
            break
    return found


def download(job: DownloadJob, overrides: list[str]) -> int:
    """Brings the files, and says where they are and what comes next; returns the exit code."""
    from harness.hub import fetch, look_up

    job.validate()
    assert job.repo is not None
    repository = look_up(job.repo, job.revision)
    files = choose(job, repository)
    new = fetch(repository, files, job.folder)
    there = len(files) - len(new)
    nbytes = sum(file.size for file in new)
    _say(
        f"{job.repo} at {repository.commit[:12]}: {len(new)} files, {nbytes / 1e9:.3f} GB brought"
        + (f", {there} there already" if there else "")
        + f": {job.folder}"
    )
    for line in next_commands(job):
        _say(line)
    return EXIT_OK


_UNKNOWN = "model=NAME"


def next_commands(job: DownloadJob) -> list[str]:
    """What to type next, from what lies in the folder."""
    folder, config = job.folder, _config(job.folder)
    tokenizer = _tokenizer_overrides(folder, config)
    if "weights" not in job.kinds:
        return [_command("train", *tokenizer)] if "tokenizer" in job.kinds and tokenizer else []
    option = _model_option(config) if config else None
    model = [f"model={option}"] if option else _own_numbers(folder)
    target = f"{folder}-dcp/step-0"
    lines = [
        _command("convert", *model, f"convert.source={folder}", f"convert.target={target}"),
        _command("train", *model, *tokenizer, f"checkpoint.initial_load_path={target}"),
    ]
    if model == [_UNKNOWN]:
        lines.append("note: no option of conf/model is this model; NAME has to be written")
    return lines


def _own_numbers(folder: Path) -> list[str]:
    """Overrides that take the model from the config.json that was brought, where it can be read."""
    try:
        model_from_config(str(folder))
    except UserError:
        return [_UNKNOWN]
    return ["model=from_config", f"model.path={folder}"]


def _command(verb: str, *overrides: str) -> str:
    return f"next: {shlex.join(['python', '-m', f'harness.{verb}', *overrides])}"


def _config(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _model_option(config: dict[str, Any]) -> str | None:
    """The option of conf/model that a config.json describes."""
    for option, values in option_values("model").items():
        try:
            check_hf_config(from_dict(ModelConfig, values), config)
        except UserError:
            continue  # it is another model
        return option
    return None


def _tokenizer_overrides(folder: Path, config: dict[str, Any]) -> list[str]:
    """The option of conf/tokenizer for what lies in the folder, and its path where that is another."""
    options = option_values("tokenizer")
    for option, values in options.items():
        path = Path(values.get("path") or "")
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return [f"tokenizer={option}"]
    file = folder / "tokenizer.json"
    if not file.is_file():
        return []
    # Options are called as transformers calls the family: qwen3_moe has the tokenizer qwen3.
    family = str(config.get("model_type", ""))
    ours = [
        name
        for name, values in options.items()
        if values["kind"] == "huggingface" and family.startswith(name)
    ]
    chosen = f"tokenizer={max(ours, key=len)}" if ours else "tokenizer.kind=huggingface"
    return [chosen, f"tokenizer.path={file}"]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point of ``python -m harness.download`` and of the console script."""
    # A scheduler's signal ends it as ^C does: what has come stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_verb(download, config_name="download", schema=DownloadJob)


if __name__ == "__main__":
    main()
