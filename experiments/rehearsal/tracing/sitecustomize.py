"""Write down which lines of harness/ run, in every Python process with this folder on its path.

HARNESS_TRACE is the file. Each line is appended when it first runs, because ranks leave without clean-up.
"""

import os
import sys
import threading
from types import FrameType
from typing import Any

_TARGET = os.environ.get("HARNESS_TRACE")
_PACKAGE = f"{os.sep}harness{os.sep}"
_seen: set[tuple[str, int]] = set()


def _trace(frame: FrameType, event: str, _argument: Any) -> Any:
    path = frame.f_code.co_filename
    if _PACKAGE not in path or "site-packages" in path or path.startswith("<"):
        return None
    return _note(frame, event, None)


def _note(frame: FrameType, _event: str, _argument: Any) -> Any:
    line = (frame.f_code.co_filename, frame.f_lineno)
    if line not in _seen:
        _seen.add(line)
        os.write(_file, f"{line[0]}:{line[1]}\n".encode())
    return _note


if _TARGET:
    _file = os.open(_TARGET, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.settrace(_trace)
    threading.settrace(_trace)
