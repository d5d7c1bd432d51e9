"""Quantized weights in safetensors: which methods are read, and which tensors make a weight (no torch).

FP8: ``NAME`` has float8_e4m3fn values [O, I], and ``NAME_scale_inv`` the factors of its blocks;
blocks at the edges may be partial. As in DeepSeek's inference/kernel.py (``weight_dequant``).
MXFP4: ``NAME_blocks`` [E, O, I/32, 16] has two e2m1 values a byte, and ``NAME_scales`` [E, O, I/32]
the exponents of 32 values each, for a weight [E, I, O]. As in transformers' integrations/mxfp4.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.config.types import fits
from harness.util.errors import UserError, one_line
from harness.weights.families.core import Shape

GROUP = 32
"""Values of MXFP4 that share a scale."""

_FP8 = "F8_E4M3"
_FP8_SCALES = "_scale_inv"
_SCALES_OF_FP8 = ("F32", "F16", "BF16", "F8_E8M0")
_ACTIVATION_SCALES = (
    "activation_scale",
    "input_scale",
)  # beside a weight; not needed for its values
# Of MXFP4.
_BLOCKS = "_blocks"
_SCALES = "_scales"

Stored = Mapping[str, tuple[Shape, str]]
"""Shape and safetensors' dtype of tensors by name."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight: the names of its stored values and scales, and its shape."""

    values: str
    scales: str
    shape: Shape
    block: tuple[int, int] | None = None
    """Rows and columns of the values that share a scale; None for MXFP4."""


Find = Callable[[Stored], dict[str, QuantizedTensor]]
"""Finds the quantized weights among stored tensors; raises UserError with a tensor's name."""


def quantization_of(content: Mapping[str, Any]) -> Find:
    """How the weights beside a config.json are quantized."""
    found = content.get("quantization_config")
    if not found:
        return lambda _stored: {}
    method = found.get("quant_method") if isinstance(found, dict) else None
    parse = _METHODS.get(str(method))
    if parse is None:
        raise _refusal(
            "quant_method", method, f"{', '.join(_METHODS)}, or the same weights in bfloat16"
        )
    return parse(found)


def part_names(stored: Stored, quantized: Mapping[str, QuantizedTensor]) -> set[str]:
    """Names of the values and scales of quantized weights, and of the scales of activations beside them."""
    parts = set()
    for name, weight in quantized.items():
        parts |= {weight.values, weight.scales}
        if name.endswith(".weight"):
            module = name.removesuffix("weight")
            parts |= {module + beside for beside in _ACTIVATION_SCALES} & stored.keys()
    return parts


def _refusal(field: str, value: object, works: str) -> UserError:
    shown = one_line(value if isinstance(value, str) else json.dumps(value))
    return UserError(
        f"config.json has quantization_config: {field} {shown} is not read; would work: {works}"
    )


# -- methods ----


def _fp8(found: Mapping[str, Any]) -> Find:
    size = found.get("weight_block_size", [128, 128])
    if not fits(size, list[int]) or len(size) != 2 or min(size) < 1:
        raise _refusal("weight_block_size", size, "[128, 128], or the same weights in bfloat16")
    return partial(_fp8_tensors, (size[0], size[1]))


_METHODS: dict[str, Callable[[Mapping[str, Any]], Find]] = {
    "fp8": _fp8,
    "mxfp4": lambda _: _mxfp4_tensors,
}


# -- tensors ----


def _fp8_tensors(block: tuple[int, int], stored: Stored) -> dict[str, QuantizedTensor]:
    found = {}
    for name, (shape, dtype) in stored.items():
        if name.endswith(f".weight{_FP8_SCALES}"):
            weight = name.removesuffix(_FP8_SCALES)
            if stored.get(weight, (shape, ""))[1] != _FP8:
                has = f"is {stored[weight][1]}" if weight in stored else "is missing"
                raise UserError(f"{name} has scales of {weight}, which {has}")
        if dtype != _FP8:
            continue
        if len(shape) != 2:
            raise UserError(
                f"{name} has {_FP8} values and is {list(shape)}, only matrices are read"
            )
        beside = name + _FP8_SCALES
        if beside not in stored:
            raise UserError(f"{name} has {_FP8} values, and its scales {beside} are missing")
        scales, scale_dtype = stored[beside]
        grid = tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
        if scales != grid:
            rule = f"one for each {block[0]} x {block[1]} of the {shape[0]} x {shape[1]} values"
            raise UserError(f"{beside} is {list(scales)} and not {list(grid)}, {rule}")
        if scale_dtype not in _SCALES_OF_FP8:
            raise UserError(f"{beside} is {scale_dtype}; would work: {', '.join(_SCALES_OF_FP8)}")
        found[name] = QuantizedTensor(name, beside, shape, block)
    return found


def _mxfp4_tensors(stored: Stored) -> dict[str, QuantizedTensor]:
    found = {}
    for name in stored:
        base = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if base == name or base in found:
            continue
        parts = (base + _BLOCKS, base + _SCALES)
        for part in parts:
            if part not in stored:
                raise UserError(f"{part} is missing, and {name} needs it")
            if stored[part][1] != "U8":
                raise UserError(f"{part} is {stored[part][1]}; would work: U8")
        if base in stored:
            raise UserError(f"{base} is stored twice, also as {name}")
        blocks, scales = (stored[part][0] for part in parts)
        if len(scales) != 3 or blocks != (*scales, GROUP // 2):
            rule = f"must be [experts, outputs, inputs / {GROUP}, {GROUP // 2}] and the same without the last"
            raise UserError(
                f"{parts[0]} is {list(blocks)} and {parts[1]} is {list(scales)}, {rule}"
            )
        experts, outputs, groups = scales
        found[base] = QuantizedTensor(*parts, (experts, groups * GROUP, outputs))
    return found
