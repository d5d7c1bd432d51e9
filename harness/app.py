"""What every verb shares: Hydra's command line around a function of a job, errors on one line, exit codes."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.compose import (
    check_overrides,
    job_from_config,
    register_schema,
    translated,
    with_own_keys,
)
from harness.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    HarnessError,
    UserError,
)
from harness.job import Job
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


@dataclass(frozen=True)
class Composed:
    """A point of a multirun: its overrides, and the job they make or the reason why they make none."""

    overrides: list[str]
    job: Any
    reason: str = ""


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
    points: list[tuple[Any, list[str]]] = []
    many = False

    def take(config: Any) -> None:
        nonlocal many
        own, many = _task_overrides()
        points.append((config, own))

    def compose_all() -> int:
        overrides = typed_overrides(sys.argv[1:])
        flags = [a for a in sys.argv[1:] if a not in overrides]
        if not {"-sc", "--shell-completion"} & set(flags):
            check_overrides(overrides, schema)
        # Hydra's parser does not find overrides on both sides of a flag.
        sys.argv[1:] = flags + with_own_keys(overrides, schema)
        register_schema(schema)
        # Hydra only composes: what runs, runs after it, outside of its error handling and global state.
        _run_hydra(take, config_name)
        return EXIT_OK

    def run() -> int:
        if not points:
            return EXIT_OK  # something was only to be shown
        if not many:
            [(config, own)] = points
            return verb(job_from_config(config, schema), own)
        if sweep is None:
            raise UserError("-m: this verb takes one job; would work: python -m harness.train -m")
        return sweep([_composed(config, own, schema) for config, own in points])

    sys.exit(guarded(compose_all) or guarded(run))


def _composed(config: Any, own: list[str], schema: type) -> Composed:
    try:
        return Composed(own, job_from_config(config, schema))
    except UserError as error:
        return Composed(own, None, str(error))


def typed_overrides(arguments: list[str]) -> list[str]:
    """The overrides among the command line's arguments; flags and their values are Hydra's."""
    overrides, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("-"):
            skip = argument in VALUE_FLAGS
        else:
            overrides.append(argument)
    return overrides


def _task_overrides() -> tuple[list[str], bool]:
    """The overrides of the job being composed, and whether it is a point of a multirun."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config = HydraConfig.get()
    return list(config.overrides.task), config.mode == RunMode.MULTIRUN


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
