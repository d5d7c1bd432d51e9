"""Rehearses the jobs of small.txt and full.txt and writes tables of what was found.

All jobs that have no row yet; these, again; the tables, from the rows:

    .venv-rehearsal/bin/python experiments/measure/rehearsal/rehearse.py
    .venv-rehearsal/bin/python experiments/measure/rehearsal/rehearse.py small fsdp fsdp_tp
    python experiments/measure/rehearsal/rehearse.py tables

Rows stand in results.jsonl, one for each rehearsed rank; of a job and rank the last one is kept.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from harness.compose.composer import compose_job
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.rehearse.config import RehearseJob, ranks_to_rehearse
from harness.tools.rehearse.figures import RankFigures
from harness.tools.rehearse.server import rehearse_rank, require_no_gpu
from harness.util.errors import UserError

FOLDER = Path(__file__).parent
ROWS = FOLDER / "results.jsonl"
SETS = ("small", "full")
COMMON = {
    "small": ("data=synthetic", "tokenizer=bytes", "precision=bf16"),
    "full": (
        *("data=synthetic", "tokenizer=bytes", "precision=bf16", "cluster=slurm_h100"),
        *("training.seq_len=8192", "training.global_batch_size=null"),
    ),
}
GIB = 2**30


def jobs_of(name: str) -> dict[str, list[str]]:
    """The overrides of each job of a set, by its name; what a line says wins over what all share."""
    jobs = {}
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            job, *own = line.split()
            said = {each.partition("=")[0] for each in own}
            jobs[job] = [
                *(each for each in COMMON[name] if each.partition("=")[0] not in said),
                *own,
            ]
    return jobs


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["tables"]:
        write_tables()
        return
    sets = [name for name in SETS if name in arguments] or SETS
    named = [each for each in arguments if each not in SETS]
    done = {row["job"] for row in rows()}
    for name in sets:
        for job, overrides in jobs_of(name).items():
            if job in named or not (named or job in done):
                rehearse_one(name, job, overrides)
    write_tables()


def rehearse_one(of: str, name: str, overrides: list[str]) -> None:
    """Rehearse the ranks of a job that differ; append a row for each."""
    began = time.perf_counter()
    try:
        job = compose_job(overrides, config_name="rehearse", schema=RehearseJob)
    except UserError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return
    require_no_gpu(job.rehearse)
    for rank in ranks_to_rehearse(job, job.rehearse):
        figures = rehearse_rank(job.plain, rank, job.rehearse)
        row = row_of(of, name, overrides, job.world_size, figures)
        with ROWS.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        said = (
            ""
            if row["failure"] is None
            else f": {row['failure']['kind']}, {row['failure']['message'][:200]}"
        )
        taken = time.perf_counter() - began
        sys.stderr.write(f"{name}, rank {rank}: {taken:.0f} s{said}\n")


def row_of(
    of: str, name: str, overrides: list[str], world_size: int, figures: RankFigures
) -> dict[str, Any]:
    """What is kept of a rank: everything but kernels' and products' lists."""
    plain = dataclasses.asdict(figures)
    for left_out in ("kernels", "products"):
        del plain[left_out]
    return {
        "job": name,
        "set": of,
        "overrides": overrides,
        "world_size": world_size,
        **plain,
        "launches": figures.launches,
        "host_launches": figures.host_launches,
        "product_count": figures.product_count,
        "product_flops": figures.product_flops,
    }


def rows() -> list[dict[str, Any]]:
    """All rows, of jobs that are rehearsed still, in the order of their lists."""
    if not ROWS.exists():
        return []
    last = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        last[row["job"], row["rank"]] = row
    order = {job: place for place, job in enumerate(job for name in SETS for job in jobs_of(name))}
    known = [row for row in last.values() if row["job"] in order]
    return sorted(known, key=lambda row: (order[row["job"]], row["rank"]))


def write_tables() -> None:
    """Writes experiments/rehearsal/TABLES.md, and the rows without those that others replaced."""
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    of_sets = {name: [row for row in rows() if row["set"] == name] for name in SETS}
    count = sum(len({row["job"] for row in found}) for found in of_sets.values())
    text = [
        f"# {count} rehearsed jobs\n",
        "Written by `rehearse.py`; one line for each rehearsed rank, of its last step. Products are "
        "cuBLAS's, kernels all others; the host launches a CUDA graph at once. Memory is at its peak, in "
        "GiB. Host seconds are processor time on the machine of the rehearsal.\n",
        "## Debug models\n",
        small_table(of_sets["small"]),
        "## Full sizes: memory\n",
        "Allocated and reserved by torch's allocator, and the plan's figure for what is reserved.\n",
        *memory_summary(of_sets["full"]),
        full_table(of_sets["full"]),
    ]
    (FOLDER.parents[1] / "rehearsal/TABLES.md").write_text("\n".join(text))


def small_table(found: list[dict[str, Any]]) -> str:
    header = [
        "job",
        "rank",
        "kernels",
        "products",
        "launched by the host",
        "collectives",
        "host waits",
    ]
    header += ["allocated / reserved", "compiled graphs"]
    lines = []
    for row in found:
        kinds = [f"{each['axis']} {each['kind']} {each['count']}" for each in row["collectives"]]
        waits = [f"{each['where']} x{each['count']}" for each in row["waits"]]
        memory = row["memory"]
        peak = f"{memory['allocated'] / GIB:.2f} / {memory['reserved'] / GIB:.2f}"
        if row["failure"] is not None:
            kinds, waits = [f"**{row['failure']['kind']}** {row['failure']['where']}"], []
        cells = [row["job"], row["rank"], f"{row['launches']:,}", row["product_count"]]
        cells += [f"{row['host_launches']:,}", ", ".join(kinds)]
        lines.append([*cells, ", ".join(waits) or "none", peak, row["graphs"] or ""])
    return table(header, lines)


def full_table(found: list[dict[str, Any]]) -> str:
    header = ["job", "rank of", "allocated", "reserved", "planned", "difference"]
    header += ["kernels", "host s", "step s, planned"]
    lines = []
    for row in found:
        memory, (peak, seconds) = row["memory"], planned(row)
        failed = row["failure"] is not None
        difference = "" if failed else f"{peak / memory['reserved'] - 1:+.1%}"
        reserved = f"**{row['failure']['kind']}**" if failed else f"{memory['reserved'] / GIB:.2f}"
        cells = [
            row["job"],
            f"{row['rank']} / {row['world_size']}",
            f"{memory.get('allocated', 0) / GIB:.2f}",
        ]
        cells += [reserved, f"{peak / GIB:.2f}", difference, f"{row['launches']:,}"]
        lines.append([*cells, f"{row['cpu_seconds']:.2f}", f"{seconds:.2f}"])
    return table(header, lines)


def planned(row: dict[str, Any]) -> tuple[float, float]:
    """Peak memory of the row's ranks, bytes, and seconds of a step, by today's plan."""
    plan = _plan_of(tuple(row["overrides"]))
    assert plan.speed is not None
    return plan.memory[row["pp_rank"]].peak, plan.speed.step_seconds


@cache
def _plan_of(overrides: tuple[str, ...]) -> Plan:
    return make_plan(compose_job(overrides, config_name="rehearse", schema=RehearseJob).plain)


def memory_summary(found: list[dict[str, Any]]) -> list[str]:
    """How far the plan is off."""
    whole = [row for row in found if row["failure"] is None]
    if not whole:
        return []
    errors = [planned(row)[0] / row["memory"]["reserved"] - 1 for row in whole]
    sizes = [abs(error) for error in errors]
    jobs = len({row["job"] for row in whole})
    return [
        f"The plan against {len(errors)} ranks of {jobs} jobs: median error {statistics.median(sizes):.1%} "
        f"(with its sign {statistics.median(errors):+.1%}), worst {max(sizes):.1%}.\n"
    ]


def table(header: list[str], lines: list[list[Any]]) -> str:
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (header, rule, *lines))


if __name__ == "__main__":
    main()
