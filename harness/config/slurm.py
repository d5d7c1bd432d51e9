"""What SLURM is asked for, and how it starts the ranks."""

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import mul
from typing import Any

from harness.config.fields import Switch, label
from harness.util.errors import ConfigError

NODE_CHECKS = ("off", "fail", "exclude")
SLURM = Switch("cluster.kind", "cluster=slurm", lambda kind: kind != "local")
slurm_label = functools.partial(label, needs=SLURM)
"""Kinds of other packages may read what SLURM does."""


@dataclass(frozen=True)
class SlurmConfig:
    """Fields of ``cluster`` that are SLURM's, or about jobs in its queue."""

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
    """SLURM's --time: minutes, h:m:s, d-h:m:s; a longer job is requeued. Null means the partition's
    limit."""
    cpus_per_rank: int | None = slurm_label(None, least=1)
    """SLURM's --cpus-per-task; null means one, or the partition's default."""
    mem: str | None = slurm_label(None)
    """SLURM's --mem per node, e.g. 500G; 0 means all memory, null the partition's default."""
    gpu_type: str | None = label(None)
    """Type in --gpus-per-node=TYPE:N, for nodes with several types; null means any."""
    gres: bool = slurm_label(False)
    """Request GPUs by --gres=gpu:TYPE:N instead of --gpus-per-node, for sites that support only
    --gres."""
    gpu_bind: str | None = slurm_label(None)
    """SLURM's --gpu-bind, e.g. closest or single:1; null lets each rank see all GPUs of its
    node."""
    distribution: str | None = slurm_label("block:block")
    """SLURM's --distribution. With block:block neighbouring ranks share a socket, as neighbouring
    GPUs do. Null is SLURM's default, which assigns ranks to sockets round-robin."""
    socket_ifname: str | None = slurm_label(None)
    """Network interface for NCCL and gloo sockets (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), e.g.
    bond0."""
    ib_hca: str | None = slurm_label(None)
    """InfiniBand adapters that NCCL uses (NCCL_IB_HCA), e.g. mlx5_0,mlx5_3; null means all."""
    node_check: str = slurm_label("off", choices=NODE_CHECKS)
    """Check of each node's GPUs, memory and run folder before ranks start. off: none; fail: a bad
    node ends the job; exclude: the job is requeued without the bad node."""
    exclude_slow: bool = label(False, needs=(SLURM, Switch("profiling.phases")))
    """Requeue the job without the nodes of ranks that profiling.phases found slow."""
    exclusive: bool = slurm_label(False)
    """SLURM's --exclusive: do not share nodes with other jobs."""
    sbatch: dict[str, Any] = slurm_label(factory=dict)
    """More sbatch options by their long names, e.g. {reservation: maintenance, mail-type: END}."""
    srun_args: list[str] = slurm_label(factory=list)
    """More options for the srun that starts the ranks."""
    setup: list[str] = slurm_label(factory=list)
    """Shell lines run on the first node before anything else, e.g. module load cuda. A line that
    fails ends the job."""
    env: dict[str, str] = slurm_label(factory=dict)
    """Environment variables of the job, e.g. {NCCL_DEBUG: INFO}."""
    container: str | None = slurm_label(None)
    """Container for ranks: srun options (--container-image=...) or a command (apptainer exec --nv
    x.sif)."""
    python: str | None = slurm_label(None)
    """Python executable of the ranks, e.g. the container's; null means the submitting one."""
    signal_seconds: int = slurm_label(120, least=1)
    """Seconds before the time limit at which SLURM signals the job to save and requeue."""
    max_requeues: int = slurm_label(100, least=0)
    """How often a job is requeued automatically after a preemption or its time limit; 0 means
    never."""
    max_running: int = slurm_label(16, least=1)
    """Maximum number of a sweep's points that one command runs on SLURM at once, over all arrays."""
    snapshot: bool = slurm_label(True)
    """Run a copy of the code made at submission, not the code as it is when the job starts."""
    wait: bool = slurm_label(False)
    """Follow the job to its end; ^C stops the following, not the job."""
    dry_run: bool = slurm_label(False)
    """Show what would be submitted and its maximum cost; submit nothing."""
    parsable: bool = slurm_label(False)
    """Print only the ids of submitted jobs on stdout, as sbatch --parsable does; the rest goes to
    stderr."""
    confirm_gpu_hours: float = slurm_label(100.0)
    """Ask before submitting jobs of more GPU-hours than this (ranks x time limit; on CPU
    rank-hours)."""

    @property
    def minutes(self) -> int | None:
        """The time limit in minutes, rounded up; None if it is the partition's."""
        return None if self.time is None else minutes_of(self.time)

    def validate_slurm(self) -> None:
        if self.minutes is not None and self.signal_seconds >= self.minutes * 60:
            rule = (
                f"must be less than cluster.time={self.time}, or SLURM stops the job as it starts"
            )
            works = f"at most {self.minutes * 60 - 1}"
            raise ConfigError("cluster.signal_seconds", self.signal_seconds, rule, works)
        for name, (pattern, rule, works) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ConfigError(f"cluster.{name}", value, rule, works)
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(
                    f"cluster.env.{name}",
                    self.env[name],
                    "is not a valid variable name",
                    "NCCL_DEBUG",
                )
        check_sbatch(self.sbatch, gres=self.gres)
        check_srun(self.srun_args)
        if self.mem and self.mem.isdecimal() and int(self.mem):
            rule = f"is {self.mem} megabytes for SLURM"
            raise ConfigError("cluster.mem", self.mem, rule, f"{self.mem}G, or {self.mem}M")
        others = [option for option in self.sbatch if option.startswith(("mem-per", "mem_per"))]
        if self.mem is not None and others:
            rule = f"sbatch takes one of --mem and cluster.sbatch.{others[0]}"
            raise ConfigError("cluster.mem", self.mem, rule, "null")
        container = self.container or ""
        try:
            shlex.split(container)
        except ValueError as error:
            raise ConfigError(
                "cluster.container", container, f"cannot be parsed: {error}"
            ) from None
        if _IMAGE.fullmatch(container):
            works = f'"--container-image={container}", or apptainer exec --nv {container}'
            rule = "is an image, which no rank can execute"
            raise ConfigError("cluster.container", container, rule, works)


