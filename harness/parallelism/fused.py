"""Makes weights adjacent in memory whose products are one (``ModuleSpec.fused``), with FSDP and without.

Parameters, and with them checkpoints and optimizers, stay as they are: a weight is a view of the
set's storage. Linears in other formats keep products of their own.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage
from torch.distributed.tensor import DTensor

from harness.model.grouped import local_shard
from harness.model.part import ModelPart
from harness.model.spec import modules
from harness.parallelism.tensor_styles import PlainLinear


def fused_sets(part: ModelPart) -> Iterator[tuple[Any, list[nn.Linear]]]:
    """Yield the modules of a part that multiply by several linears at once, with those linears."""
    built = dict(part.named_modules())
    for spec in modules(part.config):
        owner = built.get(spec.name)
        linears: Any = [getattr(owner, name, None) for name in spec.fused]
        if linears and {type(each) for each in linears} <= {nn.Linear, PlainLinear}:
            yield owner, linears


def lay_parameters(part: ModelPart) -> None:
    """Make the weights of every set adjacent, in a part without FSDP."""
    for owner, linears in fused_sets(part):
        weights = [local_shard(each, "weight").detach() for each in linears]
        owner.fused = torch.cat(weights)
        for each, own in zip(linears, owner.fused.split([*map(len, weights)]), strict=True):
            each.weight = _moved(each.weight, own)


def lay_gathered(
    part: ModelPart, gathered: dict[Tensor, Any], ranks: int, dtype: torch.dtype
) -> None:
    """Let FSDP gather the weights of every set to adjacent memory.

    Args:
        gathered: FSDP's parameters by their shards.
        ranks: ranks that share a parameter. What does not divide evenly is gathered with padding,
            and so apart.
        dtype: that of gathered weights.
    """
    for module in (_fsdp_param, _fsdp_param_group):
        module.alloc_storage = _allocate  # type: ignore[attr-defined]
    for owner, linears in fused_sets(part):
        parameters = [gathered[each.weight] for each in linears]
        rows = [each._orig_size[0] for each in parameters]
        if any(each % ranks for each in rows):
            continue
        columns = linears[0].in_features
        owner.fused = torch.empty(sum(rows), columns, dtype=dtype, device=parameters[0].device)
        for each, own in zip(parameters, owner.fused.split(rows), strict=True):
            each.all_gather_outputs = [own.view(-1)]
            each.init_unsharded_param = partial(_build, each, own)
            each.free_unsharded_param()


def _allocate(tensor: Tensor) -> None:
    """Allocate what FSDP gathers to; torch's function cuts a storage to the size of one tensor."""
    alloc_storage(tensor if tensor._base is None else tensor._base)


def _build(parameter: Any, own: Tensor) -> None:
    """Build a gathered parameter as torch does, once, and move it from the storage's begin to its place."""
    del parameter.init_unsharded_param
    parameter.init_unsharded_param()
    parameter._unsharded_param = _moved(parameter.unsharded_param, own)


def _moved(parameter: Any, own: Tensor) -> Any:
    """Return a parameter whose values, or those of its shard, are in other memory.

    A new DTensor is made: the compiler expects one whose shard was there from the beginning.
    """
    if not isinstance(parameter, DTensor):
        parameter.data = own
        return parameter
    layout = parameter.device_mesh, parameter.placements
    size: Any = {"shape": parameter.shape, "stride": parameter.stride()}
    moved = nn.Parameter(DTensor.from_local(own, *layout, run_check=False, **size))
    moved.requires_grad_(parameter.requires_grad)
    moved.grad_dtype = parameter.grad_dtype
    return moved
