"""Points of a sweep: their folders, and their arrays within one limit."""

import json
import re

import pytest
from cases import rows, texts
from one_line import one_line

from harness.compose.composer import compose_job, compose_points
from harness.launch import queue
from harness.launch import state as state_module
from harness.launch import submit as submit_module
from harness.launch.queue import Jobs, Queued
from harness.launch.rows import of_sweep
from harness.launch.state import SlurmJobRecord
from harness.launch.sweep import run
from harness.launch.sweep.folder import (
    FILE,
    Point,
    Skipped,
    SweepFolder,
    folder_of,
    labels,
    names_of,
    unique_points,
)
from harness.launch.sweep.run import arrays_of
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.util.errors import UserError

COMMON = ("name=n", "model=llama3_tiny", "data=synthetic", "tokenizer=none", "cluster.device=cpu")
ON_SLURM = ("name=n", "cluster=slurm", "training.global_batch_size=8")
SHAPES = "parallelism.dp_shard=1,2,4,8"


def point(folder, name):
    return Point(name, folder / name, [f"training.seed={name}"])


def points(folder, *typed):
    """Points of SLURM, each in the folder of its job."""
    composed = compose_points([*ON_SLURM, f"runs_dir={folder}", *typed])
    return [Point(each.job.id, each.job.run_dir, each.overrides, each.job) for each in composed]


def sweep(folder, *typed, common=ON_SLURM):
    return run.sweep(compose_points([*common, f"runs_dir={folder}", *typed]))


def test_points_are_added_once_in_order_and_a_torn_line_costs_no_other(tmp_path):
    folder = SweepFolder(tmp_path)
    for names in ("ba", "acd"):
        folder.add([point(tmp_path, name) for name in names], [Skipped(["x=1"], "cannot be")])
    assert [each.id for each in folder.points()] == ["b", "a", "c", "d"]
    assert folder.skipped() == [Skipped(["x=1"], "cannot be")]
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-9])
    assert [each.id for each in folder.points()] == ["b", "a", "c"]
    folder.add([point(tmp_path, "d"), point(tmp_path, "e")], [])
    assert [each.id for each in folder.points()] == ["b", "a", "c", "d", "e"]


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
def test_a_damaged_line_is_named(line, tmp_path):
    folder = SweepFolder(tmp_path)
    folder.add([point(tmp_path, "a")], [])
    with (tmp_path / FILE).open("a") as file:
        file.write(f"{line}\n")
    for read in (folder.points, folder.skipped, lambda: folder.add([point(tmp_path, "c")], [])):
        with one_line(UserError, r"sweep\.jsonl: line 2 is damaged: .*; would work: "):
            read()


def test_the_folder_can_be_moved(tmp_path):
    old = tmp_path / "old" / "sweep"
    old.mkdir(parents=True)
    SweepFolder(old).add([point(tmp_path / "old" / "other", "a")], [])
    (tmp_path / "old").rename(tmp_path / "new")
    [moved] = SweepFolder(tmp_path / "new" / "sweep").points()
    assert moved.run_dir.resolve() == tmp_path / "new" / "other" / "a"


def test_a_sweep_is_named_as_its_jobs_are(tmp_path):
    def folder_named(*names):
        found = folder_of([compose_job([f"name={name}", f"runs_dir={tmp_path}"]) for name in names])
        assert found.parent == tmp_path
        return found.name

    assert folder_named("a", "a") == "a" and folder_named("b", "a") == "a+b"
    many = folder_named(*(f"model_number_{n}" for n in range(40)))
    assert many.startswith("model_number_0+39-") and len(many) < 60


@pytest.mark.parametrize(
    ("typed", "others", "names"),
    # Names have no sign that nobody typed, and no label of a later command.
    rows(r"""
        [a=1 b=1 c=1, a=2 b=1 c=1]                  []             [a=1, a=2]
        [a=1 b=1 c=1, a=2 b=1 c=1]                  [a=1 b=2 c=1]  [a=1 b=1, a=2 b=1]
        [a=1]                                       []             [the only point]
        []                                          []             []
        [++c.A=a d=1, ++c.A=b d=1]                  []             [c.A=a, c.A=b]
        [k=f.py\:A d=1, k=g.py\:A d=1]              []             [k=f.py:A, k=g.py:A]
        [a=1, a=2 cluster.wait=true]                []             [a=1, a=2]
        [a=1 cluster.ranks=1, a=2 cluster.ranks=2]  []             [a=1 cluster.ranks=1, a=2 cluster.ranks=2]
    """),
)
def test_names_of_points_are_what_differs(typed, others, names):
    assert labels([each.split() for each in typed], [each.split() for each in others]) == names


def test_a_run_with_no_override_of_its_own_is_called_by_its_id(tmp_path):
    alone, other = (Point(name, tmp_path, [f"a=1{more}"]) for name, more in (("x", ""), ("y", "2")))
    base = Point("z", tmp_path, [])
    assert names_of([alone]) == ["x"]
    assert names_of([alone, other]) == ["a=1", "a=12"]
    assert names_of([base, alone]) == ["z", "a=1"]


