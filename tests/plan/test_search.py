"""The search: every layout there is, the best of them by brute force, and a sweep that measures these."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest

from harness.compose import compose_job, compose_points
from harness.errors import ConfigError, UserError
from harness.job import Job, differing_numerics
from harness.metrics.encoding import loads
from harness.parallelism.config import AXES
from harness.parallelism.stages import num_stages
from harness.plan.bound import Bounds
from harness.plan.config import PlanJob
from harness.plan.legality import Legality
from harness.plan.machine import machine_of
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.search import search
from harness.plan.space import SCHEDULES_TRIED, Point, Space

ROOT = Path(__file__).resolve().parents[2]
EIGHT = ["model=llama3_debug", "cluster=slurm_h100", "cluster.ranks=8", "training.global_batch_size=8"]
# Small models wait for collectives more than they compute; long sequences make bounds close.
LONG = [*EIGHT, "training.seq_len=2048", "model.max_seq_len=2048", "precision=bf16"]


def space_of(*overrides: str) -> Space:
    job = compose_job(["search=true", *overrides], config_name="plan", schema=PlanJob)
    return Space.of(job.plain, ["search=true", *overrides])


def points_of(space: Space) -> Iterator[Point]:
    return (point for degrees, ep in space.layouts() for point in space.points(degrees, ep))


def every_job(base: Job) -> Iterator[Job]:
    """Every legal job of 8 ranks, asked for one by one and without the search's code."""
    for degrees in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
        of = dict(zip(AXES, degrees, strict=True))
        if prod(degrees) != 8:
            continue
        pipelined = of["pp"] > 1
        for local, size, mode, schedule, layers in itertools.product(
            (1, 2, 4, 8),
            (1, 2, 4, 8) if pipelined else [1],
            ("none", "selective_op", "full"),
            SCHEDULES_TRIED if pipelined else ["1F1B"],
            [None, *range(1, 6)] if pipelined else [None],
        ):
            if pipelined and local * of["dp_replicate"] * of["dp_shard"] != base.global_batch_size:
                continue  # a pipeline is filled and drained once a step
            moved = of | {"pp_microbatch_size": size, "pp_schedule": schedule, "pp_layers_per_stage": layers}
            try:
                yield replace(
                    base,
                    parallelism=replace(base.parallelism, **moved),
                    training=replace(base.training, local_batch_size=local),
                    activation_checkpoint=replace(base.activation_checkpoint, mode=mode),
                ).resolve(gpus=0)
            except ConfigError:
                continue


def told(job: Job) -> tuple[object, ...]:
    """What tells apart jobs that run differently; the number of stages is what layers of a stage come to."""
    layout = job.parallelism
    pipeline = (layout.pp_schedule, num_stages(layout, job.model.n_layers), layout.pp_microbatch_size)
    degrees = tuple(layout.degrees.values())
    return degrees, job.local_batch_size, job.activation_checkpoint.mode, pipeline if layout.pp > 1 else None


@cache
def planned(*overrides: str) -> tuple[Space, dict[tuple[object, ...], Plan]]:
    """The plan of every legal job."""
    space = space_of(*overrides)
    return space, {told(job): make_plan(job) for job in every_job(space.base)}


def test_the_space_is_every_legal_job() -> None:
    space, plans = planned(*LONG)
    legality = Legality(space.base)
    legal = [point for point in points_of(space) if legality.broken(point) is None]
    found = [told(point.job(space.base)) for point in legal]
    assert len(set(found)) == len(found) > 300
    assert set(found) == set(plans)


def test_what_is_called_illegal_is() -> None:
    """With a format whose blocks forbid lengths, compiled blocks, and a schedule's microbatches."""
    space = space_of(*LONG, "precision=float8_tensorwise", "training.seq_len=80", "compile=on")
    legality, verdicts = Legality(space.base), Counter[str]()
    for point in itertools.islice(points_of(space), 0, None, 3):
        error = legality.broken(point)
        try:
            point.job(space.base)
            assert error is None, (point, error)
        except ConfigError as raised:
            assert error is not None, (point, raised)
            verdicts[error.field] += 1
    assert len(verdicts) >= 3, verdicts


