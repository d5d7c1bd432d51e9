"""Measures a mixture of experts against the bare matrix products that it cannot do without.

    python experiments/moe_layer.py --rounds 15

One layer, forward and backward, on one thread of a CPU. Beside it the same number of rows goes through dense
products of the same widths: w1, w3 and w2 on tokens x top_k rows, the router's in float32, and those of
shared experts. What the layer takes besides is choosing, sorting, combining, the activation, and that its
gradients are of all experts' matrices and not of one. Both sides run in turn; times are of the processor, so
that whatever else runs on the machine counts less.

The C library is told to keep memory that is freed. Left alone it returns large blocks to the system, and
the pages that it then gets anew cost the layer, whose tensors are larger than a product's, a part of its time
that is another in each process; ``--return-memory`` leaves it alone. Prints a Markdown table; with
``--output`` also writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.compose.composer import compose_job
from harness.model.moe import MoE

WARMUP = 2
TARGET = 1.3
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """A layer, and how many tokens go through it at once."""

    tokens: int
    dim: int
    experts: int
    top_k: int
    hidden: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f", shared {self.shared}" if self.shared else ""
        return (
            f"{self.tokens} tokens, dim {self.dim}, {self.top_k} of {self.experts} experts "
            f"of {self.hidden}{shared}"
        )


SHAPES = (
    Shape(tokens=2048, dim=512, experts=16, top_k=4, hidden=512),
    Shape(tokens=2048, dim=1024, experts=8, top_k=2, hidden=1024),
    Shape(tokens=2048, dim=512, experts=32, top_k=4, hidden=256, shared=512),
)


def shape_of(text: str) -> Shape:
    """A shape as it is typed; argparse tells of a ValueError or TypeError that it is no such thing."""
    return Shape(*map(int, text.split(",")))


def keep_memory() -> None:
    """Has glibc keep what is freed (mallopt(3)); other C libraries are left as they are."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            if not library.mallopt(parameter, 2**30):
                raise OSError(f"mallopt({parameter}) has no effect")


def layer(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of the layer."""
    config = compose_job(
        [
            *("model=qwen3_moe_debug", f"model.dim={shape.dim}", f"model.moe.num_experts={shape.experts}"),
            *(f"model.moe.top_k={shape.top_k}", f"model.moe.hidden_dim={shape.hidden}"),
            f"model.moe.shared_hidden_dim={shape.shared}",
        ]
    ).model
    torch.manual_seed(0)
    moe = MoE(config).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x_BTC = torch.randn(1, shape.tokens, shape.dim).to(dtype).requires_grad_()
    grad_BTC = torch.randn(1, shape.tokens, shape.dim).to(dtype)
    leaves = [x_BTC, *moe.parameters()]

    def run() -> None:
        out_BTC, _ = moe(x_BTC)
        torch.autograd.grad(out_BTC, leaves, grad_BTC)

    return run


def products(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of the products that the layer must do, each of them alone."""
    rows, dim, hidden, shared = shape.tokens * shape.top_k, shape.dim, shape.hidden, shape.shared
    sizes = [(rows, dim, hidden, dtype)] * 2 + [(rows, hidden, dim, dtype)]
    sizes += [(shape.tokens, dim, shape.experts, torch.float32)]
    if shared:
        sizes += [(shape.tokens, dim, shared, dtype)] * 2 + [(shape.tokens, shared, dim, dtype)]
    torch.manual_seed(0)

    def made(*of: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*of).to(dtype).requires_grad_()

    operands = [(made(r, i, dtype=kind), made(o, i, dtype=kind)) for r, i, o, kind in sizes]
    grads = [torch.randn(r, o).to(kind) for r, _, o, kind in sizes]

    def run() -> None:
        for (x_RI, weight_OI), grad_RO in zip(operands, grads, strict=True):
            torch.autograd.grad(F.linear(x_RI, weight_OI), (x_RI, weight_OI), grad_RO)

    return run


def seconds(run: Callable[[], None]) -> float:
    """Time of the processor that one call takes."""
    started = time.process_time()
    run()
    return time.process_time() - started


def measure(shape: Shape, dtype: str, rounds: int) -> dict[str, Any]:
    """Both sides in turn.

    Returns:
        The shape, the format, medians in seconds, the ratio of the medians, and the smallest and largest
        ratio within a round.
    """
    sides = {side.__name__: side(shape, getattr(torch, dtype)) for side in (layer, products)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARMUP + rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            taken = seconds(sides[name])
            if number >= WARMUP:
                times[name].append(taken)
    ratios = [ours / bare for ours, bare in zip(times["layer"], times["products"], strict=True)]
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        **asdict(shape),
        "dtype": dtype,
        "layer_seconds": medians["layer"],
        "products_seconds": medians["products"],
        "ratio": medians["layer"] / medians["products"],
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "rounds": rounds,
    }


def line(shape: Shape, row: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"| {shape} | {row['dtype']} | {row['layer_seconds'] * 1e3:.1f} | "
        f"{row['products_seconds'] * 1e3:.1f} | {row['ratio']:.3f} "
        f"({row['least_ratio']:.3f} to {row['most_ratio']:.3f}) | "
        f"{'yes' if row['ratio'] <= TARGET else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help=f"after {WARMUP} that do not count")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape_of,
        default=SHAPES,
        metavar="TOKENS,DIM,EXPERTS,TOP_K,HIDDEN[,SHARED]",
        help="layers in the place of the usual ones",
    )
    parser.add_argument("--return-memory", action="store_true", help="leave the C library's malloc alone")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.return_memory:
        keep_memory()
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"One thread, {platform.machine()} with {capability}, torch {torch.__version__}", end="\n\n")
    print(f"| layer | format | ms | products, ms | ratio of medians (range) | at most {TARGET} |")
    print("|---|---|---|---|---|---|")
    rows = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            rows.append(measure(shape, dtype, arguments.rounds))
            print(line(shape, rows[-1]), flush=True)
    if arguments.output:
        figures = {"torch": torch.__version__, "cpu": capability, "target": TARGET, "rows": rows}
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
