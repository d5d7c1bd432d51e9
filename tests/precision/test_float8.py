"""Emulated float8 and mxfp8, of linears and experts: against hand-computed values, bfloat16, one process."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from cases import words
from equal import assert_equal
from jobs import tiny, train_engine
from layouts import require_agreement
from one_line import one_line
from torch import nn

from harness.config.precision import FLOAT8, GROUPED, PrecisionConfig
from harness.model.grouped import grouped_product, padded_positions
from harness.model.moe import Experts
from harness.precision.grouped import build_grouped_product
from harness.precision.linears import GROUPED_CAPABILITY
from harness.precision.swap import swap_linears
from harness.tools.parity.first_wrong import Piece, relative_difference, tolerance_of
from harness.tools.parity.parity import compare, trace
from harness.util.errors import UserError

RECIPES = [*FLOAT8, "mxfp8"]
SMALL = words("""
    training.steps=10 training.seq_len=64 training.global_batch_size=4 data.mask_fraction=0.3
""")
WIDE = ("model.n_layers=2", "model.dim=128", "model.moe.hidden_dim=128")
FAMILIES = {
    "qwen3": ("model=qwen3_moe_debug", *WIDE),
    "deepseek": ("model=deepseek_v3_debug", *WIDE),
    "gpt_oss": ("model=gpt_oss_debug", *WIDE),
}
CPU = torch.device("cpu")


@cache
def job_of(*overrides):
    dense = () if overrides and overrides[0].startswith("model=") else ("model.n_kv_heads=8",)
    return tiny(*SMALL, *dense, *overrides)


_traces = {}


def alone(pool, *overrides):
    """Trace a step of a job of one rank once. Its numbers depend on the rows of a pass."""
    job = job_of(*overrides)
    if job.id not in _traces:
        [_traces[job.id]] = pool.run(1, trace, job.to_json(), 1)
    return _traces[job.id]


def trace_with_float8_gathers(job_json, steps):
    """Trace with the tensor parallelism of GPUs, which gathers in float8; gloo sends it as bytes."""
    with gloo_that_sends_float8() as sent:
        traced = trace(job_json, steps)
    assert sent and all(dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for dtype in sent), sent
    return traced


@contextmanager
def gloo_that_sends_float8():
    """Enable float8 gathers on CPUs, and send torchao's float8 tensors as bytes.

    Yields:
        The dtypes that were gathered.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    from harness.parallelism import parallelize

    op = torch.ops._c10d_functional.all_gather_into_tensor.default
    sent = set()
    chosen, dispatch = parallelize.gathers_float8, Float8TrainingTensor.__torch_dispatch__

    def as_on_cuda(precision, layout, device):
        return chosen(precision, layout, torch.device("cuda", 0))

    def gather_bytes(cls, func, types, args, kwargs=None):
        if func is not op:
            return dispatch(func, types, args, kwargs)
        cast, *rest = args
        sent.add(cast._data.dtype)
        data = op(cast._data.contiguous().view(torch.uint8), *rest).view(cast._data.dtype)
        return Float8TrainingTensor(
            data, cast._scale, cast._orig_dtype, cast._linear_mm_config, cast._gemm_input_role
        )

    parallelize.gathers_float8 = as_on_cuda
    Float8TrainingTensor.__torch_dispatch__ = classmethod(gather_bytes)
    try:
        yield sent
    finally:
        parallelize.gathers_float8 = chosen
        Float8TrainingTensor.__torch_dispatch__ = dispatch


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values, dtype, over, power_of_two):
    """Values rounded to float8, with the scale that maps the largest magnitude to the format's maximum."""
    scale = torch.finfo(dtype).max / values.abs().amax(over, keepdim=True).double()
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values.double() * scale).float().to(dtype).double() / scale


def rounded_in_blocks(values):
    """Values rounded in blocks of 32 along the last axis; scales rounded up to powers of 2 (MX, RCEIL)."""
    blocks = values.view(*values.shape[:-1], -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(peak / torch.finfo(E4M3).max)))
    return ((blocks.double() / scale).float().to(E4M3).double() * scale).view(values.shape)


def difference(found, expected):
    """Relative error in the 2-norm."""
    return float((found.detach().double() - expected).norm() / expected.norm())


def precision_of(linear, dtype="float32"):
    return (
        f"precision.linear={linear}",
        f"precision.param_dtype={dtype}",
        "precision.emulate=true",
    )


@pytest.mark.parametrize("linear", RECIPES)
def test_a_linear_by_hand(linear):
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


