"""Exact resume: a stopped and resumed run is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from resumable_runs import SMALL, Outcome, train
from tiers import THOROUGH, rest_is_thorough

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.launch.pool import RankPool

STEPS, STOP = 10, 5


def job_of(tmp_path: Path, *overrides: str) -> Job:
    return compose_job([*SMALL, f"training.steps={STEPS}", f"runs_dir={tmp_path}", *overrides])


def run(pool: RankPool, job: Job, run_dir: Path, stop_after: int | None = None) -> list[Outcome]:
    run_dir.mkdir(parents=True, exist_ok=True)
    return pool.run(job.world_size, train, job.to_json(), str(run_dir), stop_after)


LAYOUTS = {
    "single": ["parallelism=single"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=4", "precision=bf16"],
    "fsdp_tp_pp": ["parallelism=fsdp_tp_pp", "parallelism.pp_microbatch_size=2", "model.n_layers=2"],
    "hsdp_bf16": ["parallelism=hsdp", "precision=bf16"],
    "cp": ["parallelism=cp"],
    "fsdp_ep_mtp": [
        *("model=deepseek_v3_debug", "model.attention.q_lora_rank=null", "model.mtp.depth=1"),
        *("parallelism=fsdp_ep", "model.n_layers=2"),
    ],
    # Weights that FSDP gathers in float8 are torchao tensors, and running means are in bfloat16.
    "fsdp_float8": [
        *("parallelism=fsdp", "precision=float8_tensorwise", "precision.emulate=true"),
        *("precision.enable_fsdp_float8_all_gather=true", "optimizer.state_dtype=bfloat16"),
        "precision.precompute_float8_dynamic_scale_for_fsdp=true",
    ],
    # A replica that sends no piece of a matrix has its momentum all the same: checkpoints may take it there.
    "hsdp_muon": ["parallelism=hsdp", "optimizer=muon"],
    "full_bf16_in_backward": [
        *("parallelism=fsdp_tp", "precision=bf16_full"),
        *("optimizer.in_backward=true", "training.max_norm=0"),
    ],
}


@pytest.fixture(scope="module")
def straight(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Outcome]]:
    """Results of every rank of a layout after all steps, without a stop and without checkpoints."""

    @cache
    def of(layout: str) -> list[Outcome]:
        tmp_path = tmp_path_factory.mktemp(layout)
        return run(pool, job_of(tmp_path, *LAYOUTS[layout], "checkpoint=disabled"), tmp_path)

    return of


MODES = [(layout, "sync") for layout in LAYOUTS if layout not in ("fsdp_tp_pp", "full_bf16_in_backward")]
MODES += [(layout, "async") for layout in ("fsdp", "fsdp_tp_pp", "full_bf16_in_backward")]
CORE = [("fsdp", "async"), ("fsdp_ep_mtp", "sync")]


@pytest.mark.parametrize("case", rest_is_thorough(MODES, *CORE), ids="-".join)
def test_stopped_and_resumed_is_bitwise_the_run_that_was_not(
    pool: RankPool, tmp_path: Path, straight: Callable[[str], list[Outcome]], case: tuple[str, str]
) -> None:
    layout, mode = case
    # A validated step is saved: validation leaves modules gathered unless the engine frees them.
    validating = ["validation.interval=1", "validation.steps=1"]
    job = job_of(tmp_path, *LAYOUTS[layout], *validating, f"checkpoint={mode}", "checkpoint.interval=4")
    first = run(pool, job, tmp_path, stop_after=STOP)
    second = run(pool, job, tmp_path)
    assert all(each.reason == "interrupted" for each in first)
    for whole, before, after in zip(straight(layout), first, second, strict=True):
        assert after.resumed_from is not None and after.resumed_from.endswith(f"step-{STOP}")
        assert sorted(after.losses) == list(range(STOP + 1, STEPS + 1))
        assert {**before.losses, **after.losses} == whole.losses
        assert {**before.norms, **after.norms} == whole.norms
        assert {**before.batches, **after.batches} == whole.batches
        assert after.state == whole.state
        assert after.facts["tokens"] == whole.facts["tokens"] == STEPS * 8 * 32
    names = {name for outcome in second for name in outcome.state}
    state = "momentum_buffer" if "muon" in layout else "exp_avg_sq"
    assert {"output.weight", f"optimizer.state.layers.1.attention.wo.weight.{state}", "rng"} <= names


def test_twice_resumed(pool: RankPool, tmp_path: Path, straight: Callable[[str], list[Outcome]]) -> None:
    """Trap 13: a second resume must not start the data over."""
    job = job_of(tmp_path, *LAYOUTS["fsdp"], "checkpoint.interval=3")
    parts = [run(pool, job, tmp_path, stop_after=stop) for stop in (5, 6, 13, None)]
    for rank, whole in enumerate(straight("fsdp")):
        joined: dict[int, str] = {}
        for part in parts:
            assert not joined.keys() & part[rank].batches.keys()
            joined |= part[rank].batches
        assert joined == whole.batches
        assert parts[-1][rank].state == whole.state


# Each layout resumes from the one before, so one run covers all consecutive pairs.
CHAIN = ["fsdp", "tp_pp", "single", "fsdp3", "cp_tp"]
if THOROUGH:
    CHAIN[3:3] = ["hsdp", "tp4", "pp4", "fsdp_offload", "hsdp_tp", "pp_zbv"]
EACH = 1  # steps
OVERRIDES = {
    "single": "parallelism=single",
    "fsdp": "parallelism=fsdp parallelism.dp_shard=4",
    "fsdp3": "parallelism=fsdp parallelism.dp_shard=3",
    "fsdp8": "parallelism=fsdp parallelism.dp_shard=8",
    "fsdp_offload": "parallelism=fsdp parallelism.dp_shard=2 parallelism.cpu_offload=true",
    "hsdp": "parallelism=hsdp",
    "tp4": "parallelism=tp parallelism.tp=4",
    "pp4": "parallelism=pp parallelism.pp=4 parallelism.pp_microbatch_size=6",
    "pp_zbv": "parallelism=pp parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatch_size=6",
    "tp_pp": "parallelism=tp_pp parallelism.pp_microbatch_size=4",
    "cp_tp": "parallelism=cp parallelism.tp=2",
    "hsdp_tp": "parallelism=hsdp_tp",
}
# A vocabulary that no degree divides (trap 14), and a batch divisible by 3 ranks.
ODD = ["model.vocab_size=251", "training.global_batch_size=24", f"training.steps={EACH * len(CHAIN)}"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def hops(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    """One run that changes its layout every few steps."""
    tmp_path = tmp_path_factory.mktemp("hops")
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    outcomes = []
    for number, name in enumerate(CHAIN, start=1):
        job = job_of(tmp_path, *ODD, *OVERRIDES[name].split(), shared)
        stop = number * EACH if number < len(CHAIN) else None
        outcomes.append(run(pool, job, tmp_path / str(number), stop_after=stop))
    return outcomes


@pytest.fixture(scope="module")
def uninterrupted(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    [outcome] = run(pool, job_of(tmp_path, *ODD, "checkpoint=disabled"), tmp_path)
    return outcome.losses


@pytest.mark.parametrize("hop", range(1, len(CHAIN)), ids=lambda hop: f"{CHAIN[hop - 1]}-{CHAIN[hop]}")
def test_resuming_on_another_layout_goes_on_with_the_same_curve(
    hops: list[list[Outcome]], uninterrupted: dict[int, float], hop: int
) -> None:
    for outcome in hops[hop]:
        assert outcome.resumed_from is not None and outcome.resumed_from.endswith(f"/step-{hop * EACH}")
        assert sorted(outcome.losses) == list(range(hop * EACH + 1, (hop + 1) * EACH + 1))
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(uninterrupted[step], rel=TOLERANCE)


EXPERT_CHAIN = {
    "fsdp_ep": "parallelism=fsdp_ep",
    "single": "parallelism=single",
    "fsdp_tp_ep": "parallelism=fsdp_tp_ep parallelism.ep=4",
    "tp_experts": "parallelism=tp parallelism.expert_tensor_parallel=true",
    "ep": "parallelism=ep",
}


@pytest.mark.parametrize("optimizer", rest_is_thorough(["adamw", "muon"], "muon"))
def test_resuming_on_another_degree_of_expert_parallel(
    pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """Experts, their optimizer states and the balancing biases move to other ranks."""
    common = [
        "model=deepseek_v3_debug",
        f"optimizer={optimizer}",
        f"training.steps={EACH * len(EXPERT_CHAIN)}",
    ]
    [whole] = run(pool, job_of(tmp_path, *common, "checkpoint=disabled"), tmp_path / "whole")
    common.append(f"checkpoint.folder={tmp_path / 'shared'}")
    for number, (name, overrides) in enumerate(EXPERT_CHAIN.items(), start=1):
        job = job_of(tmp_path, *common, *overrides.split())
        stop = number * EACH if number < len(EXPERT_CHAIN) else None
        for outcome in run(pool, job, tmp_path / name, stop_after=stop):
            assert sorted(outcome.losses) == list(range((number - 1) * EACH + 1, number * EACH + 1))
            for step, loss in outcome.losses.items():
                assert loss == pytest.approx(whole.losses[step], rel=TOLERANCE), name
    biases = {tensor: digest for tensor, digest in whole.state.items() if tensor.endswith("balance_bias")}
    assert len(biases) == 3
    assert biases.items() <= outcome.state.items()


STREAMS = [("fsdp", "fsdp"), ("fsdp", "tp_pp"), ("tp_pp", "fsdp"), ("tp_pp", "fsdp8")]


@pytest.mark.parametrize("case", rest_is_thorough(STREAMS, STREAMS[2]), ids="-".join)
def test_streams_go_on_where_they_were(pool: RankPool, tmp_path: Path, case: tuple[str, str]) -> None:
    """Every rank holds the positions of its own rows; the checkpoint holds those of all."""
    before, after = case
    (tmp_path / "corpus").mkdir()
    documents = [{"text": f"{number} " * (number % 17 + 3)} for number in range(400)]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    stream = ["data=c4", f"data.dataset={tmp_path / 'corpus'}", "data.subset=null", "model.vocab_size=258"]
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    common = [*stream, "data.mask_fraction=0", "training.steps=8"]
    [whole] = run(
        pool, job_of(tmp_path, *common, "data.workers=0", "checkpoint=disabled"), tmp_path / "whole"
    )
    jobs = [
        job_of(tmp_path, *common, *OVERRIDES[name].split(), shared, f"data.workers={workers}")
        for workers, name in enumerate((before, after))
    ]
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
