"""Prepare a verb's process: standard streams, UTF-8, an existing working folder."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from harness.util.errors import MachineError, UserError


def prepare_process() -> None:
    """Open standard streams and ignore broken pipes; restart in UTF-8 mode if the locale is not UTF-8."""
    _open_standard_streams()
    _use_utf8()
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


def typed_arguments() -> list[str]:
    """The arguments of the command line.

    Raises:
        UserError: an argument is not UTF-8, or the current folder has been removed.
    """
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"{shown}: is not UTF-8; would work: a terminal and a locale in UTF-8") from None
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder has been removed; would work: cd to one that exists") from None
    return sys.argv[1:]


class Output(io.FileIO):
    """Standard output that drops data once its reader is gone, as after ``| head``."""

    _is_lost = False

    def write(self, data: Any, /) -> int:
        """Write; after the first failure, drop the data.

        Raises:
            MachineError: writing failed for another reason, such as a full disk.
        """
        if not self._is_lost:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._is_lost = True
            except OSError as error:
                self._is_lost = True
                raise MachineError(f"standard output cannot be written: {error.strerror}") from error
        return memoryview(data).nbytes


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr if the parent process closed them.

    Otherwise the next opened file would get their number, and output would be written into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # open uses the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115
            setattr(sys, name, nowhere)
            setattr(sys, f"__{name}__", nowhere)


def _use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale has another encoding.

    Otherwise file names, output and arguments would be limited to that encoding. Child processes inherit the
    mode.
    """
    if sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
