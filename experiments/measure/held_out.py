"""Errors of the plan on published rows, with constants that were fitted without the row's source.

    python experiments/measure/held_out.py

experiments/published/rows.csv has 114 rows of 15 tables with the overrides that express each, and what the
tables leave open; experiments/llama3_h100 has 18 more. Each source is left out in turn: the constants
``HELD_FITTED`` are fitted to all others, and its rows are planned with them. Tables
of one document or pull request come from one cluster, so they are one source. Writes held_out.csv and
held_out.md, and prints the bands of harness/tools/plan/evidence.py, by the rules of held_rows.py.
"""

from __future__ import annotations

import csv
import math
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import held_rows
from held_rows import FOLDER, MEMORY, SPEED, Held

sys.path.insert(0, str(FOLDER.parent / "llama3_h100"))

import torchtitan_rows
from torchtitan_rows import software_of

from harness.compose.composer import Composer
from harness.config.job import Job
from harness.model.accounting import account
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.evidence import class_of
from harness.tools.plan.make import (
    FITTED,
    START,
    descend,
    make_plan,
    predicted_rate,
    scale_constants,
)
from harness.tools.plan.plan import Plan
from harness.util.words import GIB

ROOT = Path(__file__).resolve().parents[2]
FILE, REPORT = FOLDER / "rows.csv", FOLDER / "held_out.md"
# Typical error of a source, and expected deviation of constants from their start, of the logarithm.
NOISE, PRIOR = 0.15, 0.25
HELD_FITTED, HELD_START = (*FITTED, "hgx"), replace(START, hgx=1.0)
STEP = 0.25
"""Logarithm by which constants are moved to find the response of a row."""


@dataclass(frozen=True)
class Row:
    """A published row, and the plan of its job with the default constants."""

    raw: dict[str, str]
    plan: Plan
    calibration: Calibration

    @property
    def published(self) -> float | None:
        """Published tokens per second and GPU; None if there is no throughput.

        Some tables have FLOP/s or MFU instead, which count attention over the full square in every layer
        (torchtitan/models/utils.py, get_moe_model_nparams_and_flops).
        """
        if tokens := self.raw["published_tokens_per_second_per_gpu"]:
            return float(tokens)
        job, device = self.plan.job, self.plan.accelerator
        whole = replace(job.model, attention=replace(job.model.attention, window=None))
        each = account(whole, job.training.seq_len).flops_per_token_full
        if tflops := self.raw["published_tflops"]:
            return float(tflops) * 1e12 / each
        if (mfu := self.raw["published_mfu"]) and device is not None:
            return float(mfu) / 100 * device.peak_flops["bfloat16"] / each
        return None

    @property
    def planned_gib(self) -> float:
        """Peak memory, of the kind that was published: reserved by the allocator, or allocated."""
        reserved = (self.raw.get("memory_is") or "reserved") == "reserved"
        return (self.plan.peak if reserved else self.plan.allocated) / GIB


def plan_all(raws: Iterable[dict[str, str]]) -> list[Row]:
    """Plan published rows, with the software of their trainers."""
    composer, rows = Composer(), []
    for raw in raws:
        calibration = Calibration(Constants(), software=software_of(raw))
        rows.append(
            Row(
                raw,
                make_plan(composer.job(shlex.split(raw["overrides"])), calibration),
                calibration,
            )
        )
    return rows


def torchtitan() -> list[Row]:
    """The rows of experiments/llama3_h100, planned."""
    rows = []
    for published, job in torchtitan_rows.jobs():
        raw = {
            "table": f"torchtitan {published.table}",
            "published_tokens_per_second_per_gpu": str(published.tokens_per_second_per_rank),
            "published_gib": str(published.memory_gib),
            "source": published.source.partition(" Table")[0],
            "memory_inexpressible": published.memory_inexpressible,
        }
        calibration = Calibration(Constants(), software=published.software)
        rows.append(Row(raw, make_plan(job, calibration), calibration))
    return rows


@dataclass(frozen=True)
class Response:
    """Logarithm of planned over published throughput, to second order in the logarithms of constants."""

    source: str
    at_start: float
    terms: dict[str, tuple[float, float]]
    """Slope and curvature by constant."""

    def miss(self, logs: dict[str, float]) -> float:
        """The logarithm, if the constants are moved by ``logs``."""
        moved = ((logs.get(name, 0.0), terms) for name, terms in self.terms.items())
        return self.at_start + sum(
            slope * log + curvature * log**2 for log, (slope, curvature) in moved
        )