@pytest.mark.parametrize(
    ("axis", "field"),
    texts("""
        cluster.env.NCCL_ALGO=Ring,Tree  cluster.env.NCCL_ALGO
        cluster.threads_per_rank=1,2     cluster.threads_per_rank
        tags=[x],[y]                     tags
        metrics.wandb_group=x,y          metrics.wandb_group
        data.cache_dir=x,y               data.cache_dir
    """),
)
def test_each_value_of_a_label_is_a_point(axis, field, tmp_path):
    switches = ["cluster=slurm_cpu", "cluster.ranks_per_node=1", "metrics=wandb"]
    typed = [*COMMON, *switches, f"runs_dir={tmp_path}", "training.seed=1,2", axis]
    found = unique_points(compose_points(typed))
    assert len({point.run_dir for point in found}) == 4
    assert len({point.id for point in found}) == 2
    for point in found:
        assert point.run_dir.parent == tmp_path / "n"
        assert point.run_dir.name.partition("-")[0] == point.id == point.job.id
    folder = SweepFolder(tmp_path / "n")
    folder.path.mkdir()
    folder.add(found, [])
    names = labels([point.overrides for point in folder.points()])
    assert len(set(names)) == 4 and all(field in name for name in names)
    # A command with more values finds these folders.
    again = unique_points(
        compose_points([*typed[:-1], f"{axis},{'[z]' if axis.endswith(']') else 3}"])
    )
    assert {point.run_dir for point in found} < {point.run_dir for point in again}


def test_no_folder_changes_without_a_sweep_over_labels(tmp_path):
    """Labels that vary with the id, or with the name, are no reason for another folder."""
    for axes in (["training.seed=1,2", "cluster.threads_per_rank=2"], ["name=a,b"]):
        for point in unique_points(compose_points([*COMMON, f"runs_dir={tmp_path}", *axes])):
            assert point.run_dir == point.job.run_dir


@pytest.mark.parametrize(
    ("axes", "same"),
    rows("""
        cluster=slurm cluster.env.A=1,2  cluster=slurm cluster.env.A='2','1'
        tags=[a],[b] notes=x,y           notes='y',x tags=['b'],['a']
        checkpoint=sync,async            checkpoint=async,sync
        profiling=off,on                 profiling=on,off
        cluster=slurm_h100,slurm_h200    cluster=slurm_h200,slurm_h100
    """),
)
def test_a_sweep_typed_in_another_way_finds_its_folders(axes, same, tmp_path):
    """Also one over a group whose options differ in labels only."""
    found = []
    for typed in (axes, same):
        points = unique_points(
            compose_points([*COMMON[:4], f"runs_dir={tmp_path}", *typed.split()])
        )
        found.append({point.run_dir for point in points})
    assert found[0] == found[1] and len(found[0]) == (4 if " notes" in axes else 2)


def test_points_of_one_label_run_apart(tmp_path, monkeypatch, capsys):
    """Each run has its value in job.json and in its row; status, the report and the same command agree."""
    ran = []

    def launch(job, folder, **_):
        ran.append(folder.read_job().cluster.threads_per_rank)
        RunRecord(folder.read_job(), folder).end("completed", 0, {"loss": 1.0})
        return 0

    monkeypatch.setattr("harness.launch.local.launch", launch)
    typed = ("cluster.threads_per_rank=1,2", "parallelism.tp=1,3")
    assert sweep(tmp_path, *typed, common=COMMON) == 0
    assert ran == [1, 2]
    folder = SweepFolder.open(tmp_path / "n")
    names = ["cluster.threads_per_rank=1", "cluster.threads_per_rank=2"]
    assert [each.overrides[-2:] for each in folder.skipped()] == [
        [name, "parallelism.tp=3"] for name in names
    ]
    out = capsys.readouterr().out
    assert all(f"{name}  completed" in out for name in names)
    assert sweep(tmp_path, *typed, common=COMMON) == run.resume(folder) == 0 and ran == [1, 2]
    values = [row.get("job.cluster.threads_per_rank") for row in of_sweep(folder)]
    assert values == [1, 2, None, None]


def test_equal_jobs_are_one_point(tmp_path):
    typed = [
        "cluster.ranks=2",
        "cluster.device=cpu",
        "training.global_batch_size=4",
        f"runs_dir={tmp_path}",
    ]
    [point] = unique_points(compose_points([*typed, "parallelism.dp_shard=2,-1"]))
    assert "parallelism.dp_shard=2" in point.overrides


