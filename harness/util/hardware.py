"""Accelerator specifications: peak FLOP/s, memory, bandwidth, and the datasheet of each value.

All peaks are dense. NVIDIA's datasheets print most tensor-core values "with sparsity"; they are halved
here. A device that is not in the table, or a slice of one (MIG, vGPU), is unknown: nothing is guessed
from a similar name.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accelerator:
    """One device as ``torch`` counts devices.

    Attributes:
        peak_flops: dense FLOP/s by the format of the matrix product: ``bfloat16``, ``float16``,
            ``float8``, ``mxfp8`` (float8 in blocks of 32 with a scale each), ``tf32``, and ``float32``
            (without tensor cores on NVIDIA). A missing key is a format that the device does not support
            in hardware.
        memory_gib: device memory as in the datasheet. Datasheets write GB and count memory in binary
            units. The usable memory is smaller: by about 1 % with HBM, by about 6 % with GDDR6, which
            stores error correction in the same memory.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second to other devices of the node, in one direction (both directions run
            at once): NVLink, Infinity Fabric, else PCIe. Datasheets print the sum of both directions.
        units: streaming multiprocessors (compute units), among which a kernel's tiles are distributed.
        power_w: the datasheet's maximum power, in W (TDP); None if unknown.
        link: name of the links that ``link_bandwidth`` is of.
        achieved: fields of ``harness.tools.plan.constants.Achieved`` that are known of this device.
    """

    name: str
    peak_flops: dict[str, float]
    memory_gib: float
    memory_bandwidth: float
    source: str
    link_bandwidth: float
    units: int
    power_w: float | None = None
    link: str = "NVLink"
    achieved: dict[str, float] = field(default_factory=dict)


POWER_SHARE = 0.85
"""Power of a device while it trains, as a fraction of ``power_w``: "fluctuating between ~15% and ~85% of our
hardware's maximum power draw", the former while checkpoints are written (arXiv:2503.05804, abstract). A whole
node with eight H100 draws 76 to 82 % of its rating (arXiv:2506.14551, arXiv:2412.08602)."""


def _peaks(
    *, half: float, tf32: float, float32: float, float8: float | None = None, mxfp8: float | None = None
) -> dict[str, float]:
    """Convert the datasheets' TFLOP/s to FLOP/s. bfloat16 is as fast as float16 on all listed devices."""
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32}
    peaks |= {name: peak for name, peak in (("float8", float8), ("mxfp8", mxfp8)) if peak is not None}
    return {dtype: round(tflops * 1000) * 1e9 for dtype, tflops in peaks.items()}


_A100_SHEET = "NVIDIA A100 datasheet, nvidia.com/en-us/data-center/a100"
_H100_PAPER = "NVIDIA H100 architecture whitepaper v1.04, table 2, dense"
_H100_SHEET = "NVIDIA H100 datasheet, nvidia.com/en-us/data-center/h100, halved: printed with sparsity"
_H200_SHEET = "NVIDIA H200 datasheet, nvidia.com/en-us/data-center/h200, halved: printed with sparsity"
_BLACKWELL_SHEET = "NVIDIA Blackwell datasheet 3384703, halved: printed with sparsity"
_L40S_SHEET = "NVIDIA L40S datasheet, nvidia.com/en-us/data-center/l40s, dense"
_A10_SHEET = "NVIDIA A10 datasheet, nvidia.com/en-us/data-center/products/a10-gpu, dense"
_L4_SHEET = "NVIDIA L4 datasheet, nvidia.com/en-us/data-center/l4, halved: printed with sparsity"
_MI300X_SHEET = "AMD Instinct MI300X datasheet, amd.com/en/products/accelerators/instinct/mi300/mi300x.html"

_A100_PEAKS = _peaks(half=312, tf32=156, float32=19.5)
_HOPPER_SXM_PEAKS = _peaks(half=989.4, tf32=494.7, float32=66.9, float8=1978.9)
_HOPPER_NVL_PEAKS = _peaks(half=835.5, tf32=417.5, float32=60, float8=1670.5)
_HOPPER_PCIE_PEAKS = _peaks(half=756, tf32=378, float32=51.2, float8=1513)
_B200_PEAKS = _peaks(half=2250, tf32=1100, float32=75, float8=4500, mxfp8=4500)
_GB200_PEAKS = _peaks(half=2500, tf32=1250, float32=80, float8=5000, mxfp8=5000)
_MI300X_PEAKS = _peaks(half=1307.4, tf32=653.7, float32=163.4, float8=2614.9)
_L40S_PEAKS = _peaks(half=362.05, tf32=183, float32=91.6, float8=733)
_A10_PEAKS = _peaks(half=125, tf32=62.5, float32=31.2)
_L4_PEAKS = _peaks(half=121, tf32=60, float32=30.3, float8=242.5)

