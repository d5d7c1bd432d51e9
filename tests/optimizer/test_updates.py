"""Settings and updates of every kind of optimizer: against formulas, torch's optimizers, and by hand."""

import dataclasses

import pytest
import torch
from equal import assert_equal
from jobs import tiny
from waits import waits

from harness.config.model import ModelConfig
from harness.config.optimizer import (
    IMPLEMENTATIONS,
    LR_SCALES,
    OptimizerConfig,
)
from harness.model.decoder import Decoder
from harness.model.spec import tensors
from harness.optimizer import elementwise
from harness.optimizer.build import build_optimizer
from harness.optimizer.elementwise import Lion, RoundedAdamW
from harness.optimizer.muon import Muon, orthogonalize
from harness.optimizer.settings import exchanges, kinds_of, tensor_settings

NORMS = {
    "norm.weight",
    *(f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attention_norm", "ffn_norm")),
}
TABLE = "tok_embeddings.weight"
ROUNDED = OptimizerConfig(
    lr=0.03, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, state_dtype="bfloat16"
)
MUON = OptimizerConfig(kind="muon", lr=0.03, weight_decay=0.2, momentum=0.9)


def model(tied=False):
    sizes = {
        "vocab_size": 32,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "ffn_hidden_dim": 24,
    }
    config = ModelConfig(**sizes, max_seq_len=8, tied_embeddings=tied)
    torch.manual_seed(0)
    return Decoder(config, 8)


SPECS = tensors(model().config)


def built_for(decoder, config):
    return build_optimizer(config, decoder.named_parameters(), tensors(decoder.config))


def trained(build, steps=5):
    """Parameters after some steps of random gradients, with a job's optimizer or those that are built."""
    decoder = model()
    named = dict(decoder.named_parameters())
    built = [built_for(decoder, build)] if isinstance(build, OptimizerConfig) else build(named)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for each in built:
            each.step()
    return {name: parameter.detach() for name, parameter in named.items()}


# Fields, whether the table is tied, and what does not decay; None: nothing does.
DECAYS = [
    ({}, False, NORMS),
    ({"state_dtype": "bfloat16"}, False, NORMS),
    ({"groups": [{"match": "norm", "weight_decay": 0.5}]}, False, set()),
    ({"groups": [{"match": "^tok_embeddings", "weight_decay": 0}]}, False, {TABLE, *NORMS}),
    ({}, True, NORMS),
    ({"groups": [{"match": "^tok_embeddings", "weight_decay": 0}]}, True, {TABLE, *NORMS}),
    ({"weight_decay": 0.0}, False, None),
]


@pytest.mark.parametrize(("fields", "tied", "kept"), DECAYS)
def test_what_decays(fields, tied, kept):
    """A step without gradients makes some parameters smaller, and none larger; each is in one group."""
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.5, **fields})
    decoder = model(tied)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    assert before.keys() >= NORMS and ("output.weight" in before) is not tied
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built = built_for(decoder, config)
    grouped = [parameter for group in built.param_groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, decoder.parameters()))
    built.step()
    for name, parameter in decoder.named_parameters():
        factor = 1.0 if kept is None or name in kept else 1 - config.lr * config.weight_decay
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)
        assert factor != 1 or torch.equal(parameter, before[name])


def test_a_part_with_vectors_only_makes_one_group():
    """A pipeline stage may hold nothing that decays; an empty group is refused by torch."""
    norm = torch.nn.Parameter(torch.ones(4))
    built = build_optimizer(OptimizerConfig(), [("norm.weight", norm)], SPECS)
    assert [group["weight_decay"] for group in built.param_groups] == [0.0]


