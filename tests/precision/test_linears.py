"""Selection of converted linears, against the decoder's modules and torchao's own rules."""

import dataclasses
from itertools import product

import pytest
import torch
from cases import rows
from jobs import tiny
from one_line import one_line
from torch import nn
from torchao.float8 import _auto_filter_for_recipe

from harness.compose.composer import compose_job
from harness.config.precision import FLOAT8, GROUPED, PrecisionConfig
from harness.model.decoder import Decoder
from harness.model.moe import Experts
from harness.precision.linears import (
    check_layout,
    is_small,
    linears_of,
    require_device,
    sort_linears,
)
from harness.tools.plan.make import make_plan
from harness.util.errors import ConfigError


def job_of(*overrides):
    return tiny("training.seq_len=64", *overrides)


@pytest.mark.parametrize(
    "model",
    [
        "llama3_tiny",
        "llama3_tiny model.tied_embeddings=true",
        "deepseek_v3_debug model.mtp.depth=1",
    ],
)
def test_linears_are_the_decoders(model):
    name, *overrides = model.split()
    config = job_of(f"model={name}", *overrides).model
    with torch.device("meta"):
        decoder = Decoder(config, 8)
    built = {
        name: tuple(module.w1.shape if isinstance(module, Experts) else module.weight.shape)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear | Experts)
    }
    assert {name: linear.shape for name, linear in linears_of(config).items()} == built


@pytest.mark.parametrize("linear", ["float8_tensorwise", "float8_rowwise"])
def test_small_ones_are_torchaos(linear):
    takes = _auto_filter_for_recipe(linear.removeprefix("float8_"), filter_fqns=[])
    edges = [1024, 1040, 2048, 2064, 4096, 4112, 8192]
    seen = set()
    for height, width in product(edges, repeat=2):
        with torch.device("meta"):
            module = nn.Linear(width, height, bias=False)
        assert is_small(linear, height, width) != takes(module, "wq"), (height, width)
        seen.add(takes(module, "wq"))
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("overrides", "warned"),
    rows("""
        [precision=float8_rowwise]                                              true
        [precision=float8_tensorwise, compile=on, 'compile.components=[loss]']  true
        [precision=float8_rowwise, compile=on]                                  false
        [precision=float8_rowwise, precision.emulate=true]                      false
        [precision=bf16]                                                        false
    """),
)
def test_warning_about_casts_without_compile(overrides, warned):
    on_gpus = [
        "model=llama3_8b",
        "cluster=slurm_h100",
        "parallelism=fsdp",
        "parallelism.dp_shard=8",
    ]
    notes = make_plan(compose_job([*on_gpus, *overrides, "cluster.partition=gpu"])).notes
    assert any("compile=on" in note for note in notes) == warned


WIDE = ("model.n_layers=2", "model.dim=128", "model.moe.hidden_dim=128")
QWEN3 = ("model=qwen3_moe_debug", *WIDE)
ROUTER = "not layers.*.moe.router (scores are float32)"
# Overrides after precision.linear=, and the description's parts.
DESCRIPTIONS = {
    "float8_rowwise": "28 of 29 linears; not output (filter_fqns)",
    "float8_rowwise precision.filter_fqns=[]": "29 of 29 linears",
    "float8_rowwise model.ffn_hidden_dim=100 precision.filter_fqns=[output,layers.0.,wq,wk,wv]": (
        "3 of 29 linears; not layers.*.attention.wq, layers.*.attention.wk, layers.*.attention.wv, "
        "layers.*.attention.wo, layers.*.feed_forward.w1, layers.*.feed_forward.w2, "
        "layers.*.feed_forward.w3, output (filter_fqns); not layers.*.feed_forward.w1, "
        "layers.*.feed_forward.w3 (100 x 64, not multiples of 16); not layers.*.feed_forward.w2 "
        "(64 x 100, not multiples of 16)"
    ),
    "float8_rowwise model.tied_embeddings=true precision.filter_fqns=[]": (
        "28 of 29 linears; not output (tied to the embedding table)"
    ),
    "float8_rowwise model=llama3_8b precision.auto_filter_small_kn=true": (
        "160 of 225 linears; not layers.*.attention.wk, layers.*.attention.wv "
        "(1024 x 4096, too small to gain); not output (filter_fqns)"
    ),
    **{
        f"{linear} {' '.join(QWEN3)}": (
            f"8 of 11 linears and the experts of 2 of 2 blocks; not output (filter_fqns); {ROUTER}"
        )
        for linear in GROUPED
    },
    f"float8_tensorwise {' '.join(QWEN3)}": (
        "8 of 11 linears and the experts of 0 of 2 blocks; not output (filter_fqns); "
        f"not layers.*.moe.experts (torchao has no grouped product in float8_tensorwise); {ROUTER}"
    ),
    f"mxfp8 {' '.join(QWEN3)} model.dim=64 precision.filter_fqns=[attention]": (
        "1 of 11 linears and the experts of 0 of 2 blocks; not layers.*.attention.wq, "
        "layers.*.attention.wk, layers.*.attention.wv, layers.*.attention.wo (filter_fqns); "
        f"not layers.*.moe.experts (128 x 64, not multiples of 128); {ROUTER}"
    ),
    f"mxfp8 {' '.join(QWEN3)} precision.filter_fqns=[output,moe.experts]": (
        "8 of 11 linears and the experts of 0 of 2 blocks; not output, layers.*.moe.experts (filter_fqns); "
        f"{ROUTER}"
    ),
}