# Options that the harness sets, of sbatch by their long names (slurm.schedmd.com/sbatch.html) and
# of srun. If srun gets one twice, it uses the last, the user's.
_OF_SBATCH = """
account array clusters constraint cpus-per-task error exclude exclusive gpus gpus-per-node gpus-per-socket
gpus-per-task help job-name mem no-requeue nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode output parsable partition qos quiet requeue signal test-only time usage version
wait wrap
"""
_OF_SRUN = """
cpus-per-task error jobid kill-on-bad-exit multi-prog nodes ntasks ntasks-per-node open-mode output wait
"""
_INSTEAD = {
    "job-name": "name",
    "nodes": "cluster.nodes",
    "wrap": "cluster.setup",
    "output": "runs_dir",
    "error": "runs_dir",
}


def check_sbatch(options: Mapping[str, Any], *, gres: bool) -> None:
    """Raise ConfigError for what is no option of sbatch, or one that the harness sets itself."""
    for option, value in options.items():
        field = f"cluster.sbatch.{option}"
        name = option.replace("_", "-")
        if len(name) < 2 or not name.replace("-", "").isalnum() or name.startswith("-"):
            rule = "must be the long name of an option"
            raise ConfigError(field, value, rule, "cluster.sbatch.reservation=x")
        if (own := _own(name, _OF_SBATCH)) is not None:
            raise ConfigError(field, value, f"the harness sets --{own} itself", _instead(own))
        if name == "gres" and (gres or "gpu" in str(value)):
            raise ConfigError(
                field, value, "the harness asks for GPUs itself", "cluster.ranks_per_node"
            )
        if value is False or not isinstance(value, bool | int | float | str):
            rule = "must be one value, or true for an option without one"
            raise ConfigError(field, value, rule, "quotes around commas")


def check_srun(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option of srun that the harness sets itself."""
    for argument in arguments:
        if argument.startswith("-") and not argument.startswith("--"):
            rule = "options of srun are given by their long names"
            raise ConfigError("cluster.srun_args", argument, rule, "[--mpi=pmix]")
        own = _own(argument[2:].partition("=")[0], _OF_SRUN) if argument.startswith("-") else None
        if own is not None:
            rule = f"the harness sets --{own} of srun itself"
            raise ConfigError("cluster.srun_args", argument, rule, _instead(own))


def _instead(option: str) -> str:
    if option in {field.name for field in fields(SlurmConfig)}:
        return f"cluster.{option}"
    return _INSTEAD.get(option, "fields of cluster and parallelism")


def _own(name: str, options: str) -> str | None:
    """Return the option that a name selects: both commands accept abbreviated names."""
    begun = [option for option in options.split() if option.startswith(name)]
    return name if name in begun else next(iter(begun), None)


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

_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
# Seconds of the numbers of a time without days, by how many there are.
_UNITS = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}


def minutes_of(time: str) -> int:
    """Convert a time of sbatch (slurm.schedmd.com/sbatch.html, ``--time``) to minutes, rounded up."""
    seconds = 0
    if match := _TIME.fullmatch(time.strip()):
        numbers = [int(number) for number in match[2].split(":")]
        units = _UNITS[3 if match[1] else len(numbers)]
        seconds = int(match[1] or 0) * 86400 + sum(map(mul, numbers, units))
    if not seconds:
        rule = "must be a time in one of sbatch's forms"
        raise ConfigError("cluster.time", time, rule, "90, 1:30:00, 2-12:00:00")
    return -(-seconds // 60)
