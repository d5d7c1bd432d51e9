"""Measures Llama 3 shapes on one GPU, whatever it is: precisions, compile, recomputation, torchtitan.

    python experiments/gpu_single/run.py                                 # all of it: some hours
    python experiments/gpu_single/run.py --titan-python ENV/bin/python   # torchtitan 0.3.0 in turn with it
    python experiments/gpu_single/run.py --shapes 8B --activation-checkpoint selective_op --rounds 1
    python experiments/gpu_single/run.py --dry-run --memory 141          # what would run, and what would fit
    python experiments/gpu_single/run.py --device cpu --shapes tiny      # the same without a GPU, to try it
    python experiments/gpu_single/run.py --render runs/gpu_single        # the table of rows that are there

Every run is a process of its own, from a cold start, so that one that is out of memory leaves nothing behind.
A round runs every mode once on both sides, the next one in the opposite order; ratios are taken within a
round. ``8B`` has as many layers as are estimated to fit; if a run of ours is out of memory all the same, the
whole group is measured again with half of them, so that what is compared has the same shape. Rows are written
as they come: ``rows.jsonl`` and ``facts.json`` in ``--out``; ``table.md`` and ``results.jsonl``, the rows of
``harness report``, are made of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_cases as cases
from gpu_cases import render, report_rows

from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.rows import keep
from harness.metrics.mfu import peak_of, utilization
from harness.model.accounting import account
from harness.run.result import git_commit, versions
from harness.util.errors import UserError
from harness.util.words import GIB

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Row = dict[str, Any]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(cases.SHAPES), default=list(cases.DEFAULT_SHAPES)
    )
    parser.add_argument("--modes", nargs="+", choices=list(cases.MODES), default=list(cases.MODES))
    parser.add_argument(
        "--activation-checkpoint",
        nargs="+",
        choices=cases.ACTIVATION_CHECKPOINTS,
        default=list(cases.ACTIVATION_CHECKPOINTS),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help=f"of a run; the first {cases.WARMUP_STEPS} do not count",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--memory", type=float, help="GiB to plan for, instead of the device's")
    parser.add_argument(
        "--layers", type=int, help="layers of shapes that are cut, instead of the number that fits"
    )
    parser.add_argument(
        "--titan-python", help="interpreter of an environment with torchtitan 0.3.0"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_single")
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would run, and run nothing"
    )
    parser.add_argument(
        "--render", type=Path, help="print the table of a folder of rows, and run nothing"
    )
    arguments = parser.parse_args(words)
    if arguments.steps <= cases.WARMUP_STEPS:
        parser.error(f"--steps must be more than {cases.WARMUP_STEPS}, which do not count")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.render:
        print(finish(arguments.render))
        return 0
    facts = gather_facts(arguments)
    groups = [(s, ac) for s in arguments.shapes for ac in arguments.activation_checkpoint]
    if arguments.dry_run:
        for shape, checkpointing in groups:
            print("\n".join(dry_lines(arguments, facts, shape, checkpointing)))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    with (arguments.out / "rows.jsonl").open("w") as file:
        for shape, checkpointing in groups:
            for row in measure_group(arguments, facts, shape, checkpointing):
                file.write(json.dumps(row) + "\n")
                file.flush()
                told = row.get("failed") or f"{row['tokens_per_second']:,.1f} tokens/s"
                print(f"{name_of(row)}: {told}", file=sys.stderr, flush=True)
    table = finish(arguments.out)
    (arguments.out / "table.md").write_text(table + "\n")
    print(table)
    return 0


def gather_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured on, with what."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else None
    # By a process of its own: this one must not take memory on the device.
    command = [sys.executable, str(HERE / "machine.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    arguments.elsewhere = (
        arguments.dry_run and arguments.device != "cpu" and found["device"] is None
    )
    if arguments.elsewhere and not arguments.memory:
        raise SystemExit("--dry-run without a GPU needs --memory, the GiB of the GPU to plan for")
    if arguments.device == "cuda" and found["device"] is None and not arguments.elsewhere:
        raise SystemExit(
            "torch sees no GPU here; --device cpu --shapes tiny tries the command without one"
        )
    if found["device"] is None and not arguments.elsewhere:
        arguments.device = "cpu"
        found |= {
            "device": "CPU",
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        }
    else:
        arguments.device = "cuda"
    if arguments.memory:
        found["memory"] = int(arguments.memory * GIB)
    settings = {name: getattr(arguments, name) for name in ("rounds", "steps", "batch")}
    return {**found, **settings, "versions": versions(), **git_commit(ROOT)}


def name_of(row: Row) -> str:
    """One run in words."""
    layers = f", {row['n_layers']} layers" if row["n_layers"] else ""
    return f"{row['shape']}{layers}, {row['activation_checkpoint']}, {row['mode']}, {row['side']}"


def case_of(arguments: argparse.Namespace, shape: str, checkpointing: str, mode: str) -> cases.Case:
    sizes = {"batch": arguments.batch, "steps": arguments.steps}
    where = {"device": arguments.device, "elsewhere": arguments.elsewhere}
    return cases.Case(shape, checkpointing, mode, **sizes, **where)


def layers_to_begin_with(arguments: argparse.Namespace, facts: Row, case: cases.Case) -> int | None:
    """Layers of a group's first round; None for a shape that is whole, 0 where nothing would fit."""
    whole_logits = arguments.titan_python is not None
    if not cases.SHAPES[case.shape].whole:
        fitting = cases.layers_that_fit(case, facts["memory"], whole_logits=whole_logits)
        return arguments.layers or fitting
    needed = cases.estimated_bytes(case.job(), whole_logits=False)
    return None if needed <= facts["memory"] else 0


