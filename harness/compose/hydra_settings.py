"""Hydra's own settings: which are honoured, and what to use instead of the others. Imports no Hydra.

Hydra only composes jobs here. A setting of anything else would have no effect, so it is refused by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from harness.util.errors import UserError

HONOURED = ("searchpath", "sweeper", "launcher")
"""Settings that have an effect, without ``hydra.``, each with the settings below it."""
PLUGINS = {
    "optuna": ("hydra_optuna_sweeper", "pip install 'harness[optuna]'"),
    "ax": ("hydra_ax_sweeper", "pip install hydra-ax-sweeper"),
    "nevergrad": ("hydra_nevergrad_sweeper", "pip install hydra-nevergrad-sweeper"),
}
"""Modules of ``hydra_plugins`` with Hydra's sweepers, and what installs them."""
LAUNCHER = "harness"
"""The only option of ``hydra/launcher``."""

_FOLDERS = "runs_dir=FOLDER name=NAME, a run's folder is FOLDER/NAME/ID, a sweep's is FOLDER/NAME"
_RECORDS = "job.json and overrides.txt in the run's folder, which are always written"
_OUTPUT = "metrics.console=plain metrics.log_interval=N; logs/ in the run's folder has each rank's output"
_ENVIRONMENT = "cluster.env.NAME=VALUE"

INSTEAD = {
    "defaults": "group=option, or the defaults list of an own primary config (--config-dir, --config-name)",
    "mode": "-m for a sweep, the command without -m for one job",
    "run": _FOLDERS,
    "sweep": _FOLDERS,
    "output": _FOLDERS,
    "output_subdir": _RECORDS,
    "hydra_logging": _OUTPUT,
    "job_logging": _OUTPUT,
    "verbose": _OUTPUT,
    "callbacks": "metrics.wandb=true, or result.json in the run's folder",
    "env": _ENVIRONMENT,
    "help": "--help",
    "hydra_help": "--help",
    "overrides": _RECORDS,
    "runtime": "--info, or code.json in the run's folder",
    "job.name": "name=NAME",
    "job.chdir": "paths relative to the current folder, which does not change",
    "job.override_dirname": "name=NAME with fields in it: 'name=a-${training.seed}'",
    "job.id": "the id in job.json, a hash of the job",
    "job.num": "the id in job.json, a hash of the job",
    "job.config_name": "--config-name NAME",
    "job.env_set": _ENVIRONMENT,
    "job.env_copy": _ENVIRONMENT,
    "job.config": "name=NAME with fields in it: 'name=a-${training.seed}'",
}
"""What would work instead of the settings without an effect; a name covers the settings below it."""


def is_honoured(key: str) -> bool:
    """Whether ``key`` (``hydra.NAME``, or ``hydra/GROUP``) is a setting that has an effect."""
    return any(f"{_name(key)}.".startswith(f"{name}.") for name in HONOURED)


def check_setting(override: str, key: str) -> None:
    """Refuse a setting of Hydra that would have no effect.

    Args:
        override: as typed, or ``key=value`` of a file.
        key: its key, which begins with ``hydra``.

    Raises:
        UserError: naming what to use instead.
    """
    if is_honoured(key):
        _check_choice(key, override.partition("=")[2].strip("'\""))
        return
    parts = _name(key).split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    works = next((INSTEAD[name] for name in names if name in INSTEAD), None)
    if works is None:
        known = sorted({*HONOURED, *INSTEAD})
        raise UserError(f"{override}: no such setting of Hydra; Hydra has: {', '.join(known)}")
    raise UserError(f"{override}: has no effect, because Hydra only composes here; would work: {works}")


def _check_choice(key: str, option: str) -> None:
    """Refuse another launcher, and a sweeper whose package is missing.

    Raises:
        UserError: naming what to use instead.
    """
    if key == "hydra/launcher" and option != LAUNCHER:
        works = "cluster=slurm on a cluster, cluster=local here, without a launcher"
        raise UserError(f"{key}={option}: jobs are started by hydra/launcher={LAUNCHER}; would work: {works}")
    if key == "hydra/sweeper" and option in PLUGINS:
        module, command = PLUGINS[option]
        if not _is_installed(module):
            raise UserError(f"{key}={option}: its package is not installed; would work: {command}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"hydra_plugins.{module}") is not None
    except ModuleNotFoundError:  # no plugins at all
        return False


def settings_of_sweeper(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that choose or configure a sweeper or launcher, except the axes of a grid."""
    found = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        name = f"{_name(key)}." if key.startswith(("hydra.", "hydra/")) else ""
        if name.startswith(("sweeper.", "launcher.")) and not name.startswith("sweeper.params."):
            found.append(override)
    return found


def _name(key: str) -> str:
    return key.removeprefix("hydra").lstrip("./").replace("/", ".")
