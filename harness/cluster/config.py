"""Where a job runs."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.hardware import ACCELERATORS
from harness.config import execution, label
from harness.errors import ConfigError

KINDS = ("local", "slurm")
DEVICES = ("auto", "cpu", "cuda")


@dataclass
class ClusterConfig:
    """Where a job runs: on this machine, or on nodes that SLURM gives it."""

    kind: str = label("local")
    """How ranks are started: ``local`` on this machine, ``slurm`` by a job that is submitted."""
    ranks: int | None = label(None)
    """Ranks in all; null means what the layout's degrees multiply to."""
    nodes: int | None = label(None)
    """Nodes, each full; null means as many as the ranks take."""
    ranks_per_node: int | None = label(None)
    """Ranks a node takes, one for each GPU if it has any; null (local only): as many as the layout needs."""
    device: str = execution("auto")
    """Device of every rank: cpu, cuda, or auto (cuda where there is one)."""
    accelerator: str | None = label(None)
    """What the nodes have, by its name in harness/cluster/hardware.py (``H100 SXM``); null means unknown."""
    network_gbps: float | None = label(None)
    """Gbit/s of the network between nodes that every device has to itself; null means unknown."""
    threads_per_rank: int | None = label(None)
    """Threads of a rank's CPU work (OMP_NUM_THREADS); null means the cores shared out evenly."""
    start_timeout_seconds: int = label(1800)
    """Longest wait for a collective before this process's first step is done (compile, communicators)."""
    step_timeout_seconds: int = label(600)
    """Longest wait for a collective after that."""
    stop_timeout_seconds: int = label(300)
    """After ^C or SIGTERM, how long the ranks may take to end their step and save before they are killed."""

    partition: str | None = label(None)
    """SLURM's --partition."""
    account: str | None = label(None)
    """SLURM's --account."""
    qos: str | None = label(None)
    """SLURM's --qos."""
    constraint: str | None = label(None)
    """SLURM's --constraint."""
    exclude: str | None = label(None)
    """SLURM's --exclude: nodes not to use."""
    time: str = label("1:00:00")
    """SLURM's --time, in its own forms: minutes, h:m:s, d-h:m:s. A job that needs longer goes on after it."""
    cpus_per_rank: int | None = label(None)
    """SLURM's --cpus-per-task; null means one, unless the partition says otherwise."""
    mem: str | None = label(None)
    """SLURM's --mem for a node, e.g. 500G; 0 is all of it, null the partition's default."""
    gpu_type: str | None = label(None)
    """Type in --gpus-per-node=TYPE:N, where nodes have several; null asks for any."""
    exclusive: bool = label(False)
    """SLURM's --exclusive: whole nodes, whoever else could fit."""
    sbatch: dict[str, Any] = label(factory=dict)
    """Further options of sbatch by their long names, e.g. {reservation: maintenance, mail-type: END}."""
    srun_args: list[str] = label(factory=list)
    """Further options of srun, by which the ranks are started."""
    setup: list[str] = label(factory=list)
    """Lines of shell run on the first node before anything else, e.g. module load cuda."""
    env: dict[str, str] = label(factory=dict)
    """Environment of the job, e.g. {NCCL_DEBUG: INFO}."""
    container: str | None = label(None)
    """What ranks run in: options of srun (--container-image=...) or a command (apptainer exec --nv x.sif)."""
    python: str | None = label(None)
    """Python of the ranks, e.g. the container's; null means the one that submits."""
    signal_seconds: int = label(120)
    """Time before the limit at which a job is told to save and make place for its own continuation."""
    max_requeues: int = label(100)
    """How often a job that was preempted or out of time goes back into the queue by itself; 0 is never."""
    max_running: int = label(16)
    """Points of a sweep with nodes of one shape that may run at once."""
    snapshot: bool = label(True)
    """Run the code as it is now, copied beside the run, and not as it will be when the job starts."""
    wait: bool = label(False)
    """Follow the job to its end; ^C stops the following, not the job."""
    dry_run: bool = label(False)
    """Show what would be submitted, and what it may cost, and submit nothing."""
    confirm_gpu_hours: float = label(100.0)
    """Ask before submitting what may cost more than this (ranks x time limit; of CPU ranks, rank-hours)."""

    @property
    def world_size(self) -> int | None:
        """Ranks in all, as far as this part of the job says so."""
        if self.ranks is not None:
            return self.ranks
        if self.kind == "slurm":
            return None if self.nodes is None else self.nodes * self._ranks_per_node
        return self.ranks_per_node

    @property
    def default_world_size(self) -> int | None:
        """Ranks that a layout fills which leaves it open: a node on SLURM; None leaves it to the machine."""
        return self._ranks_per_node if self.kind == "slurm" else None

    @property
    def _ranks_per_node(self) -> int:
        assert self.ranks_per_node is not None, "checked by validate"
        return self.ranks_per_node

    @property
    def minutes(self) -> int:
        """The time limit in minutes, rounded up.

        Raises:
            ConfigError: it has none of SLURM's forms.
        """
        return minutes_of(self.time)

    def validate(self) -> None:
        """Raises ConfigError for values that no job can have."""
        if self.kind not in KINDS:
            raise ConfigError("cluster.kind", self.kind, "no such way to start ranks", KINDS)
        if self.device not in DEVICES:
            raise ConfigError("cluster.device", self.device, "no such device", DEVICES)
        if self.accelerator is not None and self.accelerator not in ACCELERATORS:
            raise ConfigError(
                "cluster.accelerator", self.accelerator, "not in the table", [*ACCELERATORS, "null"]
            )
        for name in ("ranks", "nodes", "ranks_per_node", "threads_per_rank", "cpus_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"cluster.{name}", value, "must be at least 1, or null")
        if self.network_gbps is not None and not self.network_gbps > 0:
            raise ConfigError("cluster.network_gbps", self.network_gbps, "must be positive, or null", [400])
        for name in ("start_timeout_seconds", "step_timeout_seconds", "stop_timeout_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name}", getattr(self, name), "must be at least 1 second")
        for name, least in (("signal_seconds", 1), ("max_requeues", 0), ("max_running", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"cluster.{name}", getattr(self, name), f"must be at least {least}")
        if self.kind == "slurm":
            self._validate_slurm()
        elif self.nodes not in (None, 1):
            raise ConfigError("cluster.nodes", self.nodes, "this machine is one node", "1, or cluster=slurm")

    def _validate_slurm(self) -> None:
        if self.ranks_per_node is None:
            raise ConfigError("cluster.ranks_per_node", None, "SLURM has to be told", "8, GPUs of a node")
        if self.signal_seconds >= self.minutes * 60:
            raise ConfigError(
                "cluster.signal_seconds",
                self.signal_seconds,
                f"must be less than cluster.time={self.time}, or a job is told to stop as it starts",
                f"at most {self.minutes * 60 - 1}",
            )
        for option in self.sbatch:
            if option.replace("-", "_") in _OWN_OPTIONS:
                works = f"cluster.{_OWN_OPTIONS[option.replace('-', '_')]}"
                raise ConfigError(f"cluster.sbatch.{option}", self.sbatch[option], "has its own field", works)
            value = self.sbatch[option]
            if value is False or not isinstance(value, bool | int | float | str):
                rule, works = "must be one value, or true for an option without one", "quotes around commas"
                raise ConfigError(f"cluster.sbatch.{option}", value, rule, works)
        try:
            shlex.split(self.container or "")
        except ValueError as error:
            raise ConfigError("cluster.container", self.container, f"cannot be read: {error}") from None

    def nodes_for(self, world_size: int) -> tuple[int, int]:
        """Nodes that so many ranks take, and ranks on each.

        Raises:
            ConfigError: they do not fill whole nodes.
        """
        if self.kind == "local":
            return 1, world_size
        per_node = self._ranks_per_node
        if self.nodes is None and world_size <= per_node:
            return 1, world_size
        nodes = self.nodes or -(-world_size // per_node)
        if world_size % nodes or world_size // nodes > per_node:
            below = world_size // per_node * per_node
            raise ConfigError(
                "cluster.nodes" if self.nodes else "cluster.ranks_per_node",
                self.nodes or per_node,
                f"{world_size} ranks do not share out evenly over {nodes} nodes of {per_node}",
                f"degrees that multiply to {below or per_node} or {below + per_node}",
            )
        return nodes, world_size // nodes

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


# Options of sbatch that follow from fields of their own.
_OWN_OPTIONS = {
    **{name: name for name in ("partition", "account", "qos", "constraint", "exclude", "time", "nodes")},
    **{name: name for name in ("mem", "exclusive")},
    "ntasks": "ranks",
    "ntasks_per_node": "ranks_per_node",
    "cpus_per_task": "cpus_per_rank",
    "gpus_per_node": "ranks_per_node",
    "array": "max_running",
    "signal": "signal_seconds",
    "requeue": "max_requeues",
    "no_requeue": "max_requeues",
}

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?)"
)


def minutes_of(time: str) -> int:
    """Minutes, rounded up, in a time as sbatch takes it (slurm.schedmd.com/sbatch.html, ``--time``).

    Raises:
        ConfigError: it has none of the forms.
    """
    match = _TIME.fullmatch(time.strip())
    parts = {name: int(value or 0) for name, value in match.groupdict().items()} if match else {}
    hours, minutes = (parts.get(a, 0) + parts.get(b, 0) for a, b in (("dh", "h"), ("dm", "m")))
    seconds = parts.get("ds", 0) + parts.get("s", 0)
    total = (parts.get("days", 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total < 1:
        raise ConfigError(
            "cluster.time", time, "must be a time as sbatch takes it", "90, 1:30:00, 2-12:00:00"
        )
    return total
