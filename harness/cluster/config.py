"""Where a job runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.config import execution, label
from harness.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


@dataclass
class ClusterConfig:
    """The machine a job runs on: this one."""

    kind: str = label("local")
    """How ranks are started: ``local`` starts them on this machine."""
    ranks_per_node: int | None = label(None)
    """Ranks to start; null means what the layout's degrees multiply to."""
    device: str = execution("auto")
    """Device of every rank: cpu, cuda, or auto (cuda where there is one)."""
    threads_per_rank: int | None = label(None)
    """Threads of a rank's CPU work (OMP_NUM_THREADS); null means the cores shared out evenly."""
    start_timeout_seconds: int = label(1800)
    """Longest wait for a collective before this process's first step is done (compile, communicators)."""
    step_timeout_seconds: int = label(600)
    """Longest wait for a collective after that."""
    stop_timeout_seconds: int = label(300)
    """After ^C or SIGTERM, how long the ranks may take to end their step and save before they are killed."""

    def validate(self) -> None:
        """Raises ConfigError for a place that is not known."""
        if self.kind != "local":
            raise ConfigError("cluster.kind", self.kind, "no such way to start ranks", ["local"])
        if self.device not in DEVICES:
            raise ConfigError("cluster.device", self.device, "no such device", DEVICES)
        for name in ("ranks_per_node", "threads_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"cluster.{name}", value, "must be at least 1, or null")
        for name in ("start_timeout_seconds", "step_timeout_seconds", "stop_timeout_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name}", getattr(self, name), "must be at least 1 second")

    def validate_gpus(self, gpus: int, ranks: int) -> None:
        """Raises ConfigError when this machine has not the GPUs that the ranks need, one each."""
        if self.device == "cuda" and gpus == 0:
            raise ConfigError("cluster.device", "cuda", "this machine has no NVIDIA GPU", ["cpu", "auto"])
        if self.device != "cpu" and 0 < gpus < ranks:
            raise ConfigError(
                "cluster.device",
                self.device,
                f"the layout takes {ranks} ranks, one GPU each, and this machine has {gpus}",
                f"cpu, or degrees of parallelism that multiply to at most {gpus}",
            )


def count_gpus() -> int:
    """Number of NVIDIA GPUs a process here may use, found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdigit()])
