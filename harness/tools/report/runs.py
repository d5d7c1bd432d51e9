"""Reports of runs: predicted and measured results side by side."""

from collections import Counter
from collections.abc import Sequence

from harness.config.job import Job, differing_numerics
from harness.launch.listing import goodput_in_words
from harness.launch.rows import Row, fastest_first, job_of
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.result import PREFIX, evaluated_columns
from harness.tools.plan.constants import Calibration
from harness.tools.report.curves import curves_of, lowest_in_words, markup_of
from harness.tools.report.heat_maps import maps_of
from harness.tools.report.predictions import MEMORY, RATE, errors_in_words
from harness.tools.report.rounds import tables_of_rounds
from harness.util.document import Block, Document
from harness.util.tables import Column, Table, columns_of
from harness.util.words import plural, shortened

# Most characters of a list of fields that is shown.
LONGEST_LIST = 110
# Shown with THROUGHPUT.
SPREAD = "Spread: 90th minus 10th percentile of the steps' rates, divided by the rate."
_OF_MAPS = """What `metrics.tensors=norms` and `metrics.activations=true` have written (`tensors.bin` and \
`activations.bin`, read by `harness.metrics.tensor_file.read_tensors`): a row for each layer, a column for \
each step."""
_OF_CURVES = """Runs that differ only in their seed are one band, from the lowest to the highest, with their \
mean. The lowest loss at the end is named first. Time is that of training, without validation and saving. \
The pointer reads the nearest point."""
_THINNED = """The curves are thinned: a point is the mean of several rows, with a band from the lowest to \
the highest."""

_OF_RUNS = columns_of(f"""
    point                 run
    layout                layout
    world_size            ranks                      ,d
    measured.{RATE}       tokens/s/rank              ,.1f
    measured.spread       spread                     .1%
    predicted.{RATE}      predicted                  ,.1f
    delta.{RATE}          error                      +.1%
    measured.mfu          MFU                        .1%
    predicted.mfu         MFU, predicted             .1%
    measured.{MEMORY}     memory, GiB                .2f
    predicted.{MEMORY}    memory, predicted          .2f
    delta.{MEMORY}        error of memory            +.1%
    torchtitan.{RATE}     torchtitan, tokens/s/rank  ,.1f
    loss                  loss                       .4f
    best_validation_loss  lowest validation loss     .4f
""")
_STATES = columns_of("""
    state   state
    slow    slow ranks
    kind    class
    reason  reason
""")


def report_runs(
    title: str,
    rows: Sequence[Row],
    calibration: Calibration | None = None,
    study: StudyRecord | None = None,
    smooth: int = 1,
) -> Document:
    """Report measured and predicted results of runs, with their curves.

    Args:
        rows: rows with predictions, made with the constants of ``calibration``.
        study: the objective, if a sweeper chose the points by their results.
        smooth: rows of metrics over which training losses are averaged.
    """
    jobs = [job_of(row) for row in rows]
    layouts = ["" if job is None else layout_and_schedule(job) for job in jobs]
    rows = [{**row, "layout": layout} for row, layout in zip(rows, layouts, strict=True)]
    summary = _summary(rows)
    blocks: list[Block] = []
    ranked = [] if study is None else [rows[index] for index in study.ranked(rows)]
    if study is not None and ranked:
        best = ranked[0]
        columns = (_OF_RUNS[0], Column(study.objective, study.objective, ".6g"))
        text = f"Chosen by optuna to {study.describe()}."
        blocks.append(Table(columns, ranked, "Study", [text], best["point"]))
        value = study.format(study.value(best))
        summary.append(f"The best ({study.describe()}): `{best['point']}`, {value}.")
    blocks += [*tables_of_rounds(rows), _runs(rows)]
    curves = curves_of(rows, smooth)
    if study is None:
        summary += lowest_in_words(curves)
    if curves:
        text = _OF_CURVES
        if any(curve.is_thinned for curve in curves):
            text = f"{text} {_THINNED}"
        blocks += ["## Curves", text, markup_of(curves, smooth)]
    maps = maps_of(rows)
    if maps is not None:
        blocks += ["## Layers", _OF_MAPS, maps]
    return Document(title, summary + constants_in_words(calibration), blocks, rows)


def _runs(rows: Sequence[Row]) -> Table:
    """Return the table of runs, the fastest first and marked.

    The last rows are points of the space that are not valid jobs, with the rule that they violate.
    """
    skipped = [row for row in rows if row["state"] == "skipped"]
    ordered = fastest_first(row for row in rows if row["state"] != "skipped")
    notes = []
    jobs = [job for job in map(job_of, ordered) if job is not None]
    differ: dict[str, None] = {}
    for job in jobs[1:]:
        differ |= dict.fromkeys(differing_numerics(jobs[0], job))
    if differ:
        named = shortened(", ".join(differ), LONGEST_LIST)
        notes.append(f"The numerics of runs differ ({named}): compare losses as well as speed.")
    if any(row.get("measured.spread") for row in ordered):
        notes.append(f"{THROUGHPUT}. {SPREAD}")
    best = None
    if ordered and f"measured.{RATE}" in ordered[0]:
        best = ordered[0]["point"]
    evaluated = [
        Column(name, name.removeprefix(f"{PREFIX}."), ".4f") for name in evaluated_columns(rows)
    ]
    columns = (*_OF_RUNS, *evaluated, *_STATES)
    bars = (f"measured.{RATE}", f"measured.{MEMORY}")
    return Table(columns, [*ordered, *skipped], "Runs", notes, best, bars=bars)


def _summary(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row["state"] for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [f"{plural(len(rows), 'point')}: {states}."]
    best = fastest_first(rows)[0] if rows else {}
    if f"measured.{RATE}" in best:
        spread = best.get("measured.spread")
        of_steps = f" (spread of its steps {spread:.1%})" if spread is not None else ""
        lines.append(
            f"The fastest: `{best['point']}`, {best[f'measured.{RATE}']:,.1f} tokens/s/rank{of_steps}."
        )
    goodput = goodput_in_words(rows)
    if goodput:
        lines.append(f"{goodput[0].upper()}{goodput[1:]}: the share of time in steps that count.")
    for what, name in (("throughput", RATE), ("memory", MEMORY)):
        errors = errors_in_words(rows, f"delta.{name}")
        if errors:
            lines.append(f"Predicted against measured {what}: {errors}.")
    return lines


def constants_in_words(calibration: Calibration | None) -> list[str]:
    """Name the source of calibrated constants. For rows that they were fitted to they forecast nothing."""
    if calibration is None:
        return []
    source = calibration.source or "a calibration"
    return [f"The plan's constants are those of {source}."]


def layout_and_schedule(job: Job) -> str:
    """Format degrees as published tables do, and the pipeline schedule: ``FSDP8 TP8 PP8 1F1B``."""
    layout = job.parallelism
    words = []
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        words.append(f"HSDP{layout.dp_replicate}x{layout.dp_shard}")
    elif layout.dp_replicate > 1:
        words.append(f"DDP{layout.dp_replicate}")
    elif layout.dp_shard > 1:
        words.append(f"FSDP{layout.dp_shard}")
    for axis in ("cp", "tp", "ep", "pp"):
        degree = getattr(layout, axis)
        if degree > 1:
            words.append(f"{axis.upper()}{degree}")
    if not words:
        return "single"
    if layout.pp > 1:
        words.append(layout.pp_schedule)
    return " ".join(words)
