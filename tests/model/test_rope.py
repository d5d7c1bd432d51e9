"""Rotary embeddings: rotation against complex numbers, and stretched wavelengths."""

import dataclasses
import os
import sys

import pytest
import torch
from families_table import STRETCHED
from processes import python

from harness.config.model import RopeConfig
from harness.model.rope import _rotated, rope_table, rotate, signed_table, turn

B, T, H, D = 2, 16, 3, 8


def complex_rotation(x_BTHD, table_2TD, *, interleaved):
    """Multiply pairs as complex numbers; real parts come out in the first half."""
    pairs = x_BTHD.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * torch.complex(*table_2TD.unsqueeze(2))
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize(
    ("device", "compiled"),
    [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("config", [RopeConfig(), RopeConfig(scaling="yarn", factor=4.0)])
def test_rotation_and_its_gradient(device, compiled, interleaved, config):
    turn = torch.compile(rotate, backend="aot_eager") if compiled else rotate
    table_2TD = rope_table(config, D, T)
    # As many keys as half of the heads; queries are a part of their rows, as in latent attention.
    ours = [
        torch.randn(B, T, heads, D + 2, device=device, requires_grad=True) for heads in (2 * H, H)
    ]
    theirs = [x.detach().cpu().requires_grad_() for x in ours]
    out = turn(
        *(x[..., 2:] for x in ours), signed_table(table_2TD).to(device), interleaved=interleaved
    )
    expected = [complex_rotation(x[..., 2:], table_2TD, interleaved=interleaved) for x in theirs]
    grads = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(out, [grad.to(device) for grad in grads])
    torch.autograd.backward(expected, grads)
    torch.testing.assert_close([x.cpu() for x in out], expected)
    torch.testing.assert_close([x.grad.cpu() for x in ours], [x.grad for x in theirs])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_narrow_inputs_are_rotated_in_float32(device):
    """A GPU's last bit of float32 may differ, so that a few values are rounded to their other neighbor."""
    table_2TD = rope_table(RopeConfig(), D, T)
    x_BTHD = torch.randn(B, T, H, D).bfloat16()
    for out in rotate(*(x_BTHD.to(device) for _ in "qk"), signed_table(table_2TD).to(device)):
        assert out.dtype == torch.bfloat16
        expected = complex_rotation(x_BTHD.float(), table_2TD, interleaved=False).bfloat16()
        torch.testing.assert_close(
            out.cpu(), expected, rtol=0.0 if device == "cpu" else 2**-7, atol=0.0
        )


def compare_kernel(heads, width, direction, *, interleaved):
    table = torch.stack([signed_table(rope_table(RopeConfig(), width, T))] * B, 1)[:, :, : T - 1]
    inputs = [torch.randn(B, T - 1, each, width + 4)[..., 4:] for each in heads]
    expected = tuple(_rotated(x, table, direction, interleaved) for x in inputs)
    torch.testing.assert_close(turn(*inputs, table, direction, interleaved), expected)


def test_the_kernel_rotates_as_plain_operations_do():
    """Run by Triton's interpreter, which truncates where a GPU rounds: so in float32."""
    pytest.importorskip("triton")
    done = python(__file__, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr


def test_scaling_changes_long_wavelengths_only():
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


if __name__ == "__main__":
    for direction in (1, -1):
        compare_kernel((4, 2), 8, direction, interleaved=False)
        compare_kernel((5, 1), 12, direction, interleaved=True)
