"""The table of a first measurement: checks, ceilings, training, decoding and updates."""

from collections.abc import Sequence
from typing import Any

from gpu_cases import stack_of

from harness.metrics.mfu import peak_of
from harness.util.document import to_markdown
from harness.util.tables import Table

Row = dict[str, Any]
VERDICTS = {True: "yes", False: "**NO**", None: "not judged: virtual"}
TRAINED = [
    "job",
    "tokens/s",
    "bare loop",
    "over bare",
    "planned",
    "over plan",
    "MFU",
    "of the product's ceiling",
    "GiB",
    "bare GiB",
    "planned GiB",
    "rehearsed GiB",
    "s to step 1",
    "rehearsed kernels + products",
    "torchtitan",
]


def render(rows: Sequence[Row]) -> str:
    """Markdown of the newest row of each name and side; failures are lines below it."""
    newest = {(row["point"], row["side"]): row for row in rows}
    ours = [row for (_, side), row in newest.items() if side == "harness"]
    done = [row for row in ours if row["state"] != "failed"]
    parts: list[str | Table] = [*headings(rows)]
    checks = [checked(row) for row in done if "passed" in row]
    trained = [row for row in done if "tokens_per_second" in row]
    parts += section(["check", "largest error", "allowed", "passed"], checks)
    parts += section(
        ["ceiling", "measured", "of the data sheet"],
        [ceiling(row) for row in done if "tflops" in row or "gb_per_second" in row],
    )
    parts += section(TRAINED, [trained_line(row, rows) for row in trained])
    parts += section(
        [
            "update",
            "ms",
            "torch's fused AdamW or Muon, ms",
            "over torch's",
            "ns per 1000 parameters",
        ],
        [updated(row) for row in done if "update_seconds" in row],
    )
    parts += section(
        ["decode", "ms a token", "tokens/s", "reading the weights at the copy's ceiling, ms"],
        [decoded(row, rows) for row in done if "decode_ms" in row],
    )
    parts += section(
        ["trace", "kernels of a step", "rehearsed kernels + products", "time with a kernel"],
        [traced(row) for row in done if "traced.kernels" in row],
    )
    failed = [row for row in newest.values() if row["state"] == "failed"]
    parts += [f"- {row['point']}, {row['side']}: {row['kind']}: {row['reason']}" for row in failed]
    return to_markdown(*parts).rstrip()


def headings(rows: Sequence[Row]) -> list[str]:
    """What was measured on, with which libraries; and that nothing was, if nothing was."""
    devices = {f"{row['device']}; " + stack_of({"software": versions_of(row)}) for row in rows}
    lines = sorted(devices)
    if any(row["state"] == "virtual" for row in rows):
        lines.append("A virtual GPU: no value and no time here means anything.")
    if any(row["tiny"] for row in rows):
        lines.append("Tiny models, to try the script: no time here means anything.")
    return lines


def versions_of(row: Row) -> Row:
    """The versions of a row's libraries, by name."""
    prefix = "code.versions."
    return {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}


def section(header: list[str], lines: list[list[str]]) -> list[Table]:
    """A table, unless it would be empty."""
    return [Table.of_cells(header, lines, right=range(1, len(header)))] if lines else []


def checked(row: Row) -> list[str]:
    error = "not a number" if row["error"] is None else f"{row['error']:.2g}"
    return [row["point"], error, f"{row['allowed']:.2g}", VERDICTS[row["passed"]]]


def ceiling(row: Row) -> list[str]:
    """GB/s of a copy, or TFLOP/s of a product with its part of the data sheet's."""
    if "gb_per_second" in row:
        return [row["point"], f"{row['gb_per_second']:,.0f} GB/s", "-"]
    peak = peak_of(row["device"], "bfloat16").flops
    return [
        row["point"],
        f"{row['tflops']:,.1f} TFLOP/s",
        "-" if peak is None else f"{row['tflops'] * 1e12 / peak:.1%}",
    ]


def beside(row: Row, rows: Sequence[Row], side: str) -> Row:
    """The row of another side of the same call; empty if it has none, or failed."""
    found = [
        other
        for other in rows
        if (other["point"], other["side"], other["began"]) == (row["point"], side, row["began"])
        and other["state"] != "failed"
    ]
    return found[-1] if found else {}


def ceiling_of(row: Row, rows: Sequence[Row], figure: str) -> float | None:
    """The highest value of a ceiling in a row's call."""
    found = [each[figure] for each in rows if figure in each and each["began"] == row["began"]]
    return max(found, default=None)


def trained_line(row: Row, rows: Sequence[Row]) -> list[str]:
    """The cells of a job."""
    bare = beside(row, rows, "bare")
    titan = beside(row, rows, "torchtitan")
    rate = row["tokens_per_second"]
    product = ceiling_of(row, rows, "tflops")
    own = row.get("tflops_per_device")
    return [
        row["point"],
        f"{rate:,.0f}",
        number(bare, "tokens_per_second", ",.0f"),
        ratio(rate, bare.get("tokens_per_second")),
        number(row, "planned.tokens_per_second", ",.0f"),
        ratio(rate, row.get("planned.tokens_per_second")),
        number(row, "mfu", ".1%"),
        "-" if own is None or product is None else f"{own / product:.1%}",
        number(row, "memory_gib", ".1f"),
        number(bare, "memory_gib", ".1f"),
        number(row, "planned.memory_gib", ".1f"),
        number(row, "rehearsed.memory_gib", ".1f"),
        number(row, "first_step_seconds", ".0f"),
        rehearsed(row),
        number(titan, "tokens_per_second", ",.0f"),
    ]


def rehearsed(row: Row) -> str:
    """Kernels and products of a rehearsed step."""
    if "rehearsed.kernels" not in row:
        return "-"
    return f"{row['rehearsed.kernels']:,} + {row['rehearsed.products']:,}"


def updated(row: Row) -> list[str]:
    ours, theirs = row["update_seconds"], row["bare.update_seconds"]
    each = ours * 1e12 / row["parameters"]
    return [
        row["point"],
        f"{ours * 1e3:.2f}",
        f"{theirs * 1e3:.2f}",
        ratio(theirs, ours),
        f"{each:.1f}",
    ]


def decoded(row: Row, rows: Sequence[Row]) -> list[str]:
    """A token's time beside that of reading every weight once, which no decoding is below."""
    copied = ceiling_of(row, rows, "gb_per_second")
    least = None if copied is None else row["weight_bytes"] / copied / 1e6
    return [
        row["point"],
        f"{row['decode_ms']:.2f}",
        f"{row['sequences'] * 1e3 / row['decode_ms']:,.0f}",
        "-" if least is None else f"{least:.2f}",
    ]


def traced(row: Row) -> list[str]:
    return [
        row["point"],
        f"{row['traced.kernels']:,}",
        rehearsed(row),
        number(row, "traced.busy", ".1%"),
    ]


def number(row: Row, name: str, form: str) -> str:
    """A field of a row; a dash if the row does not have it."""
    return "-" if row.get(name) is None else format(row[name], form)


def ratio(figure: float, other: float | None) -> str:
    return "-" if not other else f"{figure / other:.3f}"