@pytest.mark.parametrize(("overrides", "description"), DESCRIPTIONS.items())
def test_description(overrides, description):
    job = job_of(*f"precision.emulate=true precision.linear={overrides}".split())
    kind, text = (
        sort_linears(job.model, job.precision).describe(job.precision.linear).split(": ", 1)
    )
    assert overrides.startswith(kind) and sorted(text.split("; ")) == sorted(
        description.split("; ")
    )


@pytest.mark.parametrize("linear", [*FLOAT8, "mxfp8"])
def test_selection_does_not_depend_on_the_layout(linear):
    """A layout that cannot convert the same linears is refused, and the suggested filter works."""
    shape = ("model.dim=256", "model.n_kv_heads=2", "model.ffn_hidden_dim=256")
    job = job_of(f"precision.linear={linear}", "precision.emulate=true", *shape)
    linears = sort_linears(job.model, job.precision)
    check_layout(linears, job.model, job.precision, tp=1, rows=1, tokens=64)
    with one_line(ConfigError, r"^parallelism.tp=8: .*would work: 1, 2.*wk,wv") as refused:
        check_layout(linears, job.model, job.precision, tp=8, rows=1, tokens=64)
    filtered = refused.value.works.split("=")[1].strip("[]").split(",")
    precision = dataclasses.replace(job.precision, filter_fqns=filtered)
    check_layout(sort_linears(job.model, precision), job.model, precision, tp=8, rows=1, tokens=64)


TOKENS = ("parallelism=pp", "training.seq_len=40", "precision.emulate=true")
SLURM = ("cluster=slurm", "cluster.ranks_per_node=8")


@pytest.mark.usefixtures("alone")
def test_hardware_that_multiplies_or_is_unknown_is_accepted(monkeypatch):
    """Ranks check unknown hardware."""
    for overrides in (
        ("precision=float8_rowwise", "cluster=slurm_h100"),
        ("precision=mxfp8", *SLURM, "cluster.accelerator=B200"),
        ("precision=float8_rowwise_hp", *SLURM, "cluster.gpu_type=h200"),
        ("precision=mxfp8", *SLURM),
        ("precision=mxfp8", *SLURM, "cluster.gpu_type=large"),
        (*QWEN3, "precision=float8_rowwise", *SLURM, "cluster.accelerator=H100 SXM"),
        # A weight gradient is a sum over whole blocks of tokens, unless it is computed in bfloat16.
        (*TOKENS, "precision=float8_rowwise_hp"),
        (*TOKENS, "precision=float8_rowwise", "parallelism.pp_microbatch_size=2"),
    ):
        compose_job(list(overrides))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    compose_job(["precision=mxfp8"])


@pytest.mark.parametrize(
    ("linear", "capability", "hip", "linears", "experts"),
    rows("""
        none            [7, 0]   null   true   true
        float8_rowwise  [8, 0]   null   false  false
        float8_rowwise  [8, 9]   null   true   false
        float8_rowwise  [9, 0]   null   true   true
        float8_rowwise  [10, 3]  null   true   true
        float8_rowwise  [12, 0]  null   true   false
        float8_rowwise  [9, 0]   '6.2'  false  false
        float8_rowwise  [9, 4]   '6.2'  true   true
        mxfp8           [9, 0]   null   false  false
        mxfp8           [10, 0]  null   true   true
        mxfp8           [12, 0]  null   true   false
        mxfp8           [9, 4]   '6.2'  false  false
    """),
)
def test_a_rank_checks_its_device(monkeypatch, linear, capability, hip, linears, experts):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    device = torch.device("cuda", 0)
    for able, with_experts in ((linears, False), (experts, True)):
        if able:
            require_device(PrecisionConfig(linear=linear), device, experts=with_experts)
            continue
        what = "multiply groups of rows in" if linears else "multiply in"
        with one_line(ConfigError, f"Some GPU does not {what}"):
            require_device(PrecisionConfig(linear=linear), device, experts=with_experts)
        require_device(PrecisionConfig(linear=linear, emulate=True), device, experts=with_experts)


def test_mfu_of_float8_is_against_the_bfloat16_peak_and_says_so(monkeypatch):
    from harness.train.trainer import device_peak

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda", 0)
    plain = device_peak(job_of("precision=bf16"), device)
    float8 = device_peak(job_of("precision=float8_rowwise", "precision.emulate=true"), device)
    assert float8.flops == plain.flops == 989.4e12
    assert "measured against the bfloat16 peak" in float8.origin
    assert "measured against" not in plain.origin
