"""The plan's memory beside published memory: tables of ``errors.py``.

The column ``memory_is`` says what a row reports: what the allocator reserved (torchtitan's log), or
``allocated``. ``memory_inexpressible`` says why our options cannot express a row's memory: its trainer keeps
other tensors. Such rows are counted and shown, but apart from the others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from errors import Row


def memory_tables(rows: Sequence[Row]) -> str:
    """Errors of the plan's memory by table, in Markdown, and the jobs that ran but do not fit."""
    published = [row for row in rows if row.memory is not None]
    ours = [row for row in published if not row.memory_inexpressible]
    others = [row for row in published if row.memory_inexpressible]
    lines = ["| memory | reported | rows | median | range | median amount |", "|---|---|---|---|---|---|"]
    tables: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in [*ours, *others]:
        name = "{} (not expressible)" if row.memory_inexpressible else "{}"
        tables[name.format(row.raw["table"]), row.memory_is].append(row)
    lines += [_line(*key, own) for key, own in tables.items()]
    lines += [_line("all that our options express", "", ours)]
    lines += [_line("all others", "", others)]
    large = [row for row in rows if row.plan.fits is False]
    why = sum(not row.memory_inexpressible for row in large)
    lines += ["", f"{len(large)} jobs that ran are too large for the plan; {why} of them are expressible."]
    for reason in dict.fromkeys(row.memory_inexpressible for row in [*others, *large]):
        if reason:
            count = sum(row.memory_inexpressible == reason for row in rows)
            lines.append(f"* not expressible, rows {count}: {reason}")
    return "\n".join(lines)


def _line(table: str, kind: str, rows: Sequence[Row]) -> str:
    errors = [row.memory for row in rows if row.memory is not None]
    amount = statistics.median(map(abs, errors))
    extremes = f"{min(errors):+.0%} to {max(errors):+.0%}"
    return (
        f"| {table} | {kind} | {len(rows)} | {statistics.median(errors):+.1%} | {extremes} | {amount:.1%} |"
    )