@pytest.mark.parametrize("memory_gib", [80.0, 0.45])
def test_the_best_are_those_of_brute_force(monkeypatch: pytest.MonkeyPatch, memory_gib: float) -> None:
    space, plans = planned(*LONG)
    limit = memory_gib * 2**30
    monkeypatch.setattr(
        "harness.plan.search.make_plan", lambda job: replace(plans[told(job)], memory_limit=limit)
    )
    found = search(space, 10)
    fitting = [plan for plan in plans.values() if plan.peak <= limit]
    by_time = sorted(fitting, key=lambda plan: (plan.speed and plan.speed.step_seconds, plan.peak))
    assert [each.seconds for each in found.best] == [
        plan.speed.step_seconds for plan in by_time[:10] if plan.speed
    ]
    assert [each.order for each in found.best] == [
        (p.speed.step_seconds, p.peak) for p in by_time[:10] if p.speed
    ]
    # Everything is accounted for, and most of it without running a schedule.
    lost = found.lost
    assert found.points == len(plans) + sum(lost.illegal.values())
    assert found.points == 10 + sum(lost.illegal.values()) + lost.too_large + sum(lost.slower.values())
    assert lost.too_large <= len(plans) - len(fitting)
    assert found.planned < len(plans) / 2


def test_no_bound_is_above_the_step() -> None:
    space, plans = planned(*LONG)
    points = [point for point in points_of(space) if Legality(space.base).broken(point) is None]
    machine = machine_of(points[0].job(space.base))
    assert machine is not None
    bounds, ratios = Bounds(space.base, machine), []
    for point in points:
        speed = plans[told(point.job(space.base))].speed
        assert speed is not None
        bound = bounds.of(point)
        assert bound.seconds == pytest.approx(sum(bound.parts.values()))
        ratios.append(bound.seconds / speed.step_seconds)
    assert max(ratios) <= 1 + 1e-9
    # A bound of nothing would hold too, and spare nothing.
    assert statistics.median(ratios) > 0.5, statistics.median(ratios)


def test_nothing_that_is_computed_changes() -> None:
    space, _ = planned(*LONG)
    for candidate in search(space, 3).best:
        job = candidate.plan.job
        assert job.global_batch_size == space.base.global_batch_size
        first = space.base
        assert not differing_numerics(first, job)


def typed(*overrides: str) -> list[Point]:
    return list(points_of(space_of(*EIGHT, *overrides)))


def test_what_is_typed_stays() -> None:
    points = typed("parallelism.tp=2", "parallelism.pp_schedule=GPipe", "activation_checkpoint=full")
    assert {point.tp for point in points} == {2}
    assert {point.schedule for point in points} == {None, "GPipe"}
    assert {point.mode for point in points} == {"full"}
    assert {point.local_batch_size for point in typed("training.local_batch_size=2")} == {2}
    assert {point.pp for point in typed("parallelism.dp_shard=-1", "training.local_batch_size=null")} == {
        1,
        2,
        4,
        8,
    }


def test_a_typed_layout_keeps_the_axes_that_it_does_not_use() -> None:
    points = typed("parallelism=fsdp_tp")
    degrees = {point.degrees for point in points}
    assert degrees == {(1, 1, 8, 1, 1), (1, 1, 4, 1, 2), (1, 1, 2, 1, 4), (1, 1, 1, 1, 8)}


def test_tensor_parallel_stays_within_a_node() -> None:
    space = space_of(*EIGHT[:2], "cluster.nodes=4", "training.global_batch_size=32")
    assert {point.tp for point in points_of(space)} == {1, 2, 4, 8}
    assert space.world == 32


