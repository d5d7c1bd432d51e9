"""Swaps linears for those that multiply in float8, by torchao. Names, shapes and initial values stay.

Experts keep their parameters and get another product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.errors import UserError
from harness.model.moe import Experts
from harness.precision.config import PrecisionConfig
from harness.precision.grouped import grouped_in
from harness.precision.hardware import require_device

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

RECIPES = {
    "float8_tensorwise": "tensorwise",
    "float8_rowwise": "rowwise",
    "float8_rowwise_hp": "rowwise_with_gw_hp",
}


def swap_linears(
    part: nn.Module, converted: Collection[str], precision: PrecisionConfig, device: torch.device
) -> None:
    """Swaps the linears of a model part, and the products of its experts, for those of a format, in place.

    Args:
        part: on the meta device, before anything is split: what is split are the swapped modules.
        converted: names of the linears and experts, in the whole model; those that the part does not hold are
            ignored.
        precision: formats.
        device: where the part will compute.

    Raises:
        ConfigError: the device cannot multiply in the format.
        UserError: torchao is missing, too old, or without kernels for the device.
    """
    modules = {name: module for name, module in part.named_modules() if name in converted}
    experts = [module for module in modules.values() if isinstance(module, Experts)]
    require_device(precision, device, experts=bool(experts))
    try:
        make = _mxfp8(precision) if precision.linear == "mxfp8" else _float8(precision)
        multiply = grouped_in(precision) if experts else None
    except ImportError as error:
        raise UserError(
            f"precision.linear={precision.linear}: this torchao does not have it ({error}); would work: "
            "pip install -U torchao, 0.18 has every format"
        ) from error
    for name, module in modules.items():
        if isinstance(module, Experts):
            assert multiply is not None
            module.multiply, module.row_block = multiply, precision.expert_block
        else:
            assert isinstance(module, nn.Linear), f"{name} is no linear"
            part.set_submodule(name, make(module))


def _float8(precision: PrecisionConfig) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config: Float8LinearConfig = replace(
        Float8LinearConfig.from_recipe_name(RECIPES[precision.linear]),
        emulate=precision.emulate,
        enable_fsdp_float8_all_gather=precision.enable_fsdp_float8_all_gather,
    )
    return lambda linear: convert_to_float8_training(linear, config=config)


def _mxfp8(precision: PrecisionConfig) -> Any:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    preference = KernelPreference.EMULATED if precision.emulate else KernelPreference.AUTO

    def make(linear: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            swapped = MXFP8Linear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                kernel_preference=preference,
            )
        swapped.weight, swapped.bias = linear.weight, linear.bias
        return swapped

    return make


def plain(tensor: Tensor) -> Tensor:
    """The tensor without torchao's subclass around what this rank holds, over the same memory.

    The subclass tells FSDP to gather a weight in float8. Whoever stores values or updates them wants the
    values alone: a checkpoint would otherwise name torchao's classes.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner = getattr(local, "_tensor", None)
    if inner is None:
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def precompute_scales(parts: Iterable[nn.Module]) -> None:
    """Computes the scales of all weights that are gathered in float8, in one reduction."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
