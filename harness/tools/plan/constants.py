"""Efficiency constants: achieved fractions of data-sheet peaks, and fixed costs.

The defaults are fitted (harness/tools/plan/make.py) on Table 1 and one row of Table 5 of
torchtitan's published tables (experiments/llama3_h100/published.csv) and on nothing else; the
report prints the errors. ``harness plan calibrate=FOLDER`` fits them to measured runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.config.fields import check_rules, from_dict, label
from harness.util.encoding import dumps, loads, parse_object
from harness.util.errors import ConfigError, UserError
from harness.util.files import require_regular


@dataclass(frozen=True)
class Achieved:
    """Fractions of a device's peaks that its best kernels achieve: those of the largest products.

    Power limits the clock of modern devices under load, so the data sheet's peak is reached by none
    of them
    (rocm.blogs.amd.com/software-tools-optimization/Understanding_Peak_and_Max-Achievable_FLOPS).
    """

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
    """Whether products run as persistent kernels, one block for each multiprocessor, as since
    Hopper."""


# Products: "Maximum Achievable Matmul FLOPS", github.com/stas00/ml-engineering, compute/accelerator
# (version 2 of the benchmark), and insights/when-to-upgrade-gpus for the H200 and B200. GB200 has
# the B200's. AMD's float8:
# rocm.blogs.amd.com/software-tools-optimization/measuring-max-achievable-flops-part2.
#
# Attention: torch.scaled_dot_product_attention prefers cuDNN on Hopper and Blackwell if its version
# is above 9.15 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which wheels carry since
# torch 2.11 (github.com/huggingface/transformers/pull/48163); before, and on Ampere, it runs
# FlashAttention-2. - flash2, A100: 50 to 73 % (arXiv:2307.08691, abstract). Hopper: 35 %
# (arXiv:2407.08608, abstract).
#   Blackwell: 333 to 390 TFLOP/s (github.com/Dao-AILab/flash-attention/issues/1589).
# - flash1: half of flash2 (arXiv:2307.08691, abstract: 25 to 40 %). - cudnn, Hopper:
# FlashAttention-3's 447 TFLOP/s in a step at 8 k tokens (insights/when-to-upgrade-gpus)
#   times 600 / 646 (arXiv:2407.08608, forward at a head width of 128 and 8 k tokens). Blackwell: assumed,
#   0.28 to 0.42; FlashAttention-4 has 834 TFLOP/s there.
# - cudnn9.10, Blackwell: what takes 8B at 8 k from 10,902 to 12,211 tokens/s if flash2 has 340
# TFLOP/s
#   (github.com/pytorch/torchtitan/pull/1196).
# - flex: 0.87 of flash2 (pytorch.org/blog/flexattention: 90 % forward, 85 % backward).
# - aotriton, MI300X: 0.11 and later run AITER's kernels, "over 500 TFLOPS" in training
#   (github.com/pytorch/pytorch/pull/161754); before, as AMD's FlashAttention-2: 223 to 231 TFLOP/s forward
#   and backward (github.com/ROCm/flash-attention/issues/142).
#
# Products of training, as a fraction of the best ones, are slower than Hopper's: - Blackwell: 0.8,
# assumed, 0.76 to 1. It is 0.76 if all but attention has 1.67 times Hopper's speed, as
#   measured at 8 k tokens (insights/when-to-upgrade-gpus), where the best products have 2.2 times.
# - MI300X: 0.93 in 16 bits, from AMD's 0.74 to 0.81 for typical products (rocm.blogs.amd.com/
#   artificial-intelligence/taf-blog, on an MI325X), against 0.82 fitted on Hopper. In 8 bits 0.85: training's
#   shapes have 990 TFLOP/s against an H100's 1,280 (newsletter.semianalysis.com, "MI300X vs H100 vs H200
#   Benchmark Part 1: Training"), the best ones 1,273 against 1,403.
_BLACKWELL_TYPICAL = 0.8
_CDNA_TYPICAL = 0.93
_CDNA_TYPICAL_8 = 0.85
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
OTHER = Achieved(0.8, 0.72, 0.35)
"""Assumed for devices that nobody measured so."""

FIXED_POWER = 200.0
"""Watts under load that do not depend on the clock: memory, links, leakage; assumed, 100 to 250."""


# The H100 96GB has 500 W in place of 700. Dynamic power is assumed to grow with the square of the
# clock; attention does not use all the power.
_CLOCK_500 = ((500 - FIXED_POWER) / (700 - FIXED_POWER)) ** 0.5
ACHIEVED = {
    "A100 SXM 40GB": _A100,
    "A100 SXM 80GB": _A100,
    "A100 PCIe 40GB": _A100_PCIE,
    "A100 PCIe 80GB": _A100_PCIE,
    "H100 SXM": _H100,
    "H100 96GB": replace(_H100, half=_H100.half * _CLOCK_500, float8=_H100.float8 * _CLOCK_500),
    "H200 SXM": _H200,
    **dict.fromkeys(("GH200", "GH200 144GB"), _H100),
    **dict.fromkeys(("B200", "GB200", "B300", "GB300"), _BLACKWELL),
    **dict.fromkeys(("MI300X", "MI325X"), _MI300X),
}
"""By the accelerator's name in ``harness/util/hardware.py``."""
HGX = ("B200", "B300")
"""Those whose products ``Constants.hgx`` slows in addition."""
KERNELS = frozenset[str]().union(*(device.others for device in ACHIEVED.values()))
"""Names of attention kernels."""


