"""What a verb needs of its process first: standard streams, text in UTF-8, a folder to be in."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from harness.errors import MachineError, UserError


def prepare_process() -> None:
    """Makes the process fit for a verb; where the locale is not UTF-8, starts it again in UTF-8."""
    _open_standard_streams()
    _use_utf8()
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return  # somebody collects what is printed
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
        UserError: one of them is no text, or the folder that the user is in has been removed.
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
        raise UserError("the current folder has been removed; would work: cd to one that is there") from None
    return sys.argv[1:]


class Output(io.FileIO):
    """Standard output that goes nowhere once nobody reads it any more, as after ``| head``."""

    _is_lost = False

    def write(self, data: Any, /) -> int:
        """Writes; after the first failure, what is left of the buffers is dropped.

        Raises:
            MachineError: it cannot be written for another reason, as when the disk is full.
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
    """Opens those of stdin, stdout and stderr that whoever started this process has closed.

    Otherwise the next file to be opened takes their place, and what is printed goes into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115
            setattr(sys, name, nowhere)
            setattr(sys, f"__{name}__", nowhere)


def _use_utf8() -> None:
    """Starts this process again with Python's UTF-8 mode where the locale has another encoding.

    Names of files, what is printed and what is typed would otherwise be limited to that encoding. Processes
    that are started from here on inherit the mode.
    """
    if sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
