"""Bars of published, predicted and measured throughput and memory."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from harness.launch.rows import Row
from harness.tools.report.predictions import MEMORY, RATE
from harness.util.plots import COLORS, new_panels, save
from harness.util.words import figure, shortened

_WORDS = {
    "published": "published",
    "predicted": "predicted",
    "expected": "predicted, machine of the measurement",
    "measured": "measured",
}
_INCHES_PER_BAR = 0.2
_AROUND = 1.5
"""Inches of title, axis and legend."""
_PANELS = ((RATE, "tokens per second and rank"), (MEMORY, "peak memory of a rank, GiB"))
_LONGEST_NAME = 60


def bars(path: Path, title: str, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Plot throughput and memory, with a bar for each known kind of value; return whether there was any."""
    kinds = [kind for kind in COLORS if any(row.get(f"{kind}.{RATE}") is not None for row in rows)]
    if not kinds or find_spec("matplotlib") is None:
        return False
    height = _INCHES_PER_BAR * (len(kinds) + 0.8) * len(rows)
    drawing, [panels] = new_panels(
        1, 2, 13, max(_AROUND + height, 2.6), sharey=True, width_ratios=(3, 2)
    )
    width = 0.8 / len(kinds)
    for axis, (fact, what) in zip(panels, _PANELS, strict=True):
        for number, kind in enumerate(kinds):
            values = [row.get(f"{kind}.{fact}") for row in rows]
            places = [index - 0.4 + (number + 0.5) * width for index in range(len(rows))]
            labels = []
            for row, value in zip(rows, values, strict=True):
                share = row.get(f"{kind}.mfu") if fact == RATE else None
                mfu = "" if share is None else f" ({share:.1%} MFU)"
                labels.append("" if value is None else f"{figure(value)}{mfu}")
            lengths = [value or 0.0 for value in values]
            drawn = axis.barh(places, lengths, 0.92 * width, color=COLORS[kind], label=_WORDS[kind])
            axis.bar_label(drawn, labels, padding=2, fontsize=7)
        axis.margins(x=0.16)
        axis.set_xlabel(what)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panels[0].set_yticks(range(len(rows)), [shortened(name, _LONGEST_NAME) for name in names])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    save(drawing, path, title, panels[0].get_legend_handles_labels()[0] if len(kinds) > 1 else ())
    return True
