"""Replacement of linears by torchao's float8 linears; names, shapes and initial values stay the same.

Experts keep their parameters and get another product function. Scales are maxima over the rows that
are multiplied at once: under tensor parallel over all shards, but each replica has those of its own
rows. So a float8 layout agrees with a process that takes the same rows at once.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle

from harness.config.parallelism import ParallelismConfig
from harness.config.precision import PrecisionConfig
from harness.model.moe import Experts
from harness.model.spec import Split
from harness.precision.grouped import build_grouped_product
from harness.precision.linears import require_device
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    pass

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
        converted: names of linears and experts in the full model; names not in the part are
            ignored.
    """
    modules = {name: module for name, module in part.named_modules() if name in converted}
    experts = [module for module in modules.values() if isinstance(module, Experts)]
    require_device(precision, device, experts=bool(experts))
    make = _mxfp8(precision) if precision.linear == "mxfp8" else _float8(precision)
    multiply = build_grouped_product(precision) if experts else None
    for name, module in modules.items():
        if isinstance(module, Experts):
            assert multiply is not None
            module.multiply = multiply
            module.row_block = precision.expert_block
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
    from torchao.quantization.quantize_.common import KernelPreference

    try:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    except ValueError as error:  # torchao 0.18 on Blackwell
        rule = f"torchao's kernels of mxfp8 do not load with the Triton of torch {torch.__version__}: {error}"
        raise ConfigError(
            "precision.linear", "mxfp8", rule, "torch 2.14, or precision=bf16"
        ) from error
    preference = KernelPreference.EMULATED if precision.emulate else KernelPreference.AUTO

    def make(linear: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            swapped = MXFP8Linear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                kernel_preference=preference,
            )
        swapped.weight = linear.weight
        swapped.bias = linear.bias
        return swapped

    return make


def plain(tensor: Tensor) -> Tensor:
    """Remove torchao's tensor subclass from the local shard; the result shares memory.

    The subclass makes FSDP gather a weight in float8. Checkpoints and the optimizer need the plain
    values: a checkpoint would otherwise name torchao's classes.
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


def gathers_float8(
    precision: PrecisionConfig, layout: ParallelismConfig, device: torch.device
) -> bool:
    """Whether tensor parallelism all-gathers in float8, half the bytes.

    A tensorwise scale is the largest magnitude over all shards, so casting before the gather gives
    the same result as casting after it. CPUs and the other recipes gather in param_dtype with the
    plain styles, which compute the same: gloo cannot send float8, and rowwise scales would have to
    be sent too.
    """
    return (
        precision.linear == "float8_tensorwise"
        and layout.uses_sequence_parallel
        and device.type == "cuda"
    )


def float8_style(module: nn.Module, split: Split, stream: Placement) -> ParallelStyle | None:
    """Parallel style of a float8 linear, or None for another module or split."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    if not isinstance(module, Float8Linear):
        return None
    if split is Split.COLUMN:
        return Float8ColwiseParallel()
    # Its gradient arrives split along the sequence and is gathered.
    return Float8RowwiseParallel(output_layouts=stream) if split is Split.ROW else None


def region_cast(
    inner: Collection[tuple[Split, nn.Module]],
) -> Callable[[DTensor], DTensor] | None:
    """Return the float8 cast of a region's input, before it is gathered, once for all linears that take it.

    Args:
        inner: the modules inside the region, and how each is split.

    Returns:
        None unless all linears that take the input are float8.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    users: list[Any] = [module for split, module in inner if split is Split.COLUMN]
    # With latents some column linears have another input.
    has_latents = any(split is Split.WHOLE for split, _ in inner)
    if has_latents or not all(isinstance(user, Float8Linear) for user in users):
        return None
    return partial(
        hp_tensor_to_float8_dynamic,
        float8_dtype=users[0].config.cast_config_input.target_dtype,
        linear_mm_config=users[0].linear_mm_config,
        gemm_input_role=GemmInputRole.INPUT,
    )
