"""Accelerator specifications of datasheets: peak FLOP/s, memory, bandwidth.

All peaks are dense. NVIDIA's datasheets print most tensor-core values "with sparsity"; they are
halved here. A device that is not in the table, or a slice of one (MIG, vGPU), is unknown: nothing
is guessed from a similar name.
"""

import os
import re
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


_WEB = "datasheet, nvidia.com/en-us/data-center"
_PAPER = "NVIDIA H100 architecture whitepaper v1.04, table 2, dense"
_HALVED = "halved: printed with sparsity"
_BLACKWELL = "NVIDIA Blackwell datasheet 3384703"
_ULTRA = "NVIDIA Blackwell Ultra datasheet"
_AMD = "datasheet, amd.com/en/products/accelerators/instinct"
# Name; compute capability (developer.nvidia.com/cuda-gpus), - without CUDA; dense TFLOP/s in 16-bit formats,
# tf32, float32, float8 and mxfp8, - where the device does not have the format; source.
#
# The H200 has the H100's peaks, and so has the GH200 (their sheets round to 1,979 and 3,958). The RTX 4090
# has sums in 32 bits, as torch multiplies. The MI355X multiplies mxfp8 too, but torchao's kernels are for
# NVIDIA; CDNA 4 has no tf32.
_SHEETS = f"""
    A100       8.0   312     156    19.5   -       -     NVIDIA A100 {_WEB}/a100
    H100       9.0   989.4   494.7  66.9   1978.9  -     {_PAPER}
    H100 PCIe  9.0   756     378    51.2   1513    -     {_PAPER}
    H100 NVL   9.0   835.5   417.5  60     1670.5  -     NVIDIA H100 {_WEB}/h100, {_HALVED}
    H200       9.0   989.4   494.7  66.9   1978.9  -     NVIDIA H200 {_WEB}/h200, {_HALVED}
    H200 NVL   9.0   835.5   417.5  60     1670.5  -     NVIDIA H200 {_WEB}/h200, {_HALVED}
    GH200      9.0   989.4   494.7  66.9   1978.9  -     NVIDIA GH200 {_WEB}/grace-hopper-superchip, {_HALVED}
    B200       10.0  2250    1100   75     4500    4500  {_BLACKWELL}, {_HALVED}, HGX B200
    GB200      10.0  2500    1250   80     5000    5000  {_BLACKWELL}, {_HALVED}, GB200
    B300       10.3  2250    1100   75     4500    4500  {_ULTRA}, {_HALVED}, HGX B300
    GB300      10.3  2500    1250   80     5000    5000  {_ULTRA}, {_HALVED}, GB300
    L40S       8.9   362.05  183    91.6   733     -     NVIDIA L40S {_WEB}/l40s, dense
    RTX 4090   8.9   165.2   82.6   82.6   330.3   -     NVIDIA Ada architecture whitepaper v2.01, table 2
    A6000      8.6   154.8   77.4   38.7   -       -     NVIDIA RTX A6000 datasheet, {_HALVED}
    A10        8.6   125     62.5   31.2   -       -     NVIDIA A10 {_WEB}/products/a10-gpu, dense
    L4         8.9   121     60     30.3   242.5   -     NVIDIA L4 {_WEB}/l4, {_HALVED}
    MI300X     -     1307.4  653.7  163.4  2614.9  -     AMD Instinct MI300X {_AMD}/mi300/mi300x.html
    MI325X     -     1307.4  653.7  163.4  2614.9  -     AMD Instinct MI325X {_AMD}/mi300/mi325x.html
    MI355X     -     2516.6  -      157.3  5033.2  -     AMD Instinct MI355X {_AMD}/mi350/mi355x.html
"""
# Name; the driver's name; sheet; GiB; bytes/s of memory and of links, their name; multiprocessors (of
# Blackwell as drivers report them). The GH200 of 96 GB has 480 GB of the CPU's memory beside it.
#
# The H100 96GB is the device of torchtitan's published tables: SXM with HBM2e, limited to 500 W (benchmarks/
# llama3_h100_202412_torchtitan.md). The peak is that of 700 W, as in those tables. Last: drivers report it
# under the name of other H100s, so it is never detected, only configured.
_DEVICES = """
    A100 SXM 40GB   NVIDIA A100-SXM4-40GB    A100       40   1.555e12  300e9    NVLink           108
    A100 SXM 80GB   NVIDIA A100-SXM4-80GB    A100       80   2.039e12  300e9    NVLink           108
    A100 PCIe 40GB  NVIDIA A100-PCIE-40GB    A100       40   1.555e12  31.5e9   PCIe             108
    A100 PCIe 80GB  NVIDIA A100 80GB PCIe    A100       80   1.935e12  31.5e9   PCIe             108
    H100 SXM        NVIDIA H100 80GB HBM3    H100       80   3.35e12   450e9    NVLink           132
    H100 PCIe       NVIDIA H100 PCIe         H100 PCIe  80   2.0e12    63e9     PCIe             114
    H100 NVL        NVIDIA H100 NVL          H100 NVL   94   3.9e12    63e9     PCIe             132
    H200 SXM        NVIDIA H200              H200       141  4.8e12    450e9    NVLink           132
    H200 NVL        NVIDIA H200 NVL          H200 NVL   141  4.8e12    450e9    NVLink           132
    GH200           NVIDIA GH200 480GB       GH200      96   4.0e12    450e9    NVLink           132
    GH200 144GB     NVIDIA GH200 144G HBM3e  GH200      144  4.9e12    450e9    NVLink           132
    B200            NVIDIA B200              B200       180  7.7e12    900e9    NVLink           148
    GB200           NVIDIA GB200             GB200      186  8.0e12    900e9    NVLink           152
    B300            NVIDIA B300 SXM6 AC      B300       270  7.7e12    900e9    NVLink           148
    GB300           NVIDIA GB300             GB300      279  8.0e12    900e9    NVLink           152
    MI300X          AMD Instinct MI300X      MI300X     192  5.3e12    448e9    Infinity Fabric  304
    MI325X          AMD Instinct MI325X      MI325X     256  6.0e12    448e9    Infinity Fabric  304
    MI355X          AMD Instinct MI355X      MI355X     288  8.0e12    537.6e9  Infinity Fabric  256
    L40S            NVIDIA L40S              L40S       48   0.864e12  31.5e9   PCIe             142
    RTX 4090        NVIDIA GeForce RTX 4090  RTX 4090   24   1.008e12  31.5e9   PCIe             128
    A6000           NVIDIA RTX A6000         A6000      48   0.768e12  31.5e9   PCIe             84
    A10             NVIDIA A10               A10        24   0.6e12    31.5e9   PCIe             72
    L4              NVIDIA L4                L4         24   0.3e12    31.5e9   PCIe             58
    H100 96GB       NVIDIA H100              H100       96   2.4e12    450e9    NVLink           132
"""