def respond(row: Row, source: str) -> Response:
    """Plan a row with moved constants."""
    published = row.published
    assert published is not None

    def log_of(**logs: float) -> float:
        return math.log(predicted_rate(row.plan.job, _moved(row, logs)) / published)

    middle, terms = log_of(), {}
    for name in HELD_FITTED:
        lower, upper = log_of(**{name: -STEP}), log_of(**{name: STEP})
        terms[name] = (upper - lower) / (2 * STEP), (upper + lower - 2 * middle) / (2 * STEP**2)
    return Response(source, middle, terms)


def _moved(row: Row, logs: dict[str, float]) -> Calibration:
    return scale_constants(replace(row.calibration, constants=HELD_START), logs)


def fit(responses: Iterable[Response]) -> dict[str, float]:
    """Fit the logarithms of constants.

    Every source counts once, and by its mean amount, so that one that is far off moves them little.
    """
    by_source: dict[str, list[Response]] = defaultdict(list)
    for each in responses:
        by_source[each.source].append(each)

    def cost_of(logs: dict[str, float]) -> float:
        misses = (
            statistics.mean(abs(each.miss(logs)) for each in own) for own in by_source.values()
        )
        return sum(misses) / NOISE + sum(log**2 for log in logs.values()) / PRIOR**2

    return descend(cost_of, HELD_FITTED)


def sources_of(rows: Sequence[Row]) -> dict[str, str]:
    """The table that stands for each table: the first one with a common source."""
    groups: list[tuple[str, set[str]]] = []
    found: dict[str, str] = {}
    for table in dict.fromkeys(row.raw["table"] for row in rows):
        names = {row.raw["source"] for row in rows if row.raw["table"] == table}
        found[table] = next((first for first, known in groups if known & names), table)
        groups.append((found[table], names))
    return found


def hold_out(rows: Sequence[Row]) -> tuple[list[Held], list[Response]]:
    """Return all rows planned without their source, and the responses of those with a throughput."""
    sources = sources_of(rows)
    responses = [
        respond(row, sources[row.raw["table"]]) for row in rows if row.published is not None
    ]
    held = []
    for source in dict.fromkeys(sources.values()):
        logs = fit(each for each in responses if each.source != source)
        held += [_held(row, source, logs) for row in rows if sources[row.raw["table"]] == source]
    return held, responses


def _held(row: Row, source: str, logs: dict[str, float]) -> Held:
    job, accelerator = row.plan.job, row.plan.accelerator
    assert accelerator is not None
    of, gib = class_of(job, accelerator.name), row.raw["published_gib"]
    assert of is not None, accelerator.name
    return Held(
        table=row.raw["table"],
        source=source,
        of=of,
        layout=_layout(job),
        setting=_setting(job),
        doubt=row.raw.get("doubt", ""),
        inexpressible=row.raw.get("memory_inexpressible", ""),
        published=row.published,
        planned=predicted_rate(job, _moved(row, logs)),
        published_gib=float(gib) if gib else None,
        planned_gib=row.planned_gib if gib else row.plan.peak / GIB,
    )


def _layout(job: Job) -> str:
    layout = job.parallelism
    degrees = " ".join(f"{axis}{degree}" for axis, degree in layout.degrees.items() if degree > 1)
    experts = f" ep{layout.ep}" if layout.ep > 1 else ""
    stages = f"{layout.pp_layers_per_stage or ''} layers"
    schedule = (
        f" {layout.pp_schedule} {stages} x {layout.pp_microbatch_size}" if layout.pp > 1 else ""
    )
    mode = job.activation_checkpoint.mode
    return f"{degrees}{experts}{schedule}, {job.local_batch_size} at once, {mode}"


def _setting(job: Job) -> str:
    """Name of the fields that a search keeps, but for the batch."""
    model, compiled = job.model, "compiled" if job.compile.blocks else "eager"
    kind = f"{job.precision.linear} {compiled}{' async_tp' * job.parallelism.async_tp}"
    return f"{model.name} {model.dim} x {model.n_layers}, {job.world_size} x {job.training.seq_len}, {kind}"


