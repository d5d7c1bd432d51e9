"""Matrix products and attention by device: the share of the data sheet's peak that the best kernels achieve.

Power limits the clock of modern devices under load, so the data sheet's peak is reached by none of them
(rocm.blogs.amd.com/software-tools-optimization/Understanding_Peak_and_Max-Achievable_FLOPS). The values are
those of the largest products; training's are slower by the constants ``matmul`` and ``float8``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Achieved:
    """Fractions of a device's peaks."""

    half: float
    """Products of 16-bit values, as a fraction of their peak."""
    float8: float
    """Products of 8-bit values, as a fraction of theirs."""
    attention: float
    """Fused attention, forward and backward, as a fraction of the 16-bit peak: the kernel that torch 2.13
    chooses on the device."""
    others: dict[str, float] = field(default_factory=dict)
    """The same for kernels that other trainers ran, by name."""
    persistent: bool = True
    """Whether products run as persistent kernels, one block for each multiprocessor, as since Hopper."""


# Products: "Maximum Achievable Matmul FLOPS", github.com/stas00/ml-engineering, compute/accelerator
# (version 2 of the benchmark), and insights/when-to-upgrade-gpus for the H200 and B200. GB200 has the
# B200's. AMD's float8: rocm.blogs.amd.com/software-tools-optimization/measuring-max-achievable-flops-part2.
#
# Attention: torch.scaled_dot_product_attention prefers cuDNN on Hopper and Blackwell if its version is above
# 9.15 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which wheels carry since torch 2.11
# (github.com/huggingface/transformers/pull/48163); before, and on Ampere, it runs FlashAttention-2.
# - flash2, A100: 50 to 73 % (arXiv:2307.08691, abstract). Hopper: 35 % (arXiv:2407.08608, abstract).
#   Blackwell: 333 to 390 TFLOP/s (github.com/Dao-AILab/flash-attention/issues/1589).
# - flash1: half of flash2 (arXiv:2307.08691, abstract: 25 to 40 %).
# - cudnn, Hopper: FlashAttention-3's 447 TFLOP/s in a step at 8 k tokens (insights/when-to-upgrade-gpus)
#   times 600 / 646 (arXiv:2407.08608, forward at a head width of 128 and 8 k tokens). Blackwell: assumed,
#   0.28 to 0.42; FlashAttention-4 has 834 TFLOP/s there.
# - cudnn9.10, Blackwell: what takes 8B at 8 k from 10,902 to 12,211 tokens/s if flash2 has 340 TFLOP/s
#   (github.com/pytorch/torchtitan/pull/1196).
# - flex: 0.87 of flash2 (pytorch.org/blog/flexattention: 90 % forward, 85 % backward).
# - aotriton, MI300X: 0.11 and later run AITER's kernels, "over 500 TFLOPS" in training
#   (github.com/pytorch/pytorch/pull/161754); before, as AMD's FlashAttention-2: 223 to 231 TFLOP/s forward
#   and backward (github.com/ROCm/flash-attention/issues/142).
#
# Products of training, as a fraction of the best ones, are slower than Hopper's:
# - Blackwell: 0.8, assumed, 0.76 to 1. It is 0.76 if all but attention has 1.67 times Hopper's speed, as
#   measured at 8 k tokens (insights/when-to-upgrade-gpus), where the best products have 2.2 times.
# - MI300X: 0.93 in 16 bits, from AMD's 0.74 to 0.81 for typical products (rocm.blogs.amd.com/
#   artificial-intelligence/taf-blog, on an MI325X), against 0.82 fitted on Hopper. In 8 bits 0.85: training's
#   shapes have 990 TFLOP/s against an H100's 1,280 (newsletter.semianalysis.com, "MI300X vs H100 vs H200
#   Benchmark Part 1: Training"), the best ones 1,273 against 1,403.
_BLACKWELL_TYPICAL, _CDNA_TYPICAL, _CDNA_TYPICAL_8 = 0.8, 0.93, 0.85
_A100 = Achieved(0.869, 0.869, 0.6, {"flash2": 0.6}, persistent=False)
_A100_PCIE = Achieved(0.811, 0.811, 0.56, {"flash2": 0.56}, persistent=False)
_HOPPER_KERNELS = {"cudnn": 0.42, "flash2": 0.35, "flash1": 0.18, "flex": 0.3}
_H100 = Achieved(0.803, 0.709, 0.42, _HOPPER_KERNELS)
_H200 = Achieved(0.803, 0.734, 0.42, _HOPPER_KERNELS)
_BLACKWELL = Achieved(
    0.776 * _BLACKWELL_TYPICAL,
    0.763 * _BLACKWELL_TYPICAL,
    0.34,
    {"cudnn": 0.34, "cudnn9.10": 0.27, "flash2": 0.16, "flex": 0.14},
)
_MI300X = Achieved(0.514 * _CDNA_TYPICAL, 0.487 * _CDNA_TYPICAL_8, 0.38, {"aotriton0.10": 0.18})
_OTHER = Achieved(0.8, 0.72, 0.35)
"""Assumed for devices that nobody measured so."""

FIXED_POWER = 200.0
"""Watts under load that do not depend on the clock: memory, links, leakage; assumed, 100 to 250."""


def _at_power(rated: Achieved, limit: float, rating: float) -> Achieved:
    """Scale products to a power limit, in W; attention does not use all the power.

    Dynamic power is assumed to grow with the square of the clock.
    """
    clock = ((limit - FIXED_POWER) / (rating - FIXED_POWER)) ** 0.5
    return replace(rated, half=rated.half * clock, float8=rated.float8 * clock)


ACHIEVED = {
    "A100 SXM 40GB": _A100,
    "A100 SXM 80GB": _A100,
    "A100 PCIe 40GB": _A100_PCIE,
    "A100 PCIe 80GB": _A100_PCIE,
    "H100 SXM": _H100,
    "H100 96GB": _at_power(_H100, 500, 700),
    "H200 SXM": _H200,
    "B200": _BLACKWELL,
    "GB200": _BLACKWELL,
    "MI300X": _MI300X,
}
"""By the accelerator's name in ``harness/util/hardware.py``."""


KERNELS = frozenset(name for each in ACHIEVED.values() for name in each.others)
"""Names of attention kernels."""


def achieved_by(name: str) -> Achieved:
    """Return a device's fractions."""
    return ACHIEVED.get(name, _OTHER)
