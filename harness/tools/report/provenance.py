"""Provenance of rows: hardware, versions, commit, window and command. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.util.document import Column, Section, Table

Row = dict[str, Any]
VERSIONS = "code.versions."
_FACTS = {
    "device": "device",
    "ranks": "ranks",
    "system": "system",
    "versions": "versions",
    "commit": "commit",
    "window": "measured steps",
}


def section_of(rows: Sequence[Row]) -> Section | None:
    """Return a section with a list of shared facts, and a table of the rest; None without measurements."""
    measured = [row for row in rows if row["state"] == "completed"]
    if not measured:
        return None
    facts = [{"point": row["point"], "command": f"`{row['command']}`", **_facts(row)} for row in measured]
    shared = [name for name in _FACTS if len({row[name] for row in facts}) == 1]
    text = [f"- {_FACTS[name]}: {facts[0][name]}" for name in shared if facts[0][name]]
    columns = [
        Column("point", "run"),
        *(Column(name, words) for name, words in _FACTS.items() if name not in shared),
        Column("command", "command"),
    ]
    return Section("Provenance", text, Table(columns, facts))


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
