"""Where the layouts of published tables rank among those that a search finds for the same job.

    python experiments/published/ranks.py [--table NAME] [--gpus 512]

One search for each number of GPUs of the tables that have several meshes or schedules: for the model and
sequence length with the most published layouts, and their largest batch. Recomputation stays as published,
since tables keep it; mesh, microbatch and pipeline schedule are free. The rank counts the layouts that the
plan takes to be faster, up to ``TOP``; equally fast ones count once. Jobs on more than ``--gpus`` are left
out: their searches take minutes. Prints Markdown, which ranks.md has.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import errors
from held_out import setting_of

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.tools.plan.evidence_table import RESOLUTION
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import PARTS, Plan, Speed
from harness.tools.plan.render import mesh_of, part_name, schedule_of
from harness.tools.plan.search import Candidate, rounded, search
from harness.tools.plan.space import Space
from harness.util.errors import UserError
from harness.util.tables import figure

TOP = 20
"""Layouts that a search ranks."""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", help="only this table")
    parser.add_argument("--gpus", type=int, default=512, help="the most GPUs of a search")
    arguments = parser.parse_args()
    began = time.perf_counter()
    print("# Published layouts among those of a search\n")
    print("| table | model, GPUs, batch | published | rank | its tokens/s | our best | its tokens/s | gain |")
    print("|---|---|---|---:|---:|---|---:|---|")
    for (table, gpus), plans in _searches(_rows(arguments.table)).items():
        if gpus <= arguments.gpus:
            for line in _lines(plans):
                print(f"| {table} | {line} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


def _rows(table: str | None) -> list[errors.Row]:
    """The rows of a table, or of all, planned."""
    with errors.FILE.open(newline="") as file:
        rows = errors.plan_all([raw for raw in csv.DictReader(file) if table in (None, raw["table"])])
    if table is None or table.startswith("torchtitan"):
        rows += [row for row in errors.torchtitan() if table in (None, row.raw["table"])]
    return rows


def _searches(rows: Sequence[errors.Row]) -> dict[tuple[str, int], list[Plan]]:
    """The layouts to rank, by table and GPUs, at one batch; of tables with several meshes or schedules."""
    layouts: dict[str, set[str]] = defaultdict(set)
    settings: dict[tuple[str, int], dict[str, dict[str, Job]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        job, table = row.plan.job, row.raw["table"]
        layouts[table].add(f"{mesh_of(job.parallelism)} {schedule_of(job) if job.parallelism.pp > 1 else ''}")
        if job.world_size > 1:
            settings[table, job.world_size][setting_of(job)].setdefault(_layout(job), job)
    found = {}
    for key, own in settings.items():
        if len(layouts[key[0]]) > 1:
            jobs = list(max(own.values(), key=len).values())
            batch = max(job.global_batch_size for job in jobs)
            found[key] = [make_plan(_at_batch(job, batch)) for job in jobs]
    return found


def _at_batch(job: Job, batch: int) -> Job:
    layout, training = job.parallelism, replace(job.training, global_batch_size=batch)
    if layout.pp > 1:
        training = replace(training, local_batch_size=batch // layout.data_parallel)
    return replace(job, training=training)


def _lines(plans: Sequence[Plan]) -> list[str]:
    """A line for each published layout of one job."""
    job = plans[0].job
    model = f"{job.model.name}, {job.model.n_layers} layers"
    what = f"{model}, {job.world_size}, {job.global_batch_size} x {job.training.seq_len:,}"
    lines = []
    for mode in dict.fromkeys(plan.job.activation_checkpoint.mode for plan in plans):
        own = [plan for plan in plans if plan.job.activation_checkpoint.mode == mode]
        kept = [f"activation_checkpoint.mode={mode}"]
        try:
            best = search(Space.of(_free(own[0].job), kept), TOP).best
        except UserError as error:
            lines += [f"{what} | {_layout(plan.job)} | none: {error} | | | |" for plan in own]
        else:
            lines += [f"{what} | {_layout(plan.job)} | {_against(plan, best)}" for plan in own]
    return lines


def _free(job: Job) -> Job:
    """The job with a layout for the search to replace."""
    layout = ParallelismConfig(dp_shard=job.world_size, async_tp=job.parallelism.async_tp)
    return replace(job, parallelism=layout)


def _against(plan: Plan, best: Sequence[Candidate]) -> str:
    speed, other = plan.speed, best[0].plan.speed
    assert speed is not None and other is not None
    ahead = sum(each.order[0] < rounded(speed.step_seconds) for each in best)
    rank = f"more than {TOP}" if ahead == TOP else f"{ahead + 1}"
    if plan.fits is False:
        rank += ", planned as too large"
    rates = speed.tokens_per_second_per_rank, other.tokens_per_second_per_rank
    gain = rates[1] / rates[0] - 1
    why = f"{gain:+.1%}"
    if gain > 0.0005:
        why += f", {_gained(speed, other)}" + ", not distinguishable" * (gain < RESOLUTION.off)
    return f"{rank} | {figure(rates[0])} | {_layout(best[0].plan.job)} | {figure(rates[1])} | {why}"


def _gained(published: Speed, best: Speed) -> str:
    """The part of the step in which the best gains most."""
    return part_name(max(PARTS, key=lambda part: published.parts[part] - best.parts[part]))


def _layout(job: Job) -> str:
    layout = job.parallelism
    schedule = f", {layout.pp_schedule} x {layout.pp_microbatch_size}" if layout.pp > 1 else ""
    each = f", {job.local_batch_size} at once" if layout.pp == 1 else ""
    return f"{mesh_of(layout)}{schedule}{each}, {job.activation_checkpoint.mode}"


if __name__ == "__main__":
    main()
