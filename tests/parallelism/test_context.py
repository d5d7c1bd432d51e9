"""Context parallel: positions of ranks; attention over split sequences equals that of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.config.model import AttentionSpan
from harness.config.parallelism import ParallelismConfig
from harness.model.kernels import AttentionSpec, Kernel, SdpaKernel
from harness.parallelism.context import RingAttention, UlyssesAttention, local_positions
from harness.parallelism.mesh import context_groups

B, T, H, K, D = 2, 24, 8, 4, 8
LAYOUTS = {
    "allgather": ParallelismConfig(cp=2),
    "alltoall": ParallelismConfig(cp=2, cp_rotate_method="alltoall"),
    "unbalanced": ParallelismConfig(cp=2, cp_load_balance=False),
    "ulysses": ParallelismConfig(cp=2, cp_method="ulysses"),
}

# Not the default scale of kernels.
REACH = AttentionSpec(AttentionSpan(), 0.3)


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_position_has_one_rank(cp, layout):
    layout = ParallelismConfig(**{**vars(layout), "cp": cp})
    shares = [local_positions(layout, 24, rank) for rank in range(cp)]
    assert torch.cat(shares).sort().values.tolist() == list(range(24))
    assert {len(share) for share in shares} == {24 // cp}
    assert local_positions(ParallelismConfig(), 1, 0).tolist() == [0]


def test_balanced_ranks_attend_to_the_same_number_of_keys():
    keys = {
        name: [int((local_positions(each, 24, r) + 1).sum()) for r in (0, 1)]
        for name, each in LAYOUTS.items()
    }
    assert keys["allgather"] == [150, 150]
    assert keys["ulysses"] == keys["unbalanced"] == [78, 222]


def test_groups_are_neighbours_on_the_shard_axis():
    """Two stages, dp_shard=2 x cp=2 as one axis, tp=2: 16 ranks, tp innermost."""
    groups = context_groups(torch.arange(16).view(2, 4, 2), 1, 2)
    assert groups == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]


def difference(layout, seed, compiled, dtype):
    """Relative error of this rank's output and gradients against those of unsplit sequences."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    kernel: Kernel = RingAttention(REACH, group, layout)
    if layout.cp_method == "ulysses":
        kernel = UlyssesAttention(SdpaKernel(REACH), group)
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, heads, D, generator=generator).to(dtype) for heads in (H, K, K)]
    weights = torch.randn(B, T, H, D, generator=generator).to(dtype)
    expected = run(SdpaKernel(REACH), tensors, weights)
    positions = local_positions(layout, T, rank)
    local = [x[:, positions] for x in tensors]
    if compiled:
        torch._dynamo.reset()
        kernel = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    found = run(kernel, local, weights[:, positions])
    return [
        float((a - b[:, positions]).float().norm() / b[:, positions].float().norm())
        for a, b in zip(found, expected, strict=True)
    ]


def run(kernel, tensors, weights):
    """Output, and gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = kernel(*leaves, None)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_over_split_sequences(pool, name, cp):
    """With grouped queries: two query heads for each key head."""
    layout = ParallelismConfig(**{**vars(LAYOUTS[name]), "cp": cp})
    for found in pool.run(cp, difference, layout, 0, False, torch.float32):
        assert len(found) == 4
        assert max(found) < 1e-6
    for found in pool.run(cp, difference, layout, 1, False, torch.bfloat16):
        assert max(found) < 2e-2


@pytest.mark.parametrize("name", ["allgather", "alltoall", "ulysses"])
def test_compiled_in_one_graph(pool, name):
    for found in pool.run(2, difference, LAYOUTS[name], 2, True, torch.float32):
        assert max(found) < 1e-6


def rounds(layout):
    """Number of ring passes in forward and backward of a block with selective_op checkpointing."""
    from harness.config.training import ActivationCheckpointConfig
    from harness.parallelism import activation_checkpoint, context

    group, original, calls = dist.group.WORLD, context._templated_ring_attention, []
    assert group is not None
    block = RingAttention(REACH, group, layout)
    part = SimpleNamespace(blocks={0: block})
    config = ActivationCheckpointConfig(mode="selective_op")
    activation_checkpoint.apply_activation_checkpoint(part, config)
    context._templated_ring_attention = lambda *args, **kwargs: (
        calls.append(1) or original(*args, **kwargs)
    )
    try:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(B, T, heads, D, generator=generator) for heads in (H, K, K)]
        run(block, tensors, torch.ones(B, T, H, D))
    finally:
        context._templated_ring_attention = original
    return len(calls)


def test_recomputation_does_not_repeat_the_ring(pool):
    assert pool.run(2, rounds, LAYOUTS["allgather"]) == [1, 1]
