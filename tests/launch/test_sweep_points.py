"""Points of a sweep: their registry, their folders, and their arrays within one limit."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.compose.composer import compose_job, compose_points
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch import submit as submit_module
from harness.launch.queue import Queued
from harness.launch.rows import names_of, of_sweep
from harness.launch.state import RunState, SlurmJobRecord
from harness.launch.sweep import run
from harness.launch.sweep.registry import (
    FILE,
    OF_THE_COMMAND,
    Point,
    Registry,
    Skipped,
    folder_of,
    labels,
    run_dir_of,
    typed_overrides,
    unique_points,
)
from harness.launch.sweep.run import Array, arrays_of
from harness.run.folder import RunFolder
from harness.util.errors import UserError


def point(folder: Path, name: str) -> Point:
    return Point(name, folder / name, [f"training.seed={name}"])


def test_points_are_added_once_and_kept_in_order(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "b"), point(tmp_path, "a")], [Skipped(["x=1"], "cannot be")])
    registry.add([point(tmp_path, "a"), point(tmp_path, "c")], [Skipped(["x=1"], "cannot be")])
    assert [each.id for each in registry.points()] == ["b", "a", "c"]
    assert registry.skipped() == [Skipped(["x=1"], "cannot be")]


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "a"), point(tmp_path, "b")], [])
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-9])
    assert [each.id for each in registry.points()] == ["a"]
    registry.add([point(tmp_path, "b"), point(tmp_path, "c")], [])
    assert [each.id for each in registry.points()] == ["a", "b", "c"]


def test_a_reader_beside_a_writer_sees_whole_points(tmp_path: Path) -> None:
    registry = Registry(tmp_path)

    def write() -> None:
        for number in range(20):
            registry.add([point(tmp_path, str(number))], [])

    with ThreadPoolExecutor() as pool:
        done = pool.submit(write)
        while not done.done():
            seen = [each.id for each in Registry(tmp_path).points()]
            assert seen == [str(number) for number in range(len(seen))]
        done.result()
    assert len(registry.points()) == 20


def test_the_folder_can_be_moved(tmp_path: Path) -> None:
    old = tmp_path / "old" / "sweep"
    old.mkdir(parents=True)
    Registry(old).add([point(tmp_path / "old" / "other", "a")], [])
    (tmp_path / "old").rename(tmp_path / "new")
    [moved] = Registry(tmp_path / "new" / "sweep").points()
    assert moved.run_dir.resolve() == tmp_path / "new" / "other" / "a"


def test_one_controller_at_a_time(tmp_path: Path) -> None:
    with (
        Registry(tmp_path).controlled(),
        pytest.raises(UserError, match="another process"),
        Registry(tmp_path).controlled(),
    ):
        pass
    with Registry(tmp_path).controlled():
        pass


def test_a_sweep_is_named_as_its_jobs_are(tmp_path: Path) -> None:
    def job(name: str) -> Job:
        made: Job = compose_job([f"name={name}", f"runs_dir={tmp_path}"])
        return made

    assert folder_of([job("a"), job("a")]) == tmp_path / "a"
    assert folder_of([job("b"), job("a")]) == tmp_path / "a+b"
    many = folder_of([job(f"model_number_{n}") for n in range(40)])
    assert many.name.startswith("model_number_0+39-") and len(many.name) < 60


def test_labels_are_what_differs() -> None:
    points = [["a=1", "b=1", "c=1"], ["a=2", "b=1", "c=1"]]
    assert labels(points) == ["a=1", "a=2"]
    assert labels(points, [["a=1", "b=2", "c=1"]]) == ["a=1 b=1", "a=2 b=1"]
    assert labels([["a=1"]]) == ["the only point"]
    assert labels([]) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "junk",
        "[]",
        "[" * 100_000,
        "9" * 5000,
        '{"of": "a later version"}',
        '{"point": "b", "run_dir": "b"}',
        '{"point": "b", "run_dir": "b", "overrides": [3]}',
        '{"point": "b", "run_dir": "b\\u0000", "overrides": []}',
        '{"point": 3, "run_dir": "b", "overrides": []}',
        '{"skipped": null, "overrides": []}',
    ],
    ids=lambda line: line[:60],
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "a")], [])
    with (tmp_path / FILE).open("a") as file:
        file.write(f"{line}\n")
    for read in (registry.points, registry.skipped, lambda: registry.add([point(tmp_path, "c")], [])):
        with pytest.raises(UserError, match=r"sweep\.jsonl: line 2 is damaged: .*; would work: ") as raised:
            read()
        assert "\n" not in str(raised.value)


COMMON = ["name=n", "model=llama3_tiny", "data=synthetic", "tokenizer=none", "cluster.device=cpu"]


@pytest.mark.parametrize(
    ("axis", "field"),
    [
        ("cluster.env.NCCL_ALGO=Ring,Tree", "cluster.env.NCCL_ALGO"),
        ("cluster.threads_per_rank=1,2", "cluster.threads_per_rank"),
        ("cluster.partition=a,b", "cluster.partition"),
        ("metrics.wandb_tags=[x],[y]", "metrics.wandb_tags"),
        ("metrics.wandb_group=x,y", "metrics.wandb_group"),
        ("data.cache_dir=x,y", "data.cache_dir"),
    ],
)
def test_each_value_of_a_label_is_a_point(axis: str, field: str, tmp_path: Path) -> None:
    typed = [*COMMON, f"runs_dir={tmp_path}", "training.seed=1,2", axis]
    composed = compose_points(typed)
    found = unique_points(composed)
    assert len({point.run_dir for point, _ in found}) == 4
    assert len({point.id for point, _ in found}) == 2
    assert {point.run_dir.parent for point, _ in found} == {tmp_path / "n"}
    for point, job in found:
        assert point.run_dir.name.partition("-")[0] == point.id == job.id
    registry = Registry(tmp_path / "n")
    registry.path.mkdir()
    registry.add([point for point, _ in found], [])
    names = labels([point.overrides for point in registry.points()])
    assert len(set(names)) == 4 and all(field in name for name in names)
    # The same command, and one with more values, find these folders.
    again = unique_points(compose_points([*typed[:-1], f"{axis},{'[z]' if axis.endswith(']') else 3}"]))
    assert {point.run_dir for point, _ in found} < {point.run_dir for point, _ in again}


def test_names_of_points_have_no_sign_that_nobody_typed() -> None:
    points = [[f"++cluster.env.A={value}", "training.steps=1"] for value in "ab"]
    assert labels(points) == ["cluster.env.A=a", "cluster.env.A=b"]


def test_no_folder_changes_without_a_sweep_over_labels(tmp_path: Path) -> None:
    """Labels that vary with the id, or with the name, are no reason for another folder."""
    for axes in (["training.seed=1,2", "cluster.partition=a"], ["name=a,b"]):
        for point, job in unique_points(compose_points([*COMMON, f"runs_dir={tmp_path}", *axes])):
            assert point.run_dir == job.run_dir


def test_a_run_before_the_sweep_keeps_its_folder(tmp_path: Path) -> None:
    common = [*COMMON, f"runs_dir={tmp_path}"]
    earlier = compose_job([*common, "cluster.threads_per_rank=2"])
    RunFolder(earlier.run_dir).plan(earlier, [])
    swept = [*common, "cluster.threads_per_rank=1,2"]
    first, second = (point.run_dir for point, _ in unique_points(compose_points(swept)))
    assert first != second == earlier.run_dir
    # A point that has a folder of its own keeps that one.
    own = run_dir_of(earlier, ["cluster.threads_per_rank", "cluster.time"])
    assert own == earlier.run_dir
    digest = hashlib.sha256(json.dumps([["cluster.threads_per_rank", 2]]).encode()).hexdigest()[:8]
    (tmp_path / "n" / f"{earlier.id}-{digest}").mkdir()
    _, second = (point.run_dir for point, _ in unique_points(compose_points(swept)))
    assert second.name == f"{earlier.id}-{digest}"


@pytest.mark.parametrize("field", OF_THE_COMMAND)
def test_labels_of_the_command_are_no_axes(field: str) -> None:
    values = "1,2" if field in ("cluster.max_running", "cluster.confirm_gpu_hours") else "true,false"
    with pytest.raises(
        UserError, match=f"^{field}: configures the command, not its runs; would work: one value"
    ):
        run.sweep(compose_points([*COMMON, f"{field}={values}"]))


def test_points_of_one_label_run_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run has its value in job.json and in its row; status, the report and the same command agree."""
    ran: list[int | None] = []

    def launch(job: Job, folder: RunFolder, **_: object) -> int:
        ran.append(folder.read_job().cluster.threads_per_rank)
        folder.write_result(folder.read_job(), "completed", 0, {"loss": 1.0})
        return 0

    monkeypatch.setattr("harness.launch.local.launch", launch)
    typed = [*COMMON, f"runs_dir={tmp_path}", "cluster.threads_per_rank=1,2", "parallelism.tp=1,3"]
    assert run.sweep(compose_points(typed)) == 0
    assert ran == [1, 2]
    registry = Registry.open(tmp_path / "n")
    rows = [RunFolder(point.run_dir).row for point in registry.points()]
    assert [row["job.cluster.threads_per_rank"] for row in rows] == [1, 2]
    assert [each.overrides[-2:] for each in registry.skipped()] == [
        ["cluster.threads_per_rank=1", "parallelism.tp=3"],
        ["cluster.threads_per_rank=2", "parallelism.tp=3"],
    ]
    out = capsys.readouterr().out
    assert "cluster.threads_per_rank=1  completed" in out and "cluster.threads_per_rank=2  completed" in out
    assert run.sweep(compose_points(typed)) == run.resume(registry) == 0 and ran == [1, 2]
    reported = of_sweep(registry)
    assert [row.get("job.cluster.threads_per_rank") for row in reported] == [1, 2, None, None]
    assert [row["point"] for row in load_points(tmp_path / "n")] == [
        "cluster.threads_per_rank=1",
        "cluster.threads_per_rank=2",
    ]


