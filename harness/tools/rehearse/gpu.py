"""A virtual GPU: its properties, and the calls that the stand-in library recorded (no torch)."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from harness.config.job import Job
from harness.tools.plan.config import DEFAULT
from harness.tools.plan.memory import CUDA_CONTEXT, HBM_LEFT, NCCL_COMMUNICATOR
from harness.tools.rehearse.build import GPU_LIBRARY
from harness.util import PACKAGE
from harness.util.hardware import ACCELERATORS, CUDA_DEVICES
from harness.util.words import GIB

_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PACKAGE = str(PACKAGE)
_OWN = str(Path(__file__).parent)


@dataclass
class Calls:
    """Calls of CUDA's libraries that were recorded."""

    kernels: Counter[str]
    """Launches by the kernel's name."""
    products: dict[tuple[str, ...], tuple[int, float]]
    """Number and FLOPs of cuBLAS's by formats of both sides, batch, rows, inner length and
    columns."""
    collectives: dict[tuple[str, ...], tuple[int, float]]
    """Number and input bytes, by kind and communicator."""
    sends: dict[tuple[str, ...], tuple[int, float]]
    """Number and bytes of single sends and receives (``send``, ``receive``), by kind and
    communicator."""
    communicators: list[str]
    """Communicators that were created."""
    copies: dict[str, tuple[int, float]]
    """Number and bytes by direction."""
    replays: tuple[int, float]
    """CUDA graphs that were launched, and the kernels and products in them."""
    unknown: list[str]
    """Functions that the library does not implement; the calls failed."""
    waits: Counter[tuple[str, str]]
    """Waits of the host for the device, by the call and the place in the code."""


class VirtualGpu:
    """The stand-in library of this process.

    Args:
        device: the device to present.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self._library = ctypes.CDLL(GPU_LIBRARY)
        assert device.bytes > 0 and device.multiprocessors > 0
        self._library.virtual_gpu_become(
            device.name.encode(),
            device.major,
            device.minor,
            ctypes.c_size_t(device.bytes),
            device.multiprocessors,
            device.shared_kib,
            device.count,
        )
        # Context and communicators take what the plan assumes.
        self._library.virtual_gpu_take(ctypes.c_size_t(int(CUDA_CONTEXT)))
        self._library.virtual_gpu_communicators_take(ctypes.c_size_t(int(NCCL_COMMUNICATOR)))
        self._waits: Counter[tuple[str, str]] = Counter()
        # Keep a reference: the library holds only the address.
        self._observer = _OBSERVER(self._observe)
        self._library.virtual_gpu_observe(self._observer)

    def clear(self) -> None:
        """Delete the recorded calls."""
        self._waits.clear()
        self._library.virtual_gpu_clear()

    def launch(self, kernel: str) -> None:
        """Record a kernel that a Python function replaces."""
        self._library.virtual_gpu_kernel(kernel.encode())

    def calls(self) -> Calls:
        """Return the calls since the last ``clear``."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "calls"
            if self._library.virtual_gpu_write(os.fsencode(path)):
                raise OSError(f"{path} cannot be written")
            return read_calls(path.read_text(), self._waits)

    def _observe(self, how: bytes) -> None:
        """Record a wait; the library calls this on the thread that waits."""
        self._waits[how.decode(), place_in_code()] += 1


def read_calls(text: str, waits: Counter[tuple[str, str]]) -> Calls:
    """Parse the output of ``virtual_gpu_write``."""
    found: dict[str, dict[tuple[str, ...], tuple[int, float]]] = defaultdict(dict)
    for line in text.splitlines():
        # Products have FLOPs, replays have launches, all else has bytes. Functions of several
        # compiled graphs may have the same name.
        number, amount, kind, *words = line.split("\t")
        count, value = found[kind].get(tuple(words), (0, 0.0))
        found[kind][tuple(words)] = (count + int(number), value + float(amount))
    return Calls(
        kernels=Counter({name: count for (name, *_), (count, _) in found["kernel"].items()}),
        products=found["product"],
        collectives=found["collective"],
        sends=found["point to point"],
        communicators=[name for name, *_ in found["communicator"]],
        copies={how: value for (how, *_), value in found["copy"].items()},
        replays=next(iter(found["replay"].values()), (0, 0.0)),
        unknown=[name for name, *_ in found["unknown"]],
        waits=Counter(waits),
    )


def place_in_harness(path: str, line: int | None) -> str:
    """Return file and line of a place in harness/; empty if it is elsewhere, or in rehearsals."""
    if not path.startswith(_PACKAGE) or path.startswith(_OWN):
        return ""
    return f"{os.path.relpath(path, _PACKAGE)}:{line}"


def place_in_code() -> str:
    """Return file and line of the innermost frame in harness/, else of the innermost one elsewhere."""
    innermost = ""
    for frame, line in traceback.walk_stack(sys._getframe()):
        path = frame.f_code.co_filename
        if place := place_in_harness(path, line):
            return place
        if path != __file__ and not innermost:
            innermost = f"{path.split('site-packages/')[-1]}:{line}"
    return innermost or "no Python code"


# KiB of shared memory of a multiprocessor (CUDA C++ programming guide, table of compute
# capabilities).
_SHARED_KIB = {(8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228, (10, 0): 228, (10, 3): 228}


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


def virtual_device(job: Job) -> VirtualDevice:
    """Return the device of a job's ranks."""
    accelerator = job.cluster.gpu or ACCELERATORS[DEFAULT]
    name, capability = CUDA_DEVICES[accelerator.name]
    return VirtualDevice(
        name,
        *capability,
        bytes=int(accelerator.memory_gib * GIB * HBM_LEFT),
        multiprocessors=accelerator.units,
        shared_kib=_SHARED_KIB[capability],
        count=max(1, job.cluster.nodes_for(job.world_size)[1]),
    )
