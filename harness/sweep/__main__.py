"""``python -m harness.sweep status|resume|collect|cancel FOLDER``: a sweep, or single runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.app import run_parsed
from harness.arguments import Parser
from harness.cluster.queue import cancel as cancel_jobs
from harness.errors import EXIT_OK, UserError
from harness.evaluate.results import evaluations_markdown, newest
from harness.run_folder import RunFolder
from harness.sweep.lost import record_lost
from harness.sweep.registry import Registry, labels
from harness.sweep.run import log_table, resume
from harness.sweep.state import BUSY, PointState, points_in, read_states
from harness.sweep.table import rows_of, table_markdown, table_text, write_csv
from harness.verify import verify_all


def main() -> None:
    """Entry point of ``python -m harness.sweep`` and of the console script."""
    run_parsed(_parser(), lambda typed: typed.verb(typed))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m harness.sweep", description="Show, resume, tabulate or cancel a sweep.")
    verbs = parser.add_subparsers(required=True, metavar="status|resume|collect|cancel")
    for name, verb, words in (
        ("status", status, "show every point: state, step, speed, memory, reason of failure"),
        ("resume", resume_verb, "start the points that are not complete"),
        ("collect", collect, "write table.csv, table.md and plot.png into the folder"),
        ("cancel", cancel, "cancel waiting and running SLURM jobs"),
    ):
        sub = verbs.add_parser(name, help=words, description=words)
        single = ", or of a run" if name in ("status", "cancel") else ""
        sub.add_argument(
            "folder", type=Path, help=f"folder of a sweep{single}, e.g. runs/llama3_8b-layouts_8"
        )
        sub.set_defaults(verb=verb)
        if name == "resume":
            text = "also start points that ran out of memory"
            sub.add_argument("--out-of-memory", action="store_true", help=text)
        if name == "status":
            text = "also compare the newest checkpoint of each completed point with its checksums"
            sub.add_argument("--verify", action="store_true", help=text)
    return parser


def status(arguments: argparse.Namespace) -> int:
    """Show the table of a sweep, or of single runs."""
    seen = record_lost(points_in(arguments.folder))
    sys.stdout.write(table_text(rows_of(seen)))
    skipped = len(Registry(arguments.folder).skipped())
    counts = {
        state: sum(each.state == state for each in seen) for state in dict.fromkeys(s.state for s in seen)
    }
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    sys.stdout.write(f"{summary}{f', {skipped} skipped' if skipped else ''}\n")
    return _verify(seen) if arguments.verify else EXIT_OK


def _verify(seen: Sequence[PointState]) -> int:
    """Compare the newest checkpoint of each completed point with its checksums; return the exit code."""
    code = EXIT_OK
    for each in seen:
        if each.state == "completed":
            try:
                code = max(code, verify_all([str(each.point.run_dir)], newest=True))
            except UserError as error:  # the point was configured to save nothing
                sys.stdout.write(f"{error}\n")
    return code


def resume_verb(arguments: argparse.Namespace) -> int:
    """Start the points that are not complete."""
    return resume(Registry.open(arguments.folder), out_of_memory=arguments.out_of_memory)


def collect(arguments: argparse.Namespace) -> int:
    """Write the results of a sweep as files."""
    registry = Registry.open(arguments.folder)
    seen = record_lost(registry.points())
    rows = rows_of(seen, full_reasons=True)
    results = [{**RunFolder(each.point.run_dir).row, **newest(each.point.run_dir)} for each in seen]
    write_csv(registry.path / "table.csv", seen, results)
    evaluated = evaluations_markdown([row["point"] for row in rows], results)
    (registry.path / "table.md").write_text(
        f"# {registry.name}\n\n{table_markdown(rows)}{evaluated}{_skipped_in_words(registry)}"
    )
    written = ["table.csv", "table.md", *(["plot.png"] if _draw(registry) else [])]
    log_table(registry, seen, [each.point.job for each in seen])
    for name in written:
        sys.stdout.write(f"{registry.path / name}\n")
    return EXIT_OK


def _draw(registry: Registry) -> bool:
    """Plot throughput and memory of the points, the fastest on top; return whether any has completed."""
    from harness.report.plots import bars
    from harness.report.rows import fastest_first, of_points

    rows = fastest_first(of_points(registry.points()))
    return bars(registry.path / "plot.png", registry.name, [row["point"] for row in rows], rows)


def _skipped_in_words(registry: Registry) -> str:
    skipped = registry.skipped()
    names = labels([each.overrides for each in skipped], [point.overrides for point in registry.points()])
    lines = [f"- {name}: {each.reason}\n" for name, each in zip(names, skipped, strict=True)]
    return "\nSkipped, because they are not valid jobs:\n\n" + "".join(lines) if lines else ""


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel the waiting and running SLURM jobs of a sweep or of single runs; their checkpoints are kept."""
    points = points_in(arguments.folder)
    busy = [each for each in read_states(points) if each.state in BUSY]
    ids = []
    for each in busy:
        if each.job_record is not None and each.job_id is not None:
            replace(each.job_record, job_id=each.job_id, cancelled=True).write(each.point.run_dir)
            ids.append(each.job_id)
    cancel_jobs(ids)
    sys.stdout.write(f"cancelled {len(ids)} of {len(points)} points\n")
    here = sum(each.job_record is None for each in busy)
    if here:
        sys.stdout.write(f"{here} run on this machine: ^C in their controller's terminal ends them\n")
    elsewhere = len(busy) - len(ids) - here
    if elsewhere:
        raise UserError(
            f"{elsewhere} points were submitted to SLURM, and there is no squeue here; would work: a login "
            "node of the cluster"
        )
    return EXIT_OK


if __name__ == "__main__":
    main()
