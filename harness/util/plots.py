"""Figures without a window."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import product
from math import log10
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from harness.util.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that can be distinguished with any kind of colour blindness (Okabe and Ito).
COLORS = {
    "published": "#8c8c8c",
    "predicted": "#0072b2",
    "expected": "#56b4e9",
    "measured": "#d55e00",
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    # Omit matplotlib's version, so that equal pictures are equal files.
    figure.savefig(image, format="png", dpi=140, metadata={"Software": None})
    write_atomically(path, image.getvalue())


def smoothed(values: Sequence[float], steps: int) -> list[float]:
    """Mean of the last ``steps`` values at every step; of fewer at the start."""
    return [fmean(values[max(0, end - steps) : end]) for end in range(1, len(values) + 1)]


def ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers as ticks of a logarithmic axis."""
    if high < 8 * low:
        from matplotlib.ticker import MaxNLocator

        return [
            tick
            for tick in MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
            if tick > 0
        ]
    decades = range(int(log10(low)) - 1, int(log10(high)) + 1)
    round_numbers = [digit * 10.0**decade for decade, digit in product(decades, (1, 2, 5))]
    return [tick for tick in round_numbers if low <= tick <= high]
