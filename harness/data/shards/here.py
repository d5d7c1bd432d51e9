"""Write a folder in shards with the processes of this machine."""

from __future__ import annotations

import sys
import time

from harness.data.build_lock import only_builder
from harness.data.shards.writer import UNFINISHED, ShardWriter
from harness.util.errors import MachineError


def write_here(writer: ShardWriter, workers: int | None) -> float:
    """Write what is missing, and the manifest; return the seconds.

    Raises:
        MachineError: the disk is full or not writable.
    """
    started = time.monotonic()
    try:
        with only_builder(writer.target / UNFINISHED, lambda: writer.is_complete) as building:
            if building is not None:
                writer.begin()
                writer.write(range(len(writer.shards)), workers)
                writer.finish()
                writer.remove_unfinished()
                building.is_useless = True
    except OSError as error:
        if error.filename is not None:
            raise
        name = f"{writer.verb}.target={writer.target}"
        raise MachineError(f"{name}: {error.strerror}; finished units are kept") from error
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command continues\n")
        raise
    return time.monotonic() - started
