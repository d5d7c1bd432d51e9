"""Command lines: the flags of all verbs, of which overrides are the rest; ``--help`` and ``--cfg``."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.compose.composer import Composer
from harness.compose.hydra_errors import user_errors
from harness.compose.overrides import checked, namesakes
from harness.compose.paths import config_folders
from harness.config.elsewhere import answer
from harness.config.fields import check_written
from harness.util.errors import EXIT_OK, UserError

CFG = ("job",)
# Flags of which a command has one.
ALONE = ("help", "cfg", "info", "multirun")


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
    Argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="WHAT",
        help="print this, or what a field or group means, or `all` fields",
    ),
    VERSION,
    Argument(
        "-c",
        "--cfg",
        choices=CFG,
        metavar="WHAT",
        help="print the composed `job`",
    ),
    Argument(
        "-p", "--package", metavar="NAME", help="with `--cfg`: print one part, e.g. `parallelism`"
    ),
    Argument("--resolve", help="with `--cfg`: replace references such as `${model.name}`"),
    Argument(
        "--info", help="print the folders of configurations, and the files that the job is made of"
    ),
    Argument("-m", "--multirun", help="run one job for each combination of values"),
    Argument(
        "-cn",
        "--config-name",
        metavar="NAME",
        help="compose another primary file of `conf/` or your own",
    ),
    Argument(
        "-cd",
        "--config-dir",
        action="append",
        metavar="FOLDER",
        help="add a folder of your own files, with groups as in `conf/`, or $HARNESS_CONF for all commands",
    ),
)
"""Flags of verbs that take a job."""


class CommandLine(argparse.Namespace):
    """The parsed arguments after the name of a verb: its own arguments, JOB_FLAGS and ``--json`` by name."""

    overrides: list[str]
    """Arguments that are not flags, in order."""
    json: bool = False
    help: str | None = None

    def validate_flags_of_job(self) -> None:
        """Check which of JOB_FLAGS can be combined."""
        asked = [
            flag.names[-1]
            for flag in JOB_FLAGS
            if getattr(self, flag.name) not in (None, False) and flag.name in ALONE
        ]
        if len(asked) > 1:
            first, second, *_ = asked
            raise UserError(f"{second}: cannot be combined with {first}; would work: one of them")
        for name in ("package", "resolve"):
            if getattr(self, name) and self.cfg is None:
                raise UserError(f"--{name}: needs --cfg; would work: --cfg job --{name}")


class Parser(argparse.ArgumentParser):
    """A parser of flags that are typed in full; its errors are one line, like those of overrides."""

    def parse_line(self, arguments: Sequence[str], schema: type | None) -> CommandLine:
        """Parse the arguments of a verb; ``schema`` is the dataclass of its job, if overrides are allowed."""
        line, rest = self.parse_known_args(arguments, CommandLine())
        shown: str = getattr(line, "help", None) or ""
        if "=" in shown:  # an override: --help alone shows the screen
            rest = [shown, *rest]
            line.help = ""
        for typed in rest:
            if typed.startswith("-"):
                name, _, value = typed.partition("=")
                self._refuse(name, value or "VALUE", schema)
        if rest and schema is None:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        line.overrides = rest
        return line

    def _refuse(self, typed: str, value: str, schema: type | None) -> NoReturn:
        name = typed.lstrip("-").replace("-", "_")
        if found := answer(name, value, schema or object):
            raise UserError(f"{typed}: {found}")
        fields = [] if schema is None else namesakes(schema, name.rpartition(".")[2])
        works = " or ".join(f"{field}=VALUE" for field in fields if field.endswith(name))
        if works:
            raise UserError(f"{typed}: no such flag; would work: {works}")
        close = difflib.get_close_matches(typed, self._option_string_actions, n=1)
        works = f"did you mean {close[0]}?" if close else "--help lists all flags"
        raise UserError(f"{typed}: no such flag; {works}")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; would work: {' '.join(self.format_usage().split()[1:])}")


def show(line: CommandLine, parser: Parser, composer: Composer) -> int:
    checked(line.overrides, composer.schema)
    if line.help is not None:
        from harness.compose.help import help_text

        text = help_text(line.help, line.overrides, parser, composer)
    elif line.cfg is None:
        text = shown_files(line, composer)
    else:
        text = shown_config(line, composer)
    sys.stdout.write(text)
    return EXIT_OK


def shown_files(line: CommandLine, composer: Composer) -> str:
    """Return the folders that are searched, and the files of a job, as ``--info`` asks for them."""
    lines = ["folders, of which the first with a file has it"]
    lines += [f"  {path}" for path in config_folders().paths]
    lines.append("files of the job, of which later ones win")
    lines += [f"  {path}" for path in composer.files(line.overrides)]
    return "\n".join([*lines, ""])


def shown_config(line: CommandLine, composer: Composer) -> str:
    """Return the composed configuration as YAML, before it becomes a job, as ``--cfg`` asks for it."""
    from omegaconf import OmegaConf

    plain = composer.config(line.overrides, resolve=line.resolve)
    shown: Any = OmegaConf.create(plain)
    with user_errors():
        if line.resolve:
            OmegaConf.resolve(shown)
        if line.package not in (None, "_global_"):
            shown = OmegaConf.select(shown, line.package)
    if shown is None:
        raise UserError(f"--package={line.package}: no such part; would work: {', '.join(plain)}")
    head = "" if line.package is None else f"# @package {line.package}\n"
    return f"{head}{OmegaConf.to_yaml(shown)}" if OmegaConf.is_config(shown) else f"{shown}\n"
