"""Figures without a window."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def new_panels(
    rows: int, columns: int, width: float, height: float, **subplots: Any
) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, without a window, and its panels, [rows, columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **subplots)
    for axis in panels.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, panels


def save(figure: Figure, path: Path, title: str = "", handles: Sequence[Any] = ()) -> None:
    """Write a figure as PNG, with a title and a legend of ``handles``, in a folder that is made."""
    if title:
        figure.suptitle(title, fontsize=11)
    if handles:
        longest = max(len(each.get_label()) for each in handles)
        columns = max(1, int(figure.get_figwidth() / (0.8 + 0.09 * longest)))
        figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    # Omit matplotlib's version, so that equal pictures are equal files.
    figure.savefig(image, format="png", dpi=140, metadata={"Software": None})
    write_atomically(path, image.getvalue())
