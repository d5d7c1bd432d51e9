"""The layouts with which a job goes on when it loses nodes."""

import pytest
from cases import words

from harness.compose.composer import Composer, compose_job
from harness.compose.resolve import resolve
from harness.config.fields import with_value
from harness.launch.layouts import prepare, read_layouts
from harness.tools.parity.parity import ParityJob
from harness.tools.parity.random_jobs import random_job
from harness.tools.plan.layouts import find_layouts, layouts_as_dict
from harness.tools.plan.make import make_plan
from harness.util.errors import UserError

CONTINUE = "cluster.on_node_loss=continue"
NODES = [
    *words("""
    model=llama3_debug precision=bf16 training.seq_len=2048 training.global_batch_size=48
    cluster=slurm_h100 cluster.nodes=4 cluster.ranks_per_node=2
"""),
    CONTINUE,
]


def require_same_numerics(job, layouts):
    """Whether every layout is legal and computes what the job computes; or there is a reason."""
    for layout in layouts:
        if layout.job is None:
            assert layout.reason
            continue
        assert layout.job.numerics_id == job.numerics_id
        assert layout.job.global_batch_size == job.global_batch_size
        _, ranks = job.cluster.nodes_to_lose(job.world_size)
        assert layout.job.world_size == layout.nodes * ranks
        lone = with_value(layout.job, "cluster.on_node_loss", "requeue")
        lone = with_value(lone, "cluster.min_nodes", None)
        assert resolve(lone) == lone
        assert make_plan(layout.job).fits is not False


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallelism=fsdp"],
        ["parallelism.dp_shard=-1", "parallelism.tp=2"],
        ["parallelism.dp_shard=-1", "parallelism.pp=2"],
        ["model=qwen3_moe_debug", "parallelism.dp_shard=-1", "parallelism.ep=2"],
    ],
)
def test_fewer_nodes_compute_the_same(overrides):
    job = compose_job([*NODES, *overrides])
    layouts = find_layouts(job)
    assert [layout.nodes for layout in layouts] == [3, 2]
    require_same_numerics(job, layouts)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(210), marks=pytest.mark.thorough, id="thorough")]
)
def test_random_jobs_go_on_with_the_same_batch(seeds):
    """On every number of ranks down to one."""
    composer = Composer("parity", ParityJob)
    found = []
    for seed in seeds:
        _, job = random_job(composer, seed, 8, [])
        job = with_value(job.plain, "cluster.min_nodes", 1)
        if job.world_size > 1:
            layouts = find_layouts(job)
            assert [layout.nodes for layout in layouts] == list(range(job.world_size - 1, 0, -1))
            require_same_numerics(job, layouts)
            found += layouts
    without = sum(layout.job is None for layout in found)
    # docs/measurements.md has the figures.
    assert len(found) > 3 * len(seeds) and without < len(found) / 10, (len(found), without)


def test_degrees_that_fewer_ranks_cannot_have_are_searched():
    """Six ranks are no multiple of eight pipeline ranks."""
    whole = ["parallelism=pp", "parallelism.pp=8", "model.n_layers=8"]
    [three, _] = find_layouts(compose_job([*NODES, *whole]))
    assert three.job is not None
    assert three.job.parallelism.pp != 8


def test_a_model_too_large_for_fewer_nodes_has_a_reason():
    large = ["model=llama3_405b", "parallelism=fsdp", "training.seq_len=512"]
    [row, _] = layouts_as_dict(find_layouts(compose_job([*NODES, *large])))
    assert row["layout"] is None
    assert "GiB too large" in row["reason"]


def test_layouts_are_kept_in_the_run_folder(tmp_path):
    job = compose_job(
        ["parallelism=fsdp", "parallelism.dp_shard=4", "cluster.min_nodes=1", CONTINUE]
    )
    prepare(job, tmp_path)
    assert list(read_layouts(tmp_path).values()) == find_layouts(job)


def test_a_damaged_file_of_layouts_is_one_line(tmp_path):
    (tmp_path / "layouts.json").write_text("{}")
    with pytest.raises(UserError, match=r"layouts\.json: damaged"):
        read_layouts(tmp_path)
