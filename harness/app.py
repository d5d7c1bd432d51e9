"""What every verb shares: Hydra's command line around a function of a job, errors on one line, exit codes."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from harness.compose import (
    Composed,
    compose_points,
    job_from_config,
    register_schema,
    translated,
)
from harness.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    HarnessError,
    UserError,
)
from harness.job import Job
from harness.overrides import check_overrides, with_own_keys
from harness.paths import conf_dir

VALUE_FLAGS = (
    "-c",
    "--cfg",
    "-p",
    "--package",
    "-cp",
    "--config-path",
    "-cn",
    "--config-name",
    "-cd",
    "--config-dir",
    "-sc",
)


MULTIRUN = {"-m", "--multirun"}
SHELL_COMPLETION = {"-sc", "--shell-completion"}
# Flags with which Hydra shows something and runs nothing.
SHOWING = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", *SHELL_COMPLETION}

Verb = Callable[[Any, list[str]], int]
Sweep = Callable[[list[Composed]], int]

# How long a rank other than 0 leaves it to rank 0 to report a mistake that all of them have found.
LISTENING_SECONDS = 10.0


def run_verb(
    verb: Verb, *, sweep: Sweep | None = None, config_name: str = "train", schema: type = Job
) -> None:
    """Composes a job from the command line, hands it to ``verb`` and exits with the code it returns.

    ``--help``, ``--cfg job``, ``-m`` and shell completion are Hydra's. With ``-m`` all points are
    composed first, and handed to ``sweep``.

    Args:
        verb: takes the resolved job and the overrides it came from.
        sweep: takes all points of a multirun: the overrides of each, and its job or why there is none.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.
    """
    typed = typed_overrides(sys.argv[1:])
    flags = [argument for argument in sys.argv[1:] if argument not in typed]
    if MULTIRUN & set(flags) and not SHOWING & set(flags):
        sys.exit(guarded(lambda: _run_sweep(sweep, typed, flags, config_name, schema)))
    composed: list[tuple[Any, list[str]]] = []

    def take(config: Any) -> None:
        composed.append((config, _task_overrides()))

    def compose_all() -> int:
        if not SHELL_COMPLETION & set(flags):
            check_overrides(typed, schema)
        # Hydra's parser does not find overrides on both sides of a flag.
        sys.argv[1:] = flags + with_own_keys(typed, schema)
        register_schema(schema)
        # Hydra only composes: what runs, runs after it, outside of its error handling and global state.
        _run_hydra(take, config_name)
        return EXIT_OK

    def run() -> int:
        if not composed:
            return EXIT_OK  # something was only to be shown
        [(config, own)] = composed
        return verb(job_from_config(config, schema), own)

    sys.exit(guarded(compose_all) or guarded(run))


def _run_sweep(
    sweep: Sweep | None, typed: list[str], flags: list[str], config_name: str, schema: type
) -> int:
    """Composes all points of a multirun and hands them on."""
    if sweep is None:
        raise UserError("-m: this verb takes one job; would work: python -m harness.train -m")
    others = sorted(set(flags) - MULTIRUN)
    if others:
        raise UserError(f"{others[0]}: -m takes no other flag")
    return sweep(compose_points(typed, config_name=config_name, schema=schema))


def typed_overrides(arguments: list[str]) -> list[str]:
    """The overrides among the command line's arguments; flags and their values are Hydra's."""
    overrides, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("-"):
            skip = argument in VALUE_FLAGS
        else:
            overrides.append(argument)
    return overrides


def _task_overrides() -> list[str]:
    """The overrides of the job being composed."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _run_hydra(task: Callable[[Any], None], config_name: str) -> None:
    """Runs Hydra with its own error report switched off, so that all errors come out in one form."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # Hydra 1.4 warns of version_base, which 1.3 needs.
    warnings.filterwarnings("ignore", message=".*version_base.*")
    wanted_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        if wanted_traceback:
            raise
        raise translated(error) from error
    finally:
        if not wanted_traceback:
            del os.environ["HYDRA_FULL_ERROR"]


def guarded(call: Callable[[], int]) -> int:
    """Calls, and turns whatever is raised into a message and an exit code."""
    try:
        return call()
    except HarnessError as error:
        if os.environ.get("RANK", "0") != "0":
            # All ranks of a torchrun find the same mistake, and the first to end ends all: let rank 0 speak.
            time.sleep(LISTENING_SECONDS)
        if error.exit_code == EXIT_BUG:
            traceback.print_exc()
        else:
            sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
