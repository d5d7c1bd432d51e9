"""Runs of a comparison: one for each technique and seed; the impossible is skipped with a reason."""

from cases import words

from harness.compose.composer import compose_job
from harness.tools.study.techniques import ConvergeJob, compose_techniques

DENSE = ("experiment=convergence/dense", "converge.seeds=[1,7]")


def composed(*overrides):
    job = compose_job([*DENSE, *overrides], config_name="converge", schema=ConvergeJob)
    job.converge.validate(job)
    return {each.name: each for each in compose_techniques(job, [*DENSE, *overrides])}


def test_every_known_technique_runs_on_a_cpu_or_says_why_not():
    techniques = composed()
    skipped = {name for name, each in techniques.items() if each.skipped}
    hardware = {"float8_tensorwise", "float8_rowwise", "float8_rowwise_hp", "mxfp8"}
    assert skipped == {"async_tp", "autotuned", "flash3", "symmetric_memory", *hardware}
    assert "needs GPUs with symmetric memory" in techniques["async_tp"].skipped
    assert len(techniques) - len(skipped) > 25
    # The control and layouts compute the same numbers; precisions do not.
    other = {name for name, each in techniques.items() if each.runs and not each.has_same_numerics}
    assert other == {"bf16", "bf16_full", "state_8bit", *(f"{name}_emulated" for name in hardware)}


def test_runs_are_paired_by_seed():
    techniques = composed("converge.only=[fsdp]", "training.steps=50")
    assert list(techniques) == ["control", "fsdp"]
    for each in techniques.values():
        assert {seed: run.job.training.seed for seed, run in each.runs.items()} == {1: 1, 7: 7}
        assert all(run.job.training.steps == 50 for run in each.runs.values())
    assert len({run.job.run_dir for each in techniques.values() for run in each.runs.values()}) == 4
    assert techniques["fsdp"].runs[7].overrides == words("""
        experiment=convergence/dense training.steps=50 parallelism=fsdp parallelism.dp_shard=2
        training.seed=7
    """)


def test_experts_have_further_techniques():
    experts = ("experiment=convergence/experts", "converge.only=[ep,fsdp_ep]")
    assert composed(*experts)["ep"].runs[7].job.parallelism.ep == 2


def test_a_job_is_compared_once():
    again = "converge.techniques.again='parallelism=fsdp parallelism.dp_shard=2 tags=[b]'"
    techniques = composed("precision=bf16", again, "converge.only=[bf16,fsdp,again]")
    assert techniques["fsdp"].runs[7].job.precision.param_dtype == "bfloat16"
    assert techniques["bf16"].skipped == "the same job as control"
    assert techniques["again"].skipped == "the same job as fsdp"


def test_world_size_limits_the_ranks():
    techniques = composed("converge.world_size=4", "converge.only=[hsdp,fsdp_tp_pp]")
    assert not techniques["hsdp"].skipped
    assert techniques["fsdp_tp_pp"].skipped == "8 ranks, converge.world_size=4"


def test_an_invalid_technique_is_skipped_with_its_error():
    skipped = composed("converge.techniques.wide='parallelism.tp=3'", "converge.only=[wide,fsdp]")[
        "wide"
    ]
    assert not skipped.runs
    assert skipped.skipped.startswith("parallelism.tp=3: must divide")
