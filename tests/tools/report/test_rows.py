"""Rows of all kinds of run folders: loaded, named, drawn, and kept when the runs are deleted."""

import json
import shlex
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from gpu_cases import report_rows
from made import DEVICE, leave_run, make_sweep, rate_of, result

from harness.compose.composer import compose_job
from harness.launch.listing import rows_of, table_of
from harness.launch.rows import (
    KEPT,
    job_of,
    keep,
    load,
    of_points,
    of_tensors,
    read_kept,
    shortened,
)
from harness.launch.state import SlurmJobRecord, read_states
from harness.launch.sweep.folder import SweepFolder, command_of
from harness.metrics.slow_ranks import SlowRank
from harness.metrics.window import THROUGHPUT, Window
from harness.run.result import write_result
from harness.tools.report.listing import list_runs
from harness.tools.report.runs import report_runs
from harness.tools.report.verb import report
from harness.util.document import to_markdown
from harness.util.errors import UserError
from harness.util.tables import Table, to_text

RATE = "tokens_per_second_per_rank"


def test_a_sweep_is_rows_of_all_its_points(tmp_path):
    folder = make_sweep(
        tmp_path, failing=lambda job: job.parallelism.tp == 2 and job.parallelism.pp == 2
    )
    rows = load(folder)
    assert [(row["point"], row["state"]) for row in rows] == [
        ("tp=1 pp=1", "completed"),
        ("tp=1 pp=2", "completed"),
        ("tp=2 pp=1", "completed"),
        ("tp=2 pp=2", "failed"),
        ("tp=3 pp=1", "skipped"),
        ("tp=3 pp=2", "skipped"),
    ]
    assert not any("runs_dir" in each for row in rows[:4] for each in row["overrides"])
    for row in rows[:3]:
        job = job_of(row)
        assert job is not None and job.id == row["id"]
        assert row["measured.tokens_per_second_per_rank"] == pytest.approx(rate_of(job))
        assert row["measured.spread"] == pytest.approx(0.04)
        assert row["measured.memory_gib"] == 3.25
        flops = rate_of(job) * row["flops_per_token_full"] / 989.4e12
        assert row["measured.mfu"] == pytest.approx(flops)
        typed = shlex.split(row["command"])
        assert typed[:2] == ["harness", "train"] and compose_job(typed[2:]).id == row["id"]
    assert (rows[3]["kind"], rows[3]["reason"]) == (
        "out_of_memory",
        "rank 3: Tried to allocate 2 GiB",
    )
    assert not any(key.startswith("measured.") for key in rows[3])
    assert "parallelism.dp_shard=-1" in rows[4]["reason"] and job_of(rows[4]) is None


def test_slow_ranks_are_named_in_status_rows_and_report(tmp_path):
    folder = make_sweep(tmp_path)
    [run, *_] = sorted(path for path in folder.iterdir() if path.is_dir())
    slow = SlowRank(3, "node7", "H100 3", "forward", 0.31, 17)
    (run / "slow_ranks.json").write_text(json.dumps({"slow": [asdict(slow)]}))
    said = (
        "rank 3 (node7, H100 3) computes 31% longer than the other ranks, most in "
        "forward; found in step 17"
    )
    points = list_runs(folder).data["runs"]
    assert [point["slow"] for point in points if "slow" in point] == [[asdict(slow)]]
    assert f"slow: {said[:60]}" in list_runs(folder).text
    rows = load(folder)
    assert [row["slow"] for row in rows if "slow" in row] == [said]
    assert f"| {said} |" in to_markdown(*report_runs("made", rows).blocks)
    assert "slow" not in read_kept(keep(tmp_path, rows).parent)[0]


def test_names_are_no_html(tmp_path):
    bad = "<script>alert(1)</script>"
    made = make_sweep(tmp_path)
    rows = [{**row, "point": f"{row['point']} {bad}", "reason": bad} for row in load(made)]
    folder = made.rename(tmp_path / "a <img src=x>")
    report(folder)
    report_runs(bad, rows).write(tmp_path, "made.md", "made.csv", "made.html")
    for text in ((tmp_path / "made.md").read_text(), (folder / "report" / "tables.md").read_text()):
        assert "&lt;" in text and "<script" not in text and "</" not in text and "<img" not in text


