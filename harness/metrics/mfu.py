"""Model FLOPs utilization (MFU): the fraction of a device's peak FLOP/s that the model's own arithmetic uses.

Defined in PaLM (https://arxiv.org/abs/2204.02311, appendix B): observed tokens per second divided by the
tokens per second at peak. Recomputed activations do not count. There are two ways to count causal attention;
both are reported, because values of different conventions cannot be compared:

* ``mfu`` counts the full square of scores, as torchtitan, PaLM and nanoGPT do;
* ``mfu_causal`` counts the half below the diagonal, as some vendors do.

Hardware that is not in the table has no MFU, because its peak is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.model.accounting import Accounting
from harness.util.hardware import Accelerator, find_accelerator


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
    return Peak(accelerator.peak_flops[dtype], f"{accelerator.name}, dense {dtype}, {accelerator.source}")


def mfu(
    tokens_per_second_per_device: float | None, flops_per_token: float | None, peak_flops: float | None
) -> float | None:
    """Fraction of the peak, 0 to 1; None if one of the three is unknown."""
    if tokens_per_second_per_device is None or flops_per_token is None or peak_flops is None:
        return None
    return tokens_per_second_per_device * flops_per_token / peak_flops


def utilization(
    tokens_per_second_per_device: float | None, flops: Accounting, peak: Peak
) -> dict[str, float | None]:
    """Fields of a row: ``tflops_per_device`` and ``mfu`` (full attention), ``mfu_causal`` (half)."""
    rate = tokens_per_second_per_device
    return {
        "tflops_per_device": None if rate is None else rate * flops.flops_per_token_full / 1e12,
        "mfu": mfu(rate, flops.flops_per_token_full, peak.flops),
        "mfu_causal": mfu(rate, flops.flops_per_token_causal, peak.flops),
    }


def describe_inputs(flops: Accounting, peak: Peak) -> str:
    """Describe the inputs of the MFU on one line, for the start of a run."""
    full, causal = flops.flops_per_token_full / 1e9, flops.flops_per_token_causal / 1e9
    work = f"{full:,.4g} GFLOP/token (full attention), {causal:,.4g} (causal half)"
    if peak.flops is None:
        return f"no MFU: {peak.origin}; {work}"
    return f"MFU from {work}, peak {peak.flops / 1e12:,.1f} TFLOP/s ({peak.origin})"