FLAGS = {
    "auto": (True, False),
    "fused": (True, False),
    "foreach": (False, True),
    "for-loop": (False, False),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_configured_implementation_is_used(implementation):
    built = built_for(model(), OptimizerConfig(implementation=implementation))
    assert (built.defaults["fused"], built.defaults["foreach"]) == FLAGS[implementation]


def test_lion_follows_the_published_algorithm():
    """Algorithm 2 of arXiv:2302.06675, in float64. Matrices decay."""
    config = OptimizerConfig(kind="lion", lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.5)
    values = {name: parameter.detach().double() for name, parameter in model().named_parameters()}
    means = {name: torch.zeros_like(value) for name, value in values.items()}
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for name, value in values.items():
            gradient = torch.randn(value.shape, generator=generator).double()
            sign = (0.9 * means[name] + 0.1 * gradient).sign()
            means[name] = 0.99 * means[name] + 0.01 * gradient
            values[name] = value - 0.01 * sign - (0.0 if name in NORMS else 0.01 * 0.5 * value)
    for name, found in trained(config, steps=4).items():
        torch.testing.assert_close(found.double(), values[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_groups_are_those_of_torch(kind, dtype):
    """torch's own optimizer with the same parameter groups; with state in bfloat16 up to its rounding."""
    group = {"match": "wq", "lr_factor": 0.5, "weight_decay": 0.3, "betas": [0.7, 0.8]}
    config = OptimizerConfig(kind=kind, lr=0.01, eps=1e-3, groups=[group], state_dtype=dtype)

    def torchs(named):
        queries = {name: p for name, p in named.items() if "wq" in name}
        groups = [
            {
                "params": list(queries.values()),
                "lr": 0.005,
                "weight_decay": 0.3,
                "betas": (0.7, 0.8),
            },
            {"params": [p for name, p in named.items() if p.ndim == 2 and name not in queries]},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
        return [made(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)]

    expected, found = trained(torchs, 4), trained(config, 4)
    tolerance = 1e-6 if dtype == "float32" else 4 * 0.01 * 2**-5
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("scale", LR_SCALES)
def test_muon_equals_torchs(scale):
    """torch.optim.Muon, in bfloat16, for the matrices of blocks, and torch.optim.AdamW."""
    config = dataclasses.replace(MUON, lr_scale=scale, newton_schulz_dtype="bfloat16")

    def torchs(named):
        matrices = {
            name: p for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")
        }
        tables = [p for name, p in named.items() if p.ndim == 2 and name not in matrices]
        adamw = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
        }
        shared = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
        return [
            torch.optim.Muon(list(matrices.values()), adjust_lr_fn=scale, **shared),
            torch.optim.AdamW(tables, weight_decay=config.weight_decay, **adamw),
            torch.optim.AdamW([p for p in named.values() if p.ndim < 2], weight_decay=0.0, **adamw),
        ]

    expected = trained(torchs)
    for name, value in trained(config).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


def test_several_kinds_are_one_optimizer():
    """One state and the groups of all; the settings of a group change the update of its kind."""
    decoder = model()
    built = built_for(
        decoder, OptimizerConfig(kind="muon", groups=[{"match": "wo", "kind": "lion"}])
    )
    assert {group["kind"] for group in built.param_groups} == {"adamw", "lion", "muon"}
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    for group in built.param_groups:
        group["lr"] = 0.0
    built.step()
    assert all(parameter.equal(before[name]) for name, parameter in decoder.named_parameters())
    assert len(built.state) == len(before)


def test_the_last_group_that_matches_wins():
    job = tiny(
        r"optimizer.groups=[{match: 'layers\..*\.wq', lr_factor: 0.5, weight_decay: 0, betas: [0.8,0.98]},"
        r"{match: 'layers\.1\.', lr_factor: 3}]"
    )
    for name, expected in {
        "layers.0.attention.wq.weight": (0.5, 0.0, (0.8, 0.98)),
        "layers.1.attention.wq.weight": (3, 0.0, (0.8, 0.98)),
        "output.weight": (1.0, 0.1, (0.9, 0.95)),
    }.items():
        found = tensor_settings(job.optimizer, tensors(job.model)[name])
        assert (found.lr_factor, found.weight_decay, found.betas) == expected


def test_muon_updates_the_matrices_inside_of_blocks():
    job = tiny("model=qwen3_moe_debug", "optimizer=muon")
    found = kinds_of(job.optimizer, tensors(job.model).values())
    ends = {
        tensor.name.split(".", 2)[-1]
        for tensor in found["muon"]
        if tensor.name.startswith("layers.")
    }
    attention = {f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    assert ends == attention | {f"moe.experts.w{i}" for i in (1, 2, 3)}
    others = {tensor.name for tensor in found["adamw"]}
    assert {
        "tok_embeddings.weight",
        "output.weight",
        "layers.0.moe.router.weight",
        "norm.weight",
    } <= others
    assert found.keys() == {"muon", "adamw"}
    kinds = [
        exchanges(each, tensors(job.model).values()) for each in (job.optimizer, OptimizerConfig())
    ]
    assert kinds == [True, False]
    chosen = tiny(
        "optimizer=muon", "optimizer.groups=[{match: wo, kind: lion}, {match: output, kind: muon}]"
    )
    found = kinds_of(chosen.optimizer, tensors(chosen.model).values())
    assert {tensor.name.split(".")[-2] for tensor in found["lion"]} == {"wo"}
    assert "output.weight" in {tensor.name for tensor in found["muon"]}


# -- rounding to bfloat16 --


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_a_step_of_adamw_by_hand(master, stored):
    """Parameter and means are computed in float32 from the stored values, then rounded to their dtypes."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, dtype=master))
    config = dataclasses.replace(ROUNDED, state_dtype=stored)
    built = build_optimizer(config, [("norm.weight", parameter)], SPECS)
    mean = square = torch.zeros(64)
    for step in (1, 2, 3):
        value = parameter.detach().float().clone()
        parameter.grad = torch.randn(64).to(master)
        g = parameter.grad.float()
        built.step()
        mean, square = 0.8 * mean + 0.2 * g, 0.9 * square + 0.1 * g * g
        value = value - 0.03 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-3)
        state = built.state[parameter]
        assert parameter.dtype == master
        for name, expected in (("exp_avg", mean), ("exp_avg_sq", square)):
            rounded = expected.to(getattr(torch, stored))
            # A float32 sum in another order may be rounded to the neighbouring bfloat16 value.
            torch.testing.assert_close(state[name], rounded, rtol=2**-7, atol=0)
        close = 1e-6 if master == torch.float32 else 2**-7
        torch.testing.assert_close(parameter.detach().float(), value, rtol=close, atol=1e-6)
        mean, square = (state[name].float().clone() for name in ("exp_avg", "exp_avg_sq"))


def test_a_step_of_muon_by_hand():
    """Parameter and momentum are updated in float32 from the stored values, then rounded."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 6).bfloat16())
    built = muon([{"params": [parameter], "lr": 0.5, "weight_decay": 0.1}], torch.bfloat16)
    momentum = torch.zeros(8, 6)
    for _ in range(3):
        value = parameter.detach().float()
        parameter.grad = torch.randn(8, 6).bfloat16()
        built.step()
        momentum = 0.9 * momentum + 0.1 * parameter.grad.float()
        update = orthogonalize((0.1 * parameter.grad.float() + 0.9 * momentum)[None].clone())[0]
        value = value * (1 - 0.5 * 0.1) - 0.5 * 0.2 * 8**0.5 * update
        stored = built.state[parameter]["momentum_buffer"]
        assert (stored.dtype, parameter.dtype) == (torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(stored.float(), momentum, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(parameter.detach().float(), value, rtol=2**-7, atol=1e-5)
        momentum = stored.float()


# -- steps that the device drops --


def muon(groups, state_dtype=torch.float32):
    scale = LR_SCALES["match_rms_adamw"]
    return Muon(groups, 1.0, state_dtype, momentum=0.9, dtype=torch.float32, scale=scale)


def own(kind, parameters):
    """One of our optimizers; ``kind`` may end in the dtype of the state."""
    name, _, state = kind.partition(" ")
    groups = [{"params": list(parameters), "weight_decay": 0.2}]
    dtype = getattr(torch, state or "float32")
    if name == "muon":
        return muon(groups, dtype)
    if name == "lion":
        return Lion([{**each, "betas": (0.9, 0.99)} for each in groups], 0.1, dtype)
    # Built directly, because build_optimizer uses torch's AdamW if everything is float32.
    return RoundedAdamW(groups, 0.03, dtype, betas=(0.8, 0.9), eps=1e-3)


B, F = torch.bfloat16, torch.float32
OWN = [
    ("adamw bfloat16", B),
    ("adamw", B),
    ("adamw bfloat16", F),
    ("adamw", F),
    ("lion", F),
    ("muon", F),
]
OWN += [("lion bfloat16", B)]


def after(kind, master, drop, device="cpu", width=6):
    """Parameter and state after a step for each entry; None: three steps without ``found_inf``."""
    torch.manual_seed(0)
    shape = (2, 8, width)
    parameter = torch.nn.Parameter(torch.randn(shape).to(device, master))
    built, gradients = own(kind, [parameter]), iter(torch.randn(3, *shape))
    for dropped in drop or [False] * 3:
        gradient = torch.full(shape, torch.nan) if dropped else next(gradients)
        parameter.grad = gradient.to(device, master)
        if drop is not None:
            built.found_inf = torch.tensor(float(dropped), device=device)
        built.step()
    return parameter.detach(), built.state[parameter]


@pytest.mark.parametrize(("kind", "master"), OWN)
def test_dropped_steps_have_no_effect(kind, master):
    """The result is bitwise that of the three steps that were applied, wherever others were dropped."""
    expected, expected_state = after(kind, master, [False] * 3)
    plain, plain_state = after(kind, master, None)
    rounds = B in (master, *(s.dtype for s in plain_state.values()))
    close = {"rtol": 2**-7 if rounds else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(expected, plain, **close)
    torch.testing.assert_close(expected_state, plain_state, **close)
    assert float(plain_state.get("step", 3)) == 3
    assert {s.dtype for name, s in plain_state.items() if name != "step"} == {
        B if "bfloat16" in kind else F
    }
    for drop in ([True, False, False, True, False, True], [False, False, False, True]):
        parameter, state = after(kind, master, drop)
        assert_equal(parameter, expected)
        assert_equal(state, expected_state)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("drop", [None, [False, True, False, False]], ids=["all", "dropped"])
@pytest.mark.parametrize(("kind", "master"), [("adamw uint8", F), *OWN])
def test_a_compiled_update_computes_the_same(kind, master, drop, device, monkeypatch):
    """A GPU compiles by itself. Where a sum is rounded to the other neighbour, a code is the next one."""
    expected, expected_state = after(kind, master, drop, width=128)
    torch._dynamo.reset()
    for rule in ("_adamw", "_lion") if device == "cpu" else ():
        compiled = torch.compile(getattr(elementwise, rule), backend="aot_eager", fullgraph=True)
        monkeypatch.setattr(elementwise, rule, compiled)
    found, state = after(kind, master, drop, device, 128)
    close = {
        "rtol": 2**-7 if master == B else 1e-5,
        "atol": 1e-5,
        "check_device": False,
    }
    torch.testing.assert_close(found, expected, **close)
    for name, values in expected_state.items():
        narrow = (
            {"rtol": 2**-7}
            if values.dtype == B
            else {"atol": 1}
            if values.dtype == torch.uint8
            else {}
        )
        torch.testing.assert_close(state[name], values, **close | narrow)


@pytest.mark.parametrize(("kind", "master"), OWN)
def test_the_host_does_not_wait(kind, master):
    """Also with experts, and two matrices of equal shapes."""
    with torch.device("meta"):
        shapes = [(2, 8, 6), (8, 6), (8, 6), (4, 12)]
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=master)) for shape in shapes]
        built = own(kind, parameters)
        built.found_inf = torch.zeros(())
    with waits() as found:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            built.step()
    assert found == []
