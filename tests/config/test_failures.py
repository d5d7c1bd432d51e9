"""Classification of exceptions and logs: real messages of torch, NCCL, gloo, SLURM and the kernel."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import rows

from harness.config.failures import describe_failure, kind_of_text
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_NON_FINITE,
    EXIT_USER,
    MachineError,
    NonFiniteError,
    UserError,
)

OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of"
)
PEER = RuntimeError("[gloo] Connection closed by peer [10.0.0.1]:1234")
BAD_NODE = OSError(5, "Input/output error")
GLOO = (
    "[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete"
)
NCCL = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("error", "kind", "code", "more"),
    [
        (OUT_OF_MEMORY, "out_of_memory", EXIT_MACHINE, {"allocation": "2.50 GiB"}),
        (RuntimeError(GLOO), "collective_timeout", EXIT_MACHINE, {"operation": "recv"}),
        (RuntimeError(NCCL), "collective_timeout", EXIT_MACHINE, {"operation": "ALLREDUCE"}),
        (UserError("no such file"), "user", EXIT_USER, {}),
        (NonFiniteError("loss nan"), "non_finite", EXIT_NON_FINITE, {}),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "node", EXIT_MACHINE, {}),
        (BAD_NODE, "node", EXIT_MACHINE, {}),
        (
            dist.DistBackendError("NCCL error: remote process exited"),
            "collective",
            EXIT_MACHINE,
            {},
        ),
        (PEER, "peer", EXIT_MACHINE, {}),
        (KeyError("layers.0"), "bug", EXIT_BUG, {}),
        (MachineError("gone"), "machine", EXIT_MACHINE, {"message": "gone"}),
        (MemoryError(), "out_of_memory", EXIT_MACHINE, {}),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "out_of_memory",
            EXIT_MACHINE,
            {},
        ),
        (KeyboardInterrupt(), "interrupted", EXIT_INTERRUPTED, {}),
        (ModuleNotFoundError("no diffusers", name="diffusers"), "user", EXIT_USER, {}),
    ],
)
def test_classes(error, kind, code, more):
    row = describe_failure(error)
    assert {"kind": kind, "exit_code": code, **more}.items() <= row.items()


def test_a_failed_allocation_is_named():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    row = describe_failure(failed.value)
    assert (row["kind"], row["exit_code"]) == ("out_of_memory", EXIT_MACHINE)
    assert row["allocation"] == f"{2**62} bytes"


def raised_over(inner, outer, *, explicit):
    """Return ``outer`` as raised from ``inner``, or as raised while ``inner`` was handled."""
    inner, outer = copy.copy(inner), copy.copy(outer)
    try:
        try:
            raise inner
        except BaseException:
            if explicit:
                raise outer from inner
            raise outer  # noqa: B904
    except BaseException as error:
        return error


@pytest.mark.parametrize("explicit", [True, False], ids=["cause", "context"])
@pytest.mark.parametrize(
    ("inner", "outer", "kind", "code"),
    [
        (
            OUT_OF_MEMORY,
            RuntimeError("Failed to run stage backward"),
            "out_of_memory",
            EXIT_MACHINE,
        ),
        (OUT_OF_MEMORY, PEER, "out_of_memory", EXIT_MACHINE),
        (PEER, RuntimeError("Failed to run stage backward"), "peer", EXIT_MACHINE),
        (BAD_NODE, KeyboardInterrupt(), "node", EXIT_MACHINE),
        (UserError("no such file"), RuntimeError("worker failed"), "user", EXIT_USER),
        (OUT_OF_MEMORY, UserError("too large"), "user", EXIT_USER),
        (KeyError("layers.0"), PEER, "peer", EXIT_MACHINE),
        (KeyError("layers.0"), RuntimeError("wrapped"), "bug", EXIT_BUG),
    ],
)
def test_an_exception_over_another(inner, outer, kind, code, explicit):
    """torch wraps the error of a pipeline's stage in another."""
    row = describe_failure(raised_over(inner, outer, explicit=explicit))
    assert (row["kind"], row["exit_code"]) == (kind, code)
    if kind == "out_of_memory":
        assert (row["type"], row["allocation"]) == ("OutOfMemoryError", "2.50 GiB")


@pytest.mark.parametrize(
    ("text", "kind"),
    rows("""
        'slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.'                   out_of_memory
        'slurmstepd-n1: error: StepId=7.0 exceeded memory limit (2 > 1), being killed'  out_of_memory
        'NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus.'                      node
        'Traceback (most recent call last):'                                            null
        'srun: error: Timed out waiting for job step to complete'                       null
    """),
)
def test_kind_of_text(text, kind):
    assert kind_of_text(text) == kind