def test_experts_are_shared_out_in_every_way() -> None:
    space = space_of("model=qwen3_moe_debug", *EIGHT[1:])
    of = {(degrees, ep) for degrees, ep in space.layouts()}
    assert {ep for degrees, ep in of if degrees == (1, 1, 8, 1, 1)} == {1, 2, 4, 8}
    assert {ep for degrees, ep in of if degrees == (2, 1, 2, 1, 2)} == {1, 2, 4}


def test_pipelines_have_every_number_of_stages() -> None:
    space = space_of(*EIGHT, "parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B")
    stages = {
        num_stages(point.layout(space.base.parallelism), space.base.model.n_layers)
        for point in points_of(space)
    }
    assert stages == {4, 8}  # 6 layers and the weight of two for the ends: 8 of 1, 4 of 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*EIGHT, "training.global_batch_size=null"], "^training.global_batch_size=null: a search compares"),
        (["model=llama3_debug"], "^cluster.ranks=null: a search has to know how many"),
        ([*EIGHT, "model.n_kv_heads=3"], "^model.n_kv_heads=3: must divide"),
    ],
)
def test_what_no_layout_can_mend(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=message):
        space_of(*overrides)


def test_nothing_legal_says_what_is_wrong_most_often() -> None:
    space = space_of(*EIGHT, "training.seq_len=1000000")
    with pytest.raises(
        UserError, match=r"^none of the .* ways to run 8 ranks is legal.*training.seq_len=1000000"
    ):
        search(space, 10)


def test_nothing_fits_says_what_lacks_least() -> None:
    space = space_of(*EIGHT[1:], "model=llama3_405b", "parallelism=fsdp_tp")
    with pytest.raises(
        UserError, match=r"fits; the closest lacks [\d,.]+ GiB on its fullest rank .*more ranks"
    ):
        search(space, 10)


def test_unknown_hardware_cannot_be_ranked() -> None:
    space = space_of(*EIGHT, "cluster.accelerator=null")
    with pytest.raises(ConfigError, match=r"^cluster.accelerator=null: a search ranks by speed.*H100 SXM"):
        search(space, 10)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.plan", "search=true", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_from_the_command_line_to_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found, as text and JSON, and the sweep: its points are the jobs that were planned."""
    file = tmp_path / "found.yaml"
    pair = [*LONG, "parallelism=fsdp_tp", "top=3", f"sweep_file={file}"]
    done = command(*pair)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("llama3_debug on 8 x H100 SXM; 8 x 2,048 = 16,384 tokens a step\n")
    kept = "kept as typed: parallelism.cp, parallelism.dp_replicate, parallelism.ep, parallelism.pp\n"
    assert kept in done.stdout
    for line in ("why the others lose\n", "  slower, most of all by ", f"to measure the 3: {file}\n"):
        assert line in done.stdout
    plain = loads(command(*pair, "--json").stdout)
    assert plain["sweep_file"] == str(file) and len(plain["best"]) == 3
    by_order = [each["plan"]["speed"]["step_seconds"] for each in plain["best"]]
    assert by_order == sorted(by_order)
    jobs = points_in(file, [*LONG, "parallelism=fsdp_tp"], monkeypatch)
    assert [job.id for job in jobs] == [each["plan"]["job"]["id"] for each in plain["best"]]
    assert {job.name for job in jobs} == {"llama3_debug-search"}


def points_in(file: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs of a sweep file, when it lies where sweeps are looked for."""
    conf = file.parent / "conf"
    shutil.copytree(ROOT / "conf", conf, ignore=shutil.ignore_patterns("experiment", "sweep"))
    (conf / "experiment").symlink_to(ROOT / "experiments")
    (conf / "sweep").mkdir()
    shutil.copy(file, conf / "sweep" / "found.yaml")
    monkeypatch.setenv("HARNESS_CONF_DIR", str(conf))
    composed = compose_points(["sweep=found", *overrides])
    assert not [each.reason for each in composed if each.reason]
    return [each.job for each in composed]