@pytest.mark.parametrize(
    ("linear", "model", "parts", "number"),
    [
        *((linear, (), (".attention.w", ".feed_forward.w"), 28) for linear in RECIPES),
        ("float8_rowwise", ("precision.filter_fqns=[wk]",), ("output.",), 1),
        ("float8_rowwise", FAMILIES["deepseek"], (".moe.experts.w", ".wkv_b."), 5),
        ("mxfp8", FAMILIES["gpt_oss"], (".moe.experts.w",), 6),
    ],
)
def test_a_job_in_float8_against_bfloat16(pool, linear, model, parts, number):
    """With fixed routing: different routing of a few rows would change a gradient by more."""
    fixed = (*model, "model.moe.force_balance=true") if model[-1:] == WIDE[-1:] else model
    plain = [each for each in fixed if not each.startswith("precision.")]
    [expected] = alone(pool, *plain, "precision.param_dtype=bfloat16")
    [found] = alone(pool, *fixed, *precision_of(linear, "bfloat16"))
    loss, norm = (5e-3, 5e-2) if "experts" in parts[0] else (1e-3, 2e-2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=loss)
    assert found["gradient norm"] == pytest.approx(expected["gradient norm"], rel=norm)
    gradients = [what for what in expected if what.startswith("gradient of ")]
    names = [name for name in gradients if any(part in name for part in parts)]
    assert len(names) == number
    for name in names:
        error = difference(found[name], expected[name].double())
        assert 0.01 < error < 0.15, name
    if not model:
        most = LARGEST_ERRORS[linear]
        both = [torch.cat([of[name].flatten() for name in names]) for of in (found, expected)]
        assert most / 2 < difference(both[0], both[1].double()) < most


# Of the gradients of all swapped linears together, against bfloat16. Tensorwise rounds gradients to two bits
# of mantissa, the others to three; rowwise_hp rounds them once less.
LARGEST_ERRORS = {
    "float8_tensorwise": 0.09,
    "float8_rowwise": 0.065,
    "float8_rowwise_hp": 0.05,
    "mxfp8": 0.065,
}

EXPERTS = (*FAMILIES["qwen3"], "model.moe.hidden_dim=256")


@pytest.mark.parametrize(
    ("linear", "model", "layout"),
    [
        ("float8_tensorwise", (), "parallelism=fsdp_tp"),
        ("float8_rowwise_hp", (), "parallelism=fsdp_tp"),
        ("mxfp8", EXPERTS, "parallelism=fsdp_tp_ep"),
        ("mxfp8", EXPERTS, "parallelism=tp parallelism.expert_tensor_parallel=true"),
    ],
)
def test_layout_agrees_with_one_process(pool, linear, model, layout):
    """In float32, with rows of a forward pass as on one rank of the layout, over which scales are computed.

    Tensor parallelism adds in another order, so a value between two float8 values may be rounded to the other
    one. In the two-bit gradients of tensorwise, one such value changes a weight's gradient by half a percent.
    """
    shared, rows = (
        (*model, *precision_of(linear)),
        () if model else ("training.local_batch_size=2",),
    )
    job = job_of(*shared, *layout.split())
    found = pool.run(job.world_size, trace, job.to_json(), 1)
    tolerances = (1e-5 if model else 1e-6, 1e-2)
    verdict = compare(layout, job.world_size, alone(pool, *shared, *rows), found, tolerances)
    require_agreement(verdict)
    assert model or verdict.norm < 1e-6


def test_the_same_numbers_another_way(pool):
    """Bitwise: gathers in float8, with scales ahead of them, recomputation and compilation."""
    gather = "precision.enable_fsdp_float8_all_gather=true"
    ahead = "precision.precompute_float8_dynamic_scale_for_fsdp=true"
    for dtype, layout, options in (
        ("float32", "fsdp", [(gather,), (gather, ahead)]),
        # A scale is that of the whole weight, of which a tensor-parallel rank has a part.
        ("float32", "fsdp_tp", [(gather,)]),
        (
            "bfloat16",
            "fsdp",
            [("activation_checkpoint=selective_op",), ("compile=on", "compile.backend=aot_eager")],
        ),
    ):
        linear = precision_of("float8_tensorwise", dtype)
        shared = (*linear, f"parallelism={layout}", "model.n_layers=2")
        runs = []
        for each in ((), *options):
            job = job_of(*shared, *each)
            runs.append(pool.run(job.world_size, train_engine, job, 3))
        for found, each in zip(runs[1:], options, strict=True):
            for rank, (a, b) in enumerate(zip(found, runs[0], strict=True)):
                if "compile=on" in each and torch.__version__ >= "2.15":
                    # There eager blocks do not round gradients of norms to bfloat16.
                    assert a.losses == pytest.approx(b.losses) and a.norms == pytest.approx(b.norms)
                    continue
                assert (a.losses, a.norms) == (b.losses, b.norms)
                assert_equal(a.weights, b.weights, f"rank {rank}")
    # In bfloat16 such a gather skips a rounding, so it is part of the numerics.
    assert job_of(*shared).numerics_id != job_of(*shared, gather).numerics_id


def local_of(value):
    return value.local if isinstance(value, Piece) else value


