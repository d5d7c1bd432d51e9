"""Speed per rank and MFU of a job, from its throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config.model import ModelConfig
from harness.metrics.mfu import Peak, utilization
from harness.model.accounting import Accounting, account
from harness.model.architecture import architecture_of

Row = dict[str, Any]


class Efficiency:
    """Convert the throughput of a job to its speed per rank and MFU.

    Args:
        model: the model, resolved.
        seq_len: full length of the sequences.
        peak: peak of the device.
        world_size: number of ranks.
    """

    def __init__(self, model: ModelConfig, seq_len: int, peak: Peak, world_size: int) -> None:
        self.accounting, self.peak = account(model, seq_len), peak
        self._model, self._seq_len, self._world_size = model, seq_len, world_size
        self._batches = architecture_of(model).batches
        self._known = {seq_len: self.accounting}

    def fields(self, tokens_per_second: float | None, lengths: Mapping[int, int]) -> Row:
        """Return the fields for a throughput of all ranks; None is unknown. ``lengths`` as in ``mean``."""
        per_rank = None if tokens_per_second is None else tokens_per_second / self._world_size
        samples = None if tokens_per_second is None else tokens_per_second / self._seq_len
        return {
            **({f"{self._batches}_per_second": samples} if self._batches != "tokens" else {}),
            "tokens_per_second_per_rank": per_rank,
            **utilization(per_rank, self.mean(lengths), self.peak),
        }

    def mean(self, lengths: Mapping[int, int]) -> Accounting:
        """Return the accounting with the mean FLOPs per token: attention's depend on the length.

        Args:
            lengths: number of tokens by the length of their sequence; empty: all have the full length.
        """
        total = sum(lengths.values())
        if not total:
            return self.accounting
        for length in lengths.keys() - self._known.keys():
            self._known[length] = account(self._model, length)
        counts = [(self._known[length], tokens / total) for length, tokens in lengths.items()]
        return replace(
            self.accounting,
            flops_per_token_full=sum(each.flops_per_token_full * share for each, share in counts),
            flops_per_token_causal=sum(each.flops_per_token_causal * share for each, share in counts),
        )