@dataclass(frozen=True)
class Constants:
    """Achieved fractions of peaks, and fixed costs."""

    matmul: float = label(0.865, above=0)
    """Speed of products of 16- or 32-bit matrices in training, as a fraction of the best that the device
    achieves (``ACHIEVED``), in addition to wave quantization of tiles. Fitted; 0.74 to 0.81 for
    typical products on an MI325X (rocm.blogs.amd.com/artificial-intelligence/taf-blog)."""
    float8: float = label(0.785, above=0)
    """The same for 8-bit products. Fitted, as ``matmul``, to 132 published rows by
    experiments/measure/held_out.py."""
    hgx: float = label(0.741, above=0)
    """Speed of products of Blackwell on HGX boards (1,000 W a GPU, mostly in air), as a fraction of that of a
    GB200 (1,200 W, in liquid), both relative to their data sheets; assumed to be the clock that
    power allows. Fitted, as ``matmul``: three sources agree, in 16 and 8 bits, eager and compiled."""
    rowwise: float = label(0.8, above=0)
    """Speed of float8 products with a scale for each row, as a fraction of those with one for each tensor:
    CUTLASS in place of cuBLAS; assumed, 0.75 to 0.9 (torchao/float8/README.md has tokens/s of
    both)."""
    spread: float = label(0.0175, least=0)
    """Standard deviation of devices' speed; a step takes as long as its slowest device. Eight devices of a
    node differ by 5 % and more (github.com/stas00/ml-engineering, compute/accelerator, "Not all
    accelerators are created equal")."""
    grouped: float = label(0.8, above=0)
    """Speed of experts' grouped products, as a fraction of a single product's; assumed, 0.7 to
    0.95."""
    imbalance: float = label(0.25, least=0)
    """Standard deviation of the experts' loads, as a fraction of their mean, unless they are forced to be
    equal: the largest of 64 is 0.5 to 0.6 above the mean with an auxiliary loss (arXiv:2408.15664,
    table 2, MaxVio)."""
    attention: float = label(1.0, above=0)
    """Speed of fused attention, as a fraction of the best kernel (``ACHIEVED``)."""
    memory: float = label(0.85, above=0)
    """Fraction of the memory bandwidth for passes over tensors; assumed."""
    link: float = label(0.75, above=0)
    """Fraction of the bandwidth of a node's links for NCCL's collectives (nccl-tests: 330 to 370 of
    450 GB/s)."""
    network: float = label(0.85, above=0)
    """Fraction of the network's bandwidth for NCCL's collectives; assumed."""
    latency: float = label(20e-6, least=0)
    """Minimum seconds of a collective; assumed."""
    contention: float = label(0.15, least=0)
    """Fraction of computing that is lost while a collective runs beside it: NCCL's blocks take
    multiprocessors (24 of an H100's 132, forums.developer.nvidia.com/t/337991) and memory
    bandwidth; assumed, 0.1 to 0.4 (arXiv:2507.03114: 0.19 in the mean, at most 0.4)."""
    second_wave: float = label(0.25, least=0)
    """Fraction that is lost in addition where matrix products are persistent kernels: a block whose
    multiprocessor NCCL holds runs after all others. Assumed, 0 to 0.35: a product beside a
    collective takes up to twice the time, a loss of 0.5 in all
    (github.com/pytorch/pytorch/issues/143988)."""
    async_tp: float = label(0.3, least=0, most=1)
    """Fraction of tensor parallel's collectives that asynchronous tensor parallel hides: 0.15 to 0.5 by the
    gains of 5 to 12 % in torchtitan's tables. It counts for all of them, though those that sum
    several products (the reduce-scatters of backward) are not fused, with any batch size."""
    launch: float = label(3e-6, least=0)
    """Minimum seconds of a kernel; assumed."""
    host: float = label(20e-6, least=0)
    """Seconds of the host for each kernel, with the Python around it; assumed, 10e-6 to 40e-6 (rehearsals
    took 35e-6 and more on a shared machine). A step takes as long as the host needs to start it."""