def _cells(table: str) -> list[list[str]]:
    return [re.split(" {2,}", line.strip()) for line in table.strip().splitlines()]


_FORMATS = ("bfloat16", "float16", "tf32", "float32", "float8", "mxfp8")
_PEAKS: dict[str, dict[str, float]] = {}
_CAPABILITIES: dict[str, tuple[int, int]] = {}
_SOURCES: dict[str, str] = {}
for _name, _capability, _half, *_others, _source in _cells(_SHEETS):
    _SOURCES[_name] = _source
    _PEAKS[_name] = {
        dtype: round(float(tflops) * 1000) * 1e9
        for dtype, tflops in zip(_FORMATS, (_half, _half, *_others), strict=True)
        if tflops != "-"
    }
    if _capability != "-":
        _major, _minor = _capability.split(".")
        _CAPABILITIES[_name] = int(_major), int(_minor)

ACCELERATORS: dict[str, Accelerator] = {}
"""All accelerators by name, for planning without a device."""
CUDA_DEVICES: dict[str, tuple[str, tuple[int, int]]] = {}
"""The driver's name and the compute capability of accelerators with CUDA."""
_BY_DRIVER: dict[str, Accelerator] = {}
for _name, _driver, _sheet, _gib, _memory, _links, _link, _units in _cells(_DEVICES):
    ACCELERATORS[_name] = Accelerator(
        _name,
        _PEAKS[_sheet],
        float(_gib),
        float(_memory),
        _SOURCES[_sheet],
        float(_links),
        int(_units),
        _link,
    )
    if _sheet in _CAPABILITIES:
        CUDA_DEVICES[_name] = _driver, _CAPABILITIES[_sheet]
    if _name != "H100 96GB":
        _BY_DRIVER[_driver.lower()] = ACCELERATORS[_name]


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the accelerator of ``torch.cuda.get_device_name()``; None if it is unknown, as a CPU is."""
    # Match full device names: a partial match would take an "A100" for an "A10", a "GH200" for an
    # "H200", and "NVIDIA H100 80GB HBM3 MIG 1g.10gb", a seventh of a device, for a full device.
    name = device_name.strip().lower().removesuffix(" oam")
    name = f"nvidia {name}" if name.startswith("a100") else name  # old drivers omit it
    return _BY_DRIVER.get(name)


def node_name() -> str:
    """Return this machine's name; inside a job, SLURM's name for the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
