"""Experts in emulated float8: against reference values and bfloat16; layouts against one process; kernels."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from equal import assert_equal
from layouts import require_agreement
from precision_runs import E4M3, difference, rounded, rounded_in_blocks, trace_alone, train
from tiers import rest_is_thorough
from torch import Tensor, nn

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.precision import FLOAT8, GROUPED, PrecisionConfig
from harness.launch.pool import RankPool
from harness.model.grouped import grouped_product, pad, padded_positions, unpad
from harness.model.moe import Experts
from harness.precision.grouped import build_grouped_product
from harness.precision.linears import GROUPED_CAPABILITY, sort_linears
from harness.precision.swap import swap_linears
from harness.tools.parity.parity import Trace, compare, trace
from harness.util.errors import ConfigError, UserError

CPU = torch.device("cpu")
SMALL = [
    *("data=synthetic", "tokenizer=bytes", "training.steps=10", "cluster.device=cpu", "model.n_layers=2"),
    *("training.seq_len=64", "training.global_batch_size=4", "data.mask_fraction=0.3"),
]
WIDE = ("model.dim=128", "model.moe.hidden_dim=128")
FAMILIES = {
    "qwen3": ("model=qwen3_moe_debug", *WIDE),
    "deepseek": ("model=deepseek_v3_debug", *WIDE),
    "gpt_oss": ("model=gpt_oss_debug", *WIDE),
}


@cache
def job_of(*overrides: str) -> Job:
    return compose_job([*SMALL, *overrides])


def precision_of(linear: str, dtype: str = "bfloat16") -> tuple[str, ...]:
    return (f"precision.linear={linear}", f"precision.param_dtype={dtype}", "precision.emulate=true")


def alone(pool: RankPool, *overrides: str, steps: int = 1) -> Trace:
    return trace_alone(pool, job_of(*overrides), steps)


def emulated(linear: str, **fields: object) -> PrecisionConfig:
    return PrecisionConfig(linear=linear, emulate=True, **fields)  # type: ignore[arg-type]


LENGTHS = [5, 0, 130, 16]


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0).int()


@pytest.mark.parametrize("linear", GROUPED)
def test_a_product_by_hand(linear: str) -> None:
    """Output and gradients of each group against reference casts and products in float64."""
    torch.manual_seed(0)
    precision = emulated(linear)
    rows = sum(LENGTHS)
    x = torch.randn(rows, 128) * torch.logspace(-2, 2, rows)[:, None]
    w, g = torch.randn(len(LENGTHS), 256, 128), torch.randn(rows, 256)
    place_R, ends_E, places = padded_positions(ends_of(LENGTHS), rows, precision.expert_block)
    inputs, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    output = unpad(build_grouped_product(precision)(pad(inputs, place_R, places), weight, ends_E), place_R)
    output.backward(g)

    def along_rows(values: Tensor) -> Tensor:
        """Values of a group rounded along rows, transposed to [columns, rows]."""
        if linear == "float8_rowwise":
            return rounded(values, E4M3, (0,), True).T
        filled = torch.cat((values, values.new_zeros(-len(values) % 32, values.shape[1])))
        return rounded_in_blocks(filled.T.contiguous())[:, : len(values)]

    def along(values: Tensor) -> Tensor:
        return rounded(values, E4M3, (1,), True) if linear == "float8_rowwise" else rounded_in_blocks(values)

    # torchao's mxfp8 product has bfloat16 inputs and outputs.
    tolerance = 1e-6 if linear == "float8_rowwise" else 3e-3
    if linear == "mxfp8":
        x, w, g = (each.bfloat16().float() for each in (x, w, g))
    end = 0
    for expert, length in enumerate(LENGTHS):
        at, end = slice(end, end + length), end + length
        if not length:
            assert weight.grad[expert].count_nonzero() == 0
            continue
        y = along(x[at]) @ along(w[expert]).T
        assert difference(output[at], y) < tolerance
        assert difference(inputs.grad[at], along(g[at]) @ along(w[expert].T.contiguous()).T) < tolerance
        assert difference(weight.grad[expert], along_rows(g[at]) @ along_rows(x[at]).T) < tolerance
        assert 0.01 < difference(output[at], x[at].double() @ w[expert].double().T) < 0.05


def experts_of(family: str) -> tuple[Experts, Experts]:
    """Two equal experts modules with random values."""
    torch.manual_seed(0)
    pair = Experts(job_of(*FAMILIES[family]).model), Experts(job_of(*FAMILIES[family]).model)
    for parameter in pair[0].parameters():
        nn.init.normal_(parameter, std=0.1)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("linear", ["none", *GROUPED])
def test_swapped_experts(linear: str, family: str) -> None:
    """Names stay, and all gradients are within the format's error; padding alone changes nothing."""
    plain, swapped = experts_of(family)
    if linear == "none":
        swapped.row_block = 16
    else:
        holder = nn.ModuleDict({"experts": swapped})
        swap_linears(holder, ["experts"], emulated(linear), CPU)
        assert holder["experts"] is swapped and type(swapped.w1) is nn.Parameter
    load_E = torch.tensor([7, 0, 40, 33, 1, 100, 64, 11])
    x_RC, grad_RC = torch.randn(256, 128), torch.randn(256, 128)
    found = []
    for experts in (plain, swapped):
        inputs = x_RC.clone().requires_grad_()
        output = experts(inputs, load_E)
        output.backward(grad_RC)
        found.append(
            {"output": output, "input": inputs.grad} | {n: p.grad for n, p in experts.named_parameters()}
        )
    for name, expected in found[0].items():
        error = difference(found[1][name], expected.detach().double())
        if linear == "none":
            assert error < 1e-6, name
        elif name != "b2":
            assert 0.005 < error < 0.15, name


