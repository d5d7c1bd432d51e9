"""Convert the rows of all rounds to rows of ``harness report``, with torchtitan's rates beside."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.compose.composer import compose_job
from harness.metrics.mfu import peak_of
from harness.util.encoding import flatten
from harness.util.hardware import find_accelerator

Row = dict[str, Any]
TORCHTITAN = "torchtitan.tokens_per_second_per_rank"


def report_rows(facts: Row, rows: Sequence[Row]) -> list[Row]:
    """Return a row for each case of the harness: medians over rounds, with torchtitan's median beside it.

    If a shape was reduced to fit into memory, only rows with its final number of layers count, as in
    ``table.md``.
    """
    last: dict[tuple[str, str], int | None] = {}
    for row in rows:
        if row.get("failed") != "refused":
            last[row["shape"], row["activation_checkpoint"]] = row["n_layers"]
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        group = (row["shape"], row["activation_checkpoint"])
        if row.get("failed") == "refused" or row["n_layers"] == last[group]:
            cases.setdefault((*group, row["mode"]), []).append(row)
    return [_of_case(each, facts) for each in cases.values() if any(row["side"] == "harness" for row in each)]


def _of_case(rows: Sequence[Row], facts: Row) -> Row:
    ours = [row for row in rows if row["side"] == "harness"]
    first, failed = ours[0], [row for row in ours if "failed" in row]
    layers = f" {first['n_layers']} layers" if first["n_layers"] else ""
    row = {
        "point": f"{first['shape']}{layers} {first['mode']} {first['activation_checkpoint']}",
        "state": "completed",
        "kind": None,
        "reason": "",
        "device": facts["device"],
        "world_size": 1,
        "overrides": first.get("overrides", []),
        "command": "python experiments/gpu_single/run.py",
        **{f"code.versions.{name}": value for name, value in facts["versions"].items()},
        "code.commit": facts["commit"],
        "code.dirty": facts["dirty"],
        **_described(first.get("overrides"), facts["device"]),
    }
    if failed:
        failure = failed[0]
        state = "skipped" if failure["failed"] in ("refused", "does not fit") else "failed"
        return {**row, "state": state, "kind": failure["failed"], "reason": failure.get("message", "")}
    rates = [each["tokens_per_second"] for each in ours]
    peak = peak_of(facts["device"], "bfloat16")
    row |= {"peak_flops": peak.flops, "peak_origin": peak.origin, "rounds": len(rates)}
    middle = statistics.median(rates)
    row |= {
        "measured.tokens_per_second_per_rank": middle,
        "measured.low": min(rates),
        "measured.high": max(rates),
        "measured.spread": (max(rates) - min(rates)) / middle,
        "measured.step_seconds": statistics.median(each["step_seconds"] for each in ours),
        "measured.memory_gib": max(each["memory_gib"] for each in ours),
    }
    if all(each.get("mfu") is not None for each in ours):
        row["measured.mfu"] = statistics.median(each["mfu"] for each in ours)
    others = [each for each in rows if each["side"] == "torchtitan" and "failed" not in each]
    if others:
        row[TORCHTITAN] = statistics.median(each["tokens_per_second"] for each in others)
    return row


def _described(overrides: list[str] | None, device: str) -> Row:
    """Compose a row's job again, on a node with the device it was measured on; return its fields."""
    if not overrides:
        return {}
    accelerator = find_accelerator(device)
    if "cluster.device=cuda" in overrides:
        overrides = [*overrides, "cluster=slurm"]
        overrides += [f"cluster.accelerator='{accelerator.name}'"] if accelerator is not None else []
    job = compose_job(overrides)
    return {"id": job.id, "numerics_id": job.numerics_id, "name": job.name, **flatten({"job": job.to_dict()})}
