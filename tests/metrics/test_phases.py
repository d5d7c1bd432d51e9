"""Phases of a step: times add up to the step, collectives have their own, slow ranks are named."""

import json
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import words

from harness.config.fields import with_value
from harness.config.job import Job
from harness.metrics.jsonl import read_metrics
from harness.metrics.slow_ranks import SlowRanks
from harness.run.folder import RunFolder
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.make import make_plan
from harness.tools.report import phases as of_phases
from harness.tools.report.verb import report
from harness.train.engine import Engine
from harness.train.observers.phase_times import Phases, PhaseSpan
from harness.train.observers.phases import PhaseLog, _mean
from harness.train.trainer import Trainer
from harness.util.annotation import annotated
from harness.util.errors import UserError

SMALL = tuple(
    words("""
    model.n_layers=2 training.seq_len=16 training.global_batch_size=8 checkpoint=disabled
    profiling.phases=true metrics.warmup_steps=1
""")
)


class Scripted:
    """Stands in for the clock: returns 0, 1, 3, 6, 10, ... A quarter of it the thread had no core."""

    sees_queue = True

    def __init__(self):
        self.calls = 0

    def now(self):
        self.calls += 1
        return (self.calls - 1) * self.calls / 2

    def is_done(self, _stamp):
        return True

    def lengths(self, stamps):
        return [(end - start, (end - start) / 4) for start, end in pairwise(stamps)]

    def free(self, stamps): ...


def test_times_are_exclusive_and_add_up():
    phases = Phases(torch.device("cpu"))
    phases._stamps = Scripted()
    phases._marks = []
    phases._mark()  # 0
    with phases.inside("forward.blocks", stage=1):  # 1
        with phases.inside("tp.all_reduce"):  # 3
            pass  # 6
        phases.change("backward.blocks")  # 10
    with phases.inside("validation"), phases.inside("forward.blocks"):  # 15, 21, 28
        phases.change("validation")  # 36; 45 and 55 leave
    phases.end_step(7)  # 66 begins the next step
    [step] = phases.take()
    assert step.step == 7
    assert step.spans == [
        PhaseSpan(0, 1, "host", 0, 0.25),
        PhaseSpan(1, 3, "forward.blocks", 1, 0.5),
        PhaseSpan(3, 6, "tp.all_reduce", 1, 0.75),
        PhaseSpan(6, 10, "forward.blocks", 1, 1),
        PhaseSpan(10, 15, "backward.blocks", 1, 1.25),
        PhaseSpan(15, 21, "host", 0, 1.5),
        PhaseSpan(21, 55, "validation", 0, 8.5),
        PhaseSpan(55, 66, "host", 0, 2.75),
    ]
    assert sum(step.seconds.values()) == 66 and step.seconds["forward.blocks"] == 6
    assert step.on_core["forward.blocks"] == 4.5
    assert step.passes == {1: {"forward.blocks": 6, "backward.blocks": 5}}


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the kernel has no scheduler statistics",
)
def test_times_of_an_interval_are_means_over_its_steps():
    assert _mean([{"forward": 1.0, "waiting": 2.0}, {"forward": 3.0}]) == {
        "forward": 2.0,
        "waiting": 1.0,
    }


def test_waiting_for_a_core_is_not_computing():
    """Another process takes half of the core."""
    cores = os.sched_getaffinity(0)
    phases = Phases(torch.device("cpu"))
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        phases.restart()
        began = time.thread_time()
        with phases.inside("forward.blocks"):
            while (on_core := time.thread_time() - began) < 0.1:
                pass
        with phases.inside("backward.blocks"):
            time.sleep(0.1)
        phases.end_step(1)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    [step] = phases.take()
    phases.close()
    assert step.on_core["forward.blocks"] == pytest.approx(on_core, rel=0.25)
    assert step.seconds["forward.blocks"] > 1.3 * on_core
    assert step.on_core["backward.blocks"] == pytest.approx(
        0.1, rel=0.25
    )  # asleep, it asks for no core


class Event:
    """Stands in for a CUDA event, on a device that has finished ``done`` events; never waits."""

    made = 0
    done = 0

    def __init__(self, *, enable_timing):
        assert enable_timing
        Event.made += 1
        self.time = -1

    def record(self):
        Event.made_records = self.time = getattr(Event, "made_records", 0) + 1

    def query(self):
        return self.time <= Event.done

    def elapsed_time(self, later):
        assert later.query(), "the time of an event that is not done"
        return 1000.0 * (later.time - self.time)


def test_on_a_gpu_times_are_read_later_without_waiting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(torch.device("cuda"))

    def steps(*numbers):
        for number in numbers:
            with phases.inside("forward.blocks"):
                pass
            phases.end_step(number)

    steps(0, 1, 2)
    assert list(phases.take()) == []
    Event.done = 4  # the first step, whose end is the fourth event
    [first] = phases.take()
    assert (first.step, first.seconds) == (0, {"host": 2.0, "forward.blocks": 1.0})
    Event.done = 10
    assert [each.step for each in phases.take()] == [1, 2]
    made = Event.made
    steps(3, 4)
    assert Event.made == made  # events are used again


