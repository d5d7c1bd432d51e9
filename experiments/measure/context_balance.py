"""Measures how evenly the work of attention within documents is spread over context-parallel ranks.

    python experiments/measure/context_balance.py

Rows have 131,072 tokens of documents of log-normal lengths, on 16 ranks. A query's work is its
place in its document. Prints a row of a Markdown table for each kind of documents: the work of the
fullest rank as a multiple of the mean, in the mean of 50 rows and in the worst.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import torch
from torch import Tensor

from harness.config import parallelism
from harness.config.parallelism import ParallelismConfig
from harness.parallelism import context

TOKENS, RANKS, ROWS = 131072, 16, 50
LENGTHS = ((500, 1.0), (1000, 1.5), (2000, 2.0), (8000, 1.5), (30000, 1.0), (TOKENS, 0.0))
"""Median length, and standard deviation of its logarithm."""


def documents_of(generator: torch.Generator, median: int, spread: float) -> Tensor:
    """Document numbers of one row [1, T]."""
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        normal = float(torch.randn((), generator=generator))
        lengths.append(max(1, int(median * math.exp(spread * normal))))
    numbers = torch.arange(len(lengths))
    return numbers.repeat_interleave(torch.tensor(lengths))[None, :TOKENS]


def fullest(balance: bool | str, documents_BT: Tensor) -> float:
    """Work of the rank with most of it, as a multiple of the mean."""
    layout = ParallelismConfig(cp=RANKS, cp_method="gather", cp_load_balance=balance)
    work_T = context.places_within(documents_BT)[0]
    if layout.balances_documents:
        shares = [context.positions_by_documents(layout, documents_BT, r)[0] for r in range(RANKS)]
    else:
        shares = [context.local_positions(layout, TOKENS, rank) for rank in range(RANKS)]
    sums = [float(work_T[share].sum()) for share in shares]
    return max(sums) / sum(sums) * RANKS


def main() -> None:
    for median, spread in LENGTHS:
        generator = torch.Generator().manual_seed(0)
        rows = [documents_of(generator, median, spread) for _ in range(ROWS)]
        cells = [f"{median:,}", f"{spread}"]
        for balance, blocks in ((False, 8), (True, 8), ("documents", 4), ("documents", 8)):
            with patch.object(parallelism, "BLOCKS", blocks):
                found = [fullest(balance, row) for row in rows]
            cells.append(f"{sum(found) / ROWS:.2f} ({max(found):.2f})")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