def measure_group(
    arguments: argparse.Namespace, facts: Row, shape: str, checkpointing: str
) -> Iterator[Row]:
    """All modes of a shape under one way of activation checkpointing, on both sides, in turn.

    Yields:
        a row for each run. Those of the most recent number of layers are the ones that count.
    """
    common = {"shape": shape, "activation_checkpoint": checkpointing}
    every = {mode: case_of(arguments, shape, checkpointing, mode) for mode in arguments.modes}
    possible: dict[str, cases.Case] = {}
    for mode, case in every.items():
        try:
            case.job()
            possible[mode] = case
        except UserError as error:
            refused = {"failed": "refused", "message": str(error), "n_layers": None, "round": 0}
            yield {**common, **refused, "mode": mode, "side": "harness"}
    if not possible:
        return
    n_layers = layers_to_begin_with(arguments, facts, next(iter(possible.values())))
    if n_layers == 0:
        estimate = cases.estimated_bytes(next(iter(possible.values())).job(), whole_logits=False)
        message = f"estimated to take {estimate / GIB:.0f} GiB of {facts['memory'] / GIB:.0f}"
        for mode in possible:
            left_out = {"failed": "does not fit", "message": message, "n_layers": None, "round": 0}
            yield {**common, **left_out, "mode": mode, "side": "harness"}
        return
    while True:
        sized = {mode: case.with_layers(n_layers) for mode, case in possible.items()}
        starved = False
        for row in run_rounds(arguments, facts, sized):
            yield {**common, **row, "n_layers": n_layers}
            starved = row["side"] == "harness" and row.get("failed") == "out_of_memory"
            if starved and n_layers is not None and n_layers > 1:
                break
        if not starved or n_layers is None or n_layers == 1:
            return
        n_layers //= 2


def run_rounds(
    arguments: argparse.Namespace, facts: Row, sized: dict[str, cases.Case]
) -> Iterator[Row]:
    """A row for each run; what has failed is not run again."""
    sides = ["harness", "torchtitan"] if arguments.titan_python else ["harness"]
    pairs = [
        (mode, side)
        for mode in sized
        for side in sides
        if side == "harness" or mode in cases.TITAN_MODES
    ]
    failed: set[tuple[str, str]] = set()
    for number in range(arguments.rounds):
        for mode, side in pairs if number % 2 == 0 else reversed(pairs):
            if (mode, side) in failed:
                continue
            row: Row = {"round": number, "mode": mode, "side": side}
            if side == "harness":
                row |= {"software": facts["software"], **run_harness(arguments, sized[mode])}
            else:
                row |= run_torchtitan(arguments, sized[mode])
            if "failed" in row:
                failed.add((mode, side))
            else:
                job = sized[mode].job()
                row |= utilization_of(row["tokens_per_second"], job, facts["device"])
            yield row


def utilization_of(tokens_per_second: float, job: Job, device: str) -> Row:
    """Both conventions of MFU against the device's bfloat16 peak, on both sides, float8 included."""
    counted = account(job.model, job.training.seq_len)
    peak = peak_of(device, "bfloat16")
    return {**utilization(tokens_per_second, counted, peak), "peak_origin": peak.origin}


