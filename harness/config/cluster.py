"""Where a job runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.fields import Switch, execution, label, part
from harness.config.hardware import HardwareConfig, described
from harness.config.registry import Registry, load_attribute
from harness.config.slurm import SLURM, SlurmConfig
from harness.util.errors import ConfigError
from harness.util.hardware import Accelerator, find_accelerator, node_name
from harness.util.words import plural

if TYPE_CHECKING:
    from harness.config.job import Job


@dataclass(frozen=True)
class ClusterKind:
    """A way to start the ranks of a job.

    Attributes:
        start: ``module:function`` that is called with a job, its ``RunFolder`` and its overrides,
            starts the job, and returns the exit code.
        is_here: whether the ranks run on this machine and use its GPUs; else on nodes of
            ``cluster.ranks_per_node`` ranks.
        options: dataclass of ``cluster.options``; None: there are none.
    """

    start: str
    is_here: bool
    options: type | None = None

    def load(self) -> Callable[[Job, Any, list[str]], int]:
        start: Callable[[Job, Any, list[str]], int] = load_attribute(self.start)
        return start


CLUSTERS: Registry[ClusterKind] = Registry(
    "cluster",
    {
        "local": ClusterKind("harness.launch.local:start", is_here=True),
        "slurm": ClusterKind("harness.launch.submit:submit_one", is_here=False),
    },
    field="cluster.kind",
    expects="harness.config.cluster:ClusterKind",
)
"""Ways to start the ranks of a job."""
DEVICES = ("auto", "cpu", "cuda")
CONTINUES = Switch("cluster.on_node_loss", on="continue")


@dataclass(frozen=True)
class NodesConfig:
    """Fields of ``cluster`` that say where the ranks are."""

    kind: str = label("local", choices=CLUSTERS)
    """How ranks are started: ``local`` on this machine, ``slurm`` by a submitted job."""
    options: dict[str, Any] = label(factory=dict)
    """Options of a kind that another package has added."""
    ranks: int | None = label(None, least=1)
    """Total number of ranks; null means the product of the layout's degrees."""
    nodes: int | None = label(None, least=1)
    """Number of nodes, each full; null means as many as the ranks need."""
    ranks_per_node: int | None = label(None, least=1)
    """Ranks per node, one per GPU if the node has any; null (local only): as many as the layout
    needs."""
    device: str = execution("auto", choices=DEVICES)
    """Device of every rank: cpu, cuda, or auto (cuda on nodes with GPUs)."""
    accelerator: str | None = label(None)
    """Accelerator of the nodes: a name in harness/util/hardware.py (``H100 SXM``), or any name with the
    numbers of ``hardware``; null means unknown."""
    hardware: HardwareConfig = part(HardwareConfig)
    """Numbers of an accelerator of the user's own."""


@dataclass(frozen=True)
class NetworkConfig:
    """Fields of ``cluster`` about the network between nodes, which plans use."""

    network_gbps: float | None = label(None, above=0)
    """Network bandwidth of each rank in Gbit/s: that of all adapters of a node, divided by its ranks; null
    means unknown."""
    link_nodes: int = label(1, least=1)
    """Neighbouring nodes whose accelerators are joined like those of one node: 18 in a GB200
    NVL72."""


@dataclass(frozen=True)
class RanksConfig:
    """Fields of ``cluster`` about what a rank costs, and how long ranks wait for each other."""

    dollars_per_gpu_hour: float | None = label(None, above=0)
    """Price, for the cost of plans and submissions; null shows none."""
    threads_per_rank: int | None = label(None, least=1)
    """CPU threads per rank (OMP_NUM_THREADS); null divides the cores evenly among ranks."""
    start_timeout_seconds: int = label(1800, least=1)
    """Timeout of collectives until this process has finished its first step (compile,
    communicators)."""
    step_timeout_seconds: int = label(600, least=1)
    """Timeout of collectives after the first step."""


@dataclass(frozen=True)
class LossConfig:
    """Fields of ``cluster`` that say how a job goes on when it loses a node."""

    on_node_loss: str = label("requeue", choices=("requeue", "continue"))
    """When a node is lost: ``requeue`` ends the ranks, and SLURM starts them again when it has as
    many nodes; ``continue`` starts them from the last checkpoint on the nodes that are left, in a layout
    that was chosen before the job began. Batches and numerics stay the same. On this machine a rank
    counts as a node."""
    min_nodes: int | None = label(None, least=1, needs=CONTINUES)
    """Fewest nodes to go on with; null: half of them, rounded up."""
    spare_nodes: int = label(0, least=0, needs=(CONTINUES, SLURM))
    """Nodes to ask for in addition: one takes the place of a lost node, and the layout stays."""


