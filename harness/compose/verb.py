"""Verbs: their declaration, their process and command line, errors on one line, exit codes."""

import argparse
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from harness.compose.arguments import JOB_FLAGS, JSON, VERSION, Argument, CommandLine, Parser, show
from harness.compose.composer import (
    Composed,
    Composer,
    chooses_points,
    compose_job,
    compose_points,
    require_one_point,
    spelled_out,
)
from harness.compose.hydra import folders_of_environment, search_path, shadowed
from harness.compose.paths import config_folders
from harness.config.registry import Registry
from harness.config.texts import masked
from harness.train.process import refuse_launched
from harness.util.encoding import dumps
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    HarnessError,
    MachineError,
    UserError,
    missing_package,
    one_line,
)


def prepare_process() -> None:
    """Ignore broken pipes; restart in UTF-8 mode if the locale is not UTF-8.

    Otherwise file names, output and arguments would be limited to the locale's encoding. Child
    processes inherit the mode.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return  # the output is captured
    stream.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(Output(1, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering),
    )


class Output(io.FileIO):
    """Standard output that drops data once its reader is gone, as after ``| head``."""

    _is_lost = False

    def write(self, data: Any, /) -> int:
        """Write; after the first failure, drop the data."""
        if not self._is_lost:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._is_lost = True
            except OSError as error:
                self._is_lost = True
                raise MachineError(
                    f"standard output cannot be written: {error.strerror}"
                ) from error
        return memoryview(data).nbytes


# How long the other ranks wait, so that rank 0 reports an error that all ranks have.
RANK_ZERO_SECONDS = 10.0

ITEM = "\n  "
"""Separator of list items in a message."""

# Errors of paths that cannot be bugs of the harness, and who can fix them: the user or the machine.
PATH_ERRORS: dict[int, type[HarnessError]] = {
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES), UserError
    ),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG), MachineError
    ),
}


@dataclass(frozen=True)
class Result:
    """Result of a verb, as data and as text.

    Attributes:
        data: the object that ``--json`` prints.
        text: printed without ``--json``, after what the verb has printed during its work.
        code: the exit code.
        error: raised after printing: the result is complete, but a later part of the work failed.
    """

    data: dict[str, Any]
    text: str = ""
    code: int = EXIT_OK
    error: HarnessError | OSError | None = None


Call = tuple[Callable[[], int | Result], bool]
"""A verb's function with its arguments, and whether its result is printed as JSON."""


