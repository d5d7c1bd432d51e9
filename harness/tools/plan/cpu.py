"""Measure the speed of this machine's cores, because no table has every CPU."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

from harness.util.hardware import Accelerator
from harness.util.tables import GIB

# A product that exceeds the caches of one core, and a copy that exceeds all caches.
ROWS, WIDTH = 1024, 1024
COPIED = 2**28
REPEATS = 7


def measure_cpu() -> Accelerator:
    """Measure one core of this machine: products in float32 and bfloat16, and copies, with one thread.

    Takes about two seconds. The link bandwidth is that of memory, through which ranks send.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dtypes = (torch.float32, torch.bfloat16)
        peaks = {str(dtype).removeprefix("torch."): _product_rate(dtype) for dtype in dtypes}
        bandwidth = _copy_rate()
    finally:
        torch.set_num_threads(threads)
    return Accelerator(
        name=f"{platform.machine()} CPU, {os.cpu_count()} cores",
        peak_flops=peaks,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        memory_bandwidth=bandwidth,
        source=f"products of {ROWS} x {WIDTH} x {WIDTH}, copies of {COPIED >> 20} MiB, on one core, measured",
        link_bandwidth=bandwidth,
        units=1,
    )


def _product_rate(dtype) -> float:  # type: ignore[no-untyped-def]
    """FLOP/s of a product."""
    import torch

    left, right = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    return 2.0 * ROWS * WIDTH * WIDTH / _seconds(lambda: torch.mm(left, right))


def _copy_rate() -> float:
    """Bytes per second, read plus written."""
    import torch

    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    return 2.0 * COPIED / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """Median time of ``work`` over ``REPEATS`` runs."""
    work()
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
