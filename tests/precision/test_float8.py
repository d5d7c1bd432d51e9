"""Emulated float8 and mxfp8, of linears and experts: against hand-computed values, bfloat16, one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from equal import assert_equal
from jobs import tiny
from layouts import require_agreement
from precision_runs import (
    E4M3,
    E5M2,
    Outcome,
    difference,
    rounded,
    rounded_in_blocks,
    trace_alone,
    trace_with_float8_gathers,
    train,
)
from tiers import rest_is_thorough
from torch import Tensor, nn

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

RECIPES = [*FLOAT8, "mxfp8"]
SMALL = [
    *("training.steps=10", "training.seq_len=64", "training.global_batch_size=4"),
    "data.mask_fraction=0.3",
]
WIDE = ("model.n_layers=2", "model.dim=128", "model.moe.hidden_dim=128")
FAMILIES = {
    "qwen3": ("model=qwen3_moe_debug", *WIDE),
    "deepseek": ("model=deepseek_v3_debug", *WIDE),
    "gpt_oss": ("model=gpt_oss_debug", *WIDE),
}
CPU = torch.device("cpu")


@cache
def job_of(*overrides: str) -> Job:
    dense = () if overrides[0].startswith("model=") else ("model.n_kv_heads=8",)
    return tiny(*SMALL, *dense, *overrides)


def alone(pool: RankPool, *overrides: str, steps: int = 1) -> Trace:
    """Trace a job of one rank once. Its numbers depend on the rows of a pass."""
    return trace_alone(pool, job_of(*overrides), steps)


def precision_of(linear: str, dtype: str = "float32") -> tuple[str, ...]:
    return (f"precision.linear={linear}", f"precision.param_dtype={dtype}", "precision.emulate=true")


@pytest.mark.parametrize("linear", RECIPES)
def test_a_linear_by_hand(linear: str) -> None:
    """Output and gradients of a swapped linear against reference casts and products in float64."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=False)
    model = nn.ModuleDict({"wq": plain, "kept": nn.Linear(64, 32, bias=False)})
    x, g = torch.randn(128, 64) * torch.logspace(-2, 2, 128)[:, None], torch.randn(128, 96)
    w = plain.weight.detach()
    if linear == "float8_tensorwise":
        y = rounded(x, E4M3, (0, 1), False) @ rounded(w, E4M3, (0, 1), False).T
        gx = rounded(g, E5M2, (0, 1), False) @ rounded(w, E4M3, (0, 1), False)
        gw = rounded(g, E5M2, (0, 1), False).T @ rounded(x, E4M3, (0, 1), False)
    elif linear == "mxfp8":
        y = rounded_in_blocks(x) @ rounded_in_blocks(w).T
        gx = rounded_in_blocks(g) @ rounded_in_blocks(w.T.contiguous()).T
        gw = rounded_in_blocks(g.T.contiguous()) @ rounded_in_blocks(x.T.contiguous()).T
    else:
        y = rounded(x, E4M3, (1,), True) @ rounded(w, E4M3, (1,), True).T
        over = (0, 1) if linear == "float8_rowwise_hp" else (0,)
        gx = rounded(g, E4M3, (1,), True) @ rounded(w, E4M3, over, True)
        gw = g.double().T @ x.double()
        if linear == "float8_rowwise":
            gw = rounded(g, E4M3, (0,), True).T @ rounded(x, E4M3, (0,), True)
    swap_linears(model, ["wq"], PrecisionConfig(linear=linear, emulate=True), CPU)
    assert type(model["kept"]) is nn.Linear and type(model["wq"]) is not nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["wq.weight", "kept.weight"]
    assert model["wq"].weight is plain.weight
    inputs = x.clone().requires_grad_()
    output = model["wq"](inputs)
    output.backward(g)
    for found, expected in ((output, y), (inputs.grad, gx), (plain.weight.grad, gw)):
        assert difference(found, expected) < 1e-6
    assert 0.01 < difference(output, x.double() @ w.double().T) < 0.05


# Error of the gradients against bfloat16: of all, and of the weights of swapped linears. Tensorwise rounds
# gradients to two bits of mantissa, the others to three; rowwise_hp rounds them once less.
ERRORS = {
    "float8_tensorwise": (1e-2, 0.09),
    "float8_rowwise": (1e-2, 0.065),
    "float8_rowwise_hp": (1e-2, 0.05),
    "mxfp8": (1e-2, 0.065),
}