def run_harness(arguments: argparse.Namespace, case: cases.Case) -> Row:
    """One run of a case."""
    with tempfile.TemporaryDirectory() as folder:
        return run_job(case.overrides(), arguments.timeout, case.device, Path(folder))


def run_job(overrides: list[str], timeout: float, device: str, folder: Path) -> Row:
    """One run of ``harness.train``, which it leaves in an empty folder."""
    command = [sys.executable, "-m", "harness.train", *overrides, f"runs_dir={folder}"]
    failure = run_process(command, timeout, device)
    results = list(folder.glob("*/[0-9a-f]*/result.json"))
    if not results:
        return {"failed": "unknown", "message": failure or "left no row", "overrides": overrides}
    result = json.loads(results[0].read_text())
    if result["exit_reason"] != "completed":
        told = {
            "failed": result.get("error.kind", "unknown"),
            "message": result.get("error.message", failure),
        }
        return {**told, "overrides": overrides}
    return {
        "tokens_per_second": result["window.tokens_per_second"],
        "step_seconds": result["window.window_seconds"] / result["window.window_steps"],
        "first_step_seconds": result["first_step_seconds"],
        "memory_gib": result["memory_gib"],
        "parameters": result["parameters"],
        "overrides": overrides,
    }


def run_torchtitan(arguments: argparse.Namespace, case: cases.Case) -> Row:
    """One run of torchtitan's trainer at the same shape."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = titan_command(arguments, case, output)
        failure = run_process(command, arguments.timeout, case.device)
        if not output.exists():
            return {"failed": "unknown", "message": failure or "left no row"}
        return json.loads(output.read_text())


def titan_command(arguments: argparse.Namespace, case: cases.Case, output: Path) -> list[str]:
    """The command line of torchtitan's side."""
    job = case.job()
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim", "vocab_size")
    model = json.dumps({name: getattr(job.model, name) for name in names})
    return [
        *(str(Path(arguments.titan_python).absolute()), "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "1", str(HERE / "titan_gpu.py")),
        *("--model", model, "--seq-len", str(job.training.seq_len), "--batch", str(case.batch)),
        *("--steps", str(case.steps), "--warmup-steps", str(cases.WARMUP_STEPS)),
        *("--precision", case.precision, "--activation-checkpoint", case.activation_checkpoint),
        *(["--compile"] if case.compiled else []),
        *("--device", case.device, "--output", str(output)),
    ]


def run_process(command: list[str], timeout: float, device: str) -> str:
    """Run a command; if it fails, return the last line of its stderr."""
    return run_for_output(command, timeout, device)[1]


def run_for_output(command: list[str], timeout: float, device: str) -> tuple[str, str]:
    """Run a command, and end all of its processes if it takes too long.

    Returns:
        its output so far, and why it failed: the last line of its stderr; empty if it did not.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **hidden},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        failure = ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            failure = f"took longer than {timeout:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
        if not failure and process.returncode:
            failure = lines[-1]
        return output.read(), failure


def dry_lines(
    arguments: argparse.Namespace, facts: Row, shape: str, checkpointing: str
) -> list[str]:
    """What a group would run, in words."""
    lines = []
    for mode in arguments.modes:
        case = case_of(arguments, shape, checkpointing, mode)
        try:
            job = case.job()
        except UserError as error:
            lines.append(f"{shape}, {checkpointing}, {mode}: refused: {error}")
            continue
        n_layers = layers_to_begin_with(arguments, facts, case)
        if n_layers:
            case, job = case.with_layers(n_layers), with_value(job, "model.n_layers", n_layers)
        needed = cases.estimated_bytes(job, whole_logits=False) / GIB
        size = f"{job.model.n_layers} layers, about {needed:.1f} of {facts['memory'] / GIB:.1f} GiB"
        left_out = "; would be left out" if n_layers == 0 else ""
        lines.append(
            f"{shape}, {checkpointing}, {mode}: {size}{left_out}\n  {' '.join(case.overrides())}"
        )
        if arguments.titan_python and mode in cases.TITAN_MODES:
            lines.append(
                f"  torchtitan: {shlex.join(titan_command(arguments, case, Path('out.json')))}"
            )
    return lines


def finish(folder: Path) -> str:
    """Write the rows of a folder for ``harness report``, and return their table."""
    facts, rows = read(folder)
    keep(folder, report_rows(facts, rows))
    return render(facts, rows)


def read(folder: Path) -> tuple[Row, list[Row]]:
    """The facts and rows of a folder."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return json.loads((folder / "facts.json").read_text()), rows


if __name__ == "__main__":
    sys.exit(main())
