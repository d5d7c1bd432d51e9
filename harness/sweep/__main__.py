"""``python -m harness.sweep status|resume|collect|cancel FOLDER``: what has become of a sweep."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from harness.app import guarded
from harness.cluster.queue import cancel as cancel_jobs
from harness.cluster.queue import queue
from harness.cluster.ticket import Ticket
from harness.errors import EXIT_OK
from harness.run_folder import RunFolder
from harness.sweep.registry import Registry, labels
from harness.sweep.run import log_table, resume, settle_lost_points
from harness.sweep.state import BUSY, look_at_all
from harness.sweep.table import aligned, draw, markdown, rows_of, write_csv


def main() -> None:
    """Entry point of ``python -m harness.sweep`` and of the console script."""
    arguments = _parser().parse_args()
    sys.exit(guarded(lambda: arguments.verb(Registry.open(arguments.folder), arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.sweep", description="What has become of a sweep."
    )
    verbs = parser.add_subparsers(required=True, metavar="status|resume|collect|cancel")
    for name, verb, words in (
        ("status", status, "show every point: state, step, speed, memory, and why it failed"),
        ("resume", resume_verb, "start what is not complete"),
        ("collect", collect, "write table.csv, table.md and plot.png into the folder"),
        ("cancel", cancel, "end the jobs that wait or run"),
    ):
        sub = verbs.add_parser(name, help=words, description=words)
        sub.add_argument("folder", type=Path, help="folder of the sweep, e.g. runs/llama3_8b-layouts_8")
        sub.set_defaults(verb=verb)
        if name == "resume":
            text = "also what failed for want of memory"
            sub.add_argument("--out-of-memory", action="store_true", help=text)
    return parser


def status(registry: Registry, _: argparse.Namespace) -> int:
    """Shows the table of a sweep."""
    seen = settle_lost_points(look_at_all(registry.points()))
    sys.stdout.write(aligned(rows_of(seen)))
    skipped = len(registry.skipped())
    counts = {
        state: sum(each.state == state for each in seen) for state in dict.fromkeys(s.state for s in seen)
    }
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    sys.stdout.write(f"{told}{f', {skipped} skipped' if skipped else ''}\n")
    return EXIT_OK


def resume_verb(registry: Registry, arguments: argparse.Namespace) -> int:
    """Starts what is not complete."""
    return resume(registry, out_of_memory=arguments.out_of_memory)


def collect(registry: Registry, _: argparse.Namespace) -> int:
    """Writes the results of a sweep as files."""
    seen = settle_lost_points(look_at_all(registry.points()))
    rows = rows_of(seen, whole=True)
    write_csv(registry.path / "table.csv", seen, [RunFolder(each.point.run_dir).row for each in seen])
    (registry.path / "table.md").write_text(
        f"# {registry.name}\n\n{markdown(rows)}{_skipped_in_words(registry)}"
    )
    draw(registry.path / "plot.png", registry.name, seen)
    log_table(registry, seen, [each.point.job for each in seen])
    for name in ("table.csv", "table.md", "plot.png"):
        sys.stdout.write(f"{registry.path / name}\n")
    return EXIT_OK


def _skipped_in_words(registry: Registry) -> str:
    skipped = registry.skipped()
    names = labels([each.overrides for each in skipped], [point.overrides for point in registry.points()])
    lines = [f"- {name}: {each.reason}\n" for name, each in zip(names, skipped, strict=True)]
    return "\nSkipped, because no job can be made of them:\n\n" + "".join(lines) if lines else ""


def cancel(registry: Registry, _: argparse.Namespace) -> int:
    """Ends the SLURM jobs of a sweep that wait or run; what they have saved stays."""
    busy = [each for each in look_at_all(registry.points()) if each.state in BUSY]
    ids, jobs = [], None
    for each in busy:
        ticket = Ticket.read(each.point.run_dir)
        if ticket is None:
            continue
        jobs = queue() if jobs is None else jobs
        found = ticket.find(jobs)
        if found is not None:
            replace(ticket, job_id=found.id, cancelled=True).write(each.point.run_dir)
            ids.append(found.id)
    cancel_jobs(ids)
    sys.stdout.write(f"cancelled {len(ids)} of {len(registry.points())} points\n")
    here = len(busy) - len(ids)
    if here:
        sys.stdout.write(f"{here} run here: ^C in their controller's terminal ends them\n")
    return EXIT_OK


if __name__ == "__main__":
    main()
