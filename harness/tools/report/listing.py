"""The verb ``runs``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb
from harness.launch.state import read_or_warn
from harness.launch.sweep.study import LONGEST_REASON
from harness.run.folder import METRICS, STATUS, RunFolder, run_folders
from harness.util.errors import UserError
from harness.util.tables import Column, Table, shortened, to_text

HELP = """`harness runs [FOLDER]`: all runs, the last written first."""


def list_runs(folder: Path) -> Result:
    """List runs, the last written first: age, state, step, loss, tokens/s, tags and notes."""
    written = {path: _last_write(path) for path in run_folders(folder)}
    if not written:
        works = "harness train, or the folder that runs_dir= names"
        raise UserError(f"{folder}: no runs; would work: {works}")
    found = sorted(written, key=lambda path: -written[path])
    rows: list[dict[str, Any]] = []
    seen, code = read_or_warn(found)
    for path, each in zip(found, seen, strict=True):
        job, facts = RunFolder(path).plain_job, each.facts or {}
        row = {"run": str(path), "age": _age(time.time() - written[path]), "state": each.state}
        row |= {"step": f"{each.step}/{each.steps}", "tags": ", ".join(job.get("tags", ()))}
        rows.append({**facts, **row, "notes": job.get("notes") or "", "reason": each.about})
    shown = []
    for row in rows:
        about = shortened(row["notes"] or row["reason"], LONGEST_REASON)
        shown.append({**row, "about": about})
    return Result({"runs": rows}, to_text(Table(_OF_RUNS, shown, missing="")), code)


_OF_RUNS = (
    *(Column(name, name) for name in ("run", "age", "state")),
    Column("step", "step", str),
    Column("loss", "loss", ".4f"),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    *(Column(name, name) for name in ("tags", "about")),
)


def _last_write(run_dir: Path) -> float:
    files = [run_dir / name for name in ("job.json", STATUS, METRICS)]
    return max(file.stat().st_mtime for file in files if file.is_file())


def _age(seconds: float) -> str:
    """A duration in its largest unit: ``3 h``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


VERB = Verb(
    "runs",
    list_runs,
    help=HELP,
    arguments=(Argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs"),),
    has_json=True,
)
