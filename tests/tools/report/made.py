"""Synthetic run folders, and plans with given values."""

import json
from pathlib import Path
from types import SimpleNamespace

from cases import words

from harness.compose.composer import compose_job, compose_points
from harness.launch.sweep.folder import Point, Skipped, SweepFolder
from harness.model.accounting import account
from harness.run.result import write_result
from harness.util.encoding import dumps
from harness.util.words import GIB

DEVICE = "NVIDIA H100 80GB HBM3"
SPACE = words("""
    name=made data=synthetic tokenizer=bytes cluster.device=cpu cluster.ranks=8
    parallelism.dp_shard=-1 parallelism.tp=1,2,3 parallelism.pp=1,2
""")


def rate_of(job):
    """Return tokens per second per rank; fewer splits are faster."""
    return 1000.0 / job.parallelism.tp / job.parallelism.pp + job.parallelism.dp_shard


def result(job, rate, device=DEVICE, **more):
    """Return the row of a completed run."""
    counted = account(job.model, job.training.seq_len)
    world = rate * job.world_size
    step = job.global_batch_size * job.training.seq_len / world
    return {
        "id": job.id,
        "numerics_id": job.numerics_id,
        "name": job.name,
        "exit_reason": "completed",
        "exit_code": 0,
        "world_size": job.world_size,
        "step": job.training.steps,
        "loss": 4.5,
        "flops_per_token_full": counted.flops_per_token_full,
        "peak_flops": 989.4e12,
        "device": device,
        # One slow step lowers the mean, which tables show.
        "window": {
            "window_steps": 7,
            "tokens_per_second": world,
            "tokens_per_second_median": 1.1 * world,
            "tokens_per_second_p10": 0.98 * world,
            "tokens_per_second_p90": 1.02 * world,
            "step_seconds_median": step,
            "step_seconds_spread": 0.04,
        },
        "memory_gib": 3.25,
        "job": job.to_dict(),
        "code": {
            "commit": "0123456789abcdef",
            "dirty": False,
            "versions": {"torch": "2.x", "python": "3.x"},
        },
        "host": {"name": "somewhere", "system": "Linux", "cores": 16},
        **more,
    }


def leave(job, overrides, row):
    """Write a run folder; return its path."""
    folder = job.run_dir
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job.to_json())
    (folder / "overrides.txt").write_text("".join(f"{each}\n" for each in overrides))
    state = "planned" if row is None else row["exit_reason"]
    (folder / "status.json").write_text(json.dumps({"state": state}))
    if row is not None:
        write_result(folder, row)
    return folder


def make_sweep(runs, space=SPACE, failing=None):
    """Write a sweep in which every valid point completed or failed; return its folder."""
    points = compose_points([*space, f"runs_dir={runs}"])
    legal = [each for each in points if each.job is not None]
    for each in legal:
        row = result(each.job, rate_of(each.job))
        if failing is not None and failing(each.job):
            error = {"kind": "out_of_memory", "message": "Tried to allocate 2 GiB", "rank": 3}
            row = {**row, "exit_reason": "failed", "window": {}, "error": error}
        leave(each.job, each.overrides, row)
    folder = SweepFolder(runs / legal[0].job.name)
    folder.add(
        [Point(each.job.id, each.job.run_dir, each.overrides) for each in legal],
        [Skipped(each.overrides, each.reason) for each in points if each.job is None],
    )
    return folder.path


def plan_of(rate, gib=4.0):
    """Return a ``make_plan`` with the exact throughput of every job."""

    def make_plan(job, calibration=None):
        tokens = rate(job)
        step = job.global_batch_size * job.training.seq_len / tokens / job.world_size
        speed = SimpleNamespace(tokens_per_second_per_rank=tokens, mfu=0.4, step_seconds=step)
        return SimpleNamespace(speed=speed, peak=gib * GIB, fits=True)

    return make_plan


COMMON = (
    "data=synthetic tokenizer=bytes cluster.device=cpu training.steps=20 metrics.log_interval=5 "
)
COMMON += "training.seq_len=32 training.global_batch_size=8 checkpoint.enable=false"


def leave_run(runs, *typed, rows=(), state="completed"):
    """Leave a run of a tiny model with these rows of metrics."""
    overrides = [*COMMON.split(), *typed, f"runs_dir={runs}"]
    job = compose_job(overrides)
    leave(job, overrides, {**result(job, rate_of(job)), "exit_reason": state})
    lines = [f"{dumps(row)}\n" for row in rows]
    (Path(job.run_dir) / "metrics.jsonl").write_text("".join(lines))