def load_points(folder: Path) -> list[dict[str, object]]:
    points = sorted(
        (Point(p.name, p, []) for p in folder.glob("*-*")),
        key=lambda each: each.job.cluster.threads_per_rank or 0,
    )
    names = names_of([Point(each.id, each.run_dir, typed_overrides(each.run_dir)) for each in points])
    return [{"point": name} for name in names]


def test_arrays_of_slurm_have_one_value_of_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*COMMON, "cluster=slurm_cpu", "cluster.dry_run=true", f"runs_dir={tmp_path}"]
    axes = ["cluster.env.ALGO=Ring,Tree", "training.seed=1,2", "cluster.snapshot=true,false"]
    assert run.sweep(compose_points([*typed, *axes])) == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash")[1:]
    assert len(scripts) == 4 and all("--array=0-1%" in each for each in scripts)
    assert sorted(("export ALGO=Ring" in each, "--code" in each) for each in scripts) == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]


def test_equal_jobs_are_one_point(tmp_path: Path) -> None:
    typed = ["cluster.ranks=2", "cluster.device=cpu", "training.global_batch_size=4", f"runs_dir={tmp_path}"]
    [(point, _)] = unique_points(compose_points([*typed, "parallelism.dp_shard=2,-1"]))
    assert "parallelism.dp_shard=2" in point.overrides