def train(job, run_dir, base=0.0, slow=None):
    """Train; every rank also sleeps in the first block's forward pass, slow ones longer.

    Returns:
        The loop's own time of each step, and the ranks that were named.
    """
    engine = Engine(job, torch.device("cpu"))
    pause = base + (slow or {}).get(dist.get_rank(), 0.0)
    if pause:
        block = next(iter(engine.parts[0].blocks.values()))
        block.register_forward_pre_hook(lambda *_: time.sleep(pause))
    trainer = Trainer(job, RunFolder(Path(run_dir)), engine, None, time.monotonic())
    trainer.train()
    [phases] = [each for each in trainer.observers if isinstance(each, PhaseLog)]
    with annotated("after the run"):  # no recorder any more
        pass
    return [each.seconds for each in trainer.window._latest], phases.slow.found


def rows_of(folder, rank):
    return read_metrics(folder / f"phases/rank{rank}.jsonl")


@pytest.fixture(scope="module")
def traced(pool, tmp_path_factory):
    """A run of eight ranks, and the times of its steps by the loop's own timer."""
    folder = tmp_path_factory.mktemp("run")
    job = jobs.tiny(*SMALL, "parallelism=fsdp_tp_pp", "training.steps=5", "metrics.all_ranks=true")
    (folder / "job.json").write_text(job.to_json())
    return folder, pool.run(8, train, job, str(folder))


def test_phases_add_up_to_the_step_on_every_rank(traced):
    """Medians of a stage: the kernel can take the core between the readings of the two timers."""
    folder, results = traced
    stages = {0: [], 1: []}
    for rank, (laps, _) in enumerate(results):
        rows = {row["step"]: row for row in rows_of(folder, rank)}
        assert sorted(rows) == [2, 3, 4, 5] and len(laps) == 4  # without the first step
        for step, row in rows.items():
            lengths = [end - start for start, end, _, _ in row["spans"]]
            total = sum(row["phases"].values())
            assert row["seconds"] == pytest.approx(sum(lengths), rel=1e-6)
            assert row["seconds"] == pytest.approx(total, rel=1e-6)
            stages[row["stage"]].append((total / laps[step - 2], row["phases"]["host"] / total))
    for shares in stages.values():
        of_lap, host = np.median(shares, axis=0)
        assert of_lap == pytest.approx(1, rel=0.02) and host < 0.1


def test_each_stage_has_its_groups_and_collectives(traced):
    folder, _ = traced
    shared = {
        "data",
        "sums",
        "pp.wait",
        "gradient_norm",
        "optimizer",
        "forward.blocks",
        "backward.blocks",
    }
    shared |= {"dp.all_gather", "dp.reduce", "tp.all_gather", "tp.reduce_scatter"}
    ends = ({"forward.embedding", "backward.embedding"}, {"forward.head", "backward.head"})
    for rank in range(8):
        [row, *_] = rows_of(folder, rank)
        stage = rank // 4
        assert row["stage"] == stage and shared | ends[stage] <= set(row["phases"])
        assert not ends[1 - stage] & set(row["phases"])


