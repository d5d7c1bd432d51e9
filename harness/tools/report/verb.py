"""The verb ``report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.compose.arguments import Argument, report_folder
from harness.compose.verb import Result, Verb
from harness.config.training import COUNTED
from harness.launch.rows import load
from harness.launch.sweep.study import StudyRecord
from harness.tools.report.fits import fits_of, report_fits
from harness.tools.report.phases import report_phases
from harness.tools.report.plots import can_draw
from harness.tools.report.predictions import CALIBRATION, calibration_of, with_predictions
from harness.tools.report.runs import report_runs
from harness.util.document import Document, to_markdown
from harness.util.errors import UserError
from harness.util.tables import Table

HELP = """`harness report FOLDER`: tables and plots of runs or a sweep."""

FILES = ("tables.md", "table.csv", "index.html")
OF_PHASES = ("phases.md", "phases.csv", "phases.html")
OF_FITS = ("fits.md", "fits.csv", "fits.html")
_NOT_DRAWN = "without pictures: matplotlib is not installed; would work: pip install -e '.[report]'"


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
    if what is not None:
        others: dict[str, object] = {"--fits": fits, "--hold-out": hold_out}
        others |= {"--counted": counted, "--smooth": smooth}
        return _phases(folder, out, calibration, others)
    if smooth is not None and smooth < 1:
        raise UserError(f"--smooth={smooth}: must be at least 1; would work: --smooth 10")
    if fits:
        for name, given in (("--calibration", calibration), ("--smooth", smooth)):
            if given:
                raise UserError(f"{name}: cannot be combined with --fits; would work: one of them")
        return _fits(folder, out, hold_out or 0, counted or COUNTED[0])
    for name, value in (("--hold-out", hold_out), ("--counted", counted)):
        if value is not None:
            raise UserError(f"{name}={value}: is for fits; would work: --fits {name} {value}")
    constants = calibration_of(folder, calibration)
    rows = with_predictions(load(folder), constants)
    study = StudyRecord.read(folder)
    made = report_runs(folder.resolve().name, rows, out, constants, study, smooth or 1)
    return _written(made, out, FILES)


def _phases(folder: Path, out: Path, calibration: Path | None, others: dict[str, object]) -> Result:
    for name, value in others.items():
        if value:
            raise UserError(f"{name}: cannot be combined with phases; would work: one of them")
    made = report_phases(folder, out, calibration_of(folder, calibration))
    written = _written(made, out, OF_PHASES)
    shown = made.blocks[0]
    assert isinstance(shown, Table)
    return Result(
        written.data, f"{to_markdown(replace(shown, title='', notes=()))}\n{written.text}"
    )


def _written(made: Document, out: Path, names: tuple[str, str, str]) -> Result:
    files = made.write(out, *names)
    return Result(
        {
            "title": made.title,
            "summary": list(made.summary),
            "files": files,
            "rows": list(made.rows),
        },
        "".join(
            f"{line}\n" for line in [*made.summary, *files, *([] if can_draw() else [_NOT_DRAWN])]
        ),
    )


def _fits(folder: Path, out: Path, hold_out: int, counted: str) -> Result:
    """Fit scaling laws to the runs of a folder."""
    if hold_out < 0:
        raise UserError(f"--hold-out={hold_out}: must be at least 0; would work: --hold-out 1")
    made = fits_of(load(folder), counted=counted, hold_out=hold_out)
    return _written(report_fits(folder.resolve().name, made, counted, out), out, OF_FITS)


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
