"""Virtual GPUs: the properties that the stand-in library reports (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.job import Job
from harness.tools.plan.config import DEFAULT
from harness.tools.plan.memory import CUDA_CONTEXT, HBM_LEFT, NCCL_COMMUNICATOR
from harness.util.hardware import ACCELERATORS, CUDA_DEVICES
from harness.util.tables import GIB

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
    accelerator = job.cluster.gpu or ACCELERATORS[DEFAULT]
    name, capability = CUDA_DEVICES[accelerator.name]
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
