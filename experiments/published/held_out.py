"""Errors of the plan on published rows, with constants that were fitted without the row's source.

    python experiments/published/held_out.py

Each source is left out in turn: the constants ``FITTED`` (harness/tools/plan/make.py) are fitted to all
others, and the rows of the one left out are planned with them. Tables of one document or pull request come
from one cluster, so they are one source. Writes held_out.csv, held_out.md, and, by the rules of held_rows.py,
harness/tools/plan/evidence_table.py.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import errors
import held_rows
from held_rows import MEMORY, SPEED, Held

from harness.config.job import Job
from harness.tools.plan import evidence
from harness.tools.plan.constants import Calibration
from harness.tools.plan.evidence import class_of, generation_of
from harness.tools.plan.make import FITTED, START, descend, predicted_rate, scale_constants
from harness.tools.report.runs import spearman
from harness.util.tables import GIB

REPORT = Path(__file__).with_name("held_out.md")
TABLE = Path(evidence.__file__).with_name("evidence_table.py")
# Typical error of a source, and expected deviation of constants from their start, of the logarithm.
NOISE, PRIOR = 0.15, 0.25
STEP = 0.25
"""Logarithm by which constants are moved to find the response of a row."""


@dataclass(frozen=True)
class Response:
    """Logarithm of planned over published throughput, to second order in the logarithms of constants."""

    source: str
    generation: str
    at_start: float
    terms: dict[str, tuple[float, float]]
    """Slope and curvature by constant."""

    def miss(self, logs: dict[str, float]) -> float:
        """The logarithm, if the constants are moved by ``logs``, of all or of this generation."""
        total = self.at_start
        for name, (slope, curvature) in self.terms.items():
            log = logs.get(name, 0.0) + logs.get(f"{self.generation} {name}", 0.0)
            total += slope * log + curvature * log**2
        return total


def respond(row: errors.Row, source: str) -> Response:
    """Plan a row with moved constants."""
    accelerator, published = row.plan.accelerator, row.published
    assert accelerator is not None and published is not None

    def log_of(**logs: float) -> float:
        return math.log(predicted_rate(row.plan.job, _moved(row, logs)) / published)

    middle, terms = log_of(), {}
    for name in FITTED:
        lower, upper = log_of(**{name: -STEP}), log_of(**{name: STEP})
        terms[name] = (upper - lower) / (2 * STEP), (upper + lower - 2 * middle) / (2 * STEP**2)
    return Response(source, generation_of(accelerator.name) or "", middle, terms)


def _moved(row: errors.Row, logs: dict[str, float]) -> Calibration:
    return scale_constants(replace(row.calibration, constants=START), logs)


def fit(responses: Iterable[Response], *, by_generation: bool = False) -> dict[str, float]:
    """Fit the logarithms of constants, one set or one more for each hardware generation.

    Every source counts once, and by its mean amount, so that one that is far off moves them little.
    """
    by_source: dict[str, list[Response]] = defaultdict(list)
    for each in responses:
        by_source[each.source].append(each)
    generations = sorted({each.generation for own in by_source.values() for each in own})

    def cost_of(logs: dict[str, float]) -> float:
        misses = (statistics.mean(abs(each.miss(logs)) for each in own) for own in by_source.values())
        return sum(misses) / NOISE + sum(log**2 for log in logs.values()) / PRIOR**2

    own = [f"{generation} {name}" for generation in generations for name in FITTED]
    return descend(cost_of, [*FITTED, *(own if by_generation else ())])


def sources_of(rows: Sequence[errors.Row]) -> dict[str, str]:
    """The table that stands for each table: the first one with a common source."""
    groups: list[tuple[str, set[str]]] = []
    found: dict[str, str] = {}
    for table in dict.fromkeys(row.raw["table"] for row in rows):
        names = {row.raw["source"] for row in rows if row.raw["table"] == table}
        first = next((first for first, known in groups if known & names), table)
        groups.append((first, names))
        found[table] = first
    return found


def hold_out(rows: Sequence[errors.Row]) -> tuple[list[Held], list[Response]]:
    """Return all rows planned without their source, and the responses of those with a throughput."""
    sources = sources_of(rows)
    known = [row for row in rows if row.published is not None]
    responses = [respond(row, sources[row.raw["table"]]) for row in known]
    held = []
    for source in dict.fromkeys(sources.values()):
        logs = fit(each for each in responses if each.source != source)
        held += [_held(row, source, logs) for row in rows if sources[row.raw["table"]] == source]
    return held, responses


def _held(row: errors.Row, source: str, logs: dict[str, float]) -> Held:
    job, accelerator = row.plan.job, row.plan.accelerator
    assert accelerator is not None
    of = class_of(job, accelerator.name)
    assert of is not None, accelerator.name
    gib = float(row.raw["published_gib"]) if row.memory is not None else None
    return Held(
        table=row.raw["table"],
        source=source,
        of=of,
        layout=_layout(job),
        setting=setting_of(job),
        doubt=row.raw.get("doubt", ""),
        inexpressible=row.raw.get("memory_inexpressible", ""),
        published=row.published,
        planned=predicted_rate(job, _moved(row, logs)),
        published_gib=gib,
        planned_gib=row.plan.peak / GIB if gib is None else gib * (1 + (row.memory or 0.0)),
    )


def _layout(job: Job) -> str:
    layout = job.parallelism
    degrees = " ".join(f"{axis}{degree}" for axis, degree in layout.degrees.items() if degree > 1)
    experts = f" ep{layout.ep}" if layout.ep > 1 else ""
    stages = f"{layout.pp_layers_per_stage or ''} layers"
    schedule = f" {layout.pp_schedule} {stages} x {layout.pp_microbatch_size}" if layout.pp > 1 else ""
    mode = job.activation_checkpoint.mode
    return f"{degrees}{experts}{schedule}, {job.local_batch_size} at once, {mode}"


def setting_of(job: Job) -> str:
    """Name of the fields that a search keeps, but for the batch."""
    model, compiled = job.model, "compiled" if job.compile.blocks else "eager"
    shape = f"{model.name} {model.dim} x {model.n_layers}"
    overlapped = " async_tp" * job.parallelism.async_tp
    return (
        f"{shape}, {job.world_size} x {job.training.seq_len}, {job.precision.linear} {compiled}{overlapped}"
    )


def write(held: Sequence[Held]) -> None:
    """Write held_out.csv."""
    with held_rows.FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = list(Held.__dataclass_fields__)
        writer.writerow(names)
        for row in held:
            values = [getattr(row, name) for name in names]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


# -- the report ----


def report(held: Sequence[Held]) -> str:
    """The errors as Markdown."""
    tables = [own for own in _groups(held, lambda row: row.table).values() if _known(own)]
    lines = [
        "Throughput: planned over published, each table with constants that were fitted without its source.",
        "The order is Spearman's rank correlation, for tables with four rows or more.",
        "",
        "| table | rows | median amount | median | worst | order |",
        "|---|---:|---:|---:|---:|---:|",
        *(f"| {own[0].table} | {_figures(_known(own))} | {_order(own)} |" for own in tables),
        "",
        "| class | rows | median amount | median | worst | in the band |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = held_rows.coverage(held, SPEED)
    for name, own in sorted(_groups(held, lambda row: row.of).items()):
        if _known(own):
            lines.append(f"| {name} | {_figures(_known(own))} | {found.by_class[name]:.0%} |")
    mixtures = [row for row in held if row.kind == "mixtures of experts"]
    lines += [f"| all mixtures of experts | {_figures(_known(mixtures))} | |"]
    lines += [f"| all | {_figures(_known(held))} | {found.rows:.0%} |", ""]
    amounts = sorted(map(abs, _known(held)))
    lines.append(f"All: median {statistics.median(amounts):.1%}, {_tail(amounts)}.")
    if doubtful := sum(bool(row.doubt) for row in held):
        amounts = sorted(map(abs, _known(row for row in held if not row.doubt)))
        without = f"median {statistics.median(amounts):.1%}, {_tail(amounts)}"
        lines.append(f"Without the {doubtful} rows that are in doubt (rows.csv): {without}.")
    orders = [order for own in tables if (order := _spearman(own)) is not None]
    right = sum(round(order, 2) >= 0.8 for order in orders)
    lines.append(f"Order of at least 0.8 in {right} of {len(orders)} tables.")
    memory = [row.memory for row in held if row.memory is not None]
    lines.append(
        f"Memory, {len(memory)} rows: median {statistics.median(map(abs, memory)):.1%}, "
        f"worst {max(memory, key=abs):+.0%}."
    )
    lines.append(
        f"In the band: throughput {_inside(found)}; memory {_inside(held_rows.coverage(held, MEMORY))}."
    )
    if left_out := sum(bool(row.published_gib and row.inexpressible) for row in held):
        lines.append(f"Left out: {left_out} rows whose memory no options of the harness express (rows.csv).")
    off = held_rows.resolution(held)
    lines.append(
        f"Against each other, {off.pairs} pairs of layouts of {off.tables} tables are off by at most "
        f"{off.off:.1%} in four of five pairs."
    )
    return "\n".join(lines) + "\n"


def _inside(found: held_rows.Coverage) -> str:
    return f"{found.rows:.1%} of rows, {found.sources:.1%} if every source counts once"


def _groups(rows: Iterable[Held], key: Callable[[Held], str]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _known(rows: Iterable[Held]) -> list[float]:
    return [row.speed for row in rows if row.speed is not None]


def _figures(values: Sequence[float]) -> str:
    amount = statistics.median(map(abs, values))
    return f"{len(values)} | {amount:.1%} | {statistics.median(values):+.1%} | {max(values, key=abs):+.0%}"


def _tail(amounts: Sequence[float]) -> str:
    *_, ninth = statistics.quantiles(amounts, n=10, method="inclusive")
    return f"90th percentile {ninth:.0%}, worst {max(amounts):.0%}"


def _spearman(rows: Sequence[Held]) -> float | None:
    pairs = [(row.published, row.planned) for row in rows if row.published is not None]
    return spearman(pairs) if len(pairs) >= 4 else None


def _order(rows: Sequence[Held]) -> str:
    order = _spearman(rows)
    return "" if order is None else f"{order:.2f}"


def constants_in_words(responses: Sequence[Response]) -> str:
    """The constants fitted to all rows, and the errors with a set for each hardware generation."""
    constants = scale_constants(Calibration(START), fit(responses)).constants
    fitted = ", ".join(f"{name} {getattr(constants, name):.3f}" for name in FITTED)
    amounts = []
    for source in {each.source for each in responses}:
        logs = fit((each for each in responses if each.source != source), by_generation=True)
        amounts += [abs(math.expm1(each.miss(logs))) for each in responses if each.source == source]
    return (
        f"Fitted to all rows: {fitted}. With a set of constants for each hardware generation instead of one "
        f"for all, the errors would be: median {statistics.median(amounts):.1%}, {_tail(amounts)}.\n"
    )


def evidence_table(held: Sequence[Held]) -> str:
    """The source of harness/tools/plan/evidence_table.py."""
    lines = [
        '"""Published figures as multiples of the planned ones, by class of job.',
        "",
        "experiments/published/held_out.py writes this file. Each published row was planned with constants",
        "that were fitted without it; experiments/published/held_rows.py has the rules.",
        '"""',
        "",
        "from harness.tools.plan.plan import Evidence, Resolution",
    ]
    kinds = (("EVIDENCE", SPEED, "Throughput"), ("MEMORY", MEMORY, "Peak memory on a GPU"))
    for name, kind, words in kinds:
        found = held_rows.evidence(held, kind)
        lines += ["", f"{name} = {{", *(f'    "{of}": {each},' for of, each in found.items()), "}"]
        lines.append(f'"""{words}; classes without published rows are not here."""')
    lines += ["", f"RESOLUTION = {held_rows.resolution(held)}"]
    lines.append('"""Below this difference the plan does not know the faster one of two layouts."""')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    began = time.perf_counter()
    held, responses = hold_out([*errors.read(errors.FILE), *errors.torchtitan()])
    write(held)
    held = held_rows.read()  # rounded
    text = report(held) + constants_in_words(responses)
    REPORT.write_text(f"# Errors on tables that the plan has not seen\n\n{text}")
    TABLE.write_text(evidence_table(held))
    print(f"{text}\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