def test_the_folder_of_a_run_on_slurm_is_one_run(tmp_path):
    """``slurm/job.json`` is not a job of the harness."""
    folder = make_sweep(tmp_path)
    (folder / "sweep.jsonl").unlink()
    [run, *_] = sorted(path for path in folder.iterdir() if path.is_dir())
    shutil.copytree(run, run / "attempts" / "1")
    SlurmJobRecord("x", None, "5").write(run)
    for where, count in ((folder, 4), (tmp_path, 4)):
        assert len(load(where)) == count
    [row] = load(run)
    assert row["id"] == run.name and row["measured.tokens_per_second_per_rank"] > 0
    # A name may be a path.
    shutil.copytree(folder, tmp_path / "group" / "of" / "runs")
    assert len(load(tmp_path)) == 8


def test_every_table_ranks_points_by_the_same_rate(tmp_path):
    """One slow step: the mean is 1018, 509 per rank; steps range from 262 to 1289, not below zero."""
    folder = make_sweep(tmp_path)
    window = Window(warmup_steps=0)
    for seconds in (2.0, 2.1, 2.2, 2.4, 30.0):
        window.add(seconds, 4096)
    [first, *_] = SweepFolder(folder).points()
    world = first.job.world_size
    row = {**result(first.job, 1.0), "window": window.summary()}
    write_result(first.run_dir, row)
    [own] = [each for each in load(folder) if each.get("id") == first.id]
    assert own["measured.tokens_per_second_per_rank"] == pytest.approx(5 * 4096 / 38.7 / world)
    assert own["measured.low"] == pytest.approx(row["window"]["tokens_per_second_p10"] / world)
    assert own["measured.high"] == pytest.approx(row["window"]["tokens_per_second_p90"] / world)
    points = SweepFolder(folder).points()
    seen = read_states([point.run_dir for point in points])
    of_sweep = {each.run_dir.name: (each.facts or {})[RATE] for each in seen}
    assert {each["id"]: each[f"measured.{RATE}"] for each in of_points(points)} == of_sweep
    table = table_of(rows_of(points, seen))
    shown = dict(zip((each.heading for each in table.shown), table.cells()[0], strict=True))
    assert shown["tokens/s"] == f"{5 * 4096 / 38.7:,.0f}"
    assert shown["tokens/s/rank"] == f"{5 * 4096 / 38.7 / world:,.1f}"
    assert to_text(table).endswith(f"{THROUGHPUT}\n")


def test_a_run_that_has_not_ended_has_no_measurement(tmp_path):
    folder = make_sweep(tmp_path)
    (folder / "sweep.jsonl").unlink()
    [run, *_] = sorted(path for path in folder.iterdir() if path.is_dir())
    (run / "status.json").write_text(json.dumps({"state": "interrupted"}))
    [row] = load(run)
    assert row["state"] == "stopped"
    assert "measured.memory_gib" not in row


def test_kept_rows_are_the_rows(tmp_path):
    rows = load(make_sweep(tmp_path / "runs"))
    keep(tmp_path, [{**row, "predicted.mfu": 0.5, "delta.mfu": 0.1} for row in rows])
    again = load(tmp_path)
    assert [row["point"] for row in again] == [row["point"] for row in rows]
    for row, kept in zip(rows, again, strict=True):
        assert job_of(kept) is None or job_of(kept).id == row["id"]
        for key in (
            "measured.tokens_per_second_per_rank",
            "code.commit",
            "device",
            "command",
            "state",
        ):
            assert kept.get(key) == row.get(key)
    text = (tmp_path / KEPT).read_text()
    # Neither the machine's name nor its folders.
    assert "somewhere" not in text and str(tmp_path) not in text
    assert "predicted" not in text


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / KEPT).write_text('{"point": "a", "state": "completed"}\n{"point": \n')
    with pytest.raises(UserError, match=r"results.jsonl: line 2 is not a JSON"):
        load(tmp_path)
    (tmp_path / KEPT).write_text('{"point": "a"}\n')
    with pytest.raises(
        UserError, match=r"results.jsonl: line 1 is not a row of a run: state is missing"
    ):
        load(tmp_path)


