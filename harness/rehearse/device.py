"""Virtual GPUs: the properties that the stand-in library reports (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.hardware import ACCELERATORS
from harness.job import Job
from harness.plan.memory import CUDA_CONTEXT, HBM_LEFT, NCCL_COMMUNICATOR
from harness.tables import GIB

DEFAULT = "H100 SXM"
"""Accelerator of jobs that do not name one."""
GPUS = 8
"""GPUs per node of jobs that do not say."""

# The driver's name of the device, and its compute capability (developer.nvidia.com/cuda-gpus).
_KNOWN: dict[str, tuple[str, tuple[int, int]]] = {
    "A100 SXM 40GB": ("NVIDIA A100-SXM4-40GB", (8, 0)),
    "A100 SXM 80GB": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "A100 PCIe 40GB": ("NVIDIA A100-PCIE-40GB", (8, 0)),
    "A100 PCIe 80GB": ("NVIDIA A100 80GB PCIe", (8, 0)),
    "H100 SXM": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "H100 96GB": ("NVIDIA H100", (9, 0)),
    "H100 PCIe": ("NVIDIA H100 PCIe", (9, 0)),
    "H100 NVL": ("NVIDIA H100 NVL", (9, 0)),
    "H200 SXM": ("NVIDIA H200", (9, 0)),
    "H200 NVL": ("NVIDIA H200 NVL", (9, 0)),
    "B200": ("NVIDIA B200", (10, 0)),
    "GB200": ("NVIDIA GB200", (10, 0)),
    "L40S": ("NVIDIA L40S", (8, 9)),
    "A10": ("NVIDIA A10", (8, 6)),
    "L4": ("NVIDIA L4", (8, 9)),
}
VIRTUAL = tuple(_KNOWN)
"""Accelerators that can be rehearsed on, by their names in ``hardware.py``."""
# KiB of shared memory of a multiprocessor (CUDA C++ programming guide, table of compute capabilities).
_SHARED_KIB = {(8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228, (10, 0): 228}


@dataclass(frozen=True)
class VirtualDevice:
    """Properties of the device that the stand-in library presents."""

    name: str
    major: int
    minor: int
    bytes: int
    multiprocessors: int
    shared_kib: int
    count: int
    """Devices of the node."""
    context_bytes: int
    """Memory that the process takes before it allocates anything."""
    communicator_bytes: int
    """Memory that each communicator takes."""


def virtual_device(job: Job) -> VirtualDevice:
    """Return the device of a job's ranks; context and communicators take what the plan assumes."""
    accelerator = ACCELERATORS[job.cluster.accelerator or DEFAULT]
    name, capability = _KNOWN[accelerator.name]
    return VirtualDevice(
        name,
        *capability,
        bytes=int(accelerator.memory_gib * GIB * HBM_LEFT),
        multiprocessors=accelerator.units,
        shared_kib=_SHARED_KIB[capability],
        count=max(1, job.cluster.nodes_for(job.world_size)[1]),
        context_bytes=int(CUDA_CONTEXT),
        communicator_bytes=int(NCCL_COMMUNICATOR),
    )