def write(held: Sequence[Held]) -> None:
    """Write held_out.csv."""
    with held_rows.FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = list(Held.__dataclass_fields__)
        writer.writerow(names)
        for row in held:
            values = [getattr(row, name) for name in names]
            writer.writerow(
                [f"{value:.6g}" if isinstance(value, float) else value for value in values]
            )


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation; None below 3 pairs or without variation."""
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(pairs).statistic)


def report(held: Sequence[Held]) -> str:
    """The errors as Markdown."""
    found, head = held_rows.coverage(held, SPEED), "rows | median amount | median | worst"
    lines = [
        "Throughput: planned over published, each table with constants that were fitted without its source.",
        "The order is Spearman's rank correlation, for tables with four rows or more.",
        *("", f"| table | {head} | order |", "|---|---:|---:|---:|---:|---:|"),
    ]
    orders = []
    for table, own in _groups(held, lambda row: row.table).items():
        order = ""
        if len(own) >= 4:
            pairs = [(row.published, row.planned) for row in own if row.published is not None]
            orders.append(spearman(pairs) or 0.0)
            order = f"{orders[-1]:.2f}"
        lines.append(f"| {table} | {_figures(own)} | {order} |")
    lines += ["", f"| class | {head} | in the band |", "|---|---:|---:|---:|---:|---:|"]
    for name, own in sorted(_groups(held, lambda row: row.of).items()):
        lines.append(f"| {name} | {_figures(own)} | {found.by_class[name]:.0%} |")
    mixtures = [row for row in held if row.kind == "mixtures of experts"]
    lines += [f"| all mixtures of experts | {_figures(mixtures)} | |"]
    lines += [f"| all | {_figures(held)} | {found.rows:.0%} |", "", f"All: {_tail(held)}."]
    sure = [row for row in held if not row.doubt]
    lines.append(
        f"Without the {len(held) - len(sure)} rows that are in doubt (rows.csv): {_tail(sure)}."
    )
    right = sum(round(order, 2) >= 0.8 for order in orders)
    lines.append(f"Order of at least 0.8 in {right} of {len(orders)} tables.")
    memory = [row.memory for row in held if row.memory is not None]
    amount, worst = statistics.median(map(abs, memory)), max(memory, key=abs)
    lines.append(f"Memory, {len(memory)} rows: median {amount:.1%}, worst {worst:+.0%}.")
    both = _inside(found), _inside(held_rows.coverage(held, MEMORY))
    lines.append(f"In the band: throughput {both[0]}; memory {both[1]}.")
    left_out = sum(bool(row.published_gib and row.inexpressible) for row in held)
    lines.append(
        f"Left out: {left_out} rows whose memory no options of the harness express (rows.csv)."
    )
    off = held_rows.resolution(held)
    lines.append(
        f"Against each other, {off.pairs} pairs of layouts of {off.tables} tables are off by at most "
        f"{off.off:.1%} in four of five pairs."
    )
    return "\n".join(lines) + "\n"


def _inside(found: held_rows.Coverage) -> str:
    return f"{found.rows:.1%} of rows, {found.sources:.1%} if every source counts once"


def _groups(rows: Iterable[Held], key: Callable[[Held], str]) -> dict[str, list[Held]]:
    """Rows with a throughput."""
    found: dict[str, list[Held]] = defaultdict(list)
    for row in rows:
        if row.speed is not None:
            found[key(row)].append(row)
    return found


def _figures(rows: Sequence[Held]) -> str:
    values = [row.speed for row in rows if row.speed is not None]
    amount = statistics.median(map(abs, values))
    return f"{len(values)} | {amount:.1%} | {statistics.median(values):+.1%} | {max(values, key=abs):+.0%}"


def _tail(rows: Sequence[Held]) -> str:
    amounts = [abs(row.speed) for row in rows if row.speed is not None]
    *_, ninth = statistics.quantiles(amounts, n=10, method="inclusive")
    return f"median {statistics.median(amounts):.1%}, 90th percentile {ninth:.0%}, worst {max(amounts):.0%}"


def bands(held: Sequence[Held]) -> str:
    """The constants of harness/tools/plan/evidence.py, as Python."""
    text = "EVIDENCE = {\n"
    for name, kind in (("throughput", SPEED), ("memory", MEMORY)):
        text += f'    "{name}": {{\n'
        for group, band in held_rows.evidence(held, kind).items():
            text += f'        "{group}": {band},\n'
        text += "    },\n"
    return f"{text}}}\nRESOLUTION = {held_rows.resolution(held)}\n"


def main() -> None:
    with FILE.open(newline="") as file:
        held, responses = hold_out([*plan_all(csv.DictReader(file)), *torchtitan()])
    write(held)
    held = held_rows.read()  # rounded
    constants = scale_constants(Calibration(HELD_START), fit(responses)).constants
    fitted = ", ".join(f"{name} {getattr(constants, name):.3f}" for name in HELD_FITTED)
    text = f"{report(held)}Fitted to all rows: {fitted}.\n"
    REPORT.write_text(f"# Errors on tables that the plan has not seen\n\n{text}")
    print(text)
    print(bands(held))


if __name__ == "__main__":
    main()
