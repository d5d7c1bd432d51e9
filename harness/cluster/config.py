"""Where a job runs."""

from __future__ import annotations

import os
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.hardware import ACCELERATORS
from harness.cluster.options import check_sbatch, check_srun
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
    time: str | None = label("1:00:00")
    """SLURM's --time: minutes, h:m:s, d-h:m:s; a longer job goes on after it. Null: the partition's limit."""
    cpus_per_rank: int | None = label(None)
    """SLURM's --cpus-per-task; null means one, unless the partition says otherwise."""
    mem: str | None = label(None)
    """SLURM's --mem for a node, e.g. 500G; 0 is all of it, null the partition's default."""
    gpu_type: str | None = label(None)
    """Type in --gpus-per-node=TYPE:N, where nodes have several; null asks for any."""
    gres: bool = label(False)
    """Ask for GPUs by --gres=gpu:TYPE:N in place of --gpus-per-node, for sites that know only that."""
    gpu_bind: str | None = label(None)
    """SLURM's --gpu-bind, e.g. closest or single:1; null lets each rank see all GPUs of its node."""
    distribution: str | None = label("block:block")
    """SLURM's --distribution; with block:block neighbouring ranks share a socket, as neighbouring GPUs do.
    Null is SLURM's default, which deals ranks out to the sockets in turn."""
    socket_ifname: str | None = label(None)
    """Network interface of NCCL's and gloo's sockets (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), e.g. bond0."""
    ib_hca: str | None = label(None)
    """InfiniBand adapters that NCCL uses (NCCL_IB_HCA), e.g. mlx5_0,mlx5_3; null means all."""
    node_check: str = label("off")
    """Before ranks start, check each node's GPUs, memory and run folder: off; fail: a bad node ends the job;
    exclude: the job goes back into the queue without it."""
    exclusive: bool = label(False)
    """SLURM's --exclusive: whole nodes, whoever else could fit."""
    sbatch: dict[str, Any] = label(factory=dict)
    """Further options of sbatch by their long names, e.g. {reservation: maintenance, mail-type: END}."""
    srun_args: list[str] = label(factory=list)
    """Further options of srun, by which the ranks are started."""
    setup: list[str] = label(factory=list)
    """Lines of shell run on the first node before anything else, e.g. module load cuda; one that fails ends
    the job."""
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
    """Points of a sweep that may run on SLURM at once, whatever their shapes."""
    snapshot: bool = label(True)
    """Run the code as it is now, copied beside the run, and not as it will be when the job starts."""
    wait: bool = label(False)
    """Follow the job to its end; ^C stops the following, not the job."""
    dry_run: bool = label(False)
    """Show what would be submitted, and what it may cost, and submit nothing."""
    parsable: bool = label(False)
    """Print only the ids of submitted jobs on stdout, as sbatch --parsable does; the rest goes to stderr."""
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
    def minutes(self) -> int | None:
        """The time limit in minutes, rounded up; None where it is the partition's.

        Raises:
            ConfigError: it has none of SLURM's forms.
        """
        return None if self.time is None else minutes_of(self.time)

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
        if self.minutes is not None and self.signal_seconds >= self.minutes * 60:
            raise ConfigError(
                "cluster.signal_seconds",
                self.signal_seconds,
                f"must be less than cluster.time={self.time}, or a job is told to stop as it starts",
                f"at most {self.minutes * 60 - 1}",
            )
        for name, (pattern, rule, works) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ConfigError(f"cluster.{name}", value, rule, works)
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(
                    f"cluster.env.{name}", self.env[name], "no name of a variable", "NCCL_DEBUG"
                )
        check_sbatch(self.sbatch, gres=self.gres)
        check_srun(self.srun_args)
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
            raise ConfigError("cluster.device", "cuda", f"{node_name()} has no NVIDIA GPU", ["cpu", "auto"])
        if self.device != "cpu" and 0 < gpus < ranks:
            raise ConfigError(
                "cluster.device",
                self.device,
                f"the layout takes {ranks} ranks, one GPU each, and this machine has {gpus}",
                f"cpu, or degrees of parallelism that multiply to at most {gpus}",
            )


def node_name() -> str:
    """The name of this machine, as SLURM calls it inside a job."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def count_gpus() -> int:
    """Number of NVIDIA GPUs a process here may use, found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdigit()])


# Pattern, rule and examples of fields that SLURM, NCCL and gloo read.
_FORMS = {
    "distribution": (
        r"block(:(block|cyclic|fcyclic|\*)){0,2}",
        "must begin with block, because ranks of a node are neighbours in the layout",
        "block:block, block:cyclic, null",
    ),
    "gpu_bind": (r"[\w:,.-]+", "must be a value of SLURM's --gpu-bind", "closest, single:1, null"),
    "socket_ifname": (
        r"[\w.-]+(,[\w.-]+)*",
        "must be whole names of interfaces, as gloo takes them; NCCL's other forms are set by "
        "cluster.env.NCCL_SOCKET_IFNAME",
        "bond0, ib0,ib1",
    ),
    "ib_hca": (
        r"[=^]{0,2}[\w.-]+(:\d+)?(,[\w.-]+(:\d+)?)*",
        "must have the form of NCCL_IB_HCA",
        "mlx5, mlx5_0,mlx5_3, '^mlx5_1'",
    ),
    "node_check": (r"off|fail|exclude", "no such check of nodes", "off, fail, exclude"),
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
