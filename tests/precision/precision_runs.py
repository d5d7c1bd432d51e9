"""Traces of the tests in this folder, on ranks of the pool, and reference casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.config.job import Job
from harness.launch.pool import RankPool
from harness.tools.parity.parity import Trace, trace

_traces: dict[tuple[str, int], Trace] = {}


def trace_alone(pool: RankPool, job: Job, steps: int) -> Trace:
    """Trace a job of one rank once. Its numbers depend on the rows of a pass."""
    if (job.id, steps) not in _traces:
        [_traces[job.id, steps]] = pool.run(1, trace, job.to_json(), steps)
    return _traces[job.id, steps]


def trace_with_float8_gathers(job_json: str, steps: int) -> Trace:
    """Trace with the tensor parallelism of GPUs, which gathers in float8; gloo sends it as bytes."""
    with gloo_that_sends_float8() as sent:
        traced = trace(job_json, steps)
    assert sent and all(dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for dtype in sent), sent
    return traced


@contextmanager
def gloo_that_sends_float8() -> Iterator[set[torch.dtype]]:
    """Enable float8 gathers on CPUs, and send torchao's float8 tensors as bytes.

    Yields:
        The dtypes that were gathered.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    from harness.parallelism import parallelize

    op = torch.ops._c10d_functional.all_gather_into_tensor.default
    sent: set[torch.dtype] = set()
    chosen, dispatch = parallelize.gathers_float8, Float8TrainingTensor.__torch_dispatch__

    def as_on_cuda(precision, layout, device):  # type: ignore[no-untyped-def]
        return chosen(precision, layout, torch.device("cuda", 0))

    def gather_bytes(cls, func, types, args, kwargs=None):  # type: ignore[no-untyped-def]
        if func is not op:
            return dispatch(func, types, args, kwargs)
        cast, *rest = args
        sent.add(cast._data.dtype)
        data = op(cast._data.contiguous().view(torch.uint8), *rest).view(cast._data.dtype)
        return Float8TrainingTensor(
            data, cast._scale, cast._orig_dtype, cast._linear_mm_config, cast._gemm_input_role
        )

    parallelize.gathers_float8 = as_on_cuda
    Float8TrainingTensor.__torch_dispatch__ = classmethod(gather_bytes)
    try:
        yield sent
    finally:
        parallelize.gathers_float8 = chosen
        Float8TrainingTensor.__torch_dispatch__ = dispatch


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values: Tensor, dtype: torch.dtype, over: tuple[int, ...], power_of_two: bool) -> Tensor:
    """Values rounded to float8, with the scale that maps the largest magnitude to the format's maximum."""
    scale = torch.finfo(dtype).max / values.abs().amax(over, keepdim=True).double()
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values.double() * scale).float().to(dtype).double() / scale


def rounded_in_blocks(values: Tensor) -> Tensor:
    """Values rounded in blocks of 32 along the last axis; scales rounded up to powers of 2 (MX, RCEIL)."""
    blocks = values.view(*values.shape[:-1], -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(peak / torch.finfo(E4M3).max)))
    return ((blocks.double() / scale).float().to(E4M3).double() * scale).view(values.shape)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((found.detach().double() - expected).norm() / expected.norm())
