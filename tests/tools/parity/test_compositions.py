"""Random valid jobs, each compared with one process; and how they are sampled."""

from functools import cache
from unittest import mock

import pytest
from layouts import require_agreement
from planted import PlantedPool, router_gradients_too_large

from harness.compose.composer import Composer
from harness.config.fields import NUMERICS, leaves
from harness.tools.parity import random_jobs as compositions
from harness.tools.parity.formats import lowest_format
from harness.tools.parity.parity import (
    LayoutComparer,
    ParityConfig,
    ParityJob,
    comparisons,
)
from harness.tools.parity.random_jobs import random_job
from harness.util.errors import UserError

QUICK, COVERING, ALL = (0, 1, 4), range(12), range(200)
RANKS = 4
STEPS = 2


@cache
def sampled(seed, *fixed):
    composer = Composer("parity", ParityJob)
    overrides, job = random_job(composer, seed, RANKS, fixed)
    return overrides, job.plain


@pytest.fixture(scope="module")
def judge(pool):
    return LayoutComparer(pool, ParityConfig(steps=STEPS))


@pytest.mark.parametrize(
    "seed",
    [
        *QUICK,
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ALL if each not in QUICK),
    ],
)
def test_a_random_job_computes_what_one_process_computes(judge, seed):
    overrides, job = sampled(seed)
    verdict = judge.verdict(f"parity.seed={seed}", job)
    require_agreement(verdict, " ".join(overrides))


@pytest.mark.parametrize(
    ("seed", "typed"),
    [
        (300, "model=qwen3_moe_debug optimizer=muon precision=bf16 schedule.warmup_steps=0"),
        (0, "experiment=flux_debug"),
    ],
)
def test_random_jobs_of_a_typed_part(judge, seed, typed):
    """The fields that are sampled fit what is typed, and right layouts agree."""
    overrides, job = sampled(seed, *typed.split())
    require_agreement(judge.verdict(typed, job), " ".join(overrides))


LOW = [
    "precision=bf16_full optimizer=muon model=qwen3_moe_debug optimizer.momentum=0.9 optimizer.beta2=0.99",
    *("precision=bf16", "precision.reduce_dtype=bfloat16", "optimizer.state_dtype=bfloat16"),
    "optimizer=muon optimizer.newton_schulz_dtype=bfloat16",
]


@pytest.mark.parametrize("typed", LOW)
def test_the_job_in_float32_has_no_other_format(typed):
    """Also none that was derived from the precision when the job was resolved."""
    composer = Composer("parity", ParityJob)
    job = composer.job(typed.split()).plain
    exact, own = comparisons(job)

    def rounding(job):
        found = [
            name for name, role, value in leaves(job) if role == NUMERICS and value == "bfloat16"
        ]
        return [name for name in found if not name.startswith("data.")]

    assert rounding(own) == rounding(job) != []
    assert rounding(exact) == []
    assert (lowest_format(own), lowest_format(exact)) == ("bfloat16", "float32")


@pytest.mark.thorough
def test_one_process_may_be_the_less_exact_one(pool):
    """Seed 150 of eight ranks: the embedding's gradient in bfloat16, summed over all rows at once."""
    composer = Composer("parity", ParityJob)
    _, job = random_job(composer, 150, 8, ())
    judge = LayoutComparer(pool, ParityConfig(steps=STEPS))
    require_agreement(judge.verdict("parity.seed=150", job.plain))


def test_typed_overrides_are_not_sampled():
    typed = ["model=qwen3_debug", "parallelism.tp=2", "training.seq_len=16"]
    for seed in range(2):
        overrides, job = sampled(seed, *typed)
        assert (job.model.name, job.parallelism.tp, job.training.seq_len) == ("qwen3_debug", 2, 16)
        assert len({override.partition("=")[0] for override in overrides}) == len(overrides)


def test_no_valid_sample_is_a_one_line_error():
    says = r"parity\.seed=0: none of 9 samples is valid; .*model\.n_kv_heads=3"
    with mock.patch.object(compositions, "SAMPLES", 9), pytest.raises(UserError, match=says):
        sampled(0, "model=llama3_tiny", "model.n_kv_heads=3")


def test_samples_cover_every_axis():
    jobs = [sampled(seed)[1] for seed in COVERING]
    layouts = [job.parallelism for job in jobs]
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert any(getattr(layout, axis) > 1 for layout in layouts), axis
    assert {job.precision.param_dtype for job in jobs} == {"float32", "bfloat16"}
    assert {job.model.moe.enabled for job in jobs} == {True, False}
    assert {job.data.kind for job in jobs} == {"synthetic", "local"}
    assert len({job.activation_checkpoint.mode for job in jobs}) > 2
    assert any(job.compile.enable for job in jobs)
    assert {len(job.sizes.lengths) for job in jobs} == {1, 2}
    assert any(job.schedule.batch_size for job in jobs)
    assert any(job.empty_in_words for job in jobs)


def test_a_wrong_gradient_of_a_router_in_bfloat16_is_noticed(judge):
    typed = [
        "model=qwen3_moe_debug",
        "parallelism.dp_shard=2",
        "parallelism.ep=2",
        "precision=bf16",
    ]
    typed += ["training.seq_len=32", "training.global_batch_size=4", "model.moe.aux_loss_coeff=0"]
    composer = Composer("parity", ParityJob)
    job = composer.job(typed).plain
    exact, in_turn = comparisons(job)
    assert (exact.precision.param_dtype, exact.model.moe.force_balance) == ("float32", False)
    assert (in_turn.precision.param_dtype, in_turn.model.moe.force_balance) == ("bfloat16", True)
    require_agreement(judge.verdict("ep", job))
    wrong = LayoutComparer(PlantedPool(judge.pool, router_gradients_too_large), judge.config)
    with mock.patch("harness.tools.parity.parity.comparisons", lambda job: [in_turn]):
        verdict = wrong.verdict("ep", job)
    assert not verdict.passed
    assert "router" in verdict.worst_parameter
    assert "gradient of layers.3.moe.router.weight" in verdict.first_wrong