def test_tensor_parallelism_that_gathers_float8(pool):
    """GPUs cast, then gather; the result equals that of gathering, then casting."""
    job = job_of(*precision_of("float8_tensorwise", "bfloat16"), "parallelism=fsdp_tp")
    expected = pool.run(4, trace, job.to_json(), 1)
    found = pool.run(4, trace_with_float8_gathers, job.to_json(), 1)
    for [whole], [own] in zip(expected, found, strict=True):
        assert whole.keys() == own.keys()
        for what in whole:
            off = relative_difference(local_of(own[what]), local_of(whole[what]))
            assert off <= tolerance_of(what, (1e-6, 1e-6)), what


LENGTHS = [5, 0, 130, 16]


@pytest.mark.parametrize("linear", GROUPED)
def test_a_product_by_hand(linear):
    """Output and gradients of each group against reference casts and products in float64."""
    torch.manual_seed(0)
    precision = PrecisionConfig(linear=linear, emulate=True)
    rows = sum(LENGTHS)
    x = torch.randn(rows, 128) * torch.logspace(-2, 2, rows)[:, None]
    w, g = torch.randn(len(LENGTHS), 256, 128), torch.randn(rows, 256)
    place_R, ends_E, places = padded_positions(
        torch.tensor(LENGTHS).cumsum(0).int(), rows, precision.expert_block
    )
    inputs, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    padded = inputs.new_zeros(places, inputs.shape[1]).index_copy(0, place_R, inputs)
    output = build_grouped_product(precision)(padded, weight, ends_E).index_select(0, place_R)
    output.backward(g)

    def along_rows(values):
        """Values of a group rounded along rows, transposed to [columns, rows]."""
        if linear == "float8_rowwise":
            return rounded(values, E4M3, (0,), True).T
        filled = torch.cat((values, values.new_zeros(-len(values) % 32, values.shape[1])))
        return rounded_in_blocks(filled.T.contiguous())[:, : len(values)]

    def along(values):
        return (
            rounded(values, E4M3, (1,), True)
            if linear == "float8_rowwise"
            else rounded_in_blocks(values)
        )

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
        assert (
            difference(inputs.grad[at], along(g[at]) @ along(w[expert].T.contiguous()).T)
            < tolerance
        )
        assert difference(weight.grad[expert], along_rows(g[at]) @ along_rows(x[at]).T) < tolerance
        assert 0.01 < difference(output[at], x[at].double() @ w[expert].double().T) < 0.05


def experts_of(family):
    """Two equal experts modules with random values."""
    torch.manual_seed(0)
    pair = Experts(job_of(*FAMILIES[family]).model), Experts(job_of(*FAMILIES[family]).model)
    for parameter in pair[0].parameters():
        nn.init.normal_(parameter, std=0.1)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.mark.parametrize("linear", GROUPED)
def test_the_kernels_that_gpus_call(linear, monkeypatch):
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

    def record(x, weight_t, ends_E, **options):
        calls.append((tuple(x.shape), tuple(weight_t.shape)))
        assert x.dtype == weight_t.dtype == torch.bfloat16
        assert x.stride(-1) == 1 and weight_t.stride(-2) == 1
        lengths = torch.diff(ends_E, prepend=torch.zeros(1, dtype=torch.int32))
        assert (
            ends_E.dtype == torch.int32
            and not (lengths % precision.expert_block).any()
            and lengths.all()
        )
        assert (
            options["out_dtype"] == torch.bfloat16
            and not options["pad_token_groups_for_grouped_mm"]
        )
        assert options.get("kernel_preference", KernelPreference.AUTO) == KernelPreference.AUTO
        return grouped_product(x, weight_t.transpose(1, 2), ends_E)

    precision = PrecisionConfig(linear=linear)
    monkeypatch.setattr(torchao, name, record)
    if linear == "mxfp8":
        # Some wheels have no extension for this Python.
        monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", False)
        with one_line(UserError, r"^precision.linear=mxfp8: experts cannot multiply"):
            build_grouped_product(precision)
        monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
        monkeypatch.setattr(quant, "_mxfp8_cutedsl_kernels_available", False)
        with one_line(UserError, r"nvidia-cutlass-dsl .*moe.experts"):
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
def test_kernels_equal_emulation(linear):
    device = torch.device("cuda")
    if (
        torch.cuda.get_device_capability()[0]
        not in GROUPED_CAPABILITY[linear.removesuffix("_rowwise")]
    ):
        pytest.skip(f"{torch.cuda.get_device_name()} has no grouped product in {linear}")
    found = []
    for precision in (PrecisionConfig(linear=linear, emulate=emulate) for emulate in (True, False)):
        experts = experts_of("qwen3")[0].to(device, torch.bfloat16)
        swap_linears(nn.ModuleDict({"experts": experts}), ["experts"], precision, device)
        torch.manual_seed(1)
        x_RC = torch.randn(256, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        output = experts(x_RC, torch.tensor([7, 0, 40, 33, 1, 100, 64, 11], device=device))
        output.square().sum().backward()
        found.append([output, x_RC.grad, *(parameter.grad for parameter in experts.parameters())])
    for expected, each in zip(*found, strict=True):
        assert difference(each, expected.detach().double()) < 1e-2
