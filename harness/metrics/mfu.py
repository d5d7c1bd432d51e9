"""Model FLOPs utilization (MFU): the fraction of a device's peak FLOP/s that the model's own arithmetic uses.

Defined in PaLM (https://arxiv.org/abs/2204.02311, appendix B): observed tokens per second divided
by the tokens per second at peak. Recomputed activations do not count. There are two ways to count
causal attention; both are reported, because values of different conventions cannot be compared:

* ``mfu`` counts the full square of scores in every layer, as torchtitan, PaLM and nanoGPT do;
* ``mfu_causal`` counts the scores that masks leave: the half below the diagonal, as some vendors
  do, and of a layer with a window or chunks only these.

The formula is that of ``account_decoder`` in ``harness/model/accounting.py``.

Hardware that is not in the table has no MFU, because its peak is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.config.model import ModelConfig
from harness.metrics.columns import Metric
from harness.model.accounting import Accounting, account
from harness.util.hardware import Accelerator, find_accelerator

UTILIZATION = (
    Metric(
        "tokens_per_second_per_rank",
        "tokens/s",
        "`tokens_per_second` divided by the number of ranks.",
        in_summary=True,
    ),
    Metric(
        "tflops_per_device",
        "TFLOP/s",
        "Model FLOPs per second and rank, attention counted in full, as in `mfu`.",
        line=lambda v: f"TFLOP/s {v:,.1f}" if v >= 1 else f"TFLOP/s {v:.2g}",
    ),
    Metric(
        "mfu",
        "0 to 1",
        "Model FLOPs utilization, attention counted in full, also of windows and chunks; null without "
        "a known peak.",
        line="mfu {:.1%}",
        in_summary=True,
    ),
    Metric(
        "mfu_causal",
        "0 to 1",
        "The same with the attention that masks leave: half, or less with windows or chunks.",
    ),
)


@dataclass(frozen=True)
class Peak:
    """Peak of one device, FLOP/s without sparsity (None if unknown), and the source of the value."""

    flops: float | None
    origin: str


def peak_of(device_name: str, dtype: str, accelerator: Accelerator | None = None) -> Peak:
    """Return the peak for the MFU of a device.

    Args:
        device_name: from ``torch.cuda.get_device_name()``; for a CPU any other text.
        dtype: format of the matrix products: bfloat16, float16, float8, tf32 or float32.
        accelerator: the device, if the job describes it (``cluster.hardware``).
    """
    accelerator = accelerator or find_accelerator(device_name)
    if accelerator is None:
        return Peak(None, f"no known peak for {device_name!r}")
    if dtype not in accelerator.peak_flops:
        return Peak(None, f"no {dtype} peak for {accelerator.name} in {accelerator.source}")
    return Peak(
        accelerator.peak_flops[dtype], f"{accelerator.name}, dense {dtype}, {accelerator.source}"
    )


def mfu(
    tokens_per_second_per_device: float | None,
    flops_per_token: float | None,
    peak_flops: float | None,
) -> float | None:
    """Fraction of the peak, 0 to 1; None if one of the three is unknown."""
    if tokens_per_second_per_device is None or flops_per_token is None or peak_flops is None:
        return None
    return tokens_per_second_per_device * flops_per_token / peak_flops


def utilization(
    tokens_per_second_per_device: float | None, flops: Accounting, peak: Peak
) -> dict[str, float | None]:
    """Return the columns ``UTILIZATION``; a rate of None is unknown."""
    rate = tokens_per_second_per_device
    return {
        "tokens_per_second_per_rank": rate,
        "tflops_per_device": None if rate is None else rate * flops.flops_per_token_full / 1e12,
        "mfu": mfu(rate, flops.flops_per_token_full, peak.flops),
        "mfu_causal": mfu(rate, flops.flops_per_token_causal, peak.flops),
    }


def describe_inputs(flops: Accounting, peak: Peak) -> str:
    """Describe the inputs of the MFU on one line, for the start of a run."""
    full = flops.flops_per_token_full / 1e9
    causal = flops.flops_per_token_causal / 1e9
    work = f"{full:,.4g} GFLOP/token (full attention), {causal:,.4g} (causal half)"
    if peak.flops is None:
        return f"no MFU: {peak.origin}; {work}"
    return f"MFU from {work}, peak {peak.flops / 1e12:,.1f} TFLOP/s ({peak.origin})"


class Efficiency:
    """Convert the throughput of a job to its speed per rank and MFU."""

    def __init__(self, model: ModelConfig, seq_len: int, peak: Peak, world_size: int) -> None:
        self.accounting = account(model, seq_len)
        self.peak = peak
        self._model = model
        self._world_size = world_size
        self._known = {seq_len: self.accounting}

    def row(
        self, tokens_per_second: float | None, lengths: Mapping[int, int]
    ) -> dict[str, float | None]:
        """Return ``UTILIZATION`` for a throughput of all ranks; ``lengths`` as in ``mean``."""
        per_rank = None if tokens_per_second is None else tokens_per_second / self._world_size
        return utilization(per_rank, self.mean(lengths), self.peak)

    def mean(self, lengths: Mapping[int, int]) -> Accounting:
        """Return the accounting with the mean FLOPs per token: attention's depend on the length.

        Args:
            lengths: number of tokens by the length of their sequence; empty: all have the full
                length.
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
            flops_per_token_causal=sum(
                each.flops_per_token_causal * share for each, share in counts
            ),
        )
