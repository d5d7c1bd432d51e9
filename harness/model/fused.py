"""One product for several linears that have the same input, such as those of queries, keys and values.

Their weights stay parameters of their own. Parallelism makes the weights of such a set
adjacent in memory (``parallelism/fused.py``) and gives their owner a view of all of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.model.grouped import local_shard

# I: input width, O: output width, of all linears together


class _Joined(torch.autograd.Function):
    """The matrix of all weights; backward gives each weight its rows of the gradient.

    Without gradients the compiler leaves out the context if otherwise there are as many arguments
    as parameters (torch 2.13, variables/misc.py, call_apply), so all tensors are one parameter.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        matrix_OI, *weights = tensors
        ctx.rows = [len(each) for each in weights]
        return matrix_OI.view_as(matrix_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_OI: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad_OI.split(ctx.rows)


def multiply(owner: nn.Module, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Apply linears to the same input, in one product if their weights are adjacent.

    Forward hooks of a linear see its part of the result, so watching a linear changes no number.

    Args:
        owner: its ``fused`` is the matrix of all weights; None: they are apart.
    """
    matrix_OI: Any = owner.fused
    if matrix_OI is not None:
        weights = [local_shard(each, "weight") for each in linears]
        if torch.compiler.is_compiling() or _are_rows(weights, matrix_OI):
            bias = None
            if linears[0].bias is not None:
                bias = torch.cat([local_shard(each, "bias") for each in linears])
            out = F.linear(x, _Joined.apply(matrix_OI, *weights), bias)
            parts = out.split([len(each) for each in weights], -1)
            return [_shown(each, x, part) for each, part in zip(linears, parts, strict=True)]
    return [linear(x) for linear in linears]


def _shown(linear: nn.Linear, x: Tensor, part: Tensor) -> Tensor:
    """Call a linear's forward hooks with its part of the result, as calling the linear does."""
    for hook in linear._forward_hooks.values():
        changed = hook(linear, (x,), part)
        part = part if changed is None else changed
    return part


def _are_rows(weights: list[Tensor], matrix_OI: Tensor) -> bool:
    """Whether the weights are still parts of the matrix: a linear may have been given another one."""
    place = matrix_OI.data_ptr()
    for weight in weights:
        if weight.data_ptr() != place:
            return False
        place += weight.nbytes
    return True