def test_gpu_single_is_rows_by_case(tmp_path):
    """Medians over rounds; the smaller model counts if the larger one did not fit."""
    typed = (
        "model=llama3_8b precision=bf16 compile=on cluster.device=cuda data=synthetic "
        "tokenizer=bytes training.global_batch_size=1 training.seq_len=8192"
    )
    common = {"shape": "8B", "activation_checkpoint": "full", "mode": "bf16_compile"}
    common |= {"overrides": typed.split(), "side": "harness", "n_layers": 10, "round": 0}
    run = {**common, "memory_gib": 70.0, "step_seconds": 1.0, "mfu": 0.5}
    rows = [{**common, "n_layers": 20, "failed": "out_of_memory", "message": "no"}]
    for number, rate in enumerate((1000.0, 1200.0, 1100.0)):
        rows.append({**run, "round": number, "tokens_per_second": rate})
        rows.append({**rows[-1], "side": "torchtitan", "tokens_per_second": rate - 100})
    rows.append({**common, "mode": "bf16", "failed": "bug"})
    facts = {"device": DEVICE, "versions": {"torch": "2.x"}, "commit": "0123", "dirty": False}
    keep(tmp_path, report_rows(facts, rows))
    compiled, eager = load(tmp_path)
    assert compiled["point"] == "8B 10 layers bf16_compile full"
    assert compiled["measured.tokens_per_second_per_rank"] == 1100.0
    assert compiled["measured.spread"] == pytest.approx(200 / 1100)
    assert compiled["torchtitan.tokens_per_second_per_rank"] == 1000.0
    job = job_of(compiled)
    assert job is not None and job.cluster.accelerator == "H100 SXM" and job.compile.enable
    assert (eager["state"], eager["kind"]) == ("failed", "bug")


def test_names_and_commands():
    assert (
        shortened("parallelism.tp=2 optimizer.lr=1.5e-3 model=llama3_8b")
        == "tp=2 lr=1.5e-3 model=llama3_8b"
    )
    assert command_of(["a=[1,2]", "b=3"]) == "harness train 'a=[1,2]' b=3"
    nested = ["cluster.setup=['echo \"a b\"']", "name='a b'", "cluster.env.A=`x`!"]
    assert shlex.split(command_of(nested))[2:] == nested


def test_the_job_of_a_row_is_the_job(tmp_path):
    job = compose_job(
        ["cluster=slurm", "cluster.env.A=b", "cluster.sbatch.reservation=x", "data.prefetch=3"]
    )
    from harness.util.encoding import flatten

    assert job_of(flatten(result(job, 1.0))) == job


def test_runs_are_named_by_the_overrides_that_differ(tmp_path):
    for rate in ("1e-3", "2e-3"):
        leave_run(tmp_path, "model=llama3_tiny", "training.seed=3", f"optimizer.lr={rate}")
    assert sorted(row["point"] for row in load(tmp_path)) == ["lr=1e-3", "lr=2e-3"]


def test_equal_jobs_of_different_names_are_shown_by_name(tmp_path):
    for name in ("one", "two"):
        leave_run(tmp_path, f"name={name}", "model=llama3_tiny")
    assert [row["point"] for row in load(tmp_path)] == ["name=one", "name=two"]


def test_differing_models_are_summarized(tmp_path):
    for model in ("llama3_tiny", "llama4_debug", "deepseek_v3_debug"):
        leave_run(tmp_path / "runs", f"model={model}", "training.seq_len=32")
    rows = load(tmp_path / "runs")
    models = ("deepseek_v3_debug", "llama3_tiny", "llama4_debug")
    assert sorted(row["point"] for row in rows) == [f"model={model}" for model in models]
    table = report_runs("t", rows).blocks[0]
    assert isinstance(table, Table)
    text = table.notes[0]
    assert text.startswith("The numerics of runs differ (model.") and len(text) < 200


def test_numbers_of_tensors_are_rows(tmp_path):
    header = {"values": ["gradient", "weight"], "names": ["head", "tail"], "sizes": [6, 2]}
    (tmp_path / "tensors.json").write_text(json.dumps(header))
    record = [("step", "<i8"), ("data", "<f4", (2, 2))]
    numbers = [(step, [[0.5, step], [2.0, 3.0]]) for step in (1, 5)]
    np.array(numbers, record).tofile(tmp_path / "tensors.bin")
    assert of_tensors(tmp_path) == [
        {"step": 1, "tensor": "head", "gradient": 0.5, "weight": 2.0},
        {"step": 1, "tensor": "tail", "gradient": 1.0, "weight": 3.0},
        {"step": 5, "tensor": "head", "gradient": 0.5, "weight": 2.0},
        {"step": 5, "tensor": "tail", "gradient": 5.0, "weight": 3.0},
    ]
