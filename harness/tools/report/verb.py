"""The verb ``report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.compose.arguments import Argument, report_folder
from harness.compose.verb import Result, Verb
from harness.config.training import COUNTED
from harness.launch.rows import KEPT, Row, keep, load
from harness.launch.sweep.folder import FILE as SWEEP
from harness.launch.sweep.study import StudyRecord
from harness.tools.report import experiment
from harness.tools.report.experiment import CALIBRATION, calibration_of, with_predictions
from harness.tools.report.fits import fits_of, report_fits
from harness.tools.report.phases import report_phases
from harness.tools.report.plots import can_draw
from harness.tools.report.runs import report_published, report_runs
from harness.util.errors import UserError
from harness.util.tables import Document, Table, to_markdown

HELP = """`harness report FOLDER`: tables and plots of runs, a sweep or an experiment."""

FILES = ("tables.md", "table.csv", "index.html")
OF_PHASES = ("phases.md", "phases.csv", "phases.html")
OF_FITS = ("fits.md", "fits.csv", "fits.html")
_NOT_DRAWN = "without pictures: matplotlib is not installed; would work: pip install -e '.[report]'"


def report(
    folder: Path,
    *,
    what: str | None = None,
    out: Path | None = None,
    runs: Path | None = None,
    calibration: Path | None = None,
    rehearse: bool = False,
    fits: bool = False,
    hold_out: int | None = None,
    counted: str | None = None,
    smooth: int | None = None,
) -> Result:
    """Compare published, predicted and measured results, or fit scaling laws: Markdown, CSV, PNG, HTML.

    Raises:
        UserError: there is nothing to report on in the folder, a flag cannot be combined with another, or a
            rehearsal failed.
    """
    if what is not None:
        others: dict[str, object] = {"--runs": runs, "--rehearse": rehearse, "--fits": fits}
        others |= {"--hold-out": hold_out, "--counted": counted, "--smooth": smooth}
        return _phases(folder, out, calibration, others)
    if smooth is not None and smooth < 1:
        raise UserError(f"--smooth={smooth}: must be at least 1; would work: --smooth 10")
    if fits:
        for name, given in (("--rehearse", rehearse), ("--calibration", calibration), ("--smooth", smooth)):
            if given:
                raise UserError(f"{name}: cannot be combined with --fits; would work: one of them")
        return _fits(folder, out, runs, hold_out or 0, counted or COUNTED[0])
    for name, value in (("--hold-out", hold_out), ("--counted", counted)):
        if value is not None:
            raise UserError(f"{name}={value}: is for fits; would work: --fits {name} {value}")
    if experiment.is_experiment(folder):
        return _experiment(folder, out or folder, runs, calibration, smooth or 1, rehearse=rehearse)
    if rehearse:
        raise UserError(f"--rehearse: {folder} has no published rows; would work: experiments/llama3_h100")
    if runs is not None:
        raise UserError(f"--runs={runs}: is for experiments; would work: harness report {runs}")
    source = _source_of(folder)
    constants = calibration_of(folder, calibration)
    rows = with_predictions(load(source), constants)
    out = out or (folder if source != folder else folder / "report")
    study = StudyRecord.read(source)
    made = report_runs(folder.resolve().name, rows, out, constants, study, smooth or 1)
    return _written(made, out, FILES)


def _experiment(
    folder: Path, out: Path, runs: Path | None, calibration: Path | None, smooth: int, *, rehearse: bool
) -> Result:
    constants = calibration_of(folder, calibration)
    tables = experiment.tables_of(folder, runs, constants, rehearse=rehearse)
    rows = [row for table in tables for row in table.rows]
    _keep(out, rows)
    title = folder.resolve().name
    if any(table.source for table in tables):
        return _written(report_published(title, tables, out, constants), out, FILES)
    return _written(report_runs(title, rows, out, constants, smooth=smooth), out, FILES)


def _keep(out: Path, rows: list[Row]) -> None:
    ended = [row for row in rows if row["state"] in ("completed", "failed")]
    if ended:
        out.mkdir(parents=True, exist_ok=True)
        keep(out, ended)


def _phases(folder: Path, out: Path | None, calibration: Path | None, others: dict[str, object]) -> Result:
    for name, value in others.items():
        if value:
            raise UserError(f"{name}: cannot be combined with phases; would work: one of them")
    out = out or folder / "report"
    made = report_phases(folder, out, calibration_of(folder, calibration))
    written = _written(made, out, OF_PHASES)
    shown = made.blocks[0]
    assert isinstance(shown, Table)
    return Result(written.data, f"{to_markdown(replace(shown, title='', notes=()))}\n{written.text}")


def _written(made: Document, out: Path, names: tuple[str, str, str]) -> Result:
    files = made.write(out, *names)
    return Result(
        {"title": made.title, "summary": list(made.summary), "files": files, "rows": list(made.rows)},
        "".join(f"{line}\n" for line in [*made.summary, *files, *([] if can_draw() else [_NOT_DRAWN])]),
    )


def _fits(folder: Path, out: Path | None, runs: Path | None, hold_out: int, counted: str) -> Result:
    """Fit scaling laws to the runs of a folder; those of an experiment are kept in it."""
    if hold_out < 0:
        raise UserError(f"--hold-out={hold_out}: must be at least 0; would work: --hold-out 1")
    is_experiment = experiment.is_experiment(folder)
    rows: list[Row] = []
    if is_experiment:
        # Of the sweeps in the folder of runs; without them, the kept ones.
        spaces = [Path(runs or "runs") / name for name in experiment.names_of(folder)]
        rows = [row for space in spaces if (space / SWEEP).is_file() for row in load(space)]
    rows = rows or load(folder if is_experiment else _source_of(folder))
    made = fits_of(rows, counted=counted, hold_out=hold_out)
    out = out or (folder if is_experiment else folder / "report")
    if is_experiment:
        _keep(out, rows)
    return _written(report_fits(folder.resolve().name, made, counted, out), out, OF_FITS)


def _source_of(folder: Path) -> Path:
    """Return the folder with the rows; for an experiment that is a program, its folder in runs/."""
    left = Path("runs") / folder.resolve().name
    is_program = experiment.option_of(folder) is not None and not (folder / KEPT).is_file()
    return left if is_program and left.is_dir() else folder


VERB = Verb(
    "report",
    report,
    help=HELP,
    arguments=(
        Argument(
            "folder",
            type=Path,
            help="an experiment (experiments/llama3_h100), or runs (runs/NAME of a sweep or of single runs)",
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
            help="output folder; default: the experiment's folder, or report/ in a folder of runs",
        ),
        Argument("--runs", type=Path, help="folder of an experiment's runs; default: runs/"),
        Argument(
            "--calibration",
            type=Path,
            help="calibration file of the measured machine, written by harness plan calibrate=FOLDER; "
            f"default: {CALIBRATION} in the folder. Machines of published tables are predicted without it",
        ),
        Argument(
            "--rehearse",
            help=f"of published rows: rehearse the jobs that {experiment.REHEARSED} does not have, on a "
            "machine without a GPU (`make rehearsal`)",
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
