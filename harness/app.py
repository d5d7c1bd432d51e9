"""Shared by all verbs: the command line, composing of jobs, errors on one line, exit codes."""

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
    spelled_out,
    sweep_params,
    to_user_error,
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
from harness.overrides import AXES, check_overrides, in_hydra_syntax
from harness.paths import conf_dir
from harness.startup import prepare_process, typed_arguments

BAR_WIDTH = 40

Verb = Callable[[Any, list[str]], int]
Sweep = Callable[[list[Composed]], int]

# How long the other ranks wait, so that rank 0 reports an error that all ranks have.
RANK_ZERO_SECONDS = 10.0

ITEM = "\n  "
"""Separator of list items in a message."""

# Errors of paths that cannot be bugs of the harness, and who can fix them: the user or the machine.
PATH_ERRORS: dict[int, type[HarnessError]] = {
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
    """Compose a job from the command line, call ``verb`` with it and exit with the returned code.

    With ``-m``, compose all points first and call ``sweep``.

    Args:
        verb: called with the resolved job and its overrides.
        sweep: called with all points of a multirun: the overrides of each, and its job or why it has none.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.
        flags: additional flags of this verb, without a value.
    """

    def run() -> int:
        line = parse(typed_arguments(), flags)
        line.overrides = spelled_out(line.overrides, schema)
        name = line.flags.get("--config-name", config_name).removesuffix(".yaml")
        if line.shows is not None:
            return _show(line, name, schema)
        if not line.is_multirun:
            job = compose_job(line.overrides, config_name=name, schema=schema)
            axes = _open_axes(line.overrides, name, schema)
            if axes:
                raise _several_points(line.overrides, axes, can_sweep=sweep is not None)
            return verb(job, in_hydra_syntax(line.overrides, schema))
        if sweep is None:
            raise UserError("-m: this verb takes one job; would work: python -m harness.train -m")
        points = compose_points(line.overrides, config_name=name, schema=schema, show=_show_composing)
        return sweep(points)

    prepare_process()
    sys.exit(guarded(run))


def run_parsed(parser: argparse.ArgumentParser, verb: Callable[[argparse.Namespace], int]) -> NoReturn:
    """Call ``verb`` with the parsed command line and exit with the returned code."""
    prepare_process()
    sys.exit(guarded(lambda: verb(parser.parse_args(typed_arguments()))))


def _show_composing(done: int, points: int) -> None:
    """Draw a progress bar of the composed points, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    filled = BAR_WIDTH * done // points
    end = "\r\x1b[K" if done == points else ""
    sys.stderr.write(f"\rcomposing [{'#' * filled:<{BAR_WIDTH}}] {done} of {points} points{end}")
    sys.stderr.flush()


def _show(line: CommandLine, config_name: str, schema: type) -> int:
    """Show the output of a flag such as ``--help``; run nothing."""
    if line.shows == "--version":
        from harness.metrics.result import versions

        sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions().items()))
        return EXIT_OK
    if line.shows != "--shell-completion":
        check_overrides(line.overrides, schema)
    if line.shows == "--cfg":
        sys.stdout.write(
            shown_config(
                in_hydra_syntax(line.overrides, schema),
                line.flags["--cfg"],
                package=line.flags.get("--package"),
                resolve="--resolve" in line.flags,
                config_name=config_name,
                schema=schema,
            )
        )
        return EXIT_OK
    if line.shows == "--help":
        text = help_text(in_hydra_syntax(line.overrides, schema), config_name=config_name, schema=schema)
        sys.stdout.write(text)
        return EXIT_OK
    flag = [f"--info={line.flags['--info']}"] if line.shows == "--info" else [str(line.shows)]
    _show_by_hydra([*flag, *in_hydra_syntax(line.overrides, schema)], config_name, schema)
    return EXIT_OK


def _open_axes(typed: list[str], config_name: str, schema: type) -> list[str]:
    """Axes of the sweep in the job's files for which the command line gives no single value."""
    if not any(each.startswith(("sweep=", "experiment=", AXES)) for each in typed):
        return []
    axes = sweep_params(typed, config_name=config_name, schema=schema)
    listed = str(axes.pop(POINTS, "")).splitlines()
    keys = {each.lstrip("+").partition("=")[0] for each in typed}
    is_listed = any(line.split() and set(line.split()) <= set(typed) for line in listed)
    remaining = [str(name) for name in axes if str(name) not in keys]
    return remaining if is_listed or not listed else [POINTS, *remaining]


def _several_points(typed: list[str], axes: list[str], *, can_sweep: bool) -> UserError:
    chosen = [each for each in typed if each.startswith(("sweep=", "experiment="))]
    named = " ".join(chosen) or "hydra.sweeper.params"
    works = "-m, which runs all points" if can_sweep else "the values of one point, without that file"
    return UserError(f"{named}: has several points ({', '.join(axes)}); would work: {works}")


def _show_by_hydra(arguments: list[str], config_name: str, schema: type) -> None:
    """Let Hydra show information or completions, but report its errors as ours."""
    import hydra

    # Hydra 1.4 warns about version_base, which 1.3 needs.
    warnings.filterwarnings("ignore", message=".*version_base.*")
    register_schema(schema)
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"], before = "1", os.environ.get("HYDRA_FULL_ERROR")
    try:
        hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(lambda _: None)()
    except Exception as error:
        raise to_user_error(error, schema) from error
    except SystemExit as done:  # Hydra's help ends this way
        if done.code:
            raise
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def guarded(call: Callable[[], int]) -> int:
    """Call ``call``; turn any exception into a message and an exit code."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except (HarnessError, OSError) as error:
        return _reported(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        # pathlib's error for a loop of links before Python 3.13.
        if str(error).startswith("Symlink loop from "):
            return _reported(UserError(str(error)))
        traceback.print_exc()
        return EXIT_BUG
    except Exception:
        traceback.print_exc()
        return EXIT_BUG


def _reported(error: HarnessError | OSError) -> int:
    """Print an error; return its exit code."""
    if isinstance(error, OSError):
        known = PATH_ERRORS.get(error.errno or 0)
        if known is None or not isinstance(error.filename, str | bytes):
            traceback.print_exc()
            return EXIT_BUG
        error = known(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if os.environ.get("RANK", "0").lstrip("0").isdecimal():
        # All ranks under torchrun have the same error, and the first to exit ends all: let rank 0 report it.
        time.sleep(RANK_ZERO_SECONDS)
    if error.exit_code == EXIT_BUG or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    else:
        # Points of a sweep are listed as indented lines.
        lines = str(error).split(ITEM) if isinstance(error, UserError) else []
        sys.stderr.write(f"error: {ITEM.join(map(one_line, lines)) or error}\n")
    return error.exit_code
