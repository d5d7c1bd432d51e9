"""Parse command lines: one parser for the flags of all verbs; overrides are the remaining arguments."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.config.fields import check_written
from harness.util.errors import UserError

CFG = ("job", "hydra", "all")
SHOWS = ("help", "cfg")
_CONF = "--config-dir FOLDER, which adds your files to those of conf/"
# Hydra's flags that are not supported, and what to type instead.
REFUSED = {
    "--config-path": _CONF,
    "-cp": _CONF,
    "--hydra-help": "--help",
    "--shell-completion": "--help, which lists groups, options and fields",
    "-sc": "--help, which lists groups, options and fields",
    "--run": "the command without it",
    "-r": "the command without it",
    "--info": "--cfg all, which prints the composed job and Hydra's settings",
    "-i": "--cfg all, which prints the composed job and Hydra's settings",
    "--experimental-rerun": "the overrides of overrides.txt in the run's folder",
}


class Argument:
    """A positional argument or a flag, with the options of argparse's ``add_argument``.

    A flag whose only option is ``help`` takes no value.
    """

    def __init__(self, *names: str, help: str, **options: Any) -> None:
        takes_no_value = names[0].startswith("-") and not options
        self.names = names
        self.options = {"help": help, **({"action": "store_true"} if takes_no_value else options)}

    @property
    def name(self) -> str:
        """Its name in the parsed line, and as a parameter of the verb's function."""
        return self.names[-1].lstrip("-").replace("-", "_")


def report_folder(value: str) -> Path:
    """The type of ``--out``: a folder that will be written."""
    check_written("--out", value, "folder", "--out report")
    return Path(value)


VERSION = Argument("--version", help="print versions of the harness, Python and the main packages")
JSON = Argument("--json", help="print one JSON object instead of text")
JOB_FLAGS = (
    Argument("-h", "--help", help="list groups, options and fields with their current values"),
    VERSION,
    Argument(
        *("-c", "--cfg"),
        choices=CFG,
        metavar="WHAT",
        help="print the composed job (`job`), Hydra's settings (`hydra`) or both (`all`), and run nothing",
    ),
    Argument("-p", "--package", metavar="NAME", help="with `--cfg`: print one part, e.g. `parallelism`"),
    Argument("--resolve", help="with `--cfg`: resolve interpolations such as `${model.name}`"),
    Argument("-m", "--multirun", help="run one job for each combination of values (`harness train` only)"),
    Argument(
        "-cn", "--config-name", metavar="NAME", help="compose another primary file, of `conf/` or your own"
    ),
    Argument(
        *("-cd", "--config-dir"),
        action="append",
        metavar="FOLDER",
        help="add a folder of your own files, with groups as in `conf/`",
    ),
)
"""Flags of verbs that take a job."""


class CommandLine(argparse.Namespace):
    """The parsed arguments after the name of a verb: its own arguments, JOB_FLAGS and ``--json`` by name."""

    overrides: list[str]
    """Arguments that are not flags, in order."""
    json: bool = False

    @property
    def shown(self) -> list[str]:
        """The given flags that show something about a job instead of running it."""
        return [f"--{name.replace('_', '-')}" for name in SHOWS if getattr(self, name) not in (None, False)]

    def validate_flags_of_job(self) -> None:
        """Check which of JOB_FLAGS can be combined, and the values that argparse does not check.

        Raises:
            UserError: naming the flag.
        """
        given = [each.names[-1] for each in JOB_FLAGS if getattr(self, each.name) not in (None, False)]
        if len(self.shown) > 1:
            first, second, *_ = self.shown
            raise UserError(f"{second}: cannot be combined with {first}; would work: one of them")
        one_job = [name for name in given if name not in ("--multirun", "--config-name", "--config-dir")]
        if self.multirun and one_job:
            raise UserError(f"{one_job[0]}: works for one job only; would work: the command without -m")
        for name in ("--package", "--resolve"):
            if name in given and self.cfg is None:
                raise UserError(f"{name}: needs --cfg; would work: --cfg job {name}")


class Parser(argparse.ArgumentParser):
    """A parser of flags that are typed in full; its errors are one line, like those of overrides."""

    def parse_line(self, arguments: Sequence[str], *, takes_overrides: bool) -> CommandLine:
        """Parse the arguments after the name of a verb.

        Raises:
            UserError: an unknown flag or argument, or an invalid value of a flag.
        """
        line, rest = self.parse_known_args(arguments, CommandLine())
        for each in rest:
            if each.startswith("-"):
                self._refuse(each.partition("=")[0])
        if rest and not takes_overrides:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        line.overrides = rest
        return line

    def _refuse(self, typed: str) -> NoReturn:
        if typed in REFUSED:
            raise UserError(f"{typed}: is not supported; would work: {REFUSED[typed]}")
        close = difflib.get_close_matches(typed, list(self._flags()), n=1)
        works = f"did you mean {close[0]}?" if close else "--help lists all flags"
        raise UserError(f"{typed}: no such flag; {works}")

    def _flags(self) -> Iterator[str]:
        """Names of all flags, also those of subcommands."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._flags()

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags that an abbreviation can stand for: none."""
        return []

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage."""
        about = re.fullmatch(r"argument ([^:]+): (.+)", message, re.DOTALL)
        name, problem = (about[1].split("/")[-1], about[2]) if about else ("", message)
        choice = re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem, re.DOTALL)
        if choice:
            works = choice[2].replace("'", "")
            wrong = f"{name}={choice[1]}" if name.startswith("-") else f"{choice[1]}: no such choice;"
            raise UserError(f"{wrong}{':' if name.startswith('-') else ''} would work: {works}")
        if problem == "expected one argument":
            action = self._option_string_actions[name]
            value = next(iter(action.choices or ()), action.metavar or action.dest.upper())
            raise UserError(f"{name}: takes a value; would work: {name} {value}")
        if given := re.fullmatch(r"ignored explicit argument '(.*)'", problem, re.DOTALL):
            raise UserError(f"{name}={given[1]}: takes no value; would work: {name}")
        raise UserError(f"{message}; would work: {' '.join(self.format_usage().split()[1:])}")