@pytest.mark.parametrize("family", rest_is_thorough(FAMILIES, "deepseek"))
@pytest.mark.parametrize("linear", GROUPED)
def test_training_stays_close_to_bfloat16(pool: RankPool, linear: str, family: str) -> None:
    overrides = FAMILIES[family]
    expected = alone(pool, *overrides, "precision.param_dtype=bfloat16", steps=3)
    found = alone(pool, *overrides, *precision_of(linear), steps=3)
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.losses != expected.losses
    assert found.norms == pytest.approx(expected.norms, rel=5e-2)


@pytest.mark.parametrize("family", rest_is_thorough(FAMILIES, "gpt_oss"))
@pytest.mark.parametrize("linear", GROUPED)
def test_gradients_against_bfloat16(pool: RankPool, linear: str, family: str) -> None:
    """With fixed routing: different routing of a few rows would change a gradient by more."""
    fixed = (*FAMILIES[family], "model.moe.force_balance=true")
    expected = alone(pool, *fixed, "precision.param_dtype=bfloat16").gradients[0]
    found = alone(pool, *fixed, *precision_of(linear)).gradients[0]
    for name, gradient in expected.items():
        if ".moe.experts.w" in name:
            assert 0.01 < difference(found[name], gradient.double()) < 0.1, name


# Scales are computed over all rows of an expert, here from all ranks, as in one process.
LAYOUTS = {
    "ep": "parallelism=ep",
    "fsdp_tp_ep": "parallelism=fsdp_tp_ep",
    "ep_of_tp": "parallelism=tp parallelism.ep=2",
    # Every expert is split in two. Rows have a scale per half, a power of 2, so rounding is the same.
    "tp": "parallelism=tp parallelism.expert_tensor_parallel=true",
}


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, "fsdp_tp_ep", "tp"))
@pytest.mark.parametrize("linear", rest_is_thorough(GROUPED, "mxfp8"))
def test_layout_agrees_with_one_process(pool: RankPool, linear: str, layout: str) -> None:
    experts = (*FAMILIES["qwen3"], "model.moe.hidden_dim=256")
    expected = alone(pool, *experts, *precision_of(linear, "float32"))
    job = job_of(*experts, *precision_of(linear, "float32"), *LAYOUTS[layout].split())
    found = pool.run(job.world_size, trace, job.to_json(), 1)
    verdict = compare(layout, job.world_size, expected, found, (1e-5, 1e-2))
    require_agreement(verdict)


@pytest.mark.thorough
def test_recomputation_and_compile_change_nothing(pool: RankPool) -> None:
    for linear in GROUPED:
        overrides = (*FAMILIES["qwen3"], *precision_of(linear), "model.n_layers=1")
        found = []
        for options in (
            (),
            ("activation_checkpoint=selective_op",),
            ("compile=on", "compile.backend=aot_eager"),
        ):
            job = job_of(*overrides, *options)
            [outcome] = pool.run(1, train, job.to_json(), 2)
            found.append(outcome)
        for each in found[1:]:
            assert each.losses == found[0].losses
            assert_equal(each.weights, found[0].weights)


def description(linear: str, *overrides: str) -> str:
    job = job_of(*overrides, f"precision.linear={linear}", "precision.emulate=true")
    return sort_linears(job.model, job.precision).describe(linear)


def test_description() -> None:
    qwen3, deepseek = FAMILIES["qwen3"], FAMILIES["deepseek"]
    router = "not layers.*.moe.router (scores are float32)"
    left = f"not output (filter_fqns); {router}"
    for linear in GROUPED:
        text = f"{linear}: 8 of 11 linears and the experts of 2 of 2 blocks; "
        assert sorted(description(linear, *qwen3).split("; ")) == sorted((text + left).split("; "))
    for linear in sorted({*FLOAT8} - {*GROUPED}):
        described = description(linear, *qwen3)
        assert described.startswith(f"{linear}: 8 of 11 linears and the experts of 0 of 2 blocks; ")
        assert f"not layers.*.moe.experts (torchao has no grouped product in {linear})" in described
    small = (*qwen3, "model.dim=64")
    assert "not layers.*.moe.experts (128 x 64, not multiples of 128)" in description("mxfp8", *small)
    assert "experts of 2 of 2 blocks" in description("float8_rowwise", *small)
    filtered = description("mxfp8", *deepseek, "precision.filter_fqns=[output,moe.experts]")
    assert "the experts of 0 of 1 blocks" in filtered
    assert "not output, layers.*.moe.experts (filter_fqns)" in filtered
    assert "shared_experts" in description("mxfp8", *deepseek, "precision.filter_fqns=[output,experts]")