def test_labels_added_to_the_command_count_nothing_twice(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for more in ([], ["cluster.wait=true"], ["++cluster.env.A=b"]):
        points = [Point(n, tmp_path / n, [f"training.seed={n}", *more]) for n in ("1", "2")]
        skipped = [Skipped([f"parallelism.tp={n}", *more], "cannot be") for n in (3, 5)]
        registry.add(points, skipped)
        assert len(registry.points()) == len(registry.skipped()) == 2
    # A file with duplicates is read too.
    rows = [
        {"skipped": "no", "overrides": ["parallelism.tp=3", *more]} for more in ([], ["cluster.wait=true"])
    ]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert registry.skipped() == [Skipped(["parallelism.tp=3"], "no")]
    assert labels([["training.seed=1"], ["training.seed=2", "cluster.wait=true"]]) == [
        "training.seed=1",
        "training.seed=2",
    ]
    assert labels([["a=1", "cluster.ranks=1"], ["a=2", "cluster.ranks=2"]]) == [
        "a=1 cluster.ranks=1",
        "a=2 cluster.ranks=2",
    ]


def test_a_point_that_never_began_gets_the_labels_of_the_last_command(tmp_path: Path) -> None:
    common = ["cluster=slurm", f"runs_dir={tmp_path}", "training.global_batch_size=8"]
    before, now = (compose_job([*common, f"cluster.time={time}"]) for time in ("1:00:00", "2:00:00"))
    folder = RunFolder(before.run_dir)
    folder.plan(before, [])
    folder.plan(now, ["cluster.time=2:00:00"])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"
    folder.set_status("submitted")
    folder.plan(before, [])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"


def test_a_job_in_the_queue_is_quoted_as_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["cluster=slurm", f"runs_dir={tmp_path}", "training.global_batch_size=8", "name=n"]
    before = compose_job([*common, "cluster.time=1:00:00"])
    folder = RunFolder(before.run_dir)
    folder.plan(before, [])
    SlurmJobRecord("n.x", None, "5").write(folder.path)
    monkeypatch.setattr(submit_module, "queued", lambda _: Queued("5", "n.x", "PENDING", "Priority"))
    now = compose_job([*common, "cluster.time=4:00:00", "cluster.partition=fast"])
    assert submit_module.submit_one(now, folder, []) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        "n: already submitted (PENDING) as job 5, 1 node x 1 rank, at most 1 GPU-hours; it keeps "
        "no partition, time=60, scancel it first to change that"
    )


SHAPES = "parallelism.dp_shard=1,2,4,8"


def points(folder: Path, *typed: str) -> list[tuple[Point, Job]]:
    common = ["cluster=slurm", "training.global_batch_size=8", f"runs_dir={folder}"]
    jobs = [(each.job, each.overrides) for each in compose_points([*common, *typed])]
    return [(Point(job.id, job.run_dir, overrides), job) for job, overrides in jobs]


