"""Gated DeltaNet with decays by head and by channel, in float64.

Chunks equal steps, documents are sequences of their own, and split sequences equal whole ones.
"""

import pytest
import torch
import torch.distributed as dist

from harness.config.model import DeltaConfig
from harness.config.parallelism import ParallelismConfig
from harness.model.delta import DeltaRule, delta_rule, fla_rule
from harness.model.kernels import Positions
from harness.parallelism.context import local_positions
from harness.parallelism.delta import FragmentedDelta

# More than a chunk, and not a multiple of it.
B, T, K, H, D, E, W = 2, 144, 2, 4, 8, 6, 4
SPEC = DeltaConfig(K, H, D, E, W)
BY_CHANNEL = DeltaConfig(H, H, D, E, W, "channel")
# A document ends in a fragment, at its end, in the halo of a convolution; the second row ends with padding.
DOCUMENTS = torch.tensor(
    [[0] * 17 + [1] * 19 + [2] * 2 + [3] * 106, [0] * 71 + [1] * 42 + [-1] * 31]
)


def inputs(spec=SPEC):
    """Queries, keys, values, convolutions, decays and shares; decays are such that states live long."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    streams = [
        random(B, T, spec.key_width),
        random(B, T, spec.key_width),
        random(B, T, spec.value_width),
    ]
    kernels = [random(x.shape[2], W) for x in streams]
    decays = -random(B, T, H, spec.decays // H).abs() / 20
    return [*streams, *kernels, decays, random(B, T, H).sigmoid()]


def run(rule, tensors, documents, weights, length=T):
    """The output, and the gradients of all tensors."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    mask = rule.mask(Positions(documents, B, length, torch.device("cpu")))
    out = rule(tuple(leaves[:3]), tuple(leaves[3:6]), *leaves[6:], mask)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def weights():
    return torch.randn(B, T, H, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def difference(layout, documents, spec):
    """The largest relative difference of a rank's output and gradients from those of whole sequences."""
    group = dist.group.WORLD
    assert group is not None
    own = local_positions(layout, T, group.rank())
    given = [x if 3 <= i < 6 else x[:, own] for i, x in enumerate(inputs(spec))]
    rule = FragmentedDelta(DeltaRule(spec), group, layout)
    found = run(rule, given, documents, weights()[:, own])
    wanted = run(DeltaRule(spec), inputs(spec), documents, weights())
    differences = []
    for i, (one, whole) in enumerate(zip(found, wanted, strict=True)):
        if 4 <= i < 7:  # convolutions: each rank has a summand
            dist.all_reduce(one)
        else:
            whole = whole[:, own]
        differences.append(float((one - whole).abs().max() / whole.abs().max()))
    return max(differences)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("spec", [SPEC, BY_CHANNEL], ids=["head", "channel"])
def test_split_sequences(pool, spec, cp, balanced, documents):
    layout = ParallelismConfig(cp=cp, cp_method="gather", cp_load_balance=balanced)
    assert max(pool.run(cp, difference, layout, documents, spec)) < 1e-12


@pytest.mark.parametrize("spec", [SPEC, BY_CHANNEL], ids=["head", "channel"])
def test_documents_are_sequences_of_their_own(spec):
    tensors, rule = inputs(spec), DeltaRule(spec)
    found, *gradients = run(rule, tensors, DOCUMENTS, weights())
    for row, documents in enumerate(DOCUMENTS):
        for number in documents.unique():
            own = documents == number
            alone = [x if 3 <= i < 6 else x[row : row + 1, own] for i, x in enumerate(tensors)]
            out = rule(tuple(alone[:3]), tuple(alone[3:6]), *alone[6:], None)
            torch.testing.assert_close(found[row, own], out[0], rtol=1e-12, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in gradients)


def step_by_step(q, k, v, decay, beta, state):
    """The recurrence itself, of queries and keys with as many heads as values."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = []
    for t in range(T):
        state = state * decay[:, t].exp().unsqueeze(-1)
        under = (k[:, t, :, None] @ state).squeeze(-2)
        new = beta[:, t, :, None] * (v[:, t] - under)
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        out.append((q[:, t, :, None] @ state).squeeze(-2) * D**-0.5)
    return torch.stack(out, 1), state


@pytest.mark.parametrize("channels", [1, D])
@pytest.mark.parametrize("strength", [0.05, 1.0, 100.0])
def test_chunks_equal_steps(strength, channels):
    """Gradients too, also where exp of a chunk's summed decays overflows."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = [random(B, T, H, D), random(B, T, H, D), random(B, T, H, E)]
    given += [
        -strength * random(B, T, H, channels).abs(),
        random(B, T, H).sigmoid(),
        random(B, H, D, E),
    ]
    found = []
    for rule in (delta_rule, step_by_step):
        leaves = [x.clone().requires_grad_() for x in given]
        out, last = rule(*leaves)
        (out.square().sum() + last.square().sum()).backward()
        found.append([out, last, *(x.grad for x in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
def test_fla_computes_the_same():
    """With a state before the first position that is wider than values, as context parallel has it."""
    pytest.importorskip("fla")
    tensors = [x.float().cuda() for x in inputs()]
    q, k, v = (x.unflatten(-1, (-1, w)) for x, w in zip(tensors[:3], (D, D, E), strict=True))
    state = torch.randn(B, H, D, E + D, device="cuda")
    found = []
    for rule in (delta_rule, fla_rule):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *tensors[6:], state)]
        out, last = rule(*leaves)
        (out.square().sum() + last.square().sum()).backward()
        found.append([out, last, *(x.grad for x in leaves)])
    for one, other in zip(*found, strict=True):
        # Its products are rounded to TF32.
        assert (one - other).norm() < 1e-2 * one.norm()
