"""``python -m harness.report FOLDER``: tables, plots and an HTML page of runs, a sweep or an experiment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.app import run_parsed
from harness.arguments import Parser
from harness.errors import EXIT_OK, UserError
from harness.files import write_atomically
from harness.plan.constants import Calibration
from harness.report import experiment, of_runs, of_tables, rehearsed
from harness.report.document import Report, as_csv, markdown
from harness.report.page import page
from harness.report.predict import CALIBRATION, calibration_of, with_predictions
from harness.report.rows import KEPT, keep, load

TABLES, CSV, PAGE = "tables.md", "table.csv", "index.html"


def main() -> None:
    """Entry point of ``python -m harness.report`` and of the console script."""
    run_parsed(
        _parser(),
        lambda typed: report(
            typed.folder,
            out=typed.out,
            runs=typed.runs,
            calibration=typed.calibration,
            rehearse=typed.rehearse,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m harness.report",
        description="Compare published, predicted and measured results: Markdown, CSV, PNG, HTML.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="an experiment (experiments/llama3_h100), or runs (runs/NAME of a sweep or of single runs)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="output folder; default: the experiment's folder, or report/ in a folder of runs",
    )
    parser.add_argument("--runs", type=Path, help="folder of an experiment's runs; default: runs/")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="calibration file of the measured machine, written by harness.plan calibrate=FOLDER; default: "
        f"{CALIBRATION} in the folder. Machines of published tables are predicted without it",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help=f"of published rows: rehearse the jobs that {rehearsed.FILE} does not have, on a machine "
        "without a GPU (`make rehearsal`)",
    )
    return parser


def report(
    folder: Path,
    *,
    out: Path | None = None,
    runs: Path | None = None,
    calibration: Path | None = None,
    rehearse: bool = False,
) -> int:
    """Write the report of a folder; return the exit code.

    Args:
        folder: folder of an experiment, or of runs.
        out: output folder; None means the experiment's folder itself, or ``report/`` inside a folder of runs.
        runs: for an experiment: folder of its runs.
        calibration: calibration file of the measured machine; None means the one in the folder, if any.
        rehearse: rehearse published jobs that have not been rehearsed yet.

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
    sys.stdout.write("".join(f"{line.removeprefix('- ')}\n" for line in made.summary))
    pictures = [section.picture for section in made.sections if section.picture is not None]
    sys.stdout.write("".join(f"{out / name}\n" for name in (TABLES, CSV, PAGE, *pictures)))
    return EXIT_OK


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


if __name__ == "__main__":
    main()
