"""What every verb shares: Hydra's command line around a function of a job, errors on one line, exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from harness.compose import check_overrides, job_from_config, register_schema, translated
from harness.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, HarnessError, UserError
from harness.job import Job
from harness.paths import conf_dir

VALUE_FLAGS = ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-sc")


def run_verb(verb: Callable[[Any, list[str]], int], *, config_name: str = "train", schema: type = Job) -> None:
    """Composes a job from the command line, hands it to ``verb`` and exits with the code it returns.

    ``--help``, ``--cfg job``, ``-m`` and shell completion are Hydra's. With ``-m`` every job is run, and
    the exit code is that of the first that failed.

    Args:
        verb: takes the resolved job and the overrides it came from.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.
    """
    points: list[tuple[Any, list[str]]] = []

    def compose_all() -> int:
        overrides = typed_overrides(sys.argv[1:])
        if not {"-sc", "--shell-completion"} & set(sys.argv):
            check_overrides(overrides, schema)
        register_schema(schema)
        # Hydra only composes: what runs, runs after it, outside of its error handling and global state.
        _run_hydra(lambda config: points.append((config, _task_overrides())), config_name)
        return EXIT_OK

    code = _guarded(compose_all)
    codes = [
        _guarded(lambda config=config, own=own: verb(job_from_config(config, schema), own))  # type: ignore[misc]
        for config, own in points
    ]
    sys.exit(next((c for c in [code, *codes] if c), EXIT_OK))


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
    """The overrides of the job being composed: in a multirun those of its point."""
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


def _guarded(call: Callable[[], int]) -> int:
    """Calls, and turns whatever is raised into a message and an exit code."""
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        return call()
    except UserError as error:
        if speaks:
            sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except HarnessError as error:
        traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
