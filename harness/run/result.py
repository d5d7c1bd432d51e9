"""Rows of a run, without torch.

``result.json`` is one flat row, with the versions and the commit of the code; ``evaluations.jsonl``
beside it has a flat row for each evaluated task.
"""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from harness.metrics.columns import Metric
from harness.util import __version__
from harness.util.encoding import dumps, flatten, parse_object
from harness.util.files import write_atomically

EVALUATIONS = "evaluations.jsonl"
_PACKAGES = ("torch", "torchao", "triton", "numpy", "wandb", "hydra-core")
_GIT_SECONDS = 20
GOES_ON = "`cluster.on_node_loss=continue`"
RUN = (
    Metric("id", "hash", "Job id: hash of all numerics and execution fields."),
    Metric(
        "numerics_id", "hash", "Hash of the numerics fields; layouts of one experiment share it."
    ),
    Metric("name", "text", "Field `name` of the job."),
    Metric("exit_reason", "text", "`completed`, `interrupted` or `failed`."),
    Metric("exit_code", "number", "Exit code of the command (see verbs)."),
    Metric("world_size", "count", "Number of ranks."),
    Metric("losses", "count", "Nodes lost so far, of a run that went on without them.", GOES_ON),
    Metric("lost_steps", "count", "Steps that were done again because of them.", GOES_ON),
    Metric(
        "wall_seconds",
        "s",
        "Time of all attempts, from the start of the command to its end; not between them.",
    ),
    Metric("goodput", "0 to 1", "`train_seconds` over `wall_seconds`; null if unknown."),
    Metric("error.kind", "text", "Failure class (see troubleshooting).", "failure"),
    Metric("error.type", "text", "Class of the exception.", "failure"),
    Metric("error.rank", "number", "Rank that failed first; null for the controller.", "failure"),
    Metric("error.step", "count", "Last step that rank completed.", "failure"),
    Metric("error.message", "text", "Message of the exception.", "failure"),
    Metric("error.allocation", "text", "Size of the allocation that failed.", "`out_of_memory`"),
    Metric("error.operation", "text", "Collective that timed out.", "`collective_timeout`"),
    Metric(
        "error.absent_ranks",
        "list",
        "Ranks that never reached the collective.",
        "`collective_timeout`",
    ),
    Metric("job.*", "field", "Every field of the resolved job."),
    Metric("code.*", "text", "Commit, whether the tree was dirty, and versions of the packages."),
    Metric("host.*", "text", "Host name, system and cores."),
)
"""Columns of result.json beside the trainer's (``RunRecord.end``)."""


def write_json_atomically(path: Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON; a reader sees the old file or the new one, never a part.

    Non-finite floats become the strings "nan", "inf" and "-inf".
    """
    write_atomically(path, dumps(obj, indent=2).encode() + b"\n")


def write_result(run_dir: Path, row: dict[str, Any]) -> Path:
    """Write ``result.json`` into ``run_dir``, nested dicts flattened with dots; return its path."""
    path = run_dir / "result.json"
    write_json_atomically(path, flatten(row))
    return path


def read_result(run_dir: Path) -> dict[str, Any]:
    """Read the row that ``write_result`` wrote."""
    return parse_object((run_dir / "result.json").read_bytes())


def versions() -> dict[str, str | None]:
    """Versions of Python, the harness and the packages that affect results; None if missing."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "harness": __version__, **packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(path: Path) -> dict[str, str | bool | None]:
    """Return the commit of the repository that contains a folder.

    Returns:
        ``commit``: the full hash, and ``dirty``: whether tracked or untracked files differ from it
        (ignored files do not count). Both are None outside of a repository, without git, or if git
        ignores ``path``: a package in the virtual environment of another project is not that
        project's code.
    """
    commit = _git(path, "rev-parse", "--verify", "--quiet", "HEAD")
    ignored = _git(path, "check-ignore", ".")
    if not commit or ignored:
        return {"commit": None, "dirty": None}
    changes = _git(path, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, or None if it fails: an unknown commit must not end a run."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            # Otherwise `status` would lock the index, and a git command of the user could fail.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


DATA = "data"
"""The task of an evaluation that is the loss of documents."""
LM_EVAL = "lm_eval:"
"""Before the name of a task of lm-evaluation-harness."""
PREFIX = "evaluation"
"""First part of a column's name: ``evaluation.<task>.<metric>``."""

ABOUT = (
    "checkpoint",
    "step",
    "model",
    "seq_len",
    "stride",
    "limit",
    "precision",
    "layout",
    "time",
    "code",
)
"""Fields of a row that are not metrics; ``code.*`` are versions of packages."""

COUNTS = ("documents", "tokens", "bytes", "examples", "versions", "n-shot")
"""Metrics that are not results."""

Metrics = dict[str, Any]


def columns(task: str, metrics: Metrics) -> dict[str, Any]:
    """The numbers of a task as columns."""
    return {
        f"{PREFIX}.{task.removeprefix(LM_EVAL)}.{name}": value
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }


def newest(run_dir: Path) -> dict[str, Any]:
    """Columns of the newest row of each task beside a run; lines that cannot be read are left out."""
    found: dict[str, Any] = {}
    try:
        lines = (run_dir / EVALUATIONS).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return found
    latest: dict[str, Metrics] = {}
    for line in lines:
        try:
            row = parse_object(line)
        except ValueError:
            continue
        if isinstance(row.get("task"), str):
            latest[row["task"]] = row
    for task, row in latest.items():
        found |= columns(task, {name: row[name] for name in row if name.split(".")[0] not in ABOUT})
    return found


def evaluated_columns(rows: Sequence[Metrics]) -> list[str]:
    """Names of the evaluation columns that any row has, without numbers of documents, tokens and examples."""
    return [
        name
        for name in dict.fromkeys(chain.from_iterable(rows))
        if name.startswith(f"{PREFIX}.") and name.rpartition(".")[2] not in COUNTS
    ]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
