"""End a process when the process that started it is gone. Imports no torch."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from harness.util.errors import EXIT_MACHINE

POLL_SECONDS = 0.5
BEFORE_END_SECONDS = 3.0


def end_with_parent(parent: int, before_end: Callable[[], None] | None = None) -> None:
    """End this process, and the children in its process group, when ``parent`` is no longer its parent.

    The starter passes its own id: if it has died already, ``os.getppid()`` is the process that
    adopted us.
    """
    end_when(lambda: os.getppid() != parent, before_end)


def end_when(is_gone: Callable[[], bool], before_end: Callable[[], None] | None = None) -> None:
    """End this process, and the children in its process group, when its starter is gone.

    A killed controller cannot end its ranks, so they check for themselves. The check runs in a
    daemon thread, because the main thread may be inside a collective that never returns.
    ``is_gone`` is polled; ``before_end`` is called once before the end, for a few seconds at most.
    """

    def watch() -> None:
        while not is_gone():
            time.sleep(POLL_SECONDS)
        if before_end is not None:
            # In its own thread: a file system that hangs must not keep an orphan alive.
            thread = threading.Thread(target=before_end, daemon=True)
            thread.start()
            thread.join(BEFORE_END_SECONDS)
        kill_own_process_group()
        os._exit(EXIT_MACHINE)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def kill_own_process_group() -> None:
    """Kill this process and its children if it leads a process group (ranks do, pool ranks do not)."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
