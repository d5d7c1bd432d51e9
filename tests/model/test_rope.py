"""Rotary embeddings: rotation against complex numbers, and stretched wavelengths."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equal import assert_equal
from families_table import STRETCHED
from torch import Tensor

from harness.config.model import RopeConfig
from harness.model.rope import rope_table, rotate, signed_table

B, T, H, D = 2, 16, 3, 8


def complex_rotation(x_BTHD: Tensor, table_2TD: Tensor, *, interleaved: bool) -> Tensor:
    """Multiply pairs as complex numbers; real parts come out in the first half."""
    pairs = x_BTHD.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * torch.complex(*table_2TD.unsqueeze(2))
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("config", [RopeConfig(), RopeConfig(scaling="yarn", factor=4.0)])
def test_rotation_and_its_gradient(compiled: bool, interleaved: bool, config: RopeConfig) -> None:
    turn = torch.compile(rotate, backend="aot_eager") if compiled else rotate
    table_2TD = rope_table(config, D, T)
    ours, theirs = (torch.randn(B, T, H, D, generator=torch.manual_seed(0), requires_grad=True) for _ in "12")
    out = turn(ours, signed_table(table_2TD), interleaved=interleaved)
    expected = complex_rotation(theirs, table_2TD, interleaved=interleaved)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_narrow_inputs_are_rotated_in_float32() -> None:
    table_2TD = rope_table(RopeConfig(), D, T)
    x_BTHD = torch.randn(B, T, H, D).bfloat16()
    out = rotate(x_BTHD, signed_table(table_2TD))
    assert out.dtype == torch.bfloat16
    assert_equal(out, complex_rotation(x_BTHD.float(), table_2TD, interleaved=False).bfloat16())


def test_scaling_changes_long_wavelengths_only() -> None:
    """Below original_max_position / high_freq_factor all is left alone, above / low_freq_factor stretched."""
    plain = rope_table(dataclasses.replace(STRETCHED, scaling="none"), 32, seq_len=2)
    stretched = rope_table(STRETCHED, 32, seq_len=2)
    angles = [torch.atan2(table[1, 1], table[0, 1]) for table in (plain, stretched)]
    wavelengths = 2 * torch.pi / angles[0]
    short, long = wavelengths < 32 / 4, wavelengths > 32 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    ratio = angles[0] / angles[1]
    torch.testing.assert_close(ratio[short], torch.ones(int(short.sum())))
    torch.testing.assert_close(ratio[long], torch.full((int(long.sum()),), 8.0), rtol=1e-4, atol=0)
    between = ratio[~short & ~long]
    assert ((between > 1) & (between < 8)).all()
