"""Where a job runs."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.fields import Switch, execution, label, part
from harness.config.registry import Registry, load_attribute, resolve_options
from harness.util.errors import ConfigError
from harness.util.hardware import ACCELERATORS, Accelerator, find_accelerator, node_name

if TYPE_CHECKING:
    from harness.config.job import Job


# Numbers that a new accelerator must have, with those of the H100 as examples.
_NEEDED = {
    "half_tflops": "989",
    "float32_tflops": "67",
    "memory_gib": "80",
    "memory_tb_s": "3.35",
    "link_gb_s": "450",
    "units": "132",
}
# Fields of an accelerator as they are, those in other units, and the formats whose peak a field is.
_SAME = ("memory_gib", "units", "power_w", "link")
_UNITS = {"memory_tb_s": ("memory_bandwidth", 1e12), "link_gb_s": ("link_bandwidth", 1e9)}
_PEAKS = {
    "half_tflops": ("bfloat16", "float16"),
    "tf32_tflops": ("tf32",),
    "float32_tflops": ("float32",),
    "float8_tflops": ("float8",),
    "mxfp8_tflops": ("mxfp8",),
}


@dataclass(frozen=True)
class HardwareConfig:
    """Numbers of an accelerator that ``util/hardware.py`` does not have, or other numbers than its own."""

    device_name: str | None = label(None)
    """Name that the driver reports (``torch.cuda.get_device_name()``), by which runs recognize the
    accelerator; null: as in harness/util/hardware.py."""
    half_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s of products in bfloat16 and float16, without sparsity."""
    tf32_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s in TF32."""
    float32_tflops: float | None = label(None, above=0)
    """TFLOP/s in float32, without tensor cores on NVIDIA."""
    float8_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s in float8; null for a new accelerator: it does not multiply in float8."""
    mxfp8_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s in mxfp8; null for a new accelerator: it does not multiply in mxfp8."""
    memory_gib: float | None = label(None, above=0)
    """Device memory, as in the data sheet."""
    memory_tb_s: float | None = label(None, above=0)
    """Memory bandwidth in TB/s."""
    link: str | None = label(None, nonempty=True, works="NVLink")
    """Name of the links between accelerators of a node, which the plan shows: ``NVLink``, ``PCIe``."""
    link_gb_s: float | None = label(None, above=0)
    """Bandwidth of these links in GB/s, in one direction. Data sheets print the sum of both."""
    units: int | None = label(None, least=1)
    """Streaming multiprocessors, or compute units."""
    power_w: float | None = label(None, above=0)
    """Maximum power in W; null for a new accelerator: its energy is unknown."""
    achieved_half: float | None = label(None, above=0, most=1)
    """Fraction of the peak that the best kernels achieve for products of 16-bit values; null: as in
    harness/tools/plan/constants.py."""
    achieved_float8: float | None = label(None, above=0, most=1)
    """The same for products of 8-bit values."""
    achieved_attention: float | None = label(None, above=0, most=1)
    """The same for fused attention, of the 16-bit peak."""

    def validate(self, accelerator: str | None) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if accelerator is None and given:
            name = f"cluster.hardware.{given[0]}"
            works = "cluster.accelerator=NAME: a new name, or one of harness/util/hardware.py"
            raise ConfigError(name, getattr(self, given[0]), "no accelerator is named", works)
        if accelerator is None or accelerator in ACCELERATORS:
            return
        if not given or not accelerator:
            choices = [*ACCELERATORS, "null, or a new name with cluster.hardware"]
            raise ConfigError("cluster.accelerator", accelerator or "''", "no such choice", choices)
        for name, example in _NEEDED.items():
            if getattr(self, name) is None:
                rule = f"must be given, because harness/util/hardware.py does not have {accelerator}"
                raise ConfigError(f"cluster.hardware.{name}", None, rule, f"{example}, if it were an H100")


@lru_cache
def described(name: str, own: HardwareConfig) -> Accelerator | None:
    """Return the accelerator with this name and the user's own numbers; None if it is unknown."""
    known = ACCELERATORS.get(name)
    if own == HardwareConfig():
        return known
    given = {each: value for each, value in vars(own).items() if value is not None}
    numbers: dict[str, Any] = {each: given[each] for each in _SAME if each in given}
    numbers |= {to: given[each] * unit for each, (to, unit) in _UNITS.items() if each in given}
    numbers["peak_flops"] = ({} if known is None else known.peak_flops) | {
        dtype: given[each] * 1e12 for each, dtypes in _PEAKS.items() if each in given for dtype in dtypes
    }
    numbers["achieved"] = {
        each.removeprefix("achieved_"): value for each, value in given.items() if each.startswith("achieved_")
    }
    if known is None:
        return Accelerator(**{"link": "in-node", **numbers}, name=name, source="cluster.hardware")
    return replace(known, **numbers, source=f"{known.source}, changed by cluster.hardware")