def test_experts_split_into_partial_blocks_are_refused() -> None:
    split = (*FAMILIES["qwen3"], "parallelism=tp", "parallelism.expert_tensor_parallel=true")
    with pytest.raises(
        ConfigError, match=r"^parallelism.tp=2: .*64 of the 128 .*moe.experts.*of 128; .*: 1, or .*,moe"
    ):
        job_of(*split, *precision_of("mxfp8"))
    job_of(*split, *precision_of("mxfp8"), "precision.filter_fqns=[output,moe.experts]")
    job_of(*split, *precision_of("float8_rowwise"))


@pytest.mark.parametrize("linear", GROUPED)
def test_the_kernels_that_gpus_call(linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of torchao's functions: rows in full blocks, bfloat16, matrices with contiguous columns."""
    import torchao.prototype.moe_training as torchao
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.prototype.moe_training.kernels.mxfp8 import quant
    from torchao.quantization.quantize_.common import KernelPreference

    name = {
        "float8_rowwise": "_to_fp8_rowwise_then_scaled_grouped_mm",
        "mxfp8": "_to_mxfp8_then_scaled_grouped_mm",
    }[linear]
    calls = []

    def record(x: Tensor, weight_t: Tensor, ends_E: Tensor, **options: object) -> Tensor:
        calls.append((tuple(x.shape), tuple(weight_t.shape)))
        assert x.dtype == weight_t.dtype == torch.bfloat16
        assert x.stride(-1) == 1 and weight_t.stride(-2) == 1
        lengths = torch.diff(ends_E, prepend=torch.zeros(1, dtype=torch.int32))
        assert ends_E.dtype == torch.int32 and not (lengths % precision.expert_block).any() and lengths.all()
        assert options["out_dtype"] == torch.bfloat16 and not options["pad_token_groups_for_grouped_mm"]
        assert options.get("kernel_preference", KernelPreference.AUTO) == KernelPreference.AUTO
        return grouped_product(x, weight_t.transpose(1, 2), ends_E)

    precision = PrecisionConfig(linear=linear)
    monkeypatch.setattr(torchao, name, record)
    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    if linear == "mxfp8":
        monkeypatch.setattr(quant, "_mxfp8_cutedsl_kernels_available", False)
        with pytest.raises(UserError, match=r"nvidia-cutlass-dsl .*moe.experts"):
            build_grouped_product(precision)
        monkeypatch.setattr(quant, "_mxfp8_cutedsl_kernels_available", True)
    plain, swapped = experts_of("qwen3")
    swapped.multiply, swapped.row_block = build_grouped_product(precision), precision.expert_block
    x_RC, load_E = torch.randn(40, 128), torch.tensor([40, 0, 0, 0, 0, 0, 0, 0])
    output = swapped(x_RC, load_E)
    assert output.dtype == torch.float32
    places = {"float8_rowwise": 48 + 8 * 16, "mxfp8": 128 + 8 * 128}[linear]
    assert calls == [((places, 128), (8, 128, 128))] * 3
    assert difference(output, plain(x_RC, load_E).detach().double()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("linear", GROUPED)
def test_kernels_equal_emulation(linear: str) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability()[0] not in GROUPED_CAPABILITY[linear.removesuffix("_rowwise")]:
        pytest.skip(f"{torch.cuda.get_device_name()} has no grouped product in {linear}")
    found: list[list[Tensor]] = []
    for precision in (emulated(linear), PrecisionConfig(linear=linear)):
        experts = experts_of("qwen3")[0].to(device, torch.bfloat16)
        swap_linears(nn.ModuleDict({"experts": experts}), ["experts"], precision, device)
        torch.manual_seed(1)
        x_RC = torch.randn(256, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        output = experts(x_RC, torch.tensor([7, 0, 40, 33, 1, 100, 64, 11], device=device))
        output.square().sum().backward()
        found.append([output, x_RC.grad, *(parameter.grad for parameter in experts.parameters())])
    for expected, each in zip(*found, strict=True):
        assert difference(each, expected.detach().double()) < 1e-2


def test_mxfp8_without_torchaos_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wheels have no extension for this Python."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm

    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", False)
    with pytest.raises(UserError, match=r"^precision.linear=mxfp8: experts cannot multiply"):
        build_grouped_product(PrecisionConfig(linear="mxfp8"))