def most_at_once(arrays: list[Array]) -> int:
    """Return the maximum number of points that run at once, given SLURM's limits and dependencies."""
    chains: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, array in enumerate(arrays):
        first[index] = index if array.after is None else first[array.after]
        running = min(array.at_once, len(array.points))
        chains[first[index]] = max(chains.get(first[index], 0), running)
    return sum(chains.values())


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 12, 100])
def test_the_limit_holds_over_all_shapes(limit: int, tmp_path: Path) -> None:
    own = points(tmp_path, SHAPES, "training.seed=1,2,3")
    arrays = arrays_of(own, limit)
    assert [len(array.points) for array in arrays] == [3] * 4
    assert most_at_once(arrays) == min(limit, len(own))
    # Arrays wait for earlier ones only, and no two wait for the same one.
    before = [array.after for array in arrays if array.after is not None]
    assert len(set(before)) == len(before)
    assert all(array.after is None or array.after < index for index, array in enumerate(arrays))


def test_a_longer_array_gets_the_larger_share(tmp_path: Path) -> None:
    long = points(tmp_path, "training.seed=1,2,3,4,5,6")
    short = points(tmp_path, "parallelism.dp_shard=2", "training.seed=1,2")
    assert [array.at_once for array in arrays_of([*long, *short], 4)] == [3, 1]


def test_the_scripts_have_limits_and_dependencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [SHAPES, "training.seed=1,2,3", "name=n", f"runs_dir={tmp_path}", "cluster=slurm"]
    typed += ["training.global_batch_size=8", "cluster.dry_run=true"]
    assert run.sweep(compose_points([*typed, "cluster.max_running=6"])) == 0
    assert sorted(re.findall("--array=(.*)", capsys.readouterr().out)) == ["0-2%1"] * 2 + ["0-2%2"] * 2
    own = "cluster.sbatch={dependency: 'afterok:7'}"
    assert run.sweep(compose_points([*typed, "cluster.max_running=3", own])) == 0
    scripts = capsys.readouterr().out
    assert re.findall("--array=(.*)", scripts) == ["0-2%1"] * 4
    dependencies = re.findall("--dependency=(.*)", scripts)
    assert dependencies == ["afterok:7"] * 3 + ["afterok:7,afterany:ID_OF_ARRAY_1"]


def test_points_that_slurm_has_already_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a limit of four are in use; then all four, and new points wait for their end."""
    own = [
        (point, with_value(job, "cluster.max_running", 4))
        for point, job in points(tmp_path, "training.seed=1,2,3,4,5,6,7,8")
    ]
    for point, job in own:
        RunFolder(point.run_dir).plan(job, point.overrides)
    job_records = [SlurmJobRecord("before", index, f"77_{index}") for index in range(4)]
    waiting = [
        RunState(point.run_dir, "pending", job_record=job_record, job_id=job_record.job_id)
        for (point, _), job_record in zip(own[:4], job_records, strict=True)
    ]
    asked = []

    def submit(submission: run.Submission, folders: list[RunFolder], overrides: list[list[str]]) -> list[str]:
        asked.append((submission.at_once, list(submission.after), len(folders)))
        return [f"88_{index}" for index in range(len(folders))]

    monkeypatch.setattr(run, "submit", submit)
    for busy in (2, 4):
        tasks = [*own[:busy], *own[4:]]
        planned = [RunState(point.run_dir, "planned") for point, _ in own[4:]]
        run.Selection.of(Registry(tmp_path), tasks, [*waiting[:busy], *planned]).submit()
    assert asked == [(2, [], 4), (4, ["77"], 4)]


def test_points_of_another_command_for_the_same_sweep_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = points(tmp_path, "name=n", "training.seed=1,2")
    Registry(tmp_path / "n").path.mkdir()
    Registry(tmp_path / "n").add([point for point, _ in before], [])
    taken = {str(point.run_dir): f"77_{index}" for index, (point, _) in enumerate(before)}

    def read_state(run_dir: Path) -> RunState:
        ident = taken.get(str(run_dir))
        if ident is None:
            return RunState(run_dir, "planned")
        return RunState(run_dir, "running", job_record=SlurmJobRecord("n"), job_id=ident)

    monkeypatch.setattr(run, "read_states", lambda asked: [read_state(path) for path in asked])
    typed = ["cluster=slurm", "training.global_batch_size=8", f"runs_dir={tmp_path}", "name=n"]
    typed += ["training.seed=3,4,5", "cluster.max_running=3", "cluster.dry_run=true"]
    assert run.sweep(compose_points(typed)) == 0
    assert "--array=0-2%1\n" in capsys.readouterr().out
