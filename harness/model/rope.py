"""Rotary position embedding.

Pairs are (i, i + D/2), the layout of Hugging Face's Llama checkpoints, whose weights can be used unchanged.
Meta's original files interleave pairs (2i, 2i + 1), so wq and wk are permuted. Families whose checkpoints are
all interleaved set ``rope.interleaved``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harness.config.model import RopeConfig

# B: batch, T: sequence, H: heads, D: rotated width


def rope_table(config: RopeConfig, width: int, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Cosines and sines of each position's rotation.

    Returns:
        float32 tensor [2, seq_len, width / 2]: cosines, then sines, times the temperature of YaRN.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        frequencies = _stretch_llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _stretch_yarn(frequencies, config, width)
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    table = torch.stack((angles.cos(), angles.sin()))
    return table if config.rotation_scale == 1 else table * config.rotation_scale


def _stretch_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones not, with a ramp between.

    Source: apply_scaling in meta-llama/llama-models, models/llama3/model.py.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position / wavelengths
    low, high = config.low_freq_factor, config.high_freq_factor
    # With equal factors (Llama 4) the ramp is a step.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns >= low).float()
    return frequencies * (kept + (1 - kept) / config.factor)


def _stretch_yarn(frequencies: Tensor, config: RopeConfig, width: int) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a ramp from unchanged to stretched pairs.

    It is between the pairs that turn ``beta_fast`` and ``beta_slow`` times within the original context.
    """

    def pair_with(turns: float) -> float:
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a step, as in the reference code of DeepSeek and transformers
    pairs = torch.arange(width // 2, dtype=torch.float32, device=frequencies.device)
    stretched = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.factor * stretched


def signed_table(table_2TD: Tensor) -> Tensor:
    """Widen [2, T, D / 2] to [2, T, D] for ``rotate``: cosines of both halves, and sines with their signs."""
    cos, sin = table_2TD
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x_BTHD: Tensor, table_2TD: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by their positions; compute in float32 and return the input's format.

    Interleaved pairs are returned as (i, i + D/2): scores do not depend on the order, which all heads share.

    Args:
        x_BTHD: queries or keys.
        table_2TD: rows of ``signed_table``; [2, B, T, D] if positions differ between sequences.
        interleaved: pairs are (2i, 2i + 1), not (i, i + D/2).
    """
    if interleaved:
        x_BTHD = x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        # A compiler fuses these operations itself.
        return _rotated(x_BTHD.float(), table_2TD, 1).type_as(x_BTHD)
    out: Tensor = _Rotation.apply(x_BTHD, table_2TD)
    return out


class _Rotation(torch.autograd.Function):
    """The gradient is a rotation back; eager autograd would launch three times as many kernels for it."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, table_2TD: Tensor) -> Tensor:
        ctx.save_for_backward(table_2TD)
        return _rotated(x_BTHD, table_2TD, 1)

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (table_2TD,) = ctx.saved_tensors
        return _rotated(grad_BTHD, table_2TD, -1), None


def _rotated(x_BTHD: Tensor, table_2TD: Tensor, direction: int) -> Tensor:
    cos, sin = table_2TD.unsqueeze(-2)
    others = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHD * cos, others, sin, value=direction).type_as(x_BTHD)