def test_labels_added_to_the_command_count_nothing_twice(tmp_path):
    folder = SweepFolder(tmp_path)
    for more in ([], ["cluster.wait=true"], ["++cluster.env.A=b"]):
        points = [Point(n, tmp_path / n, [f"training.seed={n}", *more]) for n in ("1", "2")]
        skipped = [Skipped([f"parallelism.tp={n}", *more], "cannot be") for n in (3, 5)]
        folder.add(points, skipped)
        assert len(folder.points()) == len(folder.skipped()) == 2
    # A file with duplicates is read too.
    tp = "parallelism.tp=3"
    rows = [{"skipped": "no", "overrides": [tp, *more]} for more in ([], ["cluster.wait=true"])]
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert folder.skipped() == [Skipped([tp], "no")]


def test_a_point_that_never_began_gets_the_labels_of_the_last_command(
    tmp_path, monkeypatch, capsys
):
    """A job in the queue keeps those with which it was submitted, and is quoted with them."""
    common = [*ON_SLURM, f"runs_dir={tmp_path}"]
    before, now = (
        compose_job([*common, f"cluster.time={time}"]) for time in ("1:00:00", "2:00:00")
    )
    folder = RunFolder(before.run_dir)
    folder.plan(before, [])
    folder.plan(now, ["cluster.time=2:00:00"])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"
    folder.set_status("submitted")
    folder.plan(before, [])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"

    SlurmJobRecord("n.x", None, "5").write(folder.path)
    waiting = Jobs([Queued("5", "n.x", "PENDING", "Priority")])
    monkeypatch.setattr(state_module, "queued_jobs", lambda _: waiting)
    later = compose_job([*common, "cluster.time=4:00:00", "cluster.partition=fast"])
    assert submit_module.submit_one(later, folder, []) == 0
    words = "n: already submitted (pending) as job 5, 1 node x 1 rank, at most 2 GPU-hours"
    assert capsys.readouterr().out.splitlines()[0] == words


def most_at_once(arrays):
    """Return the maximum number of points that run at once, given SLURM's limits and dependencies."""
    chains = {}
    first = {}
    for index, array in enumerate(arrays):
        first[index] = index if array.after is None else first[array.after]
        running = min(array.at_once, len(array.points))
        chains[first[index]] = max(chains.get(first[index], 0), running)
    return sum(chains.values())


@pytest.mark.parametrize(("site", "lengths"), [("3", [3, 3, 1]), ("1001", [7]), ("0", [1] * 7)])
def test_arrays_are_as_long_as_the_site_allows(site, lengths, tmp_path, put, monkeypatch):
    put(scontrol=f"echo 'MaxArraySize            = {site}'")
    monkeypatch.setattr(run, "largest_array", queue.largest_array.__wrapped__)
    own = points(tmp_path, "training.seed=1,2,3,4,5,6,7")
    assert [len(array.points) for array in arrays_of(own, 100)] == lengths


def test_the_limit_holds_over_all_shapes(tmp_path):
    own = points(tmp_path, SHAPES, "training.seed=1,2,3")
    for limit in (1, 2, 3, 4, 5, 7, 12, 100):
        arrays = arrays_of(own, limit)
        assert [len(array.points) for array in arrays] == [3] * 4
        assert most_at_once(arrays) == min(limit, len(own))
        # Arrays wait for earlier ones only, and no two wait for the same one.
        before = [array.after for array in arrays if array.after is not None]
        assert len(set(before)) == len(before)
        assert all(array.after is None or array.after < index for index, array in enumerate(arrays))


def test_scripts_have_limits_and_dependencies(tmp_path, capsys):
    typed = (SHAPES, "training.seed=1,2,3", "cluster.dry_run=true")
    assert sweep(tmp_path, *typed, "cluster.max_running=6") == 0
    said = capsys.readouterr()
    assert sorted(re.findall("--array=(.*)", said.out)) == ["0-2%1"] * 2 + ["0-2%2"] * 2
    assert said.err.startswith(f"{tmp_path}/n: 12 points, 12 to run\n  3 x 1 node x 1 rank\n")
    assert "at most 45 GPU-hours" in said.err and not (tmp_path / "n").exists()
    own = "cluster.sbatch={dependency: 'afterok:7'}"
    assert sweep(tmp_path, *typed, "cluster.max_running=3", own) == 0
    scripts = capsys.readouterr().out
    assert re.findall("--array=(.*)", scripts) == ["0-2%1"] * 4
    dependencies = re.findall("--dependency=(.*)", scripts)
    assert dependencies == ["afterok:7"] * 3 + ["afterok:7,afterany:ID_OF_ARRAY_1"]
    axes = ("cluster.env.ALGO=Ring,Tree", "training.seed=1,2", "cluster.snapshot=true,false")
    assert sweep(tmp_path, *axes, "cluster.dry_run=true") == 0
    parts = capsys.readouterr().out.split("#!/bin/bash")[1:]
    assert all("--array=0-1%" in each for each in parts)
    found = sorted(("export ALGO=Ring" in each, "--code" in each) for each in parts)
    assert found == [(False, False), (False, True), (True, False), (True, True)]
