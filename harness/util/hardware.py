"""Accelerator specifications: peak FLOP/s, memory, bandwidth, and the datasheet of each value.

All peaks are dense. NVIDIA's datasheets print most tensor-core values "with sparsity"; they are
halved here. A device that is not in the table, or a slice of one (MIG, vGPU), is unknown: nothing
is guessed from a similar name.
"""

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One device as ``torch`` counts devices.

    Attributes:
        peak_flops: dense FLOP/s by the format of the matrix product: ``bfloat16``, ``float16``,
            ``float8``, ``mxfp8`` (float8 in blocks of 32 with a scale each), ``tf32``, and
            ``float32`` (without tensor cores on NVIDIA). A missing key is a format that the device
            does not support in hardware.
        memory_gib: device memory as in the datasheet, which writes GB and counts in binary units.
            Usable are 1 % less of HBM, and 6 % less of GDDR6, which has error correction in the
            same memory.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second to other devices of the node, in one direction (both
            directions run at once): NVLink, Infinity Fabric, else PCIe. Datasheets print the sum of
            both directions.
        units: streaming multiprocessors (compute units), among which a kernel's tiles are
            distributed.
        link: name of the links that ``link_bandwidth`` is of.
    """

    name: str
    peak_flops: dict[str, float]
    memory_gib: float
    memory_bandwidth: float
    source: str
    link_bandwidth: float
    units: int
    link: str = "NVLink"


_Sheet = tuple[str, tuple[int, int] | None, dict[str, float]]


def _sheet(
    source: str,
    cuda: tuple[int, int] | None,
    half: float,
    float32: float,
    *narrow: float,
    tf32: float = 0,
) -> _Sheet:
    """Return title, CUDA capability and peaks of a datasheet in TFLOP/s; ``narrow`` are float8 and mxfp8."""
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32}
    peaks |= dict(zip(("float8", "mxfp8"), narrow, strict=False))
    return (
        source,
        cuda,
        {dtype: round(tflops * 1000) * 1e9 for dtype, tflops in peaks.items() if tflops},
    )


# Compute capabilities: developer.nvidia.com/cuda-gpus. The H200 has the H100's peaks, and so has
# the GH200 (their sheets round to 1,979 and 3,958).
_NVIDIA = "NVIDIA {} datasheet, nvidia.com/en-us/data-center/{}"
_HALVED = "halved: printed with sparsity"
_A100 = _sheet(_NVIDIA.format("A100", "a100"), (8, 0), 312, 19.5, tf32=156)
_H100_PAPER = "NVIDIA H100 architecture whitepaper v1.04, table 2, dense"
_H100 = _sheet(_H100_PAPER, (9, 0), 989.4, 66.9, 1978.9, tf32=494.7)
_H100_PCIE = _sheet(_H100_PAPER, (9, 0), 756, 51.2, 1513, tf32=378)
_H100_NVL = _sheet(
    _NVIDIA.format("H100", f"h100, {_HALVED}"), (9, 0), 835.5, 60, 1670.5, tf32=417.5
)
_H200 = (_NVIDIA.format("H200", f"h200, {_HALVED}"), *_H100[1:])
_H200_NVL = (_H200[0], *_H100_NVL[1:])
_GH200 = (_NVIDIA.format("GH200", f"grace-hopper-superchip, {_HALVED}"), *_H100[1:])
_BLACKWELL = f"NVIDIA Blackwell datasheet 3384703, {_HALVED}"
_ULTRA = f"NVIDIA Blackwell Ultra datasheet, {_HALVED}"
_B200 = _sheet(f"{_BLACKWELL}, HGX B200", (10, 0), 2250, 75, 4500, 4500, tf32=1100)
_GB200 = _sheet(f"{_BLACKWELL}, GB200", (10, 0), 2500, 80, 5000, 5000, tf32=1250)
_B300 = (f"{_ULTRA}, HGX B300", (10, 3), _B200[2])
_GB300 = (f"{_ULTRA}, GB300", (10, 3), _GB200[2])
_L40S = _sheet(_NVIDIA.format("L40S", "l40s, dense"), (8, 9), 362.05, 91.6, 733, tf32=183)
# With sums in 32 bits, as torch multiplies.
_RTX_4090 = _sheet(
    "NVIDIA Ada architecture whitepaper v2.01, table 2", (8, 9), 165.2, 82.6, 330.3, tf32=82.6
)
_A6000 = _sheet(f"NVIDIA RTX A6000 datasheet, {_HALVED}", (8, 6), 154.8, 38.7, tf32=77.4)
_A10 = _sheet(_NVIDIA.format("A10", "products/a10-gpu, dense"), (8, 6), 125, 31.2, tf32=62.5)
_L4 = _sheet(_NVIDIA.format("L4", f"l4, {_HALVED}"), (8, 9), 121, 30.3, 242.5, tf32=60)
_AMD = "AMD Instinct {} datasheet, amd.com/en/products/accelerators/instinct/{}.html"
_MI300X = _sheet(_AMD.format("MI300X", "mi300/mi300x"), None, 1307.4, 163.4, 2614.9, tf32=653.7)
_MI325X = (_AMD.format("MI325X", "mi300/mi325x"), *_MI300X[1:])
# It multiplies mxfp8 too, but torchao's kernels are for NVIDIA; CDNA 4 has no tf32.
_MI355X = _sheet(_AMD.format("MI355X", "mi350/mi355x"), None, 2516.6, 157.3, 5033.2)

_NVLINK = "NVLink"
_PCIE = "PCIe"
_FABRIC = "Infinity Fabric"
# Name; the driver's name; sheet; GiB; bytes/s of memory and of links, their name; multiprocessors
# (of Blackwell as drivers report them).
_DEVICES: tuple[tuple[str, str, _Sheet, float, float, float, str, int], ...] = (
    ("A100 SXM 40GB", "NVIDIA A100-SXM4-40GB", _A100, 40, 1.555e12, 300e9, _NVLINK, 108),
    ("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", _A100, 80, 2.039e12, 300e9, _NVLINK, 108),
    ("A100 PCIe 40GB", "NVIDIA A100-PCIE-40GB", _A100, 40, 1.555e12, 31.5e9, _PCIE, 108),
    ("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", _A100, 80, 1.935e12, 31.5e9, _PCIE, 108),
    ("H100 SXM", "NVIDIA H100 80GB HBM3", _H100, 80, 3.35e12, 450e9, _NVLINK, 132),
    ("H100 PCIe", "NVIDIA H100 PCIe", _H100_PCIE, 80, 2.0e12, 63e9, _PCIE, 114),
    ("H100 NVL", "NVIDIA H100 NVL", _H100_NVL, 94, 3.9e12, 63e9, _PCIE, 132),
    ("H200 SXM", "NVIDIA H200", _H200, 141, 4.8e12, 450e9, _NVLINK, 132),
    ("H200 NVL", "NVIDIA H200 NVL", _H200_NVL, 141, 4.8e12, 450e9, _NVLINK, 132),
    # With 480 GB of the CPU's memory, or 144 GB of its own.
    ("GH200", "NVIDIA GH200 480GB", _GH200, 96, 4.0e12, 450e9, _NVLINK, 132),
    ("GH200 144GB", "NVIDIA GH200 144G HBM3e", _GH200, 144, 4.9e12, 450e9, _NVLINK, 132),
    ("B200", "NVIDIA B200", _B200, 180, 7.7e12, 900e9, _NVLINK, 148),
    ("GB200", "NVIDIA GB200", _GB200, 186, 8.0e12, 900e9, _NVLINK, 152),
    ("B300", "NVIDIA B300 SXM6 AC", _B300, 270, 7.7e12, 900e9, _NVLINK, 148),
    ("GB300", "NVIDIA GB300", _GB300, 279, 8.0e12, 900e9, _NVLINK, 152),
    ("MI300X", "AMD Instinct MI300X", _MI300X, 192, 5.3e12, 448e9, _FABRIC, 304),
    ("MI325X", "AMD Instinct MI325X", _MI325X, 256, 6.0e12, 448e9, _FABRIC, 304),
    ("MI355X", "AMD Instinct MI355X", _MI355X, 288, 8.0e12, 537.6e9, _FABRIC, 256),
    ("L40S", "NVIDIA L40S", _L40S, 48, 0.864e12, 31.5e9, _PCIE, 142),
    ("RTX 4090", "NVIDIA GeForce RTX 4090", _RTX_4090, 24, 1.008e12, 31.5e9, _PCIE, 128),
    ("A6000", "NVIDIA RTX A6000", _A6000, 48, 0.768e12, 31.5e9, _PCIE, 84),
    ("A10", "NVIDIA A10", _A10, 24, 0.6e12, 31.5e9, _PCIE, 72),
    ("L4", "NVIDIA L4", _L4, 24, 0.3e12, 31.5e9, _PCIE, 58),
    # The device of torchtitan's published tables: SXM with HBM2e, limited to 500 W (benchmarks/
    # llama3_h100_202412_torchtitan.md). The peak is that of 700 W, as in those tables. Last:
    # drivers report it under the name of other H100s, so it is never detected, only configured.
    ("H100 96GB", "NVIDIA H100", _H100, 96, 2.4e12, 450e9, _NVLINK, 132),
)
ACCELERATORS = {
    name: Accelerator(name, peaks, gib, memory, source, links, units, link)
    for name, _, (source, _, peaks), gib, memory, links, link, units in _DEVICES
}
"""All accelerators by name, for planning without a device."""

CUDA_DEVICES = {name: (driver, cuda) for name, driver, (_, cuda, _), *_ in _DEVICES if cuda}
"""The driver's name and the compute capability of accelerators with CUDA."""


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the accelerator of ``torch.cuda.get_device_name()``; None if it is unknown, as a CPU is."""
    # Match full device names: a partial match would take an "A100" for an "A10", a "GH200" for an
    # "H200", and "NVIDIA H100 80GB HBM3 MIG 1g.10gb", a seventh of a device, for a full device.
    name = device_name.strip().lower().removesuffix(" oam")
    name = f"nvidia {name}" if name.startswith("a100") else name  # old drivers omit it
    return next(
        (ACCELERATORS[own] for own, driver, *_ in _DEVICES[:-1] if driver.lower() == name), None
    )


def node_name() -> str:
    """Return this machine's name; inside a job, SLURM's name for the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
