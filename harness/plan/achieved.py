"""Matrix products and attention by device: the share of the data sheet's peak that the best kernels achieve.

Power limits the clock of modern devices under load, so the data sheet's peak is reached by none of them
(rocm.blogs.amd.com/software-tools-optimization/Understanding_Peak_and_Max-Achievable_FLOPS). The values are
those of the largest products; training's are slower by the constants ``matmul`` and ``float8``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Achieved:
    """Fractions of a device's peaks."""

    half: float
    """Products of 16-bit values, as a fraction of their peak."""
    float8: float
    """Products of 8-bit values, as a fraction of theirs."""
    attention: float
    """Fused attention, forward and backward, as a fraction of the 16-bit peak."""


# Products: "Maximum Achievable Matmul FLOPS", github.com/stas00/ml-engineering, compute/accelerator
# (version 2 of the benchmark), and insights/when-to-upgrade-gpus for the H200 and B200. GB200 has the
# B200's. AMD's float8: rocm.blogs.amd.com/software-tools-optimization/measuring-max-achievable-flops-part2.
# Attention is what torch.scaled_dot_product_attention runs:
# - A100: FlashAttention-2, 50 to 73 % (arXiv:2307.08691, abstract).
# - Hopper: FlashAttention-2, 35 % (arXiv:2407.08608, abstract).
# - Blackwell: the same kernel, which does not use the new tensor cores: Hopper's 350 TFLOP/s, on 148 in place
#   of 132 multiprocessors.
# - MI300X: AOTriton; assumed, 0.15 to 0.3.
_A100 = Achieved(0.869, 0.869, 0.6)
_H100 = Achieved(0.803, 0.709, 0.35)
_H200 = Achieved(0.803, 0.734, 0.35)
_BLACKWELL = Achieved(0.776, 0.763, 0.17)
_MI300X = Achieved(0.514, 0.487, 0.22)
MEASURED = Achieved(1.0, 1.0, 1.0)
_OTHER = Achieved(0.8, 0.72, 0.35)
"""Assumed for devices that nobody measured so."""


def _at_power(rated: Achieved, limit: float, rating: float, idle: float = 100.0) -> Achieved:
    """Scale products to a power limit, in W; attention does not use all the power.

    Dynamic power is assumed to grow with the square of the clock.
    """
    clock = ((limit - idle) / (rating - idle)) ** 0.5
    return Achieved(rated.half * clock, rated.float8 * clock, rated.attention)


ACHIEVED = {
    "A100 SXM 40GB": _A100,
    "A100 SXM 80GB": _A100,
    "A100 PCIe 40GB": Achieved(0.811, 0.811, 0.56),
    "A100 PCIe 80GB": Achieved(0.811, 0.811, 0.56),
    "H100 SXM": _H100,
    "H100 96GB": _at_power(_H100, 500, 700),
    "H200 SXM": _H200,
    "B200": _BLACKWELL,
    "GB200": _BLACKWELL,
    "MI300X": _MI300X,
}
"""By the accelerator's name in ``harness/hardware.py``."""


def achieved_by(name: str) -> Achieved:
    """Return a device's fractions."""
    return ACHIEVED.get(name, _OTHER)