A100_SXM_40 = Accelerator("A100 SXM 40GB", _A100_PEAKS, 40, 1.555e12, _A100_SHEET, 300e9, 108, 400)
A100_SXM_80 = Accelerator("A100 SXM 80GB", _A100_PEAKS, 80, 2.039e12, _A100_SHEET, 300e9, 108, 400)
A100_PCIE_40 = Accelerator("A100 PCIe 40GB", _A100_PEAKS, 40, 1.555e12, _A100_SHEET, 31.5e9, 108, 250, "PCIe")
A100_PCIE_80 = Accelerator("A100 PCIe 80GB", _A100_PEAKS, 80, 1.935e12, _A100_SHEET, 31.5e9, 108, 300, "PCIe")
H100_SXM = Accelerator("H100 SXM", _HOPPER_SXM_PEAKS, 80, 3.35e12, _H100_PAPER, 450e9, 132, 700)
# The device of torchtitan's published tables: SXM with 96 GB of HBM2e, "2.4 TB/sec peak memory bandwidth",
# limited to 500 W (benchmarks/llama3_h100_202412_torchtitan.md). The peak is the datasheet's, at 700 W; those
# tables compute MFU against it too.
H100_96GB = Accelerator("H100 96GB", _HOPPER_SXM_PEAKS, 96, 2.4e12, _H100_PAPER, 450e9, 132, 500)
H100_PCIE = Accelerator("H100 PCIe", _HOPPER_PCIE_PEAKS, 80, 2.0e12, _H100_PAPER, 63e9, 114, 350, "PCIe")
H100_NVL = Accelerator("H100 NVL", _HOPPER_NVL_PEAKS, 94, 3.9e12, _H100_SHEET, 63e9, 132, 400, "PCIe")
# The H200 has the H100's peak FLOP/s (its sheet rounds to 1,979 and 3,958); only its memory differs.
H200_SXM = Accelerator("H200 SXM", _HOPPER_SXM_PEAKS, 141, 4.8e12, _H200_SHEET, 450e9, 132, 700)
H200_NVL = Accelerator("H200 NVL", _HOPPER_NVL_PEAKS, 141, 4.8e12, _H200_SHEET, 450e9, 132, 600, "PCIe")
B200 = Accelerator("B200", _B200_PEAKS, 180, 7.7e12, _BLACKWELL_SHEET + ", HGX B200", 900e9, 148, 1000)
GB200 = Accelerator("GB200", _GB200_PEAKS, 186, 8.0e12, _BLACKWELL_SHEET + ", GB200", 900e9, 148, 1200)
MI300X = Accelerator("MI300X", _MI300X_PEAKS, 192, 5.3e12, _MI300X_SHEET, 448e9, 304, 750, "Infinity Fabric")
L40S = Accelerator("L40S", _L40S_PEAKS, 48, 0.864e12, _L40S_SHEET, 31.5e9, 142, 350, "PCIe")
A10 = Accelerator("A10", _A10_PEAKS, 24, 0.6e12, _A10_SHEET, 31.5e9, 72, 150, "PCIe")
L4 = Accelerator("L4", _L4_PEAKS, 24, 0.3e12, _L4_SHEET, 31.5e9, 58, 72, "PCIe")

# The driver's name, and the compute capability with CUDA (developer.nvidia.com/cuda-gpus).
_DEVICES: tuple[tuple[Accelerator, str, tuple[int, int] | None], ...] = (
    (A100_SXM_40, "NVIDIA A100-SXM4-40GB", (8, 0)),
    (A100_SXM_80, "NVIDIA A100-SXM4-80GB", (8, 0)),
    (A100_PCIE_40, "NVIDIA A100-PCIE-40GB", (8, 0)),
    (A100_PCIE_80, "NVIDIA A100 80GB PCIe", (8, 0)),
    (H100_SXM, "NVIDIA H100 80GB HBM3", (9, 0)),
    (H100_PCIE, "NVIDIA H100 PCIe", (9, 0)),
    (H100_NVL, "NVIDIA H100 NVL", (9, 0)),
    (H200_SXM, "NVIDIA H200", (9, 0)),
    (H200_NVL, "NVIDIA H200 NVL", (9, 0)),
    (B200, "NVIDIA B200", (10, 0)),
    (GB200, "NVIDIA GB200", (10, 0)),
    (MI300X, "AMD Instinct MI300X", None),
    (L40S, "NVIDIA L40S", (8, 9)),
    (A10, "NVIDIA A10", (8, 6)),
    (L4, "NVIDIA L4", (8, 9)),
    # Last: drivers report it under the name of other H100s, so it is never detected, only configured.
    (H100_96GB, "NVIDIA H100", (9, 0)),
)
ACCELERATORS = {accelerator.name: accelerator for accelerator, _, _ in _DEVICES}
"""All accelerators by name, for planning without a device."""

CUDA_DEVICES = {each.name: (driver, version) for each, driver, version in _DEVICES if version is not None}
"""The driver's name and the compute capability of accelerators with CUDA."""


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the accelerator of ``torch.cuda.get_device_name()``; None if it is unknown, as a CPU is."""
    # Match full device names: a partial match would take an "A100" for an "A10", a "GH200" for an "H200", and
    # "NVIDIA H100 80GB HBM3 MIG 1g.10gb", a seventh of a device, for a full device.
    name = device_name.strip().lower().removesuffix(" oam")
    name = f"nvidia {name}" if name.startswith("a100") else name  # old drivers omit it
    found = [accelerator for accelerator, driver, _ in _DEVICES[:-1] if driver.lower() == name]
    return found[0] if found else None


def node_name() -> str:
    """Return this machine's name; inside a job, SLURM's name for the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
