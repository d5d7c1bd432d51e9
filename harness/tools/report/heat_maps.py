"""Maps of layers and steps on the page of a report: of ``metrics.tensors`` and ``metrics.activations``."""

import html
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from harness.launch.rows import Row
from harness.metrics.tensor_file import (
    ACTIVATIONS,
    TENSORS,
    TensorRecords,
    files_of,
    read_tensors,
)
from harness.util.document import Markup
from harness.util.words import plural

MOST_RUNS = 8
"""Runs with maps; a page with hundreds of them cannot be read."""
_MOST_COLUMNS = 80
_CELL = 12
_LEFT = 110
_BOTTOM = 18
# Room for the first step and the last, below few columns.
_LABELS = 90
_LAYER = re.compile(r"(.*layers\.\d+)\.")
# A share of the cells at both ends that does not decide the colors.
_OUTSIDE = 0.02
_TITLES = {
    "rms": "root mean square of the residual stream",
    "largest": "largest absolute value of the residual stream",
    "kurtosis": "kurtosis of the residual stream, 3 for a normal distribution",
    "router_entropy": "mean entropy of routers, nats",
    "max_logit": "largest score of attention before softmax",
}

Array = np.ndarray[Any, Any]


def maps_of(rows: Sequence[Row]) -> Markup | None:
    """Return a part of a page with the maps of the first runs that have records; None: none has."""
    found = []
    for row in rows:
        if not row.get("run_dir"):
            continue
        folder = Path(row["run_dir"])
        names = [name for name in _MAPS if files_of(folder, name)[0].exists()]
        if names:
            found.append((row["point"] or row["name"], folder, names))
    parts = []
    for title, folder, names in found[:MOST_RUNS]:
        drawn = []
        for name in names:
            records = read_tensors(folder, name)
            if len(records.steps):
                drawn += [_svg(records.steps, *each) for each in _MAPS[name](records)]
        if drawn:
            parts += [f"<h3>{html.escape(title)}</h3>", *drawn]
    if not parts:
        return None
    if len(found) > MOST_RUNS:
        parts.append(f"<p>{plural(len(found) - MOST_RUNS, 'more run')} with records</p>")
    return Markup("\n".join(parts), "The maps of layers and steps are on the page.")


def _of_activations(records: TensorRecords) -> list[tuple[str, list[str], Array]]:
    """Return the same as ``_of_tensors``: of each statistic a map of the places that have it."""
    maps = []
    for value, data in zip(records.values, np.moveaxis(records.data, 1, 0), strict=True):
        # A place that has a stream, and not this.
        lacks = np.isnan(data) & ~np.isnan(records.data[:, 0])
        names = [name for name, left in zip(records.names, lacks.any(0), strict=True) if not left]
        if names:
            maps.append((_TITLES[value], names, data[:, ~lacks.any(0)]))
    return maps


def _of_tensors(records: TensorRecords) -> list[tuple[str, list[str], Array]]:
    """Return title, names of layers, and numbers [records, layers] of each map."""
    layers: dict[str, list[int]] = {}
    for place, name in enumerate(records.names):
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name.partition(".")[0], []).append(place)
    squares = records.data.astype(np.float64) ** 2
    sizes = np.array(records.sizes)
    means = [
        np.sqrt(squares[:, :, places].sum(2) / sizes[places].sum()) for places in layers.values()
    ]
    # Of each value, its root mean square by record and layer.
    by_value = dict(zip(records.values, np.moveaxis(np.stack(means, 2), 1, 0), strict=True))
    weight = by_value["weight"]
    update = by_value["update"]
    ratio = np.divide(update, weight, out=np.zeros_like(update), where=weight != 0)
    return [
        ("root mean square of gradients, before clipping", [*layers], by_value["gradient"]),
        ("root mean square of weights", [*layers], weight),
        ("updates over weights, of their norms", [*layers], ratio),
    ]


_MAPS = {TENSORS: _of_tensors, ACTIVATIONS: _of_activations}


def _svg(steps: Array, title: str, layers: list[str], data: Array) -> str:
    """Draw one map: dark is large, on a log scale; what is not finite has a color of its own."""
    ends = np.linspace(0, len(steps), min(len(steps), _MOST_COLUMNS) + 1).astype(int)
    # Of each column the last record.
    chosen = [end - 1 for _, end in pairwise(ends)]
    known = data[np.isfinite(data) & (data > 0)]
    low, high = np.quantile(known, [_OUTSIDE, 1 - _OUTSIDE]) if known.size else (1.0, 1.0)
    cells = []
    for column, record in enumerate(chosen):
        for row, layer in enumerate(layers):
            value = data[record, row]
            words = html.escape(f"{layer}, step {steps[record]}: {value:.3g}")
            corner = f'x="{_LEFT + column * _CELL}" y="{row * _CELL}"'
            size = f'width="{_CELL}" height="{_CELL}"'
            color = _color(value, low, high)
            cells.append(f"<rect {corner} {size} {color}><title>{words}</title></rect>")
    for row, layer in enumerate(layers):
        corner = f'x="{_LEFT - 6}" y="{(row + 1) * _CELL - 2}"'
        cells.append(f'<text {corner} text-anchor="end">{html.escape(layer)}</text>')
    height = len(layers) * _CELL + _BOTTOM
    width = _LEFT + max(len(chosen) * _CELL, _LABELS)
    for place, anchor, record in ((_LEFT, "start", chosen[0]), (width, "end", chosen[-1])):
        text = f"step {steps[record]}" if anchor == "start" or len(chosen) > 1 else ""
        cells.append(f'<text x="{place}" y="{height - 4}" text-anchor="{anchor}">{text}</text>')
    caption = f"{title}: from {low:.2g} (light) to {high:.2g} (dark), log scale"
    style = "font-size: 10px; fill: currentColor; max-width: 100%; height: auto"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<p>{html.escape(caption)}</p>\n<svg {box} style="{style}">{"".join(cells)}</svg>'


def _color(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return 'fill="#c24d00"'
    share = 0.0
    if value > 0 and high > low:
        share = float(np.clip(np.log(value / low) / np.log(high / low), 0, 1))
    return f'fill="#0072b2" fill-opacity="{0.08 + 0.92 * share:.2f}"'
