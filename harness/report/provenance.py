"""Where rows come from: hardware, versions, commit, window and command of each. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report.document import Column, Section, Table

Row = dict[str, Any]
VERSIONS = "code.versions."
_FACTS = {
    "device": "device",
    "ranks": "ranks",
    "system": "system",
    "versions": "versions",
    "commit": "commit",
    "window": "steps that count",
}


def section_of(rows: Sequence[Row]) -> Section | None:
    """What all rows share in a list, the rest in a table with their commands; None without measurements."""
    measured = [row for row in rows if row["state"] == "completed"]
    if not measured:
        return None
    told = [{"point": row["point"], "command": f"`{row['command']}`", **_facts(row)} for row in measured]
    shared = [name for name in _FACTS if len({row[name] for row in told}) == 1]
    text = [f"- {_FACTS[name]}: {told[0][name]}" for name in shared if told[0][name]]
    columns = [
        Column("point", "run"),
        *(Column(name, words) for name, words in _FACTS.items() if name not in shared),
        Column("command", "command"),
    ]
    return Section("Where the figures are from", text, Table(columns, told))


def _facts(row: Row) -> dict[str, str]:
    versions = {key.removeprefix(VERSIONS): value for key, value in row.items() if key.startswith(VERSIONS)}
    commit = (row.get("code.commit") or "")[:10]
    steps = row.get("window.window_steps")
    rounds = row.get("rounds")
    cores = row.get("host.cores")
    system = row.get("host.system") or ""
    return {
        "device": str(row.get("device") or ""),
        "ranks": str(row.get("world_size") or ""),
        "system": f"{system}, {cores} cores" if system and cores else system,
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value),
        "commit": f"{commit}{' with changes' if row.get('code.dirty') else ''}" if commit else "",
        "window": f"{rounds} rounds" if rounds else "" if steps is None else str(steps),
    }
