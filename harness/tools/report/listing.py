"""The verb ``runs``."""

import time
from pathlib import Path
from typing import Any

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb
from harness.launch.listing import counted, rows_of, table_of
from harness.launch.state import read_or_warn
from harness.launch.submit import states_of
from harness.launch.sweep.folder import SweepFolder, points_in
from harness.launch.sweep.study import StudyRecord, best_in_words
from harness.run.folder import METRICS, STATUS, RunFolder
from harness.util.tables import to_text

HELP = """`harness runs [FOLDER]`: all runs and their states, the last written first, or a sweep."""
# Of RUNS_DIR, of folders of it, of one name.
_LEVELS = 4


def list_runs(folder: Path) -> Result:
    """List runs: age, state, step, speed, memory, loss, tags, and notes or the reason of a failure.

    Rows of runs of one name that ended without one are written; runs of several names are only
    read.
    """
    sweep = SweepFolder(folder)
    points = points_in(folder, _LEVELS)
    if not sweep.exists:
        points.sort(key=lambda point: -_last_write(point.run_dir))
    run_dirs = [point.run_dir for point in points]
    if len({run_dir.parent for run_dir in run_dirs}) == 1:
        seen, code = read_or_warn(run_dirs, lambda _: states_of(points))
    else:
        seen, code = read_or_warn(run_dirs)
    skipped = sweep.skipped()
    study = StudyRecord.read(folder)
    objective = study.objective if study else None
    rows = rows_of(points, seen, objective)
    for row in rows:
        job = RunFolder(row["run_dir"]).plain_job
        row["age"] = _age(time.time() - _last_write(row["run_dir"]))
        row["tags"] = job.get("tags", ())
        row["notes"] = job.get("notes")
        if not sweep.exists:
            row["run"] = str(row["run_dir"])
    text = to_text(table_of(rows, objective)) + counted(seen, skipped)
    data: dict[str, Any] = {
        "runs": rows,
        "skipped": [{"overrides": point.overrides, "reason": point.reason} for point in skipped],
    }
    if study is not None:
        text += best_in_words(study, points)
        best = study.best_of(points)
        data["study"] = {
            "objective": study.objective,
            "direction": study.direction,
            "best": None if best is None else best.overrides,
        }
    return Result(data, text, code)


def _last_write(run_dir: Path) -> float:
    files = [run_dir / name for name in ("job.json", STATUS, METRICS)]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


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
    arguments=(
        Argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs"),
    ),
    has_json=True,
)
