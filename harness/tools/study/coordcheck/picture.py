"""Draw activations by width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.tools.study.coordcheck.judge import STEADY, Verdict
from harness.tools.study.coordcheck.measure import Activation
from harness.util.plots import COLORS, new_figure, save

_WIDTH, _HEIGHT = 2.3, 2.3
_ROWS = (("rms", "RMS of activations"), ("change", "RMS of change since step 0"))


def draw(
    path: Path, title: str, activations: Sequence[Activation], verdicts: Sequence[Verdict], bound: float
) -> None:
    """Draw a panel for each kind of module: a line for each module and step, darker with each step.

    A panel's title has the largest exponent of its modules, in another color if one of them is not steady.
    """
    import matplotlib

    kinds = list(dict.fromkeys(each.kind for each in activations))
    last = max(each.step for each in activations)
    colors = matplotlib.colormaps["viridis_r"]
    figure = new_figure(_WIDTH * len(kinds), _HEIGHT * len(_ROWS) + 0.7)
    panels = figure.subplots(len(_ROWS), len(kinds), sharex=True, squeeze=False)
    for row, (name, label) in zip(panels, _ROWS, strict=True):
        row[0].set_ylabel(label, fontsize=8)
        for axis, kind in zip(row, kinds, strict=True):
            _lines(axis, [each for each in activations if each.kind == kind], name, last, colors)
            of_kind = [each for each in verdicts if each.kind == kind]
            slopes = [each.slope if name == "rms" else each.change_slope for each in of_kind]
            worst = max(slopes) if name == "rms" else max(slopes, key=abs)
            heading = f"{kind}\nexponent {worst:+.2f}" if name == "rms" else f"exponent {worst:+.2f}"
            passed = all(each.word == STEADY for each in of_kind)
            axis.set_title(heading, fontsize=8, color="black" if passed else COLORS["measured"])
    for axis in panels[-1]:
        axis.set_xlabel("width", fontsize=8)
    steady = sum(each.word == STEADY for each in verdicts)
    figure.suptitle(f"{title}: {steady} of {len(verdicts)} modules steady (bound {bound:g})", fontsize=10)
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, last), colors)
    figure.colorbar(scale, ax=panels, label="step", ticks=range(last + 1), shrink=0.6, pad=0.01)
    save(figure, path)


def _lines(axis: Any, activations: Sequence[Activation], name: str, last: int, colors: Any) -> None:
    """Draw the lines of one kind of module, for the field ``name``."""
    modules = dict.fromkeys(each.module for each in activations)
    for module in modules:
        for step in range(1 if name == "change" else 0, last + 1):
            points = sorted(
                (each.width, getattr(each, name))
                for each in activations
                if each.module == module and each.step == step
            )
            axis.plot(*zip(*points, strict=True), color=colors(step / max(1, last)), linewidth=0.8)
    axis.set(xscale="log", yscale="log")
    widths = sorted({each.width for each in activations})
    axis.set_xticks(widths, map(str, widths), fontsize=7)
    axis.minorticks_off()
    axis.tick_params(labelsize=7)
    # A power of at least 2 in view, so that noise does not look like a trend.
    low, high = axis.get_ylim()
    middle = (low * high) ** 0.5
    axis.set_ylim(min(low, middle / 3), max(high, middle * 3))
    axis.spines[["top", "right"]].set_visible(False)
