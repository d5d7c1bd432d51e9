"""Shapes and placements of models of every kind, at realistic numbers of ranks, without values.

One process acts as a rank of a world of up to 2048, with torch's fake process group, which sends nothing. The
model stays on the meta device. Expected values are computed from the model's configuration and the degrees,
not from the layout code.
"""

import re
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from fake_world import fake_process_group
from torch.distributed.tensor import DTensor

from harness.compose.composer import compose_job
from harness.model.accounting import account
from harness.model.spec import parameter_shapes
from harness.parallelism.materialize import local_ranges
from harness.parallelism.mesh import build_mesh
from harness.parallelism.parallelize import build_on_meta

CPU = torch.device("cpu")
ALL_KINDS = (
    4  # this many blocks include every kind of block: DeepSeek-V3 begins with three dense ones
)
# A model and its degrees: every kind of tensor, split by every axis.
CASES = [
    "llama3_8b dp_replicate=8 dp_shard=8",
    "llama3_8b dp_shard=8 tp=8 pp=4 pp_schedule=Interleaved1F1B",
    "llama32_1b dp_shard=8 tp=8",
    "qwen2_7b dp_shard=8 tp=4 pp=2",
    "qwen3_0p6b dp_shard=8 tp=4",
    "mixtral_8x7b dp_shard=8 tp=4 pp=4 ep=8",
    "qwen3_30b_a3b dp_shard=64 tp=4 expert_tensor_parallel=true",
    "deepseek_v2_lite_16b dp_shard=8 pp=4 ep=8",
    "deepseek_v3_671b dp_shard=16 cp=8 pp=16 ep=64",
    "deepseek_v3_671b dp_replicate=2 dp_shard=256 tp=4 ep=256",
    "gpt_oss_120b dp_shard=16 tp=8 pp=4 ep=16 expert_tensor_parallel=true",
    "qwen3_next_80b_a3b dp_shard=16 tp=2 cp=4 pp=4 ep=32",
    "kimi_linear_48b_a3b dp_shard=16 tp=2 cp=4 pp=4 ep=32",
    "llama4_maverick dp_shard=32 tp=8 ep=32 expert_tensor_parallel=true",
    "flux_dev dp_shard=16 tp=4 cp=2 cp_method=ulysses data=latents_synthetic training.seq_len=1536",
]
# Not split by tensor parallel: norms, latents and their projections, biases added after a reduction, and what
# embeds the inputs of Flux.
REPLICATED = re.compile(
    r".*(norm|w[qza]_a|wkv_a|router|shared_experts\.gate)\.weight|.*(router|wo|mlp\.w2)\.bias|(img|txt|time|vector|guidance)_in\..*"
)


def composed(case):
    """Compose a job of a layout for a cluster, with enough microbatches for its pipeline."""
    model, *words = case.split()
    by_axis = dict(word.split("=") for word in words)
    data_parallel = int(by_axis.get("dp_shard", 1)) * int(by_axis.get("dp_replicate", 1))
    batch = int(by_axis.get("pp", 1))
    return compose_job(
        [
            *(f"model={model}", "cluster=slurm_h100", "precision=bf16", "training.seq_len=2048"),
            *(
                f"training.local_batch_size={batch}",
                f"training.global_batch_size={batch * data_parallel}",
            ),
            *(
                word if word.startswith(("data", "training")) else f"parallelism.{word}"
                for word in words
            ),
        ]
    )


def laid_out(job, rank):
    """Model parts of a rank; every parameter is checked while the process group exists."""
    with fake_process_group(rank, job.world_size):
        mesh = build_mesh(job.parallelism, CPU, has_experts=job.model.moe.enabled)
        parts = build_on_meta(job, mesh, CPU)
        for part in parts:
            for name, parameter in part.named_parameters():
                check(name, parameter, job.parallelism)
        return parts


def is_expert(name):
    return ".moe.experts." in f".{name}"


def check(name, parameter, layout):
    assert isinstance(parameter, DTensor), name
    assert parameter.device.type == "meta" and parameter.dtype == torch.float32
    mesh = parameter.device_mesh
    axes = dict(
        zip(
            mesh.mesh_dim_names or (),
            zip(parameter.placements, mesh.shape, strict=True),
            strict=True,
        )
    )
    pieces = [1] * parameter.ndim
    for placement, size in axes.values():
        if not placement.is_replicate():
            pieces[placement.dim] *= size
    assert prod(pieces) == expected_pieces(name, layout), (name, axes)
    if is_expert(name) and layout.ep > 1:
        assert axes["ep"][0].is_shard(0) and axes["ep"][1] == layout.ep, (name, axes)
        assert axes["expert_shard"][1] == layout.expert_shards, (name, axes)
    assert ("dp_replicate" in axes) == (layout.dp_replicate > 1), (name, axes)
    local = parameter.to_local().shape
    assert [len(indices) for indices in local_ranges(parameter)] == list(local), name
    is_first = not any(mesh.get_coordinate() or [])
    for length, of, own in zip(parameter.shape, pieces, local, strict=True):
        # If a dimension does not divide evenly, pieces are rounded up and the last ones are shorter or empty.
        assert (
            own == -(-length // of) if is_first or length % of == 0 else own <= -(-length // of)
        ), name
    if is_expert(name) and layout.ep * layout.expert_shards > parameter.shape[0]:
        assert parameter.to_local().numel() * prod(pieces) == parameter.numel(), (
            f"{name} is shared unevenly"
        )


def expected_pieces(name, layout):
    """How many different pieces a parameter is cut into."""
    if not is_expert(name):
        return layout.parameter_shards * (1 if REPLICATED.fullmatch(name) else layout.tp)
    splits = layout.splits_experts and not name.endswith(".b2")
    return layout.ep * layout.expert_shards * (layout.tp if splits else 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", ","))
def test_layout(case):
    job = composed(case)
    assert 8 <= job.world_size <= 2048
    shapes = {}
    in_stage = job.world_size // job.parallelism.pp
    for first in range(0, job.world_size, in_stage):
        for part in laid_out(job, first):
            shapes |= {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
    assert shapes == parameter_shapes(job.model)
    assert sum(map(prod, shapes.values())) == account(job.model, job.training.seq_len).parameters
    # Uneven shards are shortest, or empty, on the last rank. A few blocks suffice to test it.
    if job.parallelism.pp == 1:
        job = replace(job, model=replace(job.model, n_layers=min(job.model.n_layers, ALL_KINDS)))
    laid_out(job, job.world_size - 1)


def test_the_process_group_is_destroyed():
    """Later tests in this process need to start without a group, as a rank of another world."""
    with fake_process_group(3, 16):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 16)
    assert not dist.is_initialized()
