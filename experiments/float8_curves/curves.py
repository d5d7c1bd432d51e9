"""Loss curves of float8 and mxfp8 beside bfloat16's, by emulation on a CPU: same data, same initial values.

    python experiments/float8_curves/curves.py --steps 200

A small Llama on the Python standard library's sources, byte by byte. How far two curves lie apart means
little without how far apart they lie when nothing but chance differs: bfloat16 also runs from another seed.
Prints a Markdown table and writes ``runs/float8_curves/curves.png`` beside the runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from harness.compose.composer import compose_job
from harness.metrics.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[2]
LAST = 20  # steps whose mean loss stands for the end
REFERENCE = "bf16"
SIDES = {
    "fp32": ["precision=fp32"],
    REFERENCE: ["precision=bf16"],
    "bf16, seed 43": ["precision=bf16", "training.seed=43"],
    **{
        name: [f"precision={name}", "precision.emulate=true"]
        for name in ("float8_tensorwise", "float8_rowwise", "float8_rowwise_hp", "mxfp8")
    },
}
SHAPE = [
    *("model=llama3_tiny", "model.dim=128", "model.ffn_hidden_dim=384", "model.vocab_size=272"),
    *("tokenizer=bytes", "data=python_stdlib", "training.seq_len=128", "training.global_batch_size=8"),
    "cluster.device=cpu",
    *("optimizer.lr=2e-3", "schedule.warmup_steps=20", "validation.steps=10", "metrics.log_interval=1"),
    *("checkpoint=disabled", "metrics.console=none"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "float8_curves")
    arguments = parser.parse_args()
    curves, validation = {}, {}
    for name, overrides in SIDES.items():
        curves[name], validation[name] = run(name, [*SHAPE, *overrides], arguments.steps, arguments.out)
        print(f"{name}: {curves[name][-1]:.4f}", file=sys.stderr, flush=True)
    print(table(curves, validation))
    draw(curves, arguments.out / "curves.png")
    print(f"\n{arguments.out / 'curves.png'}")


def run(name: str, overrides: list[str], steps: int, out: Path) -> tuple[list[float], float]:
    """Losses by step, and the validation loss at the end, of one run."""
    overrides = [
        *(*overrides, f"training.steps={steps}", f"validation.interval={steps}"),
        *(f"runs_dir={out}", f"name={name.replace(', ', '-').replace(' ', '')}"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "harness.train", *overrides]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = read_metrics(compose_job(overrides).run_dir / "metrics.jsonl")
    validation = next(row["validation_loss"] for row in reversed(rows) if "validation_loss" in row)
    return [row["loss"] for row in rows if "loss" in row], validation


def table(curves: dict[str, list[float]], validation: dict[str, float]) -> str:
    """Where each curve ends, and how far it is from bfloat16's on the way."""
    reference = curves[REFERENCE]
    lines = [
        f"| precision | loss, mean of the last {LAST} steps | to bf16 | validation loss | to bf16 "
        "| largest difference of a step |",
        "|---|---|---|---|---|---|",
    ]
    for name, losses in curves.items():
        end = statistics.mean(losses[-LAST:])
        validated = validation[name]
        largest = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
        lines.append(
            f"| {name} | {end:.4f} | {end / statistics.mean(reference[-LAST:]) - 1:+.2%} "
            f"| {validated:.4f} | {validated / validation[REFERENCE] - 1:+.2%} | {largest:.2%} |"
        )
    return "\n".join(lines)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves above, and below their differences from bfloat16's, averaged over 10 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, curve in curves.items():
        seed = "seed" in name
        style = {"color": "#b0b0b0", "linestyle": "--"} if seed else {}
        [line] = losses.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1, **style)
        # Another seed has other batches: step for step it is far from everything, and would set the scale.
        if name != REFERENCE and not seed:
            gap = [a - b for a, b in zip(curve, curves[REFERENCE], strict=True)]
            smooth = [statistics.mean(gap[max(0, i - 9) : i + 1]) for i in range(len(gap))]
            differences.plot(range(1, len(gap) + 1), smooth, linewidth=1, color=line.get_color())
    losses.set_ylabel("loss, nats per byte")
    losses.legend(frameon=False)
    differences.axhline(0, color="black", linewidth=0.5)
    differences.set_ylabel("difference from bf16\n(mean of 10 steps)")
    differences.set_xlabel("step")
    for axis in (losses, differences):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