@dataclass(frozen=True)
class Verb:
    """Declaration of ``harness NAME``.

    Attributes:
        name: its name; a verb with a job composes ``conf/NAME.yaml``.
        run: its function. Gets the job and its overrides, if the verb takes a job, and
            ``arguments`` by name. Returns the exit code or a ``Result``.
        help: what it does, and its commands, for ``--help`` and the reference.
        job: dataclass of the job that overrides compose; None for a verb that takes no job.
        arguments: arguments and flags of its own.
        has_json: whether ``run`` returns a ``Result``, so that ``--json`` can print it.
        sweep: function of ``-m``; gets all points and returns what ``run`` does.
        study: function of ``-m`` with points chosen by their results (``sweep=optuna``); gets the
            overrides and the name of the primary config.
        prepare: called first in a process of its own, such as to handle signals.
        is_alone: whether it starts its processes itself, so that torchrun cannot start it.
    """

    name: str
    run: Callable[..., int | Result]
    help: str = ""
    job: type | None = None
    arguments: Sequence[Argument] = ()
    has_json: bool = False
    sweep: Callable[[list[Composed]], int | Result] | None = None
    study: Callable[[list[str], str], int] | None = None
    prepare: Callable[[], None] | None = None
    is_alone: bool = False

    def parser(self) -> Parser:
        """Return its parser, without overrides, which are the remaining arguments."""
        parser = Parser(
            prog=self.command,
            description=self.help.strip(),
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, width=100, max_help_position=36
            ),
            add_help=self.job is None,
        )
        flags = [VERSION] if self.job is None else JOB_FLAGS
        for argument in (*flags, *self.arguments, *([JSON] if self.has_json else ())):
            parser.add_argument(*argument.names, **argument.options)
        return parser

    @property
    def command(self) -> str:
        return f"harness {self.name}"

    def parse(self, arguments: Sequence[str]) -> CommandLine:
        line = self.parser().parse_line(arguments, self.job)
        if self.job is not None:
            line.validate_flags_of_job()
        return line

    def main(self) -> NoReturn:
        prepare_process()
        sys.exit(guarded(lambda: self.run_line(sys.argv[1:], own_process=True)))

    def run_line(self, arguments: Sequence[str], *, own_process: bool = False) -> int:
        if own_process and self.prepare is not None:
            self.prepare()
        if VERSION.names[-1] in arguments:
            from harness.run.result import versions

            sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions().items()))
            return EXIT_OK
        line = self.parse(arguments)
        with (
            self._asked_for(line) as (call, as_json),
            _stdout_to_stderr() if as_json else nullcontext(),
        ):
            result = call()
        if isinstance(result, int):
            return result
        sys.stdout.write(f"{dumps(result.data, indent=2)}\n" if as_json else result.text)
        if result.error is not None:
            sys.stdout.flush()
            raise result.error
        return result.code

    @contextmanager
    def _asked_for(self, line: CommandLine) -> Iterator[Call]:
        """Compose what a command line asks for; yield its call, to be made with the user's folders in use."""
        names = [argument.name for argument in self.arguments]
        run = partial(self.run, **{name: getattr(line, name) for name in names})
        if self.job is None:
            yield run, line.json
            return
        if self.is_alone:
            refuse_launched(
                f"{self.command} starts its processes itself; start it without torchrun"
            )
        name = (self.name if line.config_name is None else line.config_name).removesuffix(".yaml")
        typed = spelled_out(line.overrides, self.job)
        folders = [*(line.config_dir or ()), *folders_of_environment()]
        with search_path(typed, name, folders=folders, primaries={self.name: name}) as found:
            line.overrides = found
            # Once, if torchrun started several ranks.
            if config_folders().added and os.environ.get("RANK", "0") == "0":
                sys.stderr.write("".join(f"WARNING {each}\n" for each in shadowed()))
            yield self._composed(line, name, self.job, run)

    def _composed(
        self, line: CommandLine, name: str, schema: type, run: Callable[..., int | Result]
    ) -> Call:
        composer = Composer(name, schema)
        if line.help is not None or line.cfg is not None or line.info:
            return partial(show, line, self.parser(), composer), False
        if line.multirun:
            if self.sweep is None:
                raise UserError("-m: this verb takes one job; would work: harness train -m")
            if chooses_points(composer, line.overrides):
                if self.study is None:
                    rule = "this verb takes all points of a grid at once"
                    raise UserError(f"sweep=optuna: {rule}; would work: harness train -m")
                return partial(self.study, line.overrides, name), False
            points = compose_points(line.overrides, config_name=name, schema=schema)
            return partial(self.sweep, points), self.has_json and line.json
        job = compose_job(line.overrides, config_name=name, schema=schema)
        require_one_point(composer, line.overrides, can_sweep=self.sweep is not None)
        return partial(run, job, line.overrides), line.json


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def guarded(call: Callable[[], int]) -> int:
    """Call ``call``; turn any exception into a message and an exit code."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return reported(error)


def reported(error: Exception | KeyboardInterrupt) -> int:
    """Print the exception that is handled here; return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, ImportError):
        error = missing_package(error) or error
    elif isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        known = PATH_ERRORS.get(error.errno or 0)
        error = (
            error if known is None else known(f"{os.fsdecode(error.filename)}: {error.strerror}")
        )
    if not isinstance(error, HarnessError):
        traceback.print_exc()
        return EXIT_BUG
    if os.environ.get("RANK", "0").lstrip("0").isdecimal():
        # All ranks under torchrun have the same error, and the first to exit ends all: let rank 0
        # report it.
        time.sleep(RANK_ZERO_SECONDS)
    if error.exit_code == EXIT_BUG or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    else:
        # Points of a sweep are listed as indented lines.
        lines = str(error).split(ITEM) if isinstance(error, UserError) else []
        sys.stderr.write(f"error: {masked(ITEM.join(map(one_line, lines)) or str(error))}\n")
    return error.exit_code


VERBS: Registry[Verb] = Registry(
    "verb",
    {
        "train": "harness.launch.train:VERB",
        "plan": "harness.tools.plan.verb:VERB",
        "rehearse": "harness.tools.rehearse.verb:VERB",
        "parity": "harness.tools.parity.parity:VERB",
        "converge": "harness.tools.study.converge:VERB",
        "coordcheck": "harness.tools.study.coordcheck:VERB",
        "runs": "harness.tools.report.listing:VERB",
        "sweep": "harness.tools.report.sweep:VERB",
        "report": "harness.tools.report.verb:VERB",
        "evaluate": "harness.tools.inference.evaluate:VERB",
        "generate": "harness.tools.inference.generate:VERB",
        "verify": "harness.tools.verify:VERB",
        "convert": "harness.tools.convert:VERB",
        "download": "harness.tools.download:VERB",
        "tokenize": "harness.tools.tokenize:VERB",
        "doctor": "harness.tools.doctor:VERB",
        "completion": "harness.launch.completion:VERB",
    },
    field="verb",
    expects="harness.compose.verb:Verb",
)
