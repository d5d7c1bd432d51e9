"""Selection of converted linears, against the decoder's modules and torchao's own rules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torchao.float8 import _auto_filter_for_recipe

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.model import ModelConfig
from harness.config.precision import FLOAT8, PrecisionConfig
from harness.model.decoder import Decoder
from harness.model.moe import Experts
from harness.precision.linears import check_layout, is_small, linears_of, require_device, sort_linears
from harness.tools.plan.make import make_plan
from harness.util.errors import ConfigError

TINY = ["model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.seq_len=64"]


def job_of(*overrides: str) -> Job:
    return compose_job([*TINY, "cluster.device=cpu", *overrides])


@pytest.mark.parametrize(
    "model", ["llama3_tiny", "llama3_tiny model.tied_embeddings=true", "deepseek_v3_debug model.mtp.depth=1"]
)
def test_linears_are_the_decoders(model: str) -> None:
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
def test_small_ones_are_torchaos(linear: str) -> None:
    takes = _auto_filter_for_recipe(linear.removeprefix("float8_"), filter_fqns=[])
    edges = [1024, 1040, 2048, 2064, 4096, 4112, 8192]
    seen = set()
    for rows in edges:
        for columns in edges:
            with torch.device("meta"):
                module = nn.Linear(columns, rows, bias=False)
            assert is_small(linear, rows, columns) != takes(module, "wq"), (rows, columns)
            seen.add(takes(module, "wq"))
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["precision=float8_rowwise"], True),
        (["precision=float8_tensorwise", "compile=on", "compile.components=[loss]"], True),
        (["precision=float8_rowwise", "compile=on"], False),
        (["precision=float8_rowwise", "precision.emulate=true"], False),
        (["precision=bf16"], False),
    ],
)
def test_warning_about_casts_without_compile(overrides: list[str], warned: bool) -> None:
    on_gpus = ["model=llama3_8b", "cluster=slurm_h100", "parallelism=fsdp", "parallelism.dp_shard=8"]
    notes = make_plan(compose_job([*on_gpus, *overrides, "cluster.partition=gpu"])).notes
    assert any("compile=on" in note for note in notes) == warned


def sort(model: ModelConfig, **fields: object) -> tuple[int, str]:
    precision = PrecisionConfig(linear="float8_rowwise", emulate=True, **fields)  # type: ignore[arg-type]
    linears = sort_linears(model, precision)
    return len(linears.converted), linears.describe(precision.linear)


def test_description() -> None:
    model = job_of().model
    assert sort(model) == (28, "float8_rowwise: 28 of 29 linears; not output (filter_fqns)")
    assert sort(model, filter_fqns=[]) == (29, "float8_rowwise: 29 of 29 linears")
    odd = dataclasses.replace(model, ffn_hidden_dim=100)
    assert sort(odd, filter_fqns=["output", "layers.0."]) == (
        12,
        "float8_rowwise: 12 of 29 linears; not layers.*.attention.wq, layers.*.attention.wk, "
        "layers.*.attention.wv, layers.*.attention.wo, layers.*.feed_forward.w1, layers.*.feed_forward.w2, "
        "layers.*.feed_forward.w3, output (filter_fqns); not layers.*.feed_forward.w1, "
        "layers.*.feed_forward.w3 (100 x 64, not multiples of 16); not layers.*.feed_forward.w2 "
        "(64 x 100, not multiples of 16)",
    )
    tied = dataclasses.replace(model, tied_embeddings=True)
    assert sort(tied, filter_fqns=[])[1].endswith("not output (tied to the embedding table)")


def test_a_large_model_leaves_out_small_linears() -> None:
    model = compose_job(["model=llama3_8b"]).model
    assert sort(model, auto_filter_small_kn=True) == (
        160,
        "float8_rowwise: 160 of 225 linears; not layers.*.attention.wk, layers.*.attention.wv "
        "(1024 x 4096, too small to gain); not output (filter_fqns)",
    )


@pytest.mark.parametrize("linear", [*FLOAT8, "mxfp8"])
def test_selection_does_not_depend_on_the_layout(linear: str) -> None:
    """A layout that cannot convert the same linears is refused, and the suggested filter works."""
    shape = ("model.dim=256", "model.n_kv_heads=2", "model.ffn_hidden_dim=256")
    job = job_of(f"precision.linear={linear}", "precision.emulate=true", *shape)
    linears = sort_linears(job.model, job.precision)
    check_layout(linears, job.model, job.precision, tp=1, rows=1, tokens=64)
    with pytest.raises(ConfigError, match=r"^parallelism.tp=8: .*would work: 1, 2.*wk,wv") as refused:
        check_layout(linears, job.model, job.precision, tp=8, rows=1, tokens=64)
    filtered = refused.value.works.split("=")[1].strip("[]").split(",")
    precision = dataclasses.replace(job.precision, filter_fqns=filtered)
    check_layout(sort_linears(job.model, precision), job.model, precision, tp=8, rows=1, tokens=64)


def test_weight_gradients_are_sums_over_whole_blocks_of_tokens() -> None:
    layout = ["parallelism=pp", "training.seq_len=40", "precision.emulate=true"]
    with pytest.raises(
        ConfigError, match=r"^training.seq_len=40: a linear takes 1 x 40 tokens .* multiple of 16"
    ):
        job_of(*layout, "precision=float8_rowwise")
    job_of(*layout, "precision=float8_rowwise_hp")
    job_of(*layout, "precision=float8_rowwise", "parallelism.pp_microbatch_size=2")
    with pytest.raises(ConfigError, match="multiple of 32"):
        job_of(*layout, "precision=mxfp8", "parallelism.pp_microbatch_size=2")


SLURM = ["cluster=slurm", "cluster.ranks_per_node=8"]


def compose(*overrides: str) -> Job:
    return compose_job(list(overrides))


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["precision=float8_rowwise"], "a CPU does not multiply in float8; would work: H100"),
        (["precision=mxfp8", "cluster.device=cpu"], "a CPU does not multiply in mxfp8; would work: B200"),
        (["precision=mxfp8", "cluster=slurm_h100"], "H100 SXM does not multiply in mxfp8"),
        (
            ["precision=float8_tensorwise", *SLURM, "cluster.accelerator=A100 SXM 80GB"],
            "A100 SXM 80GB does not multiply in float8",
        ),
        (
            ["precision=float8_tensorwise", *SLURM, "cluster.gpu_type=A100"],
            "cluster.gpu_type=A100 does not multiply in float8",
        ),
    ],
)
def test_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"^precision\.linear=") as refused:
        compose(*overrides)
    assert says in str(refused.value)
    assert "precision.emulate=true" in str(refused.value)
    compose(*overrides, "precision.emulate=true")


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=float8_rowwise", "cluster=slurm_h100"],
        ["precision=mxfp8", *SLURM, "cluster.accelerator=B200"],
        ["precision=float8_rowwise_hp", *SLURM, "cluster.gpu_type=h200"],
        # Unknown hardware: ranks check it.
        ["precision=mxfp8", *SLURM],
        ["precision=mxfp8", *SLURM, "cluster.gpu_type=large"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    compose(*overrides)


def test_an_unknown_gpu_of_this_machine_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    compose("precision=mxfp8")


def some_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None) -> torch.device:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("linear", "capability", "hip", "able"),
    [
        ("float8_rowwise", (8, 0), None, False),
        ("float8_rowwise", (8, 9), None, True),
        ("float8_tensorwise", (9, 0), None, True),
        ("mxfp8", (9, 0), None, False),
        ("mxfp8", (10, 0), None, True),
        ("float8_rowwise", (9, 0), "6.2", False),
        ("float8_rowwise", (9, 4), "6.2", True),
        ("mxfp8", (9, 4), "6.2", False),
        ("none", (7, 0), None, True),
    ],
)
def test_a_rank_checks_its_device(
    linear: str, capability: tuple[int, int], hip: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = some_gpu(monkeypatch, capability, hip)
    if able:
        require_device(PrecisionConfig(linear=linear), device, experts=False)
    else:
        with pytest.raises(ConfigError, match="Some GPU does not multiply in"):
            require_device(PrecisionConfig(linear=linear), device, experts=False)
        require_device(PrecisionConfig(linear=linear, emulate=True), device, experts=True)


def test_a_rank_on_a_cpu_refuses_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match="a CPU does not multiply in float8"):
        require_device(PrecisionConfig(linear="float8_rowwise"), torch.device("cpu"), experts=False)


MIXTURE = ["model=qwen3_moe_debug", "model.dim=128", "model.moe.hidden_dim=128", "precision=float8_rowwise"]


def test_hardware_without_grouped_products_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="L40S does not multiply groups of rows in float8, as exp"
    ) as refused:
        compose(*MIXTURE, *SLURM, "cluster.accelerator=L40S")
    works = refused.value.works.split(", or ")
    assert "L40S" not in works[0] and "H100" in works[0]
    assert works[1] == "precision.filter_fqns=[output,moe.experts]"
    for instead in ("cluster.accelerator=H100 SXM", works[1], "precision.emulate=true", "precision=bf16"):
        compose(*MIXTURE, *SLURM, "cluster.accelerator=L40S", instead)


@pytest.mark.parametrize(
    ("linear", "capability", "hip", "able"),
    [
        ("float8_rowwise", (8, 9), None, False),
        ("float8_rowwise", (9, 0), None, True),
        ("float8_rowwise", (10, 3), None, True),
        ("float8_rowwise", (12, 0), None, False),
        ("float8_rowwise", (9, 4), "6.2", True),
        ("mxfp8", (10, 0), None, True),
        ("mxfp8", (12, 0), None, False),
    ],
)
def test_a_rank_checks_its_device_for_experts(
    linear: str, capability: tuple[int, int], hip: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = some_gpu(monkeypatch, capability, hip)
    require_device(PrecisionConfig(linear=linear), device, experts=False)
    if able:
        require_device(PrecisionConfig(linear=linear), device, experts=True)
    else:
        with pytest.raises(ConfigError, match="Some GPU does not multiply groups of rows in"):
            require_device(PrecisionConfig(linear=linear), device, experts=True)


def test_mfu_of_float8_is_against_the_bfloat16_peak_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.train.trainer import device_peak

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda", 0)
    plain = device_peak(compose("precision=bf16"), device)
    float8 = device_peak(compose("precision=float8_rowwise", "precision.emulate=true"), device)
    assert float8.flops == plain.flops == 989.4e12
    assert "measured against the bfloat16 peak" in float8.origin
    assert "measured against" not in plain.origin
