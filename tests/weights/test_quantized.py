"""Quantized weights are those that transformers and an independent decoder read."""

import json
import re

import pytest
import torch
import transformers
from conversions import refused, require_same, run
from families_table import CASES, SEQ_LEN, batch, close, random_model, set_fields, tensors_of
from held import Held
from quantized_files import from_mxfp4, quantize_fp8, quantize_mxfp4, rewrite, stored_in
from test_families import from_theirs, require_parts
from torch import Tensor

from harness.checkpoint.catalog import open_checkpoint
from harness.model.decoder import Decoder
from harness.model.spec import is_buffer
from harness.util.errors import UserError
from harness.weights.dcp import DistributedSource
from harness.weights.huggingface import HuggingFaceSource, write_huggingface
from harness.weights.quantization import quantization_of

DEEPSEEK, GPT_OSS, LLAMA = CASES["deepseek_v3"], CASES["gpt_oss"], CASES["llama"]
WITH_MTP = set_fields(DEEPSEEK, mtp__depth=1)
E4M3 = torch.float8_e4m3fn
PARTIAL = (24, 48)  # divides almost no dimension


def written(folder, model):
    """A folder with random weights that are not quantized."""
    write_huggingface(Held(tensors_of(random_model(model))), model, None, folder)
    return folder


def require_read(folder, model, expected):
    """Fail unless the folder has the expected tensors, exactly, also in parts."""
    source = HuggingFaceSource(folder, model, torch.float32)
    ours = dict(from_theirs(model, expected))
    require_same(source, ours)
    require_parts(source, ours)


@pytest.mark.parametrize("case", ["deepseek_v3", "gpt_oss"])
def test_logits_are_those_of_transformers(case, tmp_path, monkeypatch):
    model = CASES[case]
    written(tmp_path, model)
    if case == "gpt_oss":
        quantize_mxfp4(tmp_path)
        config = transformers.Mxfp4Config(dequantize=True)
    else:
        quantize_fp8(tmp_path, (8, 16))  # transformers reads complete blocks only
        config = transformers.FineGrainedFP8Config(weight_block_size=(8, 16), dequantize=True)
        # It is needed for loading on several devices.
        where = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
        monkeypatch.setattr(where, lambda: True)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=config,
        output_loading_info=True,
    )
    assert not any(report.values()), report
    ours = Decoder(model, SEQ_LEN)
    source = HuggingFaceSource(tmp_path, model, torch.float32)
    ours.load_state_dict({name: source.read(name) for name in source.tensors})
    inputs, _ = batch(model)
    with torch.no_grad():
        logits, plain = ours(inputs), random_model(model)(inputs)
        close(logits, theirs.eval()(inputs).logits)
    assert (logits - plain).abs().max() > 1e-2 * plain.abs().max()


def power_of_two(scales):
    return scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)


