"""``python -m harness.report FOLDER``: tables, plots and an HTML page of runs, a sweep or an experiment."""

from __future__ import annotations

from pathlib import Path

from harness.app import Result, Verb
from harness.arguments import Argument
from harness.errors import UserError
from harness.files import write_atomically
from harness.plan.constants import Calibration
from harness.report import experiment, of_runs, of_tables, rehearsed
from harness.report.document import Report, as_csv, markdown
from harness.report.page import page
from harness.report.predict import CALIBRATION, calibration_of, with_predictions
from harness.report.rows import KEPT, keep, load

TABLES, CSV, PAGE = "tables.md", "table.csv", "index.html"


def report(
    folder: Path,
    *,
    out: Path | None = None,
    runs: Path | None = None,
    calibration: Path | None = None,
    rehearse: bool = False,
) -> Result:
    """Compare published, predicted and measured results: Markdown, CSV, PNG, HTML.

    Raises:
        UserError: there is nothing to report on in the folder, or a rehearsal failed.
    """
    if experiment.is_experiment(folder):
        out = out or folder
        constants = calibration_of(folder, calibration)
        tables = experiment.tables_of(folder, runs, constants, rehearse=rehearse)
        made = _of_experiment(folder, tables, out, constants)
    else:
        if rehearse:
            raise UserError(
                f"--rehearse: {folder} has no published rows; would work: experiments/llama3_h100"
            )
        if runs is not None:
            raise UserError(f"--runs={runs}: is for experiments; would work: python -m harness.report {runs}")
        source = _source_of(folder)
        constants = calibration_of(folder, calibration)
        rows = with_predictions(load(source), constants)
        out = out or (folder if source != folder else folder / "report")
        out.mkdir(parents=True, exist_ok=True)
        made = of_runs.report_of(folder.resolve().name, rows, out, constants)
    for name, text in ((TABLES, markdown(made)), (CSV, as_csv(made)), (PAGE, page(made, out))):
        write_atomically(out / name, text.encode())
    summary = [line.removeprefix("- ") for line in made.summary]
    pictures = [section.picture for section in made.sections if section.picture is not None]
    files = [str(out / name) for name in (TABLES, CSV, PAGE, *pictures)]
    return Result(
        {"title": made.title, "summary": summary, "files": files, "rows": list(made.rows)},
        "".join(f"{line}\n" for line in [*summary, *files]),
    )


def _source_of(folder: Path) -> Path:
    """Return the folder with the rows; for an experiment that is a program, its folder in runs/."""
    left = Path("runs") / folder.resolve().name
    is_program = experiment.option_of(folder) is not None and not (folder / KEPT).is_file()
    return left if is_program and left.is_dir() else folder


def _of_experiment(
    folder: Path, tables: list[experiment.Table], out: Path, calibration: Calibration | None
) -> Report:
    out.mkdir(parents=True, exist_ok=True)
    measured = experiment.measured_rows(tables)
    if measured:
        keep(out, measured)
    title = folder.resolve().name
    if any(table.source for table in tables):
        return of_tables.report_of(title, tables, out, calibration)
    return of_runs.report_of(title, [row for table in tables for row in table.rows], out, calibration)


VERB = Verb(
    "report",
    report,
    arguments=(
        Argument(
            "folder",
            type=Path,
            help="an experiment (experiments/llama3_h100), or runs (runs/NAME of a sweep or of single runs)",
        ),
        Argument(
            "--out",
            type=Path,
            help="output folder; default: the experiment's folder, or report/ in a folder of runs",
        ),
        Argument("--runs", type=Path, help="folder of an experiment's runs; default: runs/"),
        Argument(
            "--calibration",
            type=Path,
            help="calibration file of the measured machine, written by harness.plan calibrate=FOLDER; "
            f"default: {CALIBRATION} in the folder. Machines of published tables are predicted without it",
        ),
        Argument(
            "--rehearse",
            help=f"of published rows: rehearse the jobs that {rehearsed.FILE} does not have, on a machine "
            "without a GPU (`make rehearsal`)",
        ),
    ),
    has_json=True,
)
main = VERB.main

if __name__ == "__main__":
    main()
