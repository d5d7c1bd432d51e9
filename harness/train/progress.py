"""Progress of a run, and its device."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.config.job import Job
from harness.metrics.mfu import Peak, peak_of

_SAVED = ("step", "tokens", "loss", "validation_loss", "skipped_steps")


@dataclass
class Progress:
    """Step, tokens, losses and memory of a run so far."""

    step: int = 0
    start_step: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    source_validation: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0
    running: int | None = None
    """The step in which this process may wait for collectives; None between steps."""
    first_step_seconds: float | None = None
    maxima: dict[str, float | None] = field(default_factory=lambda: {"memory_gib": None})
    """Columns of observers that are maxima over all ranks, of the newest row."""

    def saved(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps: those of the run, not those of this process."""
        return {name: getattr(self, name) for name in _SAVED}

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue from the values of ``saved``; an empty dict starts from the beginning."""
        for name in _SAVED:
            setattr(self, name, saved.get(name, getattr(self, name)))
        self.start_step = self.step


def device_name(device: torch.device) -> str:
    """Name of the device; of a CPU, its architecture and number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def device_peak(job: Job, device: torch.device) -> Peak:
    """Peak of the device for MFU, in the format of the job's matrix products.

    For float8 jobs it is the bfloat16 peak, as in torchtitan: attention and head multiply in bfloat16, and
    with the same peak the MFU shows what float8 gains. It can exceed 1.
    """
    name = device_name(device)
    cluster = job.cluster.with_device(name)
    accelerator = None if cluster is None else cluster.gpu
    if job.precision.linear != "none":
        peak = peak_of(name, "bfloat16", accelerator)
        convention = f"; {job.precision.linear} is measured against the bfloat16 peak, as in torchtitan"
        return peak if peak.flops is None else replace(peak, origin=peak.origin + convention)
    dtype = job.precision.param_dtype
    if device.type == "cuda" and dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    return peak_of(name, dtype, accelerator)
