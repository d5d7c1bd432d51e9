"""Rotary position embedding.

Pairs are (i, i + D/2), the layout of Hugging Face's Llama checkpoints, whose weights can be used unchanged.
Meta's original files interleave pairs (2i, 2i + 1), so wq and wk are permuted. Families whose checkpoints are
all interleaved set ``rope.interleaved``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.model.rope_config import RopeConfig

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


def rotate(x_BTHD: Tensor, table_2TD: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by their positions; computes in float32 and returns the input's format.

    Interleaved pairs are returned as (i, i + D/2): scores do not depend on the order, which all heads share.
    """
    cos, sin = table_2TD[0].unsqueeze(1), table_2TD[1].unsqueeze(1)
    x = x_BTHD.float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BTHD)