FP8 = {"quant_method": "fp8"}
FORMS = {
    # Partial blocks, and the block of multi-token prediction; routers are not quantized.
    "deepseek": (WITH_MTP, PARTIAL, {**FP8, "weight_block_size": list(PARTIAL)}, Tensor.float),
    "e8m0": (LLAMA, PARTIAL, {**FP8, "weight_block_size": list(PARTIAL)}, power_of_two),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_fp8(name, tmp_path):
    """Factors of blocks, in several dtypes."""
    model, block, quantization, stored_as = FORMS[name]
    suffix = "_scale_inv"
    expected = quantize_fp8(written(tmp_path, model), block, quantization, stored_as)
    stored = stored_in(tmp_path)
    for key in [key for key in stored if key.endswith(suffix)]:
        stored[key.removesuffix(f"weight{suffix}") + "input_scale"] = torch.tensor(1.0)
    rewrite(tmp_path, stored, quantization)
    require_read(tmp_path, model, expected)


def test_mxfp4(tmp_path):
    """Every byte with every exponent that is a number."""
    written(tmp_path, GPT_OSS)
    expected = quantize_mxfp4(tmp_path)
    require_read(tmp_path, GPT_OSS, expected)
    stored = stored_in(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    blocks.copy_(torch.arange(blocks.numel()).view(blocks.shape) % 256)
    scales.copy_((torch.arange(scales.numel()).view(scales.shape) // 16) % 255)
    assert (
        len(set(zip(blocks[..., 0].flatten().tolist(), scales.flatten().tolist(), strict=True)))
        > 500
    )
    rewrite(tmp_path, stored, {"quant_method": "mxfp4"})
    require_read(tmp_path, GPT_OSS, {**expected, name: from_mxfp4(blocks, scales)})


def test_conversions_round_once(tmp_path):
    """To bfloat16 by default, and from float32 to another dtype."""
    expected = dict(
        from_theirs(DEEPSEEK, quantize_fp8(written(tmp_path / "hf", DEEPSEEK), PARTIAL))
    )
    for dtype in (torch.bfloat16, torch.float32):
        target = tmp_path / str(dtype)
        run(
            tmp_path / "hf",
            target,
            "model=from_config",
            f"convert.dtype={str(dtype).split('.')[1]}",
        )
        checkpoint = open_checkpoint(str(target))
        rounded = {
            name: each if is_buffer(name) else each.to(dtype) for name, each in expected.items()
        }
        require_same(DistributedSource(checkpoint.path, checkpoint.manifest, DEEPSEEK), rounded)
    run(tmp_path / "hf", tmp_path / "back", "model=from_config", "convert.format=hf")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    for name, tensor in stored_in(tmp_path / "back").items():
        is_quantized = re.search(r"_proj(_with_mqa)?\.weight$", name)
        assert tensor.dtype == (torch.bfloat16 if is_quantized else torch.float32), name


# -- mistakes ----


A = "model.layers.1.self_attn.o_proj.weight"
S = f"{A}_scale_inv"
N = "model.norm.weight"
E = "model.layers.0.mlp.experts.down_proj"
B = f"{E}_blocks"
C = f"{E}_scales"
# What takes the place of tensors (None: they are gone), and what the refusal says.
DAMAGED = [
    (lambda t: {S: None}, f"{A} has F8_E4M3 values, and its scales {S} are missing"),
    (lambda t: {A: None}, f"{S} has scales of {A}, which is missing"),
    (lambda t: {A: t[A].bfloat16()}, f"{S} has scales of {A}, which is BF16"),
    (lambda t: {S: t[S][:, :-1]}, f"{S} is [3, 1] and not [3, 2], one for each 24 x 48"),
    (lambda t: {S: t[S].int()}, f"{S} is I32; would work: F32, F16, BF16, F8_E8M0"),
    (
        lambda t: {N: torch.ones(64).to(E4M3)},
        f"{N} has F8_E4M3 values and is [64], only matrices are",
    ),
    (lambda t: {S: t[S] / 0}, f"{S} has a scale that is NaN or infinite"),
]
DAMAGED_MXFP4 = [
    (lambda t: {C: None}, f"{C} is missing, and {B} needs it"),
    (lambda t: {B: None}, f"{B} is missing, and {C} needs it"),
    (lambda t: {E: torch.ones(1)}, f"{E} is stored twice, also as {E}_"),
    (
        lambda t: {C: t[C][:, 1:]},
        f"{B} is [8, 64, 1, 16] and {C} is [8, 63, 1], must be [experts, ",
    ),
    (lambda t: {C: t[C] | 255}, f"{C} has a scale that is NaN or infinite"),
    (lambda t: {name: t[name].repeat_interleave(2, 1) for name in (B, C)}, "1 of another shape ("),
]


@pytest.mark.parametrize("rows", [DAMAGED, DAMAGED_MXFP4], ids=["fp8", "mxfp4"])
def test_damaged_folders(rows, tmp_path):
    """Scales are missing, too many, of another shape or no numbers."""
    folder = written(tmp_path / "hf", LLAMA if rows is DAMAGED else GPT_OSS)
    if rows is DAMAGED:
        quantize_fp8(folder, PARTIAL)
    else:
        quantize_mxfp4(folder)
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    before = stored_in(folder)
    for damage, says in rows:
        stored = {**before, **damage(before)}
        left = {name: tensor for name, tensor in stored.items() if tensor is not None}
        rewrite(folder, left, quantization)
        message = refused(folder, tmp_path / "out", "model=from_config")
        assert message.startswith(str(folder)) and says in message


def test_methods_that_are_not_read():
    for quantization, says in (
        (
            {"quant_method": "gptq"},
            "quant_method gptq is not read; would work: fp8, mxfp4",
        ),
        ("x", "quant_method null is not read"),
        (
            {**FP8, "weight_block_size": [0, 128]},
            "weight_block_size [0, 128] is not read; would work: [",
        ),
    ):
        with pytest.raises(UserError) as caught:
            quantization_of({"quantization_config": quantization})
        assert str(caught.value).startswith(f"config.json has quantization_config: {says}")


def test_weights_that_are_not_quantized(tmp_path):
    """A quantization_config may remain after its weights were dequantized; values decide."""
    expected = stored_in(written(tmp_path, LLAMA))
    rewrite(tmp_path, expected, FP8)
    require_read(tmp_path, LLAMA, expected)
    quantize_fp8(tmp_path, PARTIAL)
    rewrite(tmp_path, stored_in(tmp_path), None)
    with pytest.raises(
        UserError, match=r"model\.safetensors: \S+ has F8_E4M3 values; would work: F64, F32, F16"
    ):
        HuggingFaceSource(tmp_path, LLAMA)
