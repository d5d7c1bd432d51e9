"""The mixture of experts against one that is written out token by token, and the rules of its router."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
import yaml
from processes import python

from harness.compose.composer import compose_job
from harness.model import combine
from harness.model.feed_forward import gated
from harness.model.grouped import grouped_linear
from harness.model.moe import MoE, Router, inverse_of
from harness.model.workloads import Workload, key_of

B, T = 2, 10
KINDS = yaml.safe_load("""
softmax: ""
normalized: model.moe.normalize_scores=true model.moe.score_scale=2.5
sigmoid_before: model.moe.score=sigmoid model.moe.top_k=1 model.moe.score_before_experts=true
groups: model.moe.num_groups=4 model.moe.top_groups=2 model.moe.top_k=3
best_two: model.moe.num_groups=4 model.moe.top_groups=2 model.moe.group_score=top2_sum
biases: model.moe.router_bias=true model.moe.expert_bias=true model.activation=swiglu_clamped
shared: model.moe.shared_hidden_dim=24
balanced: model.moe.balance_coeff=0.001 model.moe.score=sigmoid
""")

# A choice of two: in proportion to 1/n, then in proportion among the others.
ZIPF = [0.631, 0.3811, 0.2646, 0.202, 0.1632, 0.1369, 0.1178, 0.1034]


def config_of(*overrides):
    model = [
        "model=llama3_tiny",
        "model.dim=16",
        "model.moe.num_experts=8",
        "model.moe.hidden_dim=12",
    ]
    data = ["data=synthetic", "tokenizer=bytes", "training.seq_len=16"]
    return compose_job([*model, "model.moe.top_k=2", *overrides, *data]).model


def mixture_of(config):
    torch.manual_seed(0)
    moe = MoE(config)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    if moe.balance_bias is not None:
        moe.balance_bias = torch.randn(config.moe.num_experts)
    return moe


def chosen(scores, bias, config):
    """The experts of one token, by the rules as papers state them."""
    of, wanted = config.moe, (scores + bias).tolist()
    size = of.num_experts // of.num_groups
    groups = [wanted[i : i + size] for i in range(0, of.num_experts, size)]
    value = {"max": max, "top2_sum": lambda group: sum(sorted(group)[-2:])}[of.group_score]
    best = sorted(range(of.num_groups), key=lambda g: -value(groups[g]))[: of.top_groups]
    allowed = [e for e in range(of.num_experts) if e // size in best]
    return sorted(allowed, key=lambda e: -wanted[e])[: of.top_k]


def written_out(moe, x, config):
    """Token by token and expert by expert; and how often each was chosen."""
    of, rows, load = config.moe, [], [0] * config.moe.num_experts
    bias = torch.zeros(of.num_experts) if moe.balance_bias is None else moe.balance_bias
    experts = moe.experts
    for token in x.flatten(0, 1):
        logits = F.linear(token, moe.router.weight, moe.router.bias)
        scores = logits.softmax(0) if of.score == "softmax" else logits.sigmoid()
        own = chosen(scores.detach(), bias, config)
        weights = scores[own]
        if of.normalize_scores:
            weights = weights / weights.sum()
        total = torch.zeros_like(token)
        for expert, weight in zip(own, weights * of.score_scale, strict=True):
            load[expert] += 1
            given = token * weight if of.score_before_experts else token
            gate, up = experts.w1[expert] @ given, experts.w3[expert] @ given
            if of.expert_bias:
                gate, up = gate + experts.b1[expert], up + experts.b3[expert]
            out = experts.w2[expert] @ gated(gate, up, config.activation)
            out = out + experts.b2[expert] if of.expert_bias else out
            total = total + (out if of.score_before_experts else out * weight)
        rows.append(total if moe.shared_experts is None else total + moe.shared_experts(token))
    return torch.stack(rows).view_as(x), load


@pytest.mark.parametrize("name", KINDS)
def test_output_gradients_and_loads(name):
    config = config_of(*KINDS[name].split())
    moe, x = mixture_of(config), torch.randn(B, T, config.dim, requires_grad=True)
    out, load = moe(x)
    expected, expected_load = written_out(moe, x, config)
    assert load.tolist() == expected_load
    assert max(expected_load) > min(expected_load)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    leaves = {"x": x, **dict(moe.named_parameters())}
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((expected * weights).sum(), list(leaves.values()))
    for leaf, a, b in zip(leaves, found, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-4, leaf


def test_forced_balance_gives_every_expert_its_turn():
    config = config_of("model.moe.force_balance=true")
    _, load = mixture_of(config)(torch.randn(B, 8, config.dim))
    assert load.tolist() == [4] * 8


@pytest.mark.parametrize(
    ("name", "first", "loads"),
    # In step 3; of zipf the share of all choices in the limit, by hand.
    [
        ("uniform", [[3, 4], [3, 5], [0, 5]], [2 / 8] * 8),
        ("one_hot", [[0, 4], [0, 5], [0, 5]], [1.0, *[1 / 7] * 7]),
        ("zipf", [[0, 4], [3, 5], [0, 5]], ZIPF),
        ("drifting", [[2, 4], [3, 5], [2, 5]], [*ZIPF[-2:], *ZIPF[:-2]]),
    ],
)
def test_a_workload_is_a_function(name, first, loads):
    """Its choices are fixed for ever, and differ by seed, layer and step."""
    positions = torch.arange(2**15)
    key = key_of(42, 1)
    chosen = Workload(name, 8, 2, key, 3).choose(positions)
    assert chosen[:3].sort().values.tolist() == first
    assert (chosen[:, 0] != chosen[:, 1]).all()
    found = torch.bincount(chosen.flatten(), minlength=8) / 2**15
    torch.testing.assert_close(found, torch.tensor(loads), rtol=0.05, atol=0)
    assert torch.equal(Workload(name, 8, 2, key, 3).choose(positions[7:9]), chosen[7:9])
    for other in ((key_of(43, 1), 3), (key_of(42, 2), 3), (key, 4)):
        assert not torch.equal(Workload(name, 8, 2, *other).choose(positions), chosen)


def routers(coefficient, *overrides):
    """A config without a loss of routers, and equal routers without and with it, times 0.5."""
    plain, with_loss = (config_of(*overrides, f"model.moe.{coefficient}={c}") for c in (0, 0.5))
    torch.manual_seed(0)
    router = Router(plain)
    torch.nn.init.normal_(router.weight)
    other = Router(with_loss)
    other.load_state_dict(router.state_dict())
    other.aux_scale = 1 / B
    return plain, router, other


def require_added(weights, loss, router, other, x):
    """Check that the other router has the weights of one without a loss, and also the loss's gradient."""
    expected = torch.autograd.grad(weights.square().sum() + loss, router.weight)[0]
    same, _ = other(x, None)
    torch.testing.assert_close(same, weights)
    found = torch.autograd.grad(same.square().sum(), other.weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    return found


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradient_of_the_auxiliary_loss(score):
    """The gradient of equations 17 to 20 of arXiv:2412.19437 joins the scores' own."""
    overrides = [f"model.moe.score={score}", "model.moe.normalize_scores=true"]
    plain, router, other = routers("aux_loss_coeff", *overrides)
    x, of = torch.randn(B, T, plain.dim), plain.moe
    weights, experts = router(x, None)
    logits = F.linear(x, router.weight)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    share = scores / scores.sum(-1, keepdim=True)
    loss = torch.zeros(())
    for b in range(B):
        for expert in range(of.num_experts):
            times = int((experts.view(B, T, -1)[b] == expert).sum())
            f = of.num_experts / (of.top_k * T) * times
            loss = loss + 0.5 / B * f * share[b, :, expert].mean()
    found = require_added(weights, loss, router, other, x)
    without = torch.autograd.grad(router(x, None)[0].square().sum(), router.weight)[0]
    assert float((found - without).norm() / without.norm()) > 1e-2


def test_gradient_of_the_routers_z_loss():
    """That of equation 5 of arXiv:2202.08906, a mean over tokens, joins the logits' own."""
    plain, router, other = routers("z_loss_coeff")
    x = torch.randn(B, T, plain.dim)
    weights, _ = router(x, None)
    z_loss = 0.5 * F.linear(x, router.weight).logsumexp(-1).square().mean()
    require_added(weights, z_loss, router, other, x)


def test_groups_may_be_empty_and_rows_none():
    x = torch.randn(5, 4, requires_grad=True)
    w = torch.randn(3, 6, 4, requires_grad=True)
    out = grouped_linear(x, w, torch.tensor([2, 2, 5], dtype=torch.int32))
    torch.testing.assert_close(out, torch.cat((x[:2] @ w[0].T, x[2:] @ w[2].T)))
    grad_w = torch.autograd.grad(out.sum(), w)[0]
    assert not grad_w[1].any()
    assert grad_w[0].any() and grad_w[2].any()
    none = grouped_linear(x[:0], w, torch.zeros(3, dtype=torch.int32))
    assert none.shape == (0, 6)
    assert not torch.autograd.grad(none.sum(), w)[0].any()


def compare_kernels(tokens, top_k, width):
    order, out = torch.randperm(tokens * top_k), torch.randn(tokens * top_k, width)
    place, weights, grad = inverse_of(order), torch.rand(tokens, top_k), torch.randn(tokens, width)
    found = torch.empty_like(grad), torch.empty_like(out), torch.empty_like(weights)
    shape = width, top_k, combine.BLOCK
    combine._sum[tokens, -(-width // combine.BLOCK)](out, weights, place, found[0], *shape)
    combine._gradients[tokens * top_k,](grad, out, weights, place, *found[1:], *shape)
    inputs = out, weights, order, place
    torch.testing.assert_close(found, (combine.combine(*inputs), *combine._backward(grad, *inputs)))


def test_kernels_combine_as_plain_operations_do():
    """Run by Triton's interpreter, which truncates where a GPU rounds: so in float32."""
    pytest.importorskip("triton")
    done = python(__file__, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for sizes in ((7, 8, 2048), (5, 6, 1500), (6, 1, 70)):
        compare_kernels(*sizes)
