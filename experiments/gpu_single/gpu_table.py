"""The table of the measurements on a GPU, the targets that they meet, and rows for ``harness report``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from gpu_cases import BASELINE, TARGET_SHAPE, Targets

from harness.compose.composer import compose_job
from harness.metrics.mfu import peak_of
from harness.tools.study.bench import Spread, ratios_by_round
from harness.util.encoding import flatten
from harness.util.hardware import find_accelerator
from harness.util.tables import GIB, Table, to_markdown

Row = dict[str, Any]
TORCHTITAN = "torchtitan.tokens_per_second_per_rank"
HEADER = (
    *("shape", "layers", "activation checkpoint", "mode", "tokens/s (range)", "MFU", "MFU, causal half"),
    *(
        "peak GiB",
        "s to step 1",
        f"over {BASELINE} (range)",
        "torchtitan tokens/s",
        "over torchtitan (range)",
    ),
    "target met",
)


def render(facts: Row, rows: Sequence[Row]) -> str:
    """Markdown: the machine, the table, and each target with the best value."""
    table: list[list[str]] = []
    best: dict[str, float] = {}
    for group in groups_of(rows):
        for mode in dict.fromkeys(row["mode"] for row in group):
            cells, reached = line_of(group, mode)
            table.append(cells)
            for target, figure in reached.items():
                best[target] = max(figure, best.get(target, figure))
    origins = sorted({row["peak_origin"] for row in rows if "peak_origin" in row})
    lines = [
        about(facts),
        "",
        to_markdown(Table.of_cells(HEADER, table)),
        f"MFU is against bfloat16 in every mode: {'; '.join(origins) or 'nothing ran'}.",
    ]
    lines += [*targets_in_words(facts, best), ""]
    lines += [f"{row_name(row)}: {row['failed']}: {row.get('message', '')}" for row in failures(rows)]
    return "\n".join(lines).rstrip()


def about(facts: Row) -> str:
    packages = ", ".join(f"{name} {value}" for name, value in facts["versions"].items() if value)
    platform = (
        f"CUDA {facts['cuda']}" if facts["cuda"] else f"HIP {facts['hip']}" if facts["hip"] else "no GPU"
    )
    commit = (
        f"commit {facts['commit'][:10]}{' and changes' if facts['dirty'] else ''}" if facts["commit"] else ""
    )
    return (
        f"{facts['device']}, {facts['memory'] / GIB:.1f} GiB, {platform}; {packages}; {commit}; "
        f"{facts['rounds']} rounds of {facts['steps']} steps, batch {facts['batch']}."
    )


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one shape and one way of activation checkpointing; of several sizes the last one tried."""
    keys = dict.fromkeys((row["shape"], row["activation_checkpoint"]) for row in rows)
    groups = []
    for key in keys:
        group = [row for row in rows if (row["shape"], row["activation_checkpoint"]) == key]
        last = group[-1]["n_layers"]
        groups.append([row for row in group if row["n_layers"] == last or row.get("failed") == "refused"])
    return groups


def figures(group: Sequence[Row], mode: str, side: str, name: str) -> dict[int, float]:
    """One figure of one mode and side by round; rounds that failed, or do not know it, are left out."""
    chosen = [row for row in group if (row["mode"], row["side"]) == (mode, side)]
    return {row["round"]: row[name] for row in chosen if row.get(name) is not None}


def line_of(group: Sequence[Row], mode: str) -> tuple[list[str], dict[str, float]]:
    """The cells of one mode, and its value for each target that applies."""
    own = {
        name: figures(group, mode, "harness", name)
        for name in ("tokens_per_second", "mfu", "mfu_causal", "memory_gib", "first_step_seconds")
    }
    rate = own["tokens_per_second"]
    theirs = figures(group, mode, "torchtitan", "tokens_per_second")
    over_titan = ratios_by_round(rate, theirs)
    over_baseline = ratios_by_round(rate, figures(group, BASELINE, "harness", "tokens_per_second"))
    reached: dict[str, float] = {}
    if group[0]["shape"] == TARGET_SHAPE:
        if mode == BASELINE and own["mfu"]:
            reached["mfu"] = statistics.median(own["mfu"].values())
        if mode.startswith("float8") and over_baseline:
            reached["float8"] = statistics.median(over_baseline)
        if over_titan:
            reached["torchtitan"] = statistics.median(over_titan)
    verdicts = [judged(target, figure) for target, figure in reached.items()]
    layers = group[-1]["n_layers"]
    failed = failure(group, mode, "harness")
    cells = [
        group[0]["shape"],
        "all" if layers is None else str(layers),
        group[0]["activation_checkpoint"],
        mode,
        failed or spread(list(rate.values()), ",.0f"),
        median(own["mfu"], ".1%"),
        median(own["mfu_causal"], ".1%"),
        median(own["memory_gib"], ".1f"),
        median(own["first_step_seconds"], ".0f"),
        spread(over_baseline, ".3f") if mode != BASELINE else "-",
        failure(group, mode, "torchtitan") or spread(list(theirs.values()), ",.0f"),
        spread(over_titan, ".3f"),
        "; ".join(verdicts) or "-",
    ]
    return cells, reached


def judged(target: str, figure: float) -> str:
    """Format the best value for a target, and whether it is enough."""
    wanted = getattr(Targets(), target)
    shown = {"mfu": f"MFU {figure:.1%} of {wanted:.0%}"}.get(target, f"{target} {figure:.3f} of {wanted:.2f}")
    return f"{shown}: {'yes' if figure >= wanted else 'no'}"


def targets_in_words(facts: Row, best: dict[str, float]) -> list[str]:
    targets = Targets()
    here = "" if targets.device in facts["device"] else f" (this is a {facts['device']})"
    lines = [f"Targets, stated for an {targets.device} at the {TARGET_SHAPE} shape{here}, by the best row:"]
    wanted = {
        "mfu": f"{BASELINE} at least {targets.mfu:.0%} MFU",
        "float8": f"float8 at least {targets.float8} x {BASELINE}",
        "torchtitan": f"at least {targets.torchtitan} x torchtitan's tokens/s",
    }
    for target, words in wanted.items():
        lines.append(f"- {words}: {judged(target, best[target]) if target in best else 'not measured'}")
    return lines


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "failed" in row]


def failure(group: Sequence[Row], mode: str, side: str) -> str:
    """How a mode failed, in two words; empty if it did not."""
    found = [row["failed"] for row in failures(group) if (row["mode"], row["side"]) == (mode, side)]
    return found[0].replace("_", " ") if found else ""


def row_name(row: Row) -> str:
    layers = f" {row['n_layers']} layers" if row["n_layers"] else ""
    return f"- {row['shape']}{layers}, {row['activation_checkpoint']}, {row['mode']}, {row['side']}"


def median(values: dict[int, float], form: str) -> str:
    found = Spread.of(list(values.values()))
    return format(found.median, form) if found else "-"


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the range behind it where there are several."""
    found = Spread.of(values)
    if found is None:
        return "-"
    middle, between = found.as_text(form)
    return middle if len(values) == 1 else f"{middle} ({between})"


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
