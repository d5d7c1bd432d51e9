"""Measures training speed on this CPU against torchtitan 0.3.0 and a bare loop.

    python experiments/cpu_baseline/compare.py --rounds 5 --titan-python PATH/TO/ENV/bin/python
    python experiments/cpu_baseline/compare.py --rounds 5 --titan-python PATH/TO/ENV/bin/python --compile \\
        --layouts single

Every round runs each layout once on all sides (their order changes from round to round), so that a machine
whose speed drifts drifts under all. What counts is the ratio of a round; its median and range are reported.
The bare loop (bare_loop.py) knows one layout, single. ``--compile`` compiles on all sides: ours block by
block (``compile=on``), torchtitan by its own flag, the bare loop the whole model. torchtitan's environment is
described in experiments/README.md; without ``--titan-python`` it is left out.
Writes ``runs/cpu_baseline/compare.json`` (``compare_compiled.json``) and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.tools.report.rounds import Spread, ratios_by_round
from harness.util.document import to_markdown
from harness.util.tables import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAYOUTS = {
    "single": ["parallelism=single"],
    "fsdp2": ["parallelism=fsdp", "parallelism.dp_shard=2"],
    "fsdp2_tp2": ["parallelism=fsdp_tp"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of a run; the first two do not count"
    )
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--compile", action="store_true", help="compile on all sides")
    parser.add_argument(
        "--titan-python", help="interpreter of an environment with torchtitan 0.3.0"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for layout in arguments.layouts:
            sides = sides_of(layout, with_torchtitan=arguments.titan_python is not None)
            for side in sides if number % 2 == 0 else reversed(sides):
                rows.append(
                    {
                        "round": number,
                        "layout": layout,
                        "side": side,
                        **run(side, layout, arguments),
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    out = ROOT / "runs" / "cpu_baseline"
    out.mkdir(parents=True, exist_ok=True)
    name = "compare_compiled.json" if arguments.compile else "compare.json"
    (out / name).write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    print(table(rows, arguments.layouts))
    print("\n".join(["", *against_the_best(rows, arguments.layouts)]))
    print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}"
    )


def sides_of(layout: str, *, with_torchtitan: bool) -> list[str]:
    """Who can run a layout, ours first."""
    others = ["torchtitan"] if with_torchtitan else []
    return ["harness", *others, *(["bare"] if layout == "single" else [])]


def run(side: str, layout: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of one side from a cold start."""
    if side == "harness":
        return run_harness(layout, arguments.steps, compiled=arguments.compile)
    if side == "bare":
        return run_bare(arguments.steps, compiled=arguments.compile)
    python = str(Path(arguments.titan_python).absolute())
    return run_torchtitan(layout, arguments.steps, python, compiled=arguments.compile)


def run_harness(layout: str, steps: int, *, compiled: bool) -> dict[str, Any]:
    """One run of ``harness.train`` from a cold start."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()  # the clock of metrics.jsonl
        command = [
            *(
                sys.executable,
                "-m",
                "harness.train",
                "experiment=cpu_baseline/shape",
                *LAYOUTS[layout],
            ),
            *(f"training.steps={steps}", f"runs_dir={folder}", "metrics.console=none"),
            *(["compile=on"] if compiled else []),
        ]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        # As on the other sides, a shell's own number of threads does not count.
        environment.pop("OMP_NUM_THREADS", None)
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        [result] = Path(folder).glob("cpu_baseline/[0-9a-f]*/result.json")
        row = json.loads(result.read_text())
        first = json.loads((result.parent / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "tokens_per_second": row["window.tokens_per_second_median"],
        "first_step_seconds": first["time"] - started,
    }


def run_bare(steps: int, *, compiled: bool) -> dict[str, Any]:
    """One run of the bare loop, with a thread for each core."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [
            sys.executable,
            str(HERE / "bare_loop.py"),
            "--steps",
            str(steps),
            "--output",
            str(output),
        ]
        command += ["--started", repr(time.monotonic()), *(["--compile"] if compiled else [])]
        cores = len(os.sched_getaffinity(0))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(cores)}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        row = json.loads(output.read_text())
    return {name: row[name] for name in ("tokens_per_second", "first_step_seconds")}


def run_torchtitan(layout: str, steps: int, python: str, *, compiled: bool) -> dict[str, Any]:
    """One run of torchtitan's trainer through torchrun from a cold start."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        script = str(HERE / "torchtitan_side.py")
        command = [sys.executable, script, "--layout", layout, "--launch", "--python", python]
        command += [
            "--steps",
            str(steps),
            "--output",
            str(output),
            *(["--compile"] if compiled else []),
        ]
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        row = json.loads(output.read_text())
    return {
        "tokens_per_second": row["tokens_per_second"],
        "first_step_seconds": row["process_start_to_first_step_seconds"],
    }


FIGURES = (("tokens_per_second", "tokens/s"), ("first_step_seconds", "s to the first step"))
OTHERS = {"torchtitan": "torchtitan 0.3.0", "bare": "bare loop"}


def by_round(rows: list[dict[str, Any]], layout: str, side: str, figure: str) -> dict[int, float]:
    return {r["round"]: r[figure] for r in rows if (r["layout"], r["side"]) == (layout, side)}


def table(rows: list[dict[str, Any]], layouts: list[str]) -> str:
    """Medians of all sides, and the median and range of the rounds' ratios, ours over each other one's."""
    present = [side for side in OTHERS if any(row["side"] == side for row in rows)]
    heads = [cell for side in present for cell in (OTHERS[side], "ratio, median (range)")]
    lines: list[list[str]] = []
    for layout in layouts:
        for figure, unit in FIGURES:
            ours = by_round(rows, layout, "harness", figure)
            cells = [layout, unit, f"{statistics.median(ours.values()):.1f}"]
            for side in present:
                theirs = by_round(rows, layout, side, figure)
                spread = Spread.of(ratios_by_round(ours, theirs))
                if spread is None:
                    cells += ["-", "-"]
                    continue
                median, between = spread.as_text(".3f")
                cells += [f"{statistics.median(theirs.values()):.1f}", f"{median} ({between})"]
            lines.append(cells)
    return to_markdown(
        Table.of_cells(
            ["layout", "figure", "harness", *heads], lines, right=range(2, 3 + len(heads))
        )
    )


def against_the_best(rows: list[dict[str, Any]], layouts: list[str]) -> list[str]:
    """For each layout, our tokens per second over those of the other side with the highest median."""
    lines = []
    for layout in layouts:
        others = {side: by_round(rows, layout, side, "tokens_per_second") for side in OTHERS}
        medians = {
            side: statistics.median(theirs.values()) for side, theirs in others.items() if theirs
        }
        if not medians:
            continue
        best = max(medians, key=medians.__getitem__)
        ours = by_round(rows, layout, "harness", "tokens_per_second")
        ratio = statistics.median(ratios_by_round(ours, others[best]))
        met = "yes" if ratio >= 1 else "no"
        lines.append(
            f"{layout}: {ratio:.3f} of the best other side ({OTHERS[best]}); at least 1.0: {met}"
        )
    return lines


if __name__ == "__main__":
    main()
