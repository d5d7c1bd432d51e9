"""Context parallel: positions of ranks; attention over split sequences equals that of one process."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.config.model import AttentionSpan
from harness.config.parallelism import ParallelismConfig
from harness.data.batch import Batch
from harness.model.kernels import (
    AttentionSpec,
    FlexKernel,
    Positions,
    SdpaKernel,
    VarlenKernel,
    sees,
)
from harness.parallelism.context import (
    GatheredAttention,
    RingAttention,
    Share,
    UlyssesAttention,
    local_positions,
    queries_of,
)
from harness.parallelism.mesh import context_groups

B, T, H, K, D = 2, 24, 8, 4, 8
LAYOUTS = {
    "allgather": ParallelismConfig(cp=2, cp_method="ring"),
    "alltoall": ParallelismConfig(cp=2, cp_method="ring", cp_rotate_method="alltoall"),
    "unbalanced": ParallelismConfig(cp=2, cp_method="ring", cp_load_balance=False),
    "ulysses": ParallelismConfig(cp=2, cp_method="ulysses"),
    "gather": ParallelismConfig(cp=2, cp_method="gather"),
    "gather_unbalanced": ParallelismConfig(cp=2, cp_method="gather", cp_load_balance=False),
    "documents": ParallelismConfig(cp=2, cp_method="gather", cp_load_balance="documents"),
}

# Not the default scale of kernels.
REACH = AttentionSpec(AttentionSpan(), 0.3)
LOCAL = {
    "window": AttentionSpec(AttentionSpan(window=5), 0.3),
    "chunk": AttentionSpec(AttentionSpan(chunk=7), 0.3),
    "sinks": AttentionSpec(AttentionSpan(), 0.3, has_sinks=True),
    "causal": REACH,
}
CPU = torch.device("cpu")
# Of two sequences, with padding at the end of the second.
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] * 12, [0] * 11 + [1] * 8 + [-1] * 5])


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


def difference(layout, seed, compiled, dtype, spec=REACH, documents=None):
    """Relative error of this rank's output and gradients against those of unsplit sequences."""
    group = dist.group.WORLD
    assert group is not None
    kernels = {
        "ring": RingAttention(spec, group, layout),
        "ulysses": UlyssesAttention(SdpaKernel(spec), group),
        "gather": GatheredAttention(SdpaKernel(spec), group, layout),
    }
    plain, kernel = SdpaKernel(spec), kernels[layout.cp_method]
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, heads, D, generator=generator).to(dtype) for heads in (H, K, K)]
    weights = torch.randn(B, T, H, D, generator=generator).to(dtype)
    sinks = torch.randn(H, generator=generator) if spec.has_sinks else None
    tokens = torch.zeros(B, T, dtype=torch.int64)
    share = Share(layout, T, dist.get_rank(), CPU)
    batch, positions = share.positions(Batch(tokens, tokens, documents))
    every = Positions(batch.documents_BT, B, T, CPU)
    expected = run(plain, tensors, weights, plain.mask(every), sinks)

    def own(x):
        return x.take_along_dim(positions.expand(B, -1)[:, :, None, None], 1)

    local = [own(x) for x in tensors]
    mask = kernel.mask(every)
    if compiled:
        torch._dynamo.reset()
        kernel = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    found = run(kernel, local, own(weights), mask, sinks)
    wanted = [own(each).float() for each in expected]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def run(kernel, tensors, weights, mask=None, sinks=None):
    """Output, and gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = kernel(*leaves, mask, sinks)
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


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("spec", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("name", ["gather", "gather_unbalanced", "documents"])
def test_any_mask_over_three_ranks(pool, name, spec, documents):
    """Three divide neither the query nor the key heads."""
    layout = ParallelismConfig(**{**vars(LAYOUTS[name]), "cp": 3})
    for found in pool.run(3, difference, layout, 3, False, torch.float32, spec, documents):
        assert max(found) < 1e-6


def flash(q, k, v, spec):
    """Attention of one document as flash attention aligns it: the last query with the last key."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    position = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    seen = sees(spec.span, position, torch.arange(len(k)))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [DOCUMENTS, None], ids=["documents", "whole"])
@pytest.mark.parametrize("span", [AttentionSpan(), AttentionSpan(window=5), AttentionSpan(chunk=7)])
def test_masks_of_some_queries(span, documents):
    """Of the last, and of each rank's blocks: for sdpa, flex, and flash attention over documents."""
    spec = AttentionSpec(span, 0.3)
    q, k, v = (torch.randn(B, T, heads, D) for heads in (H, H, H))
    whole = SdpaKernel(spec)
    every = Positions(documents, B, T, CPU)
    expected = whole(q, k, v, whole.mask(every))
    parts = [every._replace(first=8)]
    for rank in range(2 if documents is not None else 0):
        parts += queries_of(LAYOUTS["documents"], every, rank)
    for own in parts:
        index = own.queries_BT[:, :, None, None]
        some, wanted = (each.take_along_dim(index, 1) for each in (q, expected))
        for kernel in (whole, FlexKernel(spec)):
            torch.testing.assert_close(kernel(some, k, v, kernel.mask(own)), wanted)
        rows = torch.arange(B + 1)
        offsets = VarlenKernel(spec).mask(own) or [(rows * some.shape[1], rows * T)]
        torch.testing.assert_close(varlen(some, k, v, offsets, spec), wanted)


def varlen(q, k, v, masks, spec):
    """Attention by ``flash`` of every document of every piece."""
    found = []
    for piece, offsets in zip(q.chunk(len(masks), dim=1), masks, strict=True):
        queries, keys = (pairwise(each.tolist()) for each in offsets)
        own = [
            flash(
                piece.flatten(0, 1)[slice(*some)],
                k.flatten(0, 1)[slice(*seen)],
                v.flatten(0, 1)[slice(*seen)],
                spec,
            )
            for some, seen in zip(queries, keys, strict=True)
        ]
        found.append(torch.cat(own).unflatten(0, (B, -1)))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", ["allgather", "alltoall", "ulysses", "gather", "documents"])
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
