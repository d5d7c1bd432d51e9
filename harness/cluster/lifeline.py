"""What ties a process to the one that started it: when the starter is gone, so is it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from harness.errors import EXIT_MACHINE

POLL_SECONDS = 0.5
LAST_WORDS_SECONDS = 3.0


def end_with_parent(parent: int, last_words: Callable[[], None] | None = None) -> None:
    """End this process, and the children in its process group, when ``parent`` is no longer its parent.

    Args:
        parent: process id of the starter, as the starter knows it: a process that asked for its own parent
            only now would take whoever adopted it for its parent.
        last_words: called once before the end, for a few seconds at most.
    """
    end_when(lambda: os.getppid() != parent, last_words)


def end_when(is_gone: Callable[[], bool], last_words: Callable[[], None] | None = None) -> None:
    """End this process, and the children in its process group, when its starter is gone.

    A killed controller cannot end its ranks, so they have to notice by themselves. A daemon thread watches,
    because the main thread may be inside a collective that never returns.

    Args:
        is_gone: tells whether the starter is gone; polled.
        last_words: called once before the end, for a few seconds at most.
    """

    def watch() -> None:
        while not is_gone():
            time.sleep(POLL_SECONDS)
        if last_words is not None:
            # In a thread of its own: a file system that hangs must not keep an orphan alive.
            speaker = threading.Thread(target=last_words, daemon=True)
            speaker.start()
            speaker.join(LAST_WORDS_SECONDS)
        end_process_group_of_own()
        os._exit(EXIT_MACHINE)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_process_group_of_own() -> None:
    """Kills this process with its own children, if it leads a process group (ranks do, pool ranks do not)."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
