"""Rotary position embedding.

Pairs are (i, i + D/2), the layout of Hugging Face's checkpoints, so that weights go to and from them
unchanged; Meta's original files interleave pairs (2i, 2i + 1) and need a permutation of wq and wk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.model.config import RopeConfig

# B: batch, T: sequence, H: heads, D: head width


def rope_table(config: RopeConfig, head_dim: int, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Cosines and sines of every position's rotation.

    Returns:
        float32 tensor [2, seq_len, head_dim / 2]: cosines, then sines.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "llama3":
        frequencies = _stretch_llama3(frequencies, config)
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def _stretch_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones left, a ramp between.

    Source: apply_scaling in meta-llama/llama-models, models/llama3/model.py.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position / wavelengths
    ramp = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / config.factor)


def rotate(x_BTHD: Tensor, table_2TD: Tensor) -> Tensor:
    """Rotates queries or keys by their positions; computes in float32 and returns the input's format."""
    cos, sin = table_2TD[0].unsqueeze(1), table_2TD[1].unsqueeze(1)
    first, second = x_BTHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BTHD)
