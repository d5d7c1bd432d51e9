"""The verb ``report``."""

from dataclasses import replace
from pathlib import Path

from harness.compose.arguments import Argument, report_folder
from harness.compose.verb import Result, Verb
from harness.config.training import COUNTED
from harness.launch.rows import load
from harness.launch.sweep.study import StudyRecord
from harness.tools.report.fits import fits_of, report_fits
from harness.tools.report.phases import report_phases
from harness.tools.report.predictions import CALIBRATION, calibration_of, with_predictions
from harness.tools.report.runs import report_runs
from harness.util.document import Document, to_markdown
from harness.util.errors import UserError
from harness.util.tables import Table

HELP = """`harness report FOLDER`: tables and plots of runs or a sweep."""

_FILES = {
    "runs": ("tables.md", "table.csv", "index.html"),
    "phases": ("phases.md", "phases.csv", "phases.html"),
    "fits": ("fits.md", "fits.csv", "fits.html"),
}


def report(
    folder: Path,
    *,
    what: str | None = None,
    out: Path | None = None,
    calibration: Path | None = None,
    fits: bool = False,
    hold_out: int | None = None,
    counted: str | None = None,
    smooth: int | None = None,
) -> Result:
    """Compare predicted and measured results of runs, or fit scaling laws: Markdown, CSV, PNG, HTML.

    Raises:
        UserError: there is nothing to report on in the folder, or a flag cannot be combined with
            another.
    """
    out = out or folder / "report"
    kind = what or ("fits" if fits else "runs")
    for name, value, kinds in (
        ("--calibration", calibration, ("runs", "phases")),
        ("--smooth", smooth, ("runs",)),
        ("--fits", fits or None, ("fits",)),
        ("--hold-out", hold_out, ("fits",)),
        ("--counted", counted, ("fits",)),
    ):
        if value is not None and kind not in kinds:
            works = " or ".join(f"a report of {other}" for other in kinds)
            raise UserError(f"{name}: has no effect on a report of {kind}; would work: {works}")
    for name, number, least in (("--smooth", smooth, 1), ("--hold-out", hold_out, 0)):
        if number is not None and number < least:
            raise UserError(
                f"{name}={number}: must be at least {least}; would work: {name} {least}"
            )
    if kind == "fits":
        counted = counted or COUNTED[0]
        found = fits_of(load(folder), counted=counted, hold_out=hold_out or 0)
        return _written(report_fits(folder.resolve().name, found, counted, out), out, "fits")
    constants = calibration_of(folder, calibration)
    if kind == "phases":
        made = report_phases(folder, out, constants)
        written = _written(made, out, "phases")
        shown = made.blocks[0]
        assert isinstance(shown, Table)
        table = to_markdown(replace(shown, title="", notes=()))
        return replace(written, text=f"{table}\n{written.text}")
    rows = with_predictions(load(folder), constants)
    study = StudyRecord.read(folder)
    made = report_runs(folder.resolve().name, rows, constants, study, smooth or 1)
    return _written(made, out, "runs")


def _written(made: Document, out: Path, kind: str) -> Result:
    files = made.write(out, *_FILES[kind])
    data = {
        "title": made.title,
        "summary": list(made.summary),
        "files": files,
        "rows": list(made.rows),
    }
    lines = [*made.summary, *files]
    return Result(data, "".join(f"{line}\n" for line in lines))


VERB = Verb(
    "report",
    report,
    help=HELP,
    arguments=(
        Argument(
            "folder",
            type=Path,
            help="runs (runs/NAME of a sweep or of single runs), or a folder with kept rows (results.jsonl)",
        ),
        Argument(
            "what",
            nargs="?",
            choices=("phases",),
            help="of the folder of one run with `profiling.phases=true`: where the time of its steps went",
        ),
        Argument(
            "--out",
            type=report_folder,
            help="output folder; default: report/ in the folder",
        ),
        Argument(
            "--calibration",
            type=Path,
            help="calibration file of the measured machine, written by harness plan calibrate=FOLDER; "
            f"default: {CALIBRATION} in the folder",
        ),
        Argument(
            "--smooth",
            type=int,
            metavar="COUNT",
            help="draw training losses as the mean of this many rows of metrics; default: as they are",
        ),
        Argument(
            "--fits",
            help="fit scaling laws to the losses of runs of several sizes (`sweep=ladder`, `sweep=isoflop`), "
            "and predict runs that have not completed",
        ),
        Argument(
            "--hold-out",
            type=int,
            metavar="COUNT",
            help="with `--fits`: leave the runs of this many of the largest computes out, and predict them",
        ),
        Argument(
            "--counted",
            choices=COUNTED,
            help="with `--fits`: parameters that count, as in `scale.counted`; default: non_embedding",
        ),
    ),
    has_json=True,
)