@dataclass(frozen=True)
class Software:
    """What a trainer ran where it differs from this harness on torch 2.13; for published rows."""

    attention: str = label("", choices=("", *sorted(KERNELS)))
    """Kernel of fused attention, one of ``KERNELS``; empty: the one that torch chooses."""
    fused_norm: bool = True
    """Whether an eager norm is one kernel, as an RMSNorm is since torch 2.9."""
    speed: float = label(1.0, above=0)
    """Speed of computing as a multiple of torch's kernels', of a trainer with other libraries."""
    joint_ends: bool = False
    """Whether embedding, last norm and output are one FSDP group, gathered from the first module to the last,
    and the last block stays gathered too: torchtitan before its pull request 1094 (July 2025). For
    memory."""
    repeats_keys: bool = False
    """Whether a ring has keys and values repeated for all query heads: torchtitan before its pull request
    2259 (January 2026; issue 1283). For memory."""
    expert_imbalance: float | None = label(None, least=1)
    """Rows of the fullest rank of experts, as a multiple of the mean
    (``PlanJob.expert_imbalance``)."""
    keeps_outputs: bool = False
    """Whether a pipeline keeps outputs of stages, the last one's too, and gradients of their inputs until the
    next step: torch before its pull requests 153383 (May 2025) and 164329 (October 2025; issue
    159251 on the last stage). For memory."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants."""

    constants: Constants
    source: str = ""
    """Runs that the constants were fitted on."""
    software: Software = field(default_factory=Software)

    @staticmethod
    def read(path: str) -> Calibration:
        """Read a calibration that ``write`` wrote.

        Raises:
            UserError: the file is missing, from another version, or has an invalid value.
        """
        try:
            require_regular(Path(path))
            plain = parse_object(Path(path).read_bytes())
            read: Calibration = from_dict(Calibration, loads(dumps(plain)))  # "inf" is text there
            # An earlier version fitted the others without it: its default would count twice.
            if missing := sorted(asdict(read.constants).keys() - plain["constants"].keys()):
                raise ValueError(f"lacks {', '.join(missing)}; another version wrote it")
            check_rules(read)
            return read
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        except (ConfigError, ValueError) as error:
            reason = str(error)
        works = "would work: a file that harness plan calibrate=FOLDER wrote"
        raise UserError(f"calibration={path}: {reason}; {works}")

    def write(self, path: str) -> None:
        """Write the calibration as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


DEFAULTS = Calibration(Constants())
"""Constants that were fitted to published runs."""
