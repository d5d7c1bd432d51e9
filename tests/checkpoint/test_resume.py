"""Exact resume: a run that was stopped and resumed is, bit by bit, the run that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resumable_runs import SMALL, Outcome, train

from harness.cluster.pool import RankPool
from harness.compose import compose_job
from harness.job import Job


def job_of(tmp_path: Path, *overrides: str) -> Job:
    return compose_job([*SMALL, "training.steps=20", f"runs_dir={tmp_path}", *overrides])


def run(pool: RankPool, job: Job, run_dir: Path, stop_after: int | None = None) -> list[Outcome]:
    run_dir.mkdir(parents=True, exist_ok=True)
    return pool.run(job.world_size, train, job.to_json(), str(run_dir), stop_after)


LAYOUTS = {
    "single": ["parallelism=single"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=4"],
    "fsdp_tp_pp": ["parallelism=fsdp_tp_pp"],
    "async_fsdp": ["parallelism=fsdp", "parallelism.dp_shard=4", "checkpoint=async"],
    "async_fsdp_tp_pp": ["parallelism=fsdp_tp_pp", "checkpoint=async"],
    "hsdp_bf16": ["parallelism=hsdp", "precision=bf16"],
    "pp_zbv": ["parallelism=pp", "parallelism.pp_schedule=ZBVZeroBubble"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_and_resumed_is_bitwise_the_run_that_was_not(
    pool: RankPool, tmp_path: Path, layout: str
) -> None:
    job = job_of(tmp_path, *LAYOUTS[layout], "checkpoint.interval=4")
    whole = run(pool, job, tmp_path / "whole")
    first = run(pool, job, tmp_path / "parts", stop_after=10)
    second = run(pool, job, tmp_path / "parts")
    assert all(each.reason == "interrupted" for each in first)
    for straight, before, after in zip(whole, first, second, strict=True):
        assert after.resumed_from is not None and after.resumed_from.endswith("step-10")
        assert sorted(after.losses) == list(range(11, 21))
        assert {**before.losses, **after.losses} == straight.losses
        assert {**before.norms, **after.norms} == straight.norms
        assert {**before.batches, **after.batches} == straight.batches
        assert after.state == straight.state
        assert any(name.startswith("optimizer.state.layers.") for name in after.state) or layout != "single"
        assert after.facts["tokens"] == straight.facts["tokens"] == 20 * 8 * 32


def test_twice_resumed(pool: RankPool, tmp_path: Path) -> None:
    """Trap 13: a second resume must not start the data over."""
    job = job_of(tmp_path, *LAYOUTS["fsdp"], "checkpoint.interval=3")
    whole = run(pool, job, tmp_path / "whole")
    parts = [run(pool, job, tmp_path / "parts", stop_after=stop) for stop in (5, 6, 13, None)]
    for rank, straight in enumerate(whole):
        joined: dict[int, str] = {}
        for part in parts:
            assert not joined.keys() & part[rank].batches.keys()
            joined |= part[rank].batches
        assert joined == straight.batches
        assert parts[-1][rank].state == straight.state


PAIRS = [
    ("fsdp", "tp_pp"),
    ("tp_pp", "fsdp"),
    ("fsdp", "single"),
    ("single", "fsdp_tp_pp"),
    ("fsdp_tp_pp", "hsdp"),
    ("hsdp", "fsdp_tp"),
    ("fsdp_tp", "ddp"),
    ("ddp", "pp_zbv"),
    ("pp_zbv", "tp4"),
    ("tp4", "fsdp8"),
    ("fsdp8", "fsdp3"),
    ("fsdp3", "pp4"),
    ("pp4", "fsdp_pp"),
    ("fsdp_pp", "fsdp_offload"),
    ("fsdp_offload", "hsdp_tp"),
    ("hsdp_tp", "single"),
]
OVERRIDES = {
    "single": "parallelism=single",
    "ddp": "parallelism=ddp parallelism.dp_replicate=2",
    "fsdp": "parallelism=fsdp parallelism.dp_shard=4",
    "fsdp3": "parallelism=fsdp parallelism.dp_shard=3",
    "fsdp8": "parallelism=fsdp parallelism.dp_shard=8",
    "fsdp_offload": "parallelism=fsdp parallelism.dp_shard=2 parallelism.cpu_offload=true",
    "hsdp": "parallelism=hsdp",
    "tp4": "parallelism=tp parallelism.tp=4",
    "pp4": "parallelism=pp parallelism.pp=4",
    "pp_zbv": "parallelism=pp parallelism.pp_schedule=ZBVZeroBubble",
    "tp_pp": "parallelism=tp_pp",
    "fsdp_tp": "parallelism=fsdp_tp",
    "fsdp_pp": "parallelism=fsdp_pp",
    "hsdp_tp": "parallelism=hsdp_tp",
    "fsdp_tp_pp": "parallelism=fsdp_tp_pp",
}
# A vocabulary that no degree divides (trap 14), and a batch that 3 ranks share.
ODD = ["model.vocab_size=251", "training.global_batch_size=24", "training.steps=12"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def uninterrupted(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    [outcome] = run(pool, job_of(tmp_path, *ODD, "checkpoint=disabled"), tmp_path)
    return outcome.losses


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resuming_on_another_layout_goes_on_with_the_same_curve(
    pool: RankPool, tmp_path: Path, uninterrupted: dict[int, float], before: str, after: str
) -> None:
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    jobs = [job_of(tmp_path, *ODD, *OVERRIDES[name].split(), shared) for name in (before, after)]
    run(pool, jobs[0], tmp_path / "before", stop_after=6)
    outcomes = run(pool, jobs[1], tmp_path / "after")
    for outcome in outcomes:
        assert outcome.resumed_from == f"{tmp_path / 'shared'}/step-6"
        assert sorted(outcome.losses) == list(range(7, 13))
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(uninterrupted[step], rel=TOLERANCE)


@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("fsdp", "tp_pp"), ("tp_pp", "fsdp8")])
def test_streams_go_on_where_they_were(pool: RankPool, tmp_path: Path, before: str, after: str) -> None:
    """Every rank holds the positions of its own rows; the checkpoint holds those of all."""
    (tmp_path / "corpus").mkdir()
    documents = [{"text": f"{number} " * (number % 17 + 3)} for number in range(400)]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    stream = ["data=c4", f"data.dataset={tmp_path / 'corpus'}", "data.subset=null", "model.vocab_size=258"]
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    common = [*stream, "data.mask_fraction=0", "training.steps=8"]
    [whole] = run(pool, job_of(tmp_path, *common, "checkpoint=disabled"), tmp_path / "whole")
    jobs = [job_of(tmp_path, *common, *OVERRIDES[name].split(), shared) for name in (before, after)]
    first = run(pool, jobs[0], tmp_path / "before", stop_after=3)
    second = run(pool, jobs[1], tmp_path / "after")
    for outcome in (*first, *second):
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(whole.losses[step], rel=TOLERANCE)
    assert sorted(second[0].losses) == [4, 5, 6, 7, 8]


def test_a_manifest_says_what_was_written(pool: RankPool, tmp_path: Path) -> None:
    job = job_of(tmp_path, *LAYOUTS["fsdp"], "training.steps=2")
    run(pool, job, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 2 and manifest["holds"] == "full" and manifest["world_size"] == 4
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert Job.from_json(json.dumps(manifest["job"])).numerics_id == job.numerics_id