# Options that the harness sets, of sbatch by their long names (slurm.schedmd.com/sbatch.html) and of srun. If
# srun gets one twice, it uses the last, the user's.
_OF_SBATCH = """
account array clusters constraint cpus-per-task error exclude exclusive gpus gpus-per-node gpus-per-socket
gpus-per-task help job-name mem no-requeue nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode output parsable partition qos quiet requeue signal test-only time usage version
wait wrap
"""
_OF_SRUN = """
cpus-per-task error jobid kill-on-bad-exit multi-prog nodes ntasks ntasks-per-node open-mode output wait
"""
_SHORT = {"c": "cpus-per-task", "e": "error", "K": "kill-on-bad-exit", "N": "nodes", "n": "ntasks"}
_SHORT |= {"o": "output", "W": "wait"}
_INSTEAD = {"job-name": "name", "wrap": "cluster.setup", "output": "runs_dir", "error": "runs_dir"}


def check_sbatch(options: Mapping[str, Any], *, gres: bool) -> None:
    """Raise ConfigError for what is no option of sbatch, or one that the harness sets itself."""
    for option, value in options.items():
        field, name = f"cluster.sbatch.{option}", option.replace("_", "-")
        if len(name) < 2 or not name.replace("-", "").isalnum() or name.startswith("-"):
            rule = "must be the long name of an option"
            raise ConfigError(field, value, rule, "cluster.sbatch.reservation=x")
        if (own := _own(name, _OF_SBATCH)) is not None:
            raise ConfigError(field, value, f"the harness sets --{own} itself", _instead(own))
        if name == "gres" and (gres or "gpu" in str(value)):
            raise ConfigError(field, value, "the harness asks for GPUs itself", "cluster.ranks_per_node")
        if value is False or not isinstance(value, bool | int | float | str):
            rule, works = "must be one value, or true for an option without one", "quotes around commas"
            raise ConfigError(field, value, rule, works)


