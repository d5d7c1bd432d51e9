"""Format rows of metrics as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Format = Callable[[Any], str]

EVALUATION = "evaluation."
SOURCE_VALIDATION = "validation_loss."

# In the order of a line: key of the row, its name on the line, its format.
_FIELDS: tuple[tuple[str, str, Format], ...] = (
    ("loss", "loss", lambda v: f"{v:.4f}"),
    ("loss_max", "loss_max", lambda v: f"{v:.4f}"),
    ("mtp_loss", "mtp_loss", lambda v: f"{v:.4f}"),
    ("validation_loss", "validation_loss", lambda v: f"{v:.4f}"),
    ("grad_norm", "grad_norm", lambda v: f"{v:.3f}"),
    ("lr", "lr", lambda v: f"{v:.2e}"),
    ("tokens_per_second", "tokens/s", lambda v: f"{v:,.0f}"),
    ("tflops_per_device", "TFLOP/s", lambda v: f"{v:,.1f}" if v >= 1 else f"{v:.2g}"),
    ("mfu", "mfu", lambda v: f"{v:.1%}"),
    ("memory_gib", "mem", lambda v: f"{v:.2f} GiB"),
    ("data_share", "data", lambda v: f"{v:.1%}"),
)


def metrics_text(row: Mapping[str, Any]) -> str:
    """Format the metrics of a row, without its step; None and keys without a format are left out."""
    shown = [f"{name} {text(row[key])}" for key, name, text in _FIELDS if row.get(key) is not None]
    evaluated = [key for key in row if key.startswith((EVALUATION, SOURCE_VALIDATION))]
    return "  ".join(shown + [f"{key.removeprefix(EVALUATION)} {row[key]:.5g}" for key in evaluated])


def row_line(row: Mapping[str, Any], total_steps: int) -> str:
    """``step    20/100  loss 5.1234  grad_norm 1.234 ...``."""
    width = max(5, len(str(total_steps)))
    return f"step {row['step']:>{width}}/{total_steps}  {metrics_text(row)}".rstrip()


def summary_lines(title: str, values: Mapping[str, Any]) -> list[str]:
    """Return a heading and one aligned line per value that is not None."""
    shown = {name: _format(value) for name, value in values.items() if value is not None}
    width = max(map(len, shown), default=0)
    return [title, *(f"  {name:<{width}}  {text}" for name, text in shown.items())]


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
