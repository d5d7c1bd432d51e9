"""Float8 rounding by its definition: the reference for torchao's casts."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values: Tensor, dtype: torch.dtype, over: tuple[int, ...], power_of_two: bool) -> Tensor:
    """Values rounded to float8, with the scale that maps the largest magnitude to the format's maximum."""
    scale = torch.finfo(dtype).max / values.abs().amax(over, keepdim=True).double()
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values.double() * scale).float().to(dtype).double() / scale


def rounded_in_blocks(values: Tensor) -> Tensor:
    """Values rounded in blocks of 32 along the last axis; scales rounded up to powers of 2 (MX, RCEIL)."""
    blocks = values.view(*values.shape[:-1], -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(peak / torch.finfo(E4M3).max)))
    return ((blocks.double() / scale).float().to(E4M3).double() * scale).view(values.shape)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((found.detach().double() - expected).norm() / expected.norm())
