"""Options of sbatch and srun that the harness sets itself, and the job field to use instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.util.errors import ConfigError

_RUN_FOLDER = "runs_dir, because the job's files are in the run folder"

# Options of sbatch by their long names (slurm.schedmd.com/sbatch.html).
_OF_SBATCH = {
    **{name: f"cluster.{name}" for name in ("partition", "account", "qos", "constraint", "exclude", "time")},
    **{name: f"cluster.{name}" for name in ("nodes", "mem", "exclusive", "wait", "parsable")},
    "array": "cluster.max_running",
    "clusters": "a login node of that cluster",
    "cpus-per-task": "cluster.cpus_per_rank",
    "error": _RUN_FOLDER,
    "gpus": "cluster.ranks_per_node",
    "gpus-per-node": "cluster.ranks_per_node",
    "gpus-per-socket": "cluster.ranks_per_node",
    "gpus-per-task": "cluster.ranks_per_node",
    "help": "sbatch --help",
    "job-name": "name",
    "no-requeue": "cluster.max_requeues=0",
    "ntasks": "degrees of parallelism",
    "ntasks-per-core": "cluster.ranks_per_node",
    "ntasks-per-gpu": "cluster.ranks_per_node",
    "ntasks-per-node": "cluster.ranks_per_node",
    "ntasks-per-socket": "cluster.ranks_per_node",
    "open-mode": _RUN_FOLDER,
    "output": _RUN_FOLDER,
    "quiet": "cluster.parsable",
    "requeue": "cluster.max_requeues",
    "signal": "cluster.signal_seconds",
    "test-only": "cluster.dry_run",
    "usage": "sbatch --help",
    "version": "sbatch --version",
    "wrap": "cluster.setup",
}

# Options of srun (slurm.schedmd.com/srun.html). If an option is given twice, srun uses the last, the user's.
_OF_SRUN = {
    "cpus-per-task": "cluster.cpus_per_rank",
    "error": _RUN_FOLDER,
    "jobid": "",
    "kill-on-bad-exit": "",
    "multi-prog": "",
    "nodes": "cluster.nodes",
    "ntasks": "degrees of parallelism",
    "ntasks-per-node": "cluster.ranks_per_node",
    "open-mode": _RUN_FOLDER,
    "output": _RUN_FOLDER,
    "wait": "",
}
_SHORT = {"c": "cpus-per-task", "e": "error", "K": "kill-on-bad-exit", "N": "nodes", "n": "ntasks"}
_SHORT |= {"o": "output", "W": "wait"}


def check_sbatch(options: Mapping[str, Any], *, gres: bool) -> None:
    """Raise ConfigError for an entry of ``cluster.sbatch`` that is not an option, or that the harness sets.

    Args:
        options: option values by long name.
        gres: whether the harness asks for GPUs by ``--gres``.
    """
    for option, value in options.items():
        field, name = f"cluster.sbatch.{option}", option.replace("_", "-")
        if len(name) < 2 or not name.replace("-", "").isalnum() or name.startswith("-"):
            raise ConfigError(
                field, value, "must be the long name of an option", "cluster.sbatch.reservation=x"
            )
        if (own := _own(name, _OF_SBATCH)) is not None:
            raise ConfigError(field, value, f"the harness sets --{own} itself", _OF_SBATCH[own])
        if name == "gres" and (gres or "gpu" in str(value)):
            raise ConfigError(field, value, "the harness asks for GPUs itself", "cluster.ranks_per_node")
        if value is False or not isinstance(value, bool | int | float | str):
            rule, works = "must be one value, or true for an option without one", "quotes around commas"
            raise ConfigError(field, value, rule, works)


def check_srun(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option in ``cluster.srun_args`` that the harness sets."""
    for argument in arguments:
        if argument.startswith("--"):
            own = _own(argument[2:].partition("=")[0], _OF_SRUN)
        else:
            own = _SHORT.get(argument[1:2]) if argument.startswith("-") else None
        if own is not None:
            rule = f"the harness sets --{own} of srun itself"
            raise ConfigError("cluster.srun_args", argument, rule, _OF_SRUN[own])


def _own(name: str, options: Mapping[str, str]) -> str | None:
    """Return the option that a name selects: both commands accept abbreviated names."""
    if name in options:
        return name
    begun = [option for option in options if option.startswith(name)]
    return begun[0] if begun else None
