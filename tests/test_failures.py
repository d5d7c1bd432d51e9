"""What a rank died of, from what it raised: real messages of torch, NCCL, gloo, SLURM and the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.errors import EXIT_BUG, EXIT_MACHINE, EXIT_NON_FINITE, EXIT_USER, NonFiniteError, UserError
from harness.failures import describe_failure, kind_of_text


def test_an_allocation_that_cannot_be_had_is_named() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    row = describe_failure(failed.value)
    assert (row["kind"], row["exit_code"]) == ("out_of_memory", EXIT_MACHINE)
    assert row["allocation"] == f"{2**62} bytes"


def test_an_allocation_on_a_gpu() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB"
    row = describe_failure(torch.OutOfMemoryError(text))
    assert (row["kind"], row["allocation"]) == ("out_of_memory", "2.50 GiB")


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (
            "[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete",
            "recv",
        ),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
            "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.",
            "ALLREDUCE",
        ),
    ],
)
def test_a_collective_that_took_too_long_is_named(text: str, operation: str) -> None:
    row = describe_failure(RuntimeError(text))
    assert (row["kind"], row["operation"]) == ("collective_timeout", operation)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (UserError("no such file"), "user", EXIT_USER),
        (NonFiniteError("loss nan"), "non_finite", EXIT_NON_FINITE),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "node", EXIT_MACHINE),
        (OSError(5, "Input/output error"), "node", EXIT_MACHINE),
        (dist.DistBackendError("NCCL error: remote process exited"), "collective", EXIT_MACHINE),
        (RuntimeError("[gloo] Connection closed by peer [10.0.0.1]:1234"), "peer", EXIT_MACHINE),
        (KeyError("layers.0"), "bug", EXIT_BUG),
    ],
)
def test_classes(error: Exception, kind: str, code: int) -> None:
    row = describe_failure(error)
    assert (row["kind"], row["exit_code"]) == (kind, code)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "out_of_memory"),
        ("slurmstepd-n1: error: StepId=7.0 exceeded memory limit (2 > 1), being killed", "out_of_memory"),
        ("NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus.", "node"),
        ("Traceback (most recent call last):", None),
    ],
)
def test_last_words(text: str, kind: str | None) -> None:
    assert kind_of_text(text) == kind