def test_every_rank_writes_its_own_values(traced):
    folder, _ = traced
    for rank in range(8):
        rows = read_metrics(folder / f"metrics/rank{rank}.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        assert all(row["rank"] == rank and row["memory_gib"] > 0 for row in rows)
        # One rank of each data-parallel group counts tokens, on the stage with the loss.
        assert all((row["loss"] is not None) == (rank in (4, 6)) for row in rows)
        for row, phases in zip(rows[1:], rows_of(folder, rank), strict=True):
            own = {
                name.removeprefix("phase."): value
                for name, value in row.items()
                if "phase." in name
            }
            assert own == phases["phases"]


def test_experts_and_context_have_their_collectives(pool, tmp_path):
    layout = (
        "model=qwen3_moe_debug",
        "parallelism.dp_shard=4",
        "parallelism.ep=4",
        "parallelism.cp=2",
    )
    job = jobs.tiny(*SMALL, *layout, "training.steps=2")
    (tmp_path / "job.json").write_text(job.to_json())
    pool.run(8, train, job, str(tmp_path))
    report(tmp_path, what="phases", out=tmp_path)
    page = (tmp_path / "phases.md").read_text()
    assert "forward.blocks |" in page and "backward.head |" in page
    [row] = rows_of(tmp_path, 0)
    assert {"ep.all_to_all", "dp.all_gather", "ep.all_reduce"} <= set(row["phases"])
    assert any(phase.startswith("cp.") for phase in row["phases"])


def test_a_rank_of_several_stages_has_the_passes_of_each(pool, tmp_path):
    loops = ("model.n_layers=4", "parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B")
    job = jobs.tiny(*SMALL, *loops, "training.steps=2")
    (tmp_path / "job.json").write_text(job.to_json())
    pool.run(2, train, job, str(tmp_path))
    for rank, ends in ((0, {0: {"forward.embedding"}}), (1, {3: {"forward.head"}})):
        [row] = rows_of(tmp_path, rank)
        forward = {
            int(stage): {phase for phase in phases if phase.startswith("forward.")}
            for stage, phases in row["stages"].items()
        }
        assert forward == {s: {"forward.blocks", *ends.get(s, ())} for s in (rank, rank + 2)}
        total = sum(phases.get("backward.blocks", 0.0) for phases in row["stages"].values())
        assert total == pytest.approx(row["phases"]["backward.blocks"])
    report(tmp_path, what="phases", out=tmp_path)
    page = (tmp_path / "phases.md").read_text()
    assert all(f"| {stage} | forward.blocks |" in page for stage in range(4))


def test_the_report_has_the_means_and_the_plan(traced, tmp_path):
    """The plan has no times of CPUs, so the job is said to have run on GPUs."""
    with pytest.raises(UserError, match=r"has no phases; would work: .*profiling\.phases=true"):
        report(tmp_path, what="phases")
    folder, calibration = tmp_path / "run", Calibration(Constants(launch=1e-4))
    shutil.copytree(traced[0], folder)
    job = with_value(Job.read(folder / "job.json"), "cluster.device", "cuda")
    job = with_value(job, "cluster.accelerator", "H100 SXM")
    (folder / "job.json").write_text(job.to_json())
    calibration.write(str(tmp_path / "calibration.json"))
    result = report(folder, what="phases", out=tmp_path, calibration=tmp_path / "calibration.json")
    rows = {row["part"]: row for row in result.data["rows"]}
    every = [row["phases"] for rank in range(8) for row in rows_of(folder, rank)]
    for part, prefixes in {
        "compute": ("forward.", "backward."),
        "tp": ("tp.",),
        "pp": ("pp.",),
    }.items():
        seconds = [sum(s for name, s in row.items() if name.startswith(prefixes)) for row in every]
        assert rows[part]["seconds"] == pytest.approx(np.mean(seconds))
    speed = make_plan(job, calibration).speed
    assert speed is not None
    assert rows["pp"]["planned"] == pytest.approx(speed.parts["pp"] + speed.parts["bubble"])
    assert rows["step"]["ratio"] == pytest.approx(rows["step"]["seconds"] / speed.step_seconds)
    assert (tmp_path / of_phases.PICTURE).read_bytes().startswith(b"\x89PNG")
    heads = [row["phases"]["forward.head"] for rank in range(4, 8) for row in rows_of(folder, rank)]
    assert f"| 1 | forward.head | {np.mean(heads):.4f} |" in (tmp_path / "phases.md").read_text()
    assert "no rank was found slow" in result.text


@pytest.mark.parametrize("slow", [{3: 0.03}, {}], ids=["one slowed by 30 %", "none"])
def test_a_slow_rank_is_named_and_no_other(pool, tmp_path, slow):
    """Sleeping does not need a core, so ranks that share cores do not slow each other down."""
    job = jobs.tiny(
        *SMALL, "parallelism.dp_shard=8", "training.steps=20", "metrics.log_interval=50"
    )
    found = pool.run(8, train, job, str(tmp_path), 0.1, slow)
    named = found[0][1]
    assert [each.rank for each in named] == list(slow)
    assert all(each[1] == named for each in found)  # all ranks decide the same
    if slow:
        [each] = named
        assert each.phase == "forward" and 0.15 < each.excess < 0.45
        assert json.loads((tmp_path / "slow_ranks.json").read_text())["slow"][0]["rank"] == 3
        assert "rank 3 (" in str(each) and "in forward" in str(each)
    else:
        assert not (tmp_path / "slow_ranks.json").exists()


def test_the_rule_finds_slow_ranks_in_noise():
    """Medians of 5 steps of eight ranks with log-normal noise of 10 % per step."""
    for seed in range(50):
        generator = np.random.default_rng(seed)
        for slow in ({}, {5: 0.3}):
            rule, found = SlowRanks([0] * 8, [("node", "cpu")] * 8), []
            for at in range(40):
                steps = 0.1 * generator.lognormal(0.0, 0.1, (5, 8))
                steps[:, list(slow)] *= 1.3
                window = [[0.0, each / 3, each * 2 / 3, 0.0] for each in np.median(steps, axis=0)]
                found += [(each.rank, at) for each in rule.observe(window, at)]
            assert {rank for rank, _ in found} == set(slow)
            assert all(at <= 5 for _, at in found[:1])


def test_ranks_are_compared_within_their_stage():
    rule = SlowRanks([0, 0, 1, 1, 2], [("node", "cpu")] * 5)
    window = [[0, 1.0, 1, 0], [0, 1.0, 1, 0], [0, 3.0, 3, 0], [0, 3.0, 5, 0], [0, 9.0, 9, 0]]
    assert [rule.observe(window, step) for step in (5, 10)] == [[], []]
    [found] = rule.observe(window, 15)
    # One third above its only peer, in backward; the rank alone in its stage has nobody to compare with.
    assert (found.rank, found.phase, found.excess, found.step) == (3, "backward", 0.333, 15)
    assert rule.observe(window, 20) == [] and list(rule.slow) == [3]
    rule.observe([[0, 1.0, 1, 0]] * 5, 25)
    assert not rule.slow
