"""Points as tables: aligned text, Markdown, CSV, and a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.metrics.atomic import write_atomically
from harness.sweep.registry import labels
from harness.sweep.state import Seen

COLUMNS = ("point", "state", "step", "tokens/s", "MFU", "memory GiB", "loss", "reason")
LONGEST_REASON = 110
# Tables speak of points, plots of speed: what is not known is not drawn.
_INCHES_PER_POINT, _LEAST_INCHES = 0.32, 2.2


def rows_of(seen: Sequence[Seen], *, whole: bool = False) -> list[dict[str, str]]:
    """One row a point, as text; an unknown value is empty.

    Args:
        seen: the points.
        whole: give reasons in full.
    """
    names = labels([each.point.overrides for each in seen])
    rows = []
    for name, each in zip(names, seen, strict=True):
        facts = each.facts or {}
        reason = each.about
        if not whole and len(reason) > LONGEST_REASON:
            reason = reason[: LONGEST_REASON - 1] + "…"
        rows.append(
            {
                "point": name,
                "state": each.state,
                "step": f"{each.step}/{each.steps}",
                "tokens/s": _number(facts.get("tokens_per_second"), ",.0f"),
                "MFU": _number(facts.get("mfu"), ".1%"),
                "memory GiB": _number(facts.get("memory_gib"), ".2f"),
                "loss": _number(facts.get("loss"), ".4f"),
                "reason": reason,
            }
        )
    return rows


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """A table for the terminal; columns that are empty all the way are left out."""
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    numbers = {name for name in columns if name not in ("point", "state", "reason")}

    def line(values: dict[str, str]) -> str:
        cells = [
            values[name].rjust(widths[name]) if name in numbers else values[name].ljust(widths[name])
            for name in columns
        ]
        return "  ".join(cells).rstrip() + "\n"

    return line({name: name for name in columns}) + "".join(line(row) for row in rows)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The same for a page."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row[name].replace('|', chr(92) + '|') for name in COLUMNS)} |" for row in rows]
    return "\n".join(lines) + "\n"


def write_csv(path: Path, seen: Sequence[Seen], results: Sequence[dict[str, Any]]) -> None:
    """Writes everything that the results say, one row a point, one column a figure."""
    names = labels([each.point.overrides for each in seen])
    known = list(dict.fromkeys(key for result in results for key in result))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "state", "kind", *known])
        for name, each, result in zip(names, seen, results, strict=True):
            writer.writerow([name, each.state, each.kind or "", *(_plain(result.get(key)) for key in known)])


def draw(path: Path, title: str, seen: Sequence[Seen]) -> None:
    """Draws throughput and memory of every point that has them, the fastest on top, and names the others."""
    import io

    from matplotlib.figure import Figure

    names = labels([each.point.overrides for each in seen])
    pairs = sorted(
        zip(names, seen, strict=True), key=lambda pair: (pair[1].facts or {}).get("tokens_per_second") or 0
    )
    height = max(_LEAST_INCHES, 1.1 + _INCHES_PER_POINT * len(pairs))
    figure = Figure(figsize=(11, height), layout="constrained")
    rates, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axis, fact, what, color in (
        (rates, "tokens_per_second", "tokens per second", "#3b6ea8"),
        (memory, "memory_gib", "peak memory of a rank, GiB", "#b5653a"),
    ):
        values = [(each.facts or {}).get(fact) if each.state == "completed" else None for _, each in pairs]
        axis.barh(range(len(pairs)), [value or 0.0 for value in values], color=color)
        axis.set_xlabel(what)
        axis.spines[["top", "right"]].set_visible(False)
        for place, (value, (_, each)) in enumerate(zip(values, pairs, strict=True)):
            if value is not None:
                text = f" {value:,.0f}" if fact == "tokens_per_second" else f" {value:.2f}"
                if fact == "tokens_per_second" and (mfu := (each.facts or {}).get("mfu")) is not None:
                    text += f" ({mfu:.1%} MFU)"
                axis.text(value, place, text, va="center", fontsize=8)
            elif axis is rates:
                axis.text(
                    0, place, f" {each.state}{f': {each.kind}' if each.kind else ''}", va="center", fontsize=8
                )
        axis.margins(x=0.18)
    rates.set_yticks(range(len(pairs)), [name for name, _ in pairs], fontsize=8)
    figure.suptitle(title)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_atomically(path, image.getvalue())


def _number(value: float | None, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _plain(value: Any) -> Any:
    return "" if value is None else value