# Bases give their fields from the last to the first: the order of files and of --help.
@dataclass(frozen=True)
class ClusterConfig(SlurmConfig, LossConfig, RanksConfig, NetworkConfig, NodesConfig):
    """Where a job runs: on this machine, or on nodes of a SLURM cluster."""

    def resolve(self) -> ClusterConfig:
        return replace(self, options=CLUSTERS.resolve_options(self.kind, self.options))

    @property
    def is_here(self) -> bool:
        return CLUSTERS[self.kind].is_here

    @property
    def world_size(self) -> int | None:
        """Total number of ranks, if the cluster fields alone determine it."""
        if self.ranks is not None:
            return self.ranks
        if not self.is_here:
            return None if self.nodes is None else self.nodes * self._ranks_per_node
        return self.ranks_per_node

    @property
    def default_world_size(self) -> int | None:
        """Ranks of a layout that does not determine them: one node's; None: this machine decides."""
        return None if self.is_here else self._ranks_per_node

    @property
    def _ranks_per_node(self) -> int:
        assert self.ranks_per_node is not None, "checked by validate"
        return self.ranks_per_node

    def validate(self) -> None:
        if self.ranks_per_node is None and not self.is_here:
            rule = f"must be set with cluster.kind={self.kind}"
            raise ConfigError("cluster.ranks_per_node", None, rule, "8, GPUs of a node")
        self.hardware.validate(self.accelerator)
        one_node = "this machine is one node"
        if self.is_here and self.link_nodes > 1:
            raise ConfigError("cluster.link_nodes", self.link_nodes, one_node, "1")
        if self.kind == "slurm":
            self.validate_slurm()
        elif self.is_here and self.nodes not in (None, 1):
            raise ConfigError("cluster.nodes", self.nodes, one_node, "1, or cluster=slurm")

    def nodes_for(self, world_size: int) -> tuple[int, int]:
        """Return the number of nodes for ``world_size`` ranks, and the ranks on each."""
        if self.is_here:
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
                f"{world_size} ranks do not fill {nodes} nodes of {per_node} evenly",
                f"degrees that multiply to {below or per_node} or {below + per_node}",
            )
        return nodes, world_size // nodes

    def nodes_to_lose(self, world_size: int) -> tuple[int, int]:
        """Return how many nodes can be lost, and the ranks of each; here every rank is a node."""
        return (world_size, 1) if self.is_here else self.nodes_for(world_size)

    def fewest_nodes(self, nodes: int) -> int:
        """Return the fewest of ``nodes`` nodes that the job goes on with."""
        return -(-nodes // 2) if self.min_nodes is None else self.min_nodes

    def check_losses(self, world_size: int, *, has_checkpoints: bool) -> None:
        """Check that a job that goes on without a node has nodes to lose, and saves checkpoints."""
        if self.on_node_loss != "continue":
            return
        nodes, _ = self.nodes_to_lose(world_size)
        rule = ""
        if self.kind not in ("local", "slurm"):
            rule = f"is of cluster.kind=local and slurm, and this is {self.kind}"
            works = "requeue"
        elif not has_checkpoints:
            rule = "goes on from checkpoints, and the job saves none"
            works = "requeue, or checkpoint.enable=true"
        elif nodes < 2:
            rule = f"needs at least two nodes, and the job has {plural(world_size, 'rank')} on one"
            works = "requeue"
        if rule:
            raise ConfigError("cluster.on_node_loss", "continue", rule, works)
        if self.min_nodes is not None and self.min_nodes >= nodes:
            what = "ranks, which count as nodes on this machine" if self.is_here else "nodes"
            rule = f"must be less than the {nodes} {what}"
            raise ConfigError("cluster.min_nodes", self.min_nodes, rule, f"1 to {nodes - 1}")

    def linked_ranks(self, world_size: int) -> int:
        """Return the number of neighbouring ranks that the accelerators' own links join."""
        return min(self.nodes_for(world_size)[1] * self.link_nodes, world_size)

    @property
    def gpu(self) -> Accelerator | None:
        """The accelerator of the nodes; None if it is unknown."""
        return None if self.accelerator is None else described(self.accelerator, self.hardware)

    def with_device(self, device_name: str) -> ClusterConfig | None:
        """Return the cluster with the accelerator of this name of torch.cuda; None if it is unknown."""
        if self.gpu is not None and device_name.strip() == self.hardware.device_name:
            return self
        found = find_accelerator(device_name)
        if found is None:
            return None
        if found.name == self.accelerator:
            return self
        return replace(self, accelerator=found.name, hardware=HardwareConfig())

    def validate_gpus(self, gpus: int, ranks: int) -> None:
        """Raise ConfigError if this machine has fewer GPUs than the ranks need, one each."""
        if self.device == "cuda" and gpus == 0:
            raise ConfigError(
                "cluster.device", "cuda", f"{node_name()} has no NVIDIA GPU", ["cpu", "auto"]
            )
        if self.device != "cpu" and 0 < gpus < ranks:
            rule = f"the layout takes {ranks} ranks, one GPU each, and this machine has {gpus}"
            works = f"cpu, or degrees of parallelism that multiply to at most {gpus}"
            raise ConfigError("cluster.device", self.device, rule, works)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use. Imports no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # SLURM sets NoDevFiles for a job without GPUs.
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1", "NoDevFiles")])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdigit()])
