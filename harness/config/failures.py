"""Classify failures into the kinds that tables show, by the exception of a rank. Imports no torch.

| kind | exit code | meaning |
|---|---|---|
| ``user`` | 2 | a mistake in the job or its data |
| ``out_of_memory`` | 3 | on the device or the host; ``allocation`` is the size that was requested |
| ``collective_timeout`` | 3 | a collective timed out; ``operation`` names it |
| ``non_finite`` | 4 | loss or gradients are not finite, or spikes do not end |
| ``preempted`` | 3 | preemption or the time limit ended the job, twice before a step was done |
| ``cancelled`` | 130 | the SLURM job was cancelled |
| ``node`` | 3 | a hardware failure: an accelerator, a link, a disk, or the node itself |
| ``machine`` | 3 | another machine failure: a killed launcher, a full disk |
| ``bug`` | 1 | an unexpected exception: a bug of the harness |
| ``unknown`` | 3 | ended without recording an error |
| ``peer`` | 3 | of a rank whose connection to another one broke; of a run, if that one left no trace |
| ``collective`` | 3 | of a rank in which a collective failed because of another one; of a run, as ``peer`` |
| ``interrupted`` | 130 | of a rank that got a signal to stop; a run then counts as stopped |
"""

import errno
import re
import traceback
from pathlib import Path
from typing import Any

from harness.util import PACKAGE
from harness.util.errors import (
    DISK_FULL,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    HarnessError,
    missing_package,
)

# A higher value means the kind is less likely to be the cause.
CONSEQUENCES = {"collective": 1, "collective_timeout": 1, "peer": 2, "interrupted": 3}
VICTIMS = tuple(CONSEQUENCES)

# Fields of an error that are copied to the run's row.
ERROR_FIELDS_IN_ROW = (
    "kind",
    "type",
    "rank",
    "step",
    "message",
    "allocation",
    "operation",
    "absent_ranks",
)

_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was closed",
    "Application timeout caused pair closure",
    "failed to connect",
)
# Messages of torch, the C library, and SLURM (its memory limit, and the kernel's OOM killer in its
# cgroup).
_MEMORY_SIGNS = (
    "Cannot allocate memory",
    "can't allocate memory",
    "CUDA out of memory",
    "oom_kill",
    "oom-kill",
    "Out Of Memory",
    "memory limit",
)
_TIMED_OUT = re.compile(
    r"Timed out waiting (?!for job step)|Watchdog caught collective operation timeout"
)
# Messages of NVIDIA's driver and CUDA about broken hardware, and of disks that do not answer.
_NODE_SIGNS = (
    "uncorrectable ECC",
    "fallen off the bus",
    "uncorrectable NVLink",
    "GPU is lost",
    "Input/output error",
    "Stale file handle",
)
_ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
# Messages of NCCL's watchdog (OpType=ALLREDUCE) and gloo (waiting ... for recv operation to
# complete).
_OPERATION = re.compile(r"OpType=(\w+)|for (\w+) operation to complete")


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Return the fields of an error file for an exception: kind, type, message, where, exit code and more.

    If an exception wraps another, or was raised while another was handled, the one in the chain
    whose kind is closest to a cause is described. An error of the harness's own is always described
    itself.
    """
    raised = error
    error = missing_package(error) or error
    if not isinstance(error, HarnessError):
        # Causes first, then consequences; an unexpected exception explains the least.
        order = {**CONSEQUENCES, "bug": 4}
        error = min(chain_of(error), key=lambda each: order.get(_kind_of(each), 0))
    message = text_of(error)
    kind = _kind_of(error)
    codes = {"interrupted": EXIT_INTERRUPTED, "bug": EXIT_BUG}
    row = {
        "kind": kind,
        "type": type(error).__name__,
        "message": message,
        "where": _where(error) or _where(raised),
        "exit_code": error.exit_code
        if isinstance(error, HarnessError)
        else codes.get(kind, EXIT_MACHINE),
    }
    if kind == "out_of_memory" and (wanted := _ALLOCATION.search(message)):
        row["allocation"] = wanted[1]
    if kind == "collective_timeout":
        named = _OPERATION.search(message)
        row["operation"] = (named[1] or named[2]) if named else row["where"]
    return row


def chain_of(error: BaseException, *, suppressed: bool = False) -> list[BaseException]:
    """An exception, its causes and its contexts, outermost first; ``suppressed``: also of ``from None``."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        hidden = current.__suppress_context__ and not suppressed
        current = current.__cause__ or (None if hidden else current.__context__)
    return chain


def kind_of_text(text: str) -> str | None:
    """Return the kind that a log or message indicates, or None."""
    if any(sign in text for sign in _MEMORY_SIGNS):
        return "out_of_memory"
    if any(sign in text for sign in _NODE_SIGNS):
        return "node"
    if any(sign in text for sign in _PEER_SIGNS):
        return "peer"
    return "collective_timeout" if _TIMED_OUT.search(text) else None


def is_consequence(text: str) -> bool:
    """Whether a traceback shows that another rank is gone or stuck."""
    return any(sign in text for sign in (*_PEER_SIGNS, "Timed out waiting"))


def text_of(error: BaseException) -> str:
    """Return an exception's message, or its type if it has none or ``str`` fails."""
    try:
        return str(error).strip() or type(error).__name__
    except Exception:
        return type(error).__name__


def _kind_of(error: BaseException) -> str:
    if isinstance(error, HarnessError):
        return error.kind
    name = type(error).__name__
    text = text_of(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if "OutOfMemory" in name or isinstance(error, MemoryError):
        return "out_of_memory"
    from_torch = name in ("DistBackendError", "DistStoreError", "DistNetworkError")
    kind = kind_of_text(text)
    if kind is None and isinstance(error, OSError) and error.errno in (*DISK_FULL, errno.EROFS):
        return "machine"
    if kind is None and from_torch:
        return "collective_timeout" if "imed out" in text else "collective"
    return kind or "bug"


def _where(error: BaseException) -> str | None:
    """Return the innermost line of this package in an exception's traceback."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(f.filename).parents
    ]
    if not frames:
        return None
    frame = frames[-1]
    return f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno} {frame.name}: {frame.line}"
