"""What every verb shares: Hydra's command line around a function of a job, errors on one line, exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from harness.arguments import CommandLine, parse
from harness.compose import (
    POINTS,
    Composed,
    compose_job,
    compose_points,
    help_text,
    register_schema,
    shown_config,
    sweep_params,
    translated,
)
from harness.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    HarnessError,
    MachineError,
    UserError,
    one_line,
)
from harness.job import Job
from harness.overrides import AXES, check_overrides, with_own_keys
from harness.paths import conf_dir
from harness.startup import prepare_process, typed_arguments

BAR_WIDTH = 40

Verb = Callable[[Any, list[str]], int]
Sweep = Callable[[list[Composed]], int]

# How long a rank other than 0 leaves it to rank 0 to report a mistake that all of them have found.
LISTENING_SECONDS = 10.0

ITEM = "\n  "
"""What separates the items of a list in a message."""

# What is wrong with a path and cannot be a mistake of ours, and whose fault it is.
OF_PATHS: dict[int, type[HarnessError]] = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES), UserError),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG), MachineError),
}


def run_verb(
    verb: Verb,
    *,
    sweep: Sweep | None = None,
    config_name: str = "train",
    schema: type = Job,
    flags: Sequence[str] = (),
) -> NoReturn:
    """Composes a job from the command line, hands it to ``verb`` and exits with the code it returns.

    With ``-m`` all points are composed first, and handed to ``sweep``.

    Args:
        verb: takes the resolved job and the overrides it came from.
        sweep: takes all points of a multirun: the overrides of each, and its job or why there is none.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.
        flags: flags without a value that this verb takes beside those of all verbs.
    """

    def run() -> int:
        line = parse(typed_arguments(), flags)
        name = line.flags.get("--config-name", config_name).removesuffix(".yaml")
        if line.shows is not None:
            return _show(line, name, schema)
        if not line.is_multirun:
            job = compose_job(line.overrides, config_name=name, schema=schema)
            axes = _open_axes(line.overrides, name, schema)
            if axes:
                raise _several_points(line.overrides, axes, can_sweep=sweep is not None)
            return verb(job, with_own_keys(line.overrides, schema))
        if sweep is None:
            raise UserError("-m: this verb takes one job; would work: python -m harness.train -m")
        points = compose_points(line.overrides, config_name=name, schema=schema, show=_show_composing)
        return sweep(points)

    prepare_process()
    sys.exit(guarded(run))


def run_parsed(parser: argparse.ArgumentParser, verb: Callable[[argparse.Namespace], int]) -> NoReturn:
    """Hands the command line, as ``parser`` reads it, to ``verb`` and exits with the code it returns."""
    prepare_process()
    sys.exit(guarded(lambda: verb(parser.parse_args(typed_arguments()))))


def _show_composing(done: int, points: int) -> None:
    """Draw a bar of the points that are composed, if somebody looks on."""
    if not sys.stderr.isatty():
        return
    filled = BAR_WIDTH * done // points
    end = "\r\x1b[K" if done == points else ""
    sys.stderr.write(f"\rcomposing [{'#' * filled:<{BAR_WIDTH}}] {done} of {points} points{end}")
    sys.stderr.flush()


def _show(line: CommandLine, config_name: str, schema: type) -> int:
    """Shows what a flag asks for; nothing is run."""
    if line.shows == "--version":
        from harness.metrics.result import versions

        sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions().items()))
        return EXIT_OK
    if line.shows != "--shell-completion":
        check_overrides(line.overrides, schema)
    if line.shows == "--cfg":
        sys.stdout.write(
            shown_config(
                with_own_keys(line.overrides, schema),
                line.flags["--cfg"],
                package=line.flags.get("--package"),
                resolve="--resolve" in line.flags,
                config_name=config_name,
                schema=schema,
            )
        )
        return EXIT_OK
    if line.shows == "--help":
        text = help_text(with_own_keys(line.overrides, schema), config_name=config_name, schema=schema)
        sys.stdout.write(text)
        return EXIT_OK
    flag = [f"--info={line.flags['--info']}"] if line.shows == "--info" else [str(line.shows)]
    _show_by_hydra([*flag, *with_own_keys(line.overrides, schema)], config_name, schema)
    return EXIT_OK


def _open_axes(typed: list[str], config_name: str, schema: type) -> list[str]:
    """The axes of the space that the job's files describe, of which no single value is typed."""
    if not any(each.startswith(("sweep=", "experiment=", AXES)) for each in typed):
        return []
    axes = sweep_params(typed, config_name=config_name, schema=schema)
    listed = str(axes.pop(POINTS, "")).splitlines()
    keys = {each.lstrip("+").partition("=")[0] for each in typed}
    is_listed = any(line.split() and set(line.split()) <= set(typed) for line in listed)
    left = [str(name) for name in axes if str(name) not in keys]
    return left if is_listed or not listed else [POINTS, *left]


def _several_points(typed: list[str], axes: list[str], *, can_sweep: bool) -> UserError:
    chosen = [each for each in typed if each.startswith(("sweep=", "experiment="))]
    named = " ".join(chosen) or "hydra.sweeper.params"
    works = "-m, which runs all points" if can_sweep else "the values of one point, without that file"
    return UserError(f"{named}: has several points ({', '.join(axes)}); would work: {works}")


def _show_by_hydra(arguments: list[str], config_name: str, schema: type) -> None:
    """Shows information or completions as Hydra does, with its own report of errors switched off."""
    import hydra

    # Hydra 1.4 warns of version_base, which 1.3 needs.
    warnings.filterwarnings("ignore", message=".*version_base.*")
    register_schema(schema)
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"], before = "1", os.environ.get("HYDRA_FULL_ERROR")
    try:
        hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(lambda _: None)()
    except Exception as error:
        raise translated(error, schema) from error
    except SystemExit as done:  # that is how its help ends
        if done.code:
            raise
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def guarded(call: Callable[[], int]) -> int:
    """Calls, and turns whatever is raised into a message and an exit code."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except (HarnessError, OSError) as error:
        return _reported(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        # That is how pathlib tells of it before Python 3.13.
        if str(error).startswith("Symlink loop from "):
            return _reported(UserError(str(error)))
        traceback.print_exc()
        return EXIT_BUG
    except Exception:
        traceback.print_exc()
        return EXIT_BUG


def _reported(error: HarnessError | OSError) -> int:
    """Tells of an error; returns the exit code."""
    if isinstance(error, OSError):
        known = OF_PATHS.get(error.errno or 0)
        if known is None or not isinstance(error.filename, str | bytes):
            traceback.print_exc()
            return EXIT_BUG
        error = known(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if os.environ.get("RANK", "0").lstrip("0").isdecimal():
        # All ranks of a torchrun find the same mistake, and the first to end ends all: let rank 0 speak.
        time.sleep(LISTENING_SECONDS)
    if error.exit_code == EXIT_BUG or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    else:
        # Points of a sweep are listed below, indented.
        lines = str(error).split(ITEM) if isinstance(error, UserError) else []
        sys.stderr.write(f"error: {ITEM.join(map(one_line, lines)) or error}\n")
    return error.exit_code
