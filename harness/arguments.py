"""Parse the command line: overrides, and flags that show something instead of running."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from harness.errors import UserError
from harness.paths import conf_dir

CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SHELLS = ("bash", "fish", "zsh")

# Names of each flag; the last one is its long name.
NAMES = (
    ("-h", "--help"),
    ("--version",),
    ("-c", "--cfg"),
    ("-p", "--package"),
    ("--resolve",),
    ("-i", "--info"),
    ("-m", "--multirun"),
    ("-sc", "--shell-completion"),
    ("-cn", "--config-name"),
)
TAKES_VALUE = ("--cfg", "--package", "--config-name")
SHOWS = ("--help", "--version", "--cfg", "--info", "--shell-completion")
_CONF = "HARNESS_CONF_DIR=FOLDER in the environment, a copy of conf/ with your files in it"
# Hydra's flags that are not supported, and what to type instead.
REFUSED = {
    "--config-dir": _CONF,
    "-cd": _CONF,
    "--config-path": _CONF,
    "-cp": _CONF,
    "--hydra-help": "--help",
    "--run": "the command without it",
    "-r": "the command without it",
    "--experimental-rerun": "the overrides of overrides.txt in the run's folder",
}


@dataclass
class CommandLine:
    """The arguments after the name of the verb."""

    overrides: list[str] = field(default_factory=list)
    """Overrides, in order; with --shell-completion, its action."""
    flags: dict[str, str] = field(default_factory=dict)
    """Values of the flags by long name; empty for flags without a value."""

    @property
    def shows(self) -> str | None:
        """The flag that shows something instead of running, if any."""
        return next((name for name in SHOWS if name in self.flags), None)

    @property
    def is_multirun(self) -> bool:
        """Whether to run one job per combination of values."""
        return "--multirun" in self.flags

    def validate(self) -> None:
        """Check the values of flags, and which flags can be combined.

        Raises:
            UserError: naming the flag.
        """
        shown = [name for name in SHOWS if name in self.flags]
        if len(shown) > 1:
            raise UserError(f"{shown[1]}: cannot be combined with {shown[0]}; would work: one of them")
        if self.is_multirun and len(self.flags) > 1:
            other = next(name for name in self.flags if name != "--multirun")
            raise UserError(f"{other}: works for one job only; would work: the command without -m")
        self._validate_choice("--cfg", CFG)
        self._validate_choice("--info", INFO)
        for name in ("--package", "--resolve"):
            if name in self.flags and "--cfg" not in self.flags:
                raise UserError(f"{name}: needs --cfg; would work: --cfg job {name}")
        name = self.flags.get("--config-name", "train").removesuffix(".yaml")
        if not _is_file(Path(conf_dir()) / f"{name}.yaml"):
            existing = ", ".join(sorted(path.stem for path in Path(conf_dir()).glob("*.yaml")))
            raise UserError(f"--config-name={name}: no such file in {conf_dir()}; would work: {existing}")
        if "--shell-completion" in self.flags:
            self._validate_completion()

    def _validate_choice(self, name: str, choices: Sequence[str]) -> None:
        if self.flags.get(name, choices[0]) not in choices:
            raise UserError(f"{name}={self.flags[name]}: would work: {', '.join(choices)}")

    def _validate_completion(self) -> None:
        works = ", ".join(f"-sc install={shell}" for shell in SHELLS)
        action, _, shell = self.overrides[0].partition("=") if self.overrides else ("", "", "")
        known = action in ("install", "uninstall", "query") and shell in SHELLS
        if len(self.overrides) != 1 or not known:
            typed = " ".join(["-sc", *self.overrides])
            raise UserError(f"{typed}: takes one action and a shell; would work: {works}")
        if action == "query" and "COMP_LINE" not in os.environ:
            raise UserError(f"-sc query={shell}: is for the shell, which sets COMP_LINE; would work: {works}")


def parse(arguments: Sequence[str], own: Sequence[str] = ()) -> CommandLine:
    """Sort the arguments into overrides and flags.

    Args:
        arguments: the arguments after the name of the verb.
        own: additional flags of this verb, without a value.

    Raises:
        UserError: an unknown flag, a missing value, or flags that cannot be combined.
    """
    line, rest = CommandLine(), list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            line.overrides.append(argument)
            continue
        typed, sign, value = argument.partition("=")
        name = _long_name(typed, own)
        if name in TAKES_VALUE and not sign:
            if not rest or rest[0].startswith("-"):
                works = f"{typed} {'job' if name == '--cfg' else 'NAME'}"
                raise UserError(f"{typed}: takes a value; would work: {works}")
            value = rest.pop(0)
        elif name == "--info" and not sign:
            value = rest.pop(0) if rest and rest[0] in INFO else INFO[0]
        elif name not in TAKES_VALUE and name != "--info" and sign:
            raise UserError(f"{argument}: takes no value; would work: {typed}")
        line.flags[name] = value
    line.validate()
    return line


def _long_name(typed: str, own: Sequence[str]) -> str:
    names_of_all = [*NAMES, *((name,) for name in own)]
    for names in names_of_all:
        if typed in names:
            return names[-1]
    if typed in REFUSED:
        raise UserError(f"{typed}: is not supported; would work: {REFUSED[typed]}")
    raise UserError(_no_such_flag(typed, [name for names in names_of_all for name in names]))


def _no_such_flag(typed: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(typed, known, n=1)
    works = f"did you mean {close[0]}?" if close else "--help lists all flags"
    return f"{typed}: no such flag; {works}"


def _is_file(path: Path) -> bool:
    """Whether the file exists; False for an invalid path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of overrides."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage."""
        choice = re.fullmatch(r"argument .+: invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        if choice:
            works = choice[2].replace("'", "")
            raise UserError(f"{choice[1]}: no such choice; would work: {works}")
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL)
        if unknown and unknown[1].startswith("-"):
            raise UserError(_no_such_flag(unknown[1].split(" ")[0], list(self._option_string_actions)))
        raise UserError(f"{message}; would work: {' '.join(self.format_usage().split()[1:])}")