@pytest.mark.parametrize("linear", RECIPES)
def test_against_bfloat16(pool: RankPool, linear: str) -> None:
    expected = alone(pool, "precision.param_dtype=bfloat16")
    found = alone(pool, *precision_of(linear, "bfloat16"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    assert found.norms == pytest.approx(expected.norms, rel=2e-2)
    swapped = [name for name in expected.gradients[0] if ".attention.w" in name or ".feed_forward.w" in name]
    assert len(swapped) == 28
    all_error, swapped_error = ERRORS[linear]
    assert error(found, expected, list(expected.gradients[0])) < all_error
    assert swapped_error / 2 < error(found, expected, swapped) < swapped_error


def error(found: Trace, expected: Trace, names: list[str]) -> float:
    """Relative error of the named gradients, as one vector."""
    vectors = [
        torch.cat([t.gradients[0][name].double().flatten() for name in names]) for t in (found, expected)
    ]
    return difference(vectors[0], vectors[1])


# A layout, and the number of rows per forward pass of its ranks. The single process uses the same number,
# because scales are computed over all rows of a forward pass.
LAYOUTS = {
    "fsdp": ("parallelism=fsdp parallelism.dp_shard=2", 2),
    "pp": ("parallelism=pp", 1),
    "tp": ("parallelism=tp", 4),
    "fsdp_tp": ("parallelism=fsdp_tp", 2),
}


# Of experts, whose scales are computed over all rows of an expert, from all ranks. With tensor parallelism
# every expert is split in two. Rows have a scale per half, a power of 2, so rounding is the same.
LAYOUTS_OF_EXPERTS = {
    "ep": "parallelism=ep",
    "fsdp_tp_ep": "parallelism=fsdp_tp_ep",
    "ep_of_tp": "parallelism=tp parallelism.ep=2",
    "tp_experts": "parallelism=tp parallelism.expert_tensor_parallel=true",
}
CASES = [
    *((linear, layout) for linear in ("float8_tensorwise", "mxfp8") for layout in LAYOUTS),
    *((linear, "fsdp_tp") for linear in ("float8_rowwise", "float8_rowwise_hp")),
    *((linear, layout) for linear in GROUPED for layout in LAYOUTS_OF_EXPERTS),
]
CORE = [("float8_tensorwise", "fsdp_tp"), ("float8_rowwise_hp", "fsdp_tp")]
CORE += [("mxfp8", "fsdp_tp_ep"), ("mxfp8", "tp_experts")]


@pytest.mark.parametrize("case", rest_is_thorough(CASES, *CORE), ids="-".join)
def test_layout_agrees_with_one_process(pool: RankPool, case: tuple[str, str]) -> None:
    """In float32, with the tolerance of layouts without float8, except under tensor parallelism.

    Tensor parallelism adds in another order, so a value between two float8 values may be rounded to the other
    one. In the two-bit gradients of tensorwise, one such value changes a weight's gradient by half a percent.
    """
    linear, layout = case
    if has_experts := layout in LAYOUTS_OF_EXPERTS:
        shared = (*FAMILIES["qwen3"], "model.moe.hidden_dim=256", *precision_of(linear))
        overrides, rows, tolerances = LAYOUTS_OF_EXPERTS[layout], (), (1e-5, 1e-2)
    else:
        overrides, local_batch_size = LAYOUTS[layout]
        shared, rows = precision_of(linear), (f"training.local_batch_size={local_batch_size}",)
        tolerances = (1e-6, 1e-2 if layout in ("tp", "fsdp_tp") else 1e-6)
    job = job_of(*shared, *overrides.split())
    found = pool.run(job.world_size, trace, job.to_json(), 1)
    verdict = compare(layout, job.world_size, alone(pool, *shared, *rows), found, tolerances)
    require_agreement(verdict)
    assert has_experts or verdict.norm < 1e-6


def test_scales_depend_on_the_rows_of_a_forward_pass(pool: RankPool) -> None:
    """Another number of rows gives other numbers, so the test above is meaningful."""
    two = alone(pool, *precision_of("float8_tensorwise"), "training.local_batch_size=2")
    four = alone(pool, *precision_of("float8_tensorwise"), "training.local_batch_size=4")
    assert not compare("rows", 1, two, [four], (1e-3, 1e-2)).passed
    # mxfp8: the scale of a block of 32 values does not depend on other rows.
    two, four = (alone(pool, *precision_of("mxfp8"), f"training.local_batch_size={n}") for n in (2, 4))
    require_agreement(compare("rows", 1, two, [four], (1e-6, 1e-6)))


def test_tensor_parallelism_that_gathers_float8(pool: RankPool) -> None:
    """GPUs cast, then gather; the result equals that of gathering, then casting."""
    job = job_of(*precision_of("float8_tensorwise", "bfloat16"), "parallelism=fsdp_tp")
    [expected, *_] = pool.run(4, trace, job.to_json(), 1)
    found = pool.run(4, trace_with_float8_gathers, job.to_json(), 1)
    verdict = compare("float8 gathers", 4, expected, found, (1e-6, 1e-6))
    require_agreement(verdict)


def outcomes(pool: RankPool, *overrides: str) -> list[Outcome]:
    job = job_of(*overrides)
    return pool.run(job.world_size, train, job.to_json(), 3)


def assert_same(left: list[Outcome], right: list[Outcome]) -> None:
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        assert (a.losses, a.norms) == (b.losses, b.norms)
        assert_equal(a.weights, b.weights, f"rank {rank}")


@pytest.mark.parametrize("layout", rest_is_thorough(["fsdp_tp", "hsdp", "fsdp"], "fsdp"))
def test_gathering_weights_in_float8(pool: RankPool, layout: str) -> None:
    """Bitwise equal to casting after the gather, in float32; precomputed scales change nothing."""
    tensorwise = (*precision_of("float8_tensorwise"), *f"parallelism={layout}".split())
    gathered = outcomes(pool, *tensorwise, "precision.enable_fsdp_float8_all_gather=true")
    ahead = "precision.precompute_float8_dynamic_scale_for_fsdp=true"
    assert_same(gathered, outcomes(pool, *tensorwise))
    assert_same(gathered, outcomes(pool, *tensorwise, "precision.enable_fsdp_float8_all_gather=true", ahead))


RECOMPUTED = [
    ("float8_tensorwise", "dense"),
    ("mxfp8", "dense"),
    *((linear, "experts") for linear in GROUPED),
]


@pytest.mark.parametrize("case", rest_is_thorough(RECOMPUTED, RECOMPUTED[0]), ids="-".join)
def test_recomputation_and_compile_change_nothing(pool: RankPool, case: tuple[str, str]) -> None:
    linear, model = case
    experts, dense = (*FAMILIES["qwen3"], "model.n_layers=1"), ("parallelism=fsdp", "model.n_layers=2")
    float8 = (*(dense if model == "dense" else experts), *precision_of(linear, "bfloat16"))
    plain = outcomes(pool, *float8)
    assert_same(outcomes(pool, *float8, "activation_checkpoint=selective_op"), plain)
    assert_same(outcomes(pool, *float8, "compile=on", "compile.backend=aot_eager"), plain)


def test_a_head_in_float8(pool: RankPool) -> None:
    """If the filter does not match it, the head multiplies in float8."""
    float8 = (*precision_of("float8_rowwise"), "precision.filter_fqns=[wk]")
    head = alone(pool, *float8).gradients[0]["output.weight"]
    plain = alone(pool, *precision_of("float8_rowwise")).gradients[0]["output.weight"]
    assert 0.01 < difference(head, plain.double()) < 0.1


def test_gathering_in_float8_skips_a_rounding_to_bfloat16(pool: RankPool) -> None:
    """So the field is part of the numerics."""
    tensorwise = (*precision_of("float8_tensorwise", "bfloat16"), "parallelism=fsdp")
    option = "precision.enable_fsdp_float8_all_gather=true"
    assert job_of(*tensorwise).numerics_id != job_of(*tensorwise, option).numerics_id
    [dynamic, *_], [gathered, *_] = outcomes(pool, *tensorwise), outcomes(pool, *tensorwise, option)
    assert dynamic.losses != gathered.losses
    assert dynamic.losses == pytest.approx(gathered.losses, rel=1e-3)


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
    found = alone(pool, *overrides, *precision_of(linear, "bfloat16"), steps=3)
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.losses != expected.losses
    assert found.norms == pytest.approx(expected.norms, rel=5e-2)


@pytest.mark.parametrize("family", rest_is_thorough(FAMILIES, "gpt_oss"))
@pytest.mark.parametrize("linear", GROUPED)
def test_gradients_against_bfloat16(pool: RankPool, linear: str, family: str) -> None:
    """With fixed routing: different routing of a few rows would change a gradient by more."""
    fixed = (*FAMILIES[family], "model.moe.force_balance=true")
    expected = alone(pool, *fixed, "precision.param_dtype=bfloat16").gradients[0]
    found = alone(pool, *fixed, *precision_of(linear, "bfloat16")).gradients[0]
    for name, gradient in expected.items():
        if ".moe.experts.w" in name:
            assert 0.01 < difference(found[name], gradient.double()) < 0.1, name


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
        job_of(*split, *precision_of("mxfp8", "bfloat16"))
    job_of(*split, *precision_of("mxfp8", "bfloat16"), "precision.filter_fqns=[output,moe.experts]")
    job_of(*split, *precision_of("float8_rowwise", "bfloat16"))


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