def check_srun(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith("--"):
            own = _own(argument[2:].partition("=")[0], _OF_SRUN)
        else:
            own = _SHORT.get(argument[1:2]) if argument.startswith("-") else None
        if own is not None:
            rule = f"the harness sets --{own} of srun itself"
            raise ConfigError("cluster.srun_args", argument, rule, _instead(own))


def _instead(option: str) -> str:
    has_field = option in (field.name for field in fields(ClusterConfig))
    return f"cluster.{option}" if has_field else _INSTEAD.get(option, "fields of cluster and parallelism")


def _own(name: str, options: str) -> str | None:
    """Return the option that a name selects: both commands accept abbreviated names."""
    begun = [option for option in options.split() if option.startswith(name)]
    return name if name in begun else next(iter(begun), None)


@dataclass(frozen=True)
class ClusterKind:
    """A way to start the ranks of a job.

    Attributes:
        start: ``module:function`` that is called with a job, its ``RunFolder`` and its overrides, starts the
            job, and returns the exit code.
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
NODE_CHECKS = ("off", "fail", "exclude")

SLURM = Switch("cluster.kind", "cluster=slurm", lambda kind: kind != "local")
slurm_label = functools.partial(label, needs=SLURM)
"""Kinds of other packages may read what SLURM does."""
NETWORK = Switch("cluster.network_gbps", "cluster.network_gbps=400")
LEAVES = Switch("cluster.leaf_nodes", "cluster.leaf_nodes=32")
UPLINKS = Switch("cluster.oversubscription", "cluster.oversubscription=2")


@dataclass(frozen=True)
class ClusterConfig:
    """Where a job runs: on this machine, or on nodes of a SLURM cluster."""

    kind: str = label("local", choices=CLUSTERS)
    """How ranks are started: ``local`` on this machine, ``slurm`` by a submitted job."""
    options: dict[str, Any] = label(factory=dict)
    """Options of a kind that another package has added."""
    ranks: int | None = label(None, least=1)
    """Total number of ranks; null means the product of the layout's degrees."""
    nodes: int | None = label(None, least=1)
    """Number of nodes, each full; null means as many as the ranks need."""
    ranks_per_node: int | None = label(None, least=1)
    """Ranks per node, one per GPU if the node has any; null (local only): as many as the layout needs."""
    device: str = execution("auto", choices=DEVICES)
    """Device of every rank: cpu, cuda, or auto (cuda on nodes with GPUs)."""
    accelerator: str | None = label(None)
    """Accelerator of the nodes: a name in harness/util/hardware.py (``H100 SXM``), or any name with the
    numbers of ``hardware``; null means unknown."""
    hardware: HardwareConfig = part(HardwareConfig)
    """Numbers of an accelerator of the user's own."""
    network_gbps: float | None = label(None, above=0)
    """Bandwidth of a network adapter in Gbit/s; null means unknown."""
    network_adapters: int | None = label(None, least=1, needs=NETWORK)
    """Network adapters of a node, which its ranks share evenly; null means one for each."""
    link_nodes: int = label(1, least=1)
    """Neighbouring nodes whose accelerators are joined like those of one node: 18 in a GB200 NVL72."""
    leaf_nodes: int | None = label(None, least=1, needs=UPLINKS)
    """Neighbouring nodes under the same leaf switches; null: the network is as fast between all nodes."""
    oversubscription: float | None = label(None, least=1, needs=LEAVES)
    """Bandwidth of the nodes under a leaf switch divided by that of its links to other leaves; with
    leaf_nodes."""
    dollars_per_gpu_hour: float | None = label(None, above=0)
    """Price, for the cost of plans and submissions; null shows none."""
    pue: float | None = label(None, least=1)
    """Power usage effectiveness: the site's energy divided by the energy of its computers, for the energy of
    plans; null leaves it out."""
    threads_per_rank: int | None = label(None, least=1)
    """CPU threads per rank (OMP_NUM_THREADS); null divides the cores evenly among ranks."""
    start_timeout_seconds: int = label(1800, least=1)
    """Timeout of collectives until this process has finished its first step (compile, communicators)."""
    step_timeout_seconds: int = label(600, least=1)
    """Timeout of collectives after the first step."""
    stop_timeout_seconds: int = label(300, least=1)
    """Time that ranks have after ^C or SIGTERM to finish their step and save, before they are killed."""
    partition: str | None = slurm_label(None)
    """SLURM's --partition."""
    account: str | None = slurm_label(None)
    """SLURM's --account."""
    qos: str | None = slurm_label(None)
    """SLURM's --qos."""
    constraint: str | None = slurm_label(None)
    """SLURM's --constraint."""
    exclude: str | None = slurm_label(None)
    """SLURM's --exclude."""
    time: str | None = slurm_label("1:00:00")
    """SLURM's --time: minutes, h:m:s, d-h:m:s; a longer job is requeued. Null means the partition's limit."""
    cpus_per_rank: int | None = slurm_label(None, least=1)
    """SLURM's --cpus-per-task; null means one, or the partition's default."""
    mem: str | None = slurm_label(None)
    """SLURM's --mem per node, e.g. 500G; 0 means all memory, null the partition's default."""
    gpu_type: str | None = label(None)
    """Type in --gpus-per-node=TYPE:N, for nodes with several types; null means any."""
    gres: bool = slurm_label(False)
    """Request GPUs by --gres=gpu:TYPE:N instead of --gpus-per-node, for sites that support only --gres."""
    gpu_bind: str | None = slurm_label(None)
    """SLURM's --gpu-bind, e.g. closest or single:1; null lets each rank see all GPUs of its node."""
    distribution: str | None = slurm_label("block:block")
    """SLURM's --distribution. With block:block neighbouring ranks share a socket, as neighbouring GPUs do.
    Null is SLURM's default, which assigns ranks to sockets round-robin."""
    socket_ifname: str | None = slurm_label(None)
    """Network interface for NCCL and gloo sockets (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), e.g. bond0."""
    ib_hca: str | None = slurm_label(None)
    """InfiniBand adapters that NCCL uses (NCCL_IB_HCA), e.g. mlx5_0,mlx5_3; null means all."""
    node_check: str = slurm_label("off", choices=NODE_CHECKS)
    """Check of each node's GPUs, memory and run folder before ranks start. off: none; fail: a bad node ends
    the job; exclude: the job is requeued without the bad node."""
    exclude_slow: bool = label(False, needs=(SLURM, Switch("profiling.phases")))
    """Requeue the job without the nodes of ranks that profiling.phases found slow."""
    exclusive: bool = slurm_label(False)
    """SLURM's --exclusive: do not share nodes with other jobs."""
    sbatch: dict[str, Any] = slurm_label(factory=dict)
    """More sbatch options by their long names, e.g. {reservation: maintenance, mail-type: END}."""
    srun_args: list[str] = slurm_label(factory=list)
    """More options for the srun that starts the ranks."""
    setup: list[str] = slurm_label(factory=list)
    """Shell lines run on the first node before anything else, e.g. module load cuda. A line that fails ends
    the job."""
    env: dict[str, str] = slurm_label(factory=dict)
    """Environment variables of the job, e.g. {NCCL_DEBUG: INFO}."""
    container: str | None = slurm_label(None)
    """Container for ranks: srun options (--container-image=...) or a command (apptainer exec --nv x.sif)."""
    python: str | None = slurm_label(None)
    """Python executable of the ranks, e.g. the container's; null means the submitting one."""
    signal_seconds: int = slurm_label(120, least=1)
    """Seconds before the time limit at which SLURM signals the job to save and requeue."""
    max_requeues: int = slurm_label(100, least=0)
    """How often a job is requeued automatically after a preemption or its time limit; 0 means never."""
    max_running: int = slurm_label(16, least=1)
    """Maximum number of a sweep's points that run on SLURM at once, over all arrays."""
    snapshot: bool = slurm_label(True)
    """Run a copy of the code made at submission, not the code as it is when the job starts."""
    wait: bool = slurm_label(False)
    """Follow the job to its end; ^C stops the following, not the job."""
    dry_run: bool = slurm_label(False)
    """Show what would be submitted and its maximum cost; submit nothing."""
    parsable: bool = slurm_label(False)
    """Print only the ids of submitted jobs on stdout, as sbatch --parsable does; the rest goes to stderr."""
    confirm_gpu_hours: float = slurm_label(100.0)
    """Ask before submitting jobs of more GPU-hours than this (ranks x time limit; on CPU rank-hours)."""

    def resolve(self) -> ClusterConfig:
        schema, owner = CLUSTERS[self.kind].options, f"cluster.kind={self.kind}"
        return replace(self, options=resolve_options(self.options, schema, "cluster.options", owner))

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

    @property
    def minutes(self) -> int | None:
        """The time limit in minutes, rounded up; None if it is the partition's."""
        return None if self.time is None else minutes_of(self.time)

    def validate(self) -> None:
        if self.ranks_per_node is None and not self.is_here:
            rule = f"must be set with cluster.kind={self.kind}"
            raise ConfigError("cluster.ranks_per_node", None, rule, "8, GPUs of a node")
        self.hardware.validate(self.accelerator)
        self._validate_network()
        if self.kind == "slurm":
            self._validate_slurm()
        elif self.is_here and self.nodes not in (None, 1):
            raise ConfigError("cluster.nodes", self.nodes, "this machine is one node", "1, or cluster=slurm")

    def _validate_network(self) -> None:
        if self.link_nodes > 1 and self.is_here:
            raise ConfigError("cluster.link_nodes", self.link_nodes, "this machine is one node", "1")
        if self.leaf_nodes is not None and self.leaf_nodes % self.link_nodes:
            rule = f"must be a multiple of cluster.link_nodes={self.link_nodes}"
            raise ConfigError("cluster.leaf_nodes", self.leaf_nodes, rule, f"{self.link_nodes}")

    def _validate_slurm(self) -> None:
        if self.minutes is not None and self.signal_seconds >= self.minutes * 60:
            rule = f"must be less than cluster.time={self.time}, or SLURM stops the job as it starts"
            works = f"at most {self.minutes * 60 - 1}"
            raise ConfigError("cluster.signal_seconds", self.signal_seconds, rule, works)
        for name, (pattern, rule, works) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ConfigError(f"cluster.{name}", value, rule, works)
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(
                    f"cluster.env.{name}", self.env[name], "is not a valid variable name", "NCCL_DEBUG"
                )
        check_sbatch(self.sbatch, gres=self.gres)
        check_srun(self.srun_args)
        self._validate_memory()
        container = self.container or ""
        try:
            shlex.split(container)
        except ValueError as error:
            raise ConfigError("cluster.container", container, f"cannot be parsed: {error}") from None
        if _IMAGE.fullmatch(container):
            works = f'"--container-image={container}", or apptainer exec --nv {container}'
            rule = "is an image, which no rank can execute"
            raise ConfigError("cluster.container", container, rule, works)

    def _validate_memory(self) -> None:
        if self.mem and self.mem.isdecimal() and int(self.mem):
            rule = f"is {self.mem} megabytes for SLURM"
            raise ConfigError("cluster.mem", self.mem, rule, f"{self.mem}G, or {self.mem}M")
        others = [option for option in self.sbatch if option.startswith(("mem-per", "mem_per"))]
        if self.mem is not None and others:
            rule = f"sbatch takes one of --mem and cluster.sbatch.{others[0]}"
            raise ConfigError("cluster.mem", self.mem, rule, "null")

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

    def linked_ranks(self, world_size: int) -> int:
        """Return the number of neighbouring ranks that the accelerators' own links join."""
        return min(self.nodes_for(world_size)[1] * self.link_nodes, world_size)

    def leaf_ranks(self, world_size: int) -> int | None:
        """Return the number of neighbouring ranks under the same leaf switches; None if all are equal."""
        return None if self.leaf_nodes is None else self.nodes_for(world_size)[1] * self.leaf_nodes

    @property
    def rank_gbps(self) -> float | None:
        """Network bandwidth of a rank of a full node, in Gbit/s; None if unknown."""
        if self.network_gbps is None or self.network_adapters is None or self.ranks_per_node is None:
            return self.network_gbps
        return self.network_gbps * self.network_adapters / self.ranks_per_node

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
            raise ConfigError("cluster.device", "cuda", f"{node_name()} has no NVIDIA GPU", ["cpu", "auto"])
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


# Pattern, rule and examples of the fields that SLURM, NCCL and gloo parse.
_FORMS = {
    "distribution": (
        r"block(:(block|cyclic|fcyclic|\*)){0,2}",
        "must begin with block, because ranks of a node are neighbours in the layout",
        "block:block, block:cyclic, null",
    ),
    "gpu_bind": (r"[\w:,.-]+", "must be a value of SLURM's --gpu-bind", "closest, single:1, null"),
    "socket_ifname": (
        r"[\w.-]+(,[\w.-]+)*",
        "must be full interface names, as gloo requires; set NCCL's other forms by "
        "cluster.env.NCCL_SOCKET_IFNAME",
        "bond0, ib0,ib1",
    ),
    "ib_hca": (
        r"[=^]{0,2}[\w.-]+(:\d+)?(,[\w.-]+(:\d+)?)*",
        "must have the form of NCCL_IB_HCA",
        "mlx5, mlx5_0,mlx5_3, '^mlx5_1'",
    ),
}

# Not a command around Python: the file of an image, or its name and tag in a registry.
_IMAGE = re.compile(r"[^\s-]\S*(\.(sqsh|squashfs|sif|simg|img)|:\S+)")

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?)"
)


def minutes_of(time: str) -> int:
    """Convert a time of sbatch (slurm.schedmd.com/sbatch.html, ``--time``) to minutes, rounded up."""
    match = _TIME.fullmatch(time.strip())
    parts = {name: int(value or 0) for name, value in match.groupdict().items()} if match else {}
    hours, minutes = (parts.get(a, 0) + parts.get(b, 0) for a, b in (("dh", "h"), ("dm", "m")))
    seconds = parts.get("ds", 0) + parts.get("s", 0)
    total = (parts.get("days", 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total < 1:
        raise ConfigError(
            "cluster.time", time, "must be a time in one of sbatch's forms", "90, 1:30:00, 2-12:00:00"
        )
    return total
