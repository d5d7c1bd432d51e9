"""Replacement of linears by torchao's float8 linears; names, shapes and initial values stay the same.

Experts keep their parameters and get another product function. Scales are maxima over the rows that are
multiplied at once: under tensor parallel over all shards, but each replica has those of its own rows. So a
float8 layout agrees with a process that takes the same rows at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.config.precision import PrecisionConfig
from harness.model.moe import Experts
from harness.precision.grouped import build_grouped_product
from harness.precision.hardware import require_device
from harness.util.errors import UserError

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
    """Replace the linears of a model part, and the product of its experts, in place.

    Args:
        part: a model part on the meta device, before tensor parallel splits it.
        converted: names of linears and experts in the full model; names not in the part are ignored.
        precision: number formats.
        device: where the part will compute.

    Raises:
        ConfigError: the device does not support the format.
        UserError: torchao is missing, too old, or has no kernels for the device.
    """
    modules = {name: module for name, module in part.named_modules() if name in converted}
    experts = [module for module in modules.values() if isinstance(module, Experts)]
    require_device(precision, device, experts=bool(experts))
    try:
        make = _mxfp8(precision) if precision.linear == "mxfp8" else _float8(precision)
        multiply = build_grouped_product(precision) if experts else None
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
            assert isinstance(module, nn.Linear), f"{name} is not a linear"
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
    """Remove torchao's tensor subclass from the local shard; the result shares memory.

    The subclass makes FSDP gather a weight in float8. Checkpoints and the optimizer need the plain values: a
    checkpoint would otherwise name torchao's classes.
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
    """Compute the scales of all weights that FSDP gathers in float8, in one reduction."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
