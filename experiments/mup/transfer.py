"""Best learning rates by width, in the standard parametrization and in muP.

    python experiments/mup/transfer.py

trains a small model at every width with every learning rate, in this process, prints the table of
experiments/README.md, and draws a picture in runs/mup. The same command again trains only the points that
runs/mup/results.jsonl has not. At the base width both parametrizations are the same, so it is trained once.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps

from harness.compose.composer import compose_job
from harness.compose.resolve import resolve
from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import process_group, set_up_process
from harness.util.document import to_markdown
from harness.util.plots import new_panels, save
from harness.util.tables import Table

RESULTS = Path("runs/mup/results.jsonl")
BASE, WIDTHS, RATES = 256, (32, 64, 128, 256), [2.0**exponent for exponent in range(-11, -3)]
STEPS, LAST = 100, 10
JOB = (
    "model=llama3_tiny",
    "model.n_layers=2",
    "model.vocab_size=320",
    "tokenizer=bytes",
    "training.seq_len=64",
    "training.global_batch_size=8",
    f"training.steps={STEPS}",
    "schedule.warmup_steps=10",
    "cluster.device=cpu",
)
NAMES = {"standard": "standard parametrization", "mup": f"muP, base width {BASE}"}


def main() -> None:
    """Train what is missing, then print the table and draw the picture."""
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["parametrization"], row["width"], row["lr"]) for row in rows}
    with RESULTS.open("a") as out:
        for name in NAMES:
            for width in WIDTHS:
                for rate in RATES:
                    if (name, width, rate) in done or (name == "mup" and width == BASE):
                        continue
                    began = time.process_time()
                    row = {
                        "parametrization": name,
                        "width": width,
                        "lr": rate,
                        "loss": loss_of(name, width, rate),
                    }
                    row["cpu_seconds"] = round(time.process_time() - began, 2)
                    rows.append(row)
                    out.write(f"{json.dumps(row)}\n")
                    out.flush()
                    sys.stderr.write(f"{row}\n")
    print(table(rows))
    draw(rows)


def loss_of(parametrization: str, width: int, rate: float) -> float:
    """Mean training loss of the last steps."""
    mup = [f"model.mup.base_dim={BASE}"] if parametrization == "mup" else []
    composed = compose_job([*JOB, *mup, f"optimizer.lr={rate}"])
    job = Job.from_json(composed.to_json())
    job = resolve(dataclasses.replace(job, model=job.model.at_width(width)), gpus=0)
    set_up_process(job)
    device = torch.device("cpu")
    with process_group(job, device):
        engine = Engine(job, device)
        loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
        losses = []
        for _ in range(job.steps):
            outcome = engine.gradients(loader.next())
            engine.update(outcome.norm)
            losses.append(outcome.loss)
    return statistics.fmean(losses[-LAST:])


def curves(rows: list[dict[str, Any]], name: str) -> dict[int, dict[float, float]]:
    """Loss by width and learning rate of a parametrization."""
    found: dict[int, dict[float, float]] = {width: {} for width in WIDTHS}
    for row in rows:
        if row["parametrization"] == name or row["width"] == BASE:
            found[row["width"]][row["lr"]] = row["loss"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Losses of all points; the best of each width is bold."""
    cells = []
    for name, title in NAMES.items():
        for width, losses in curves(rows, name).items():
            best = min(losses.values())
            shown = [
                f"**{losses[lr]:.3f}**" if losses[lr] == best else f"{losses[lr]:.3f}"
                for lr in RATES
            ]
            cells.append([title, str(width), *shown])
    headings = ["parametrization", "width", *(f"{rate:.2g}" for rate in RATES)]
    made = to_markdown(Table.of_cells(headings, cells, right=range(1, len(headings))))
    return f"Loss by width and learning rate, mean of the last {LAST} of {STEPS} steps.\n\n{made}"


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw loss over learning rate, a line for each width."""
    figure, [panels] = new_panels(1, 2, 9, 3.6, sharey=True)
    for axis, (name, title) in zip(panels, NAMES.items(), strict=True):
        for number, (width, losses) in enumerate(curves(rows, name).items()):
            color = colormaps["viridis"](0.28 * number)
            rates = sorted(losses)
            best = min(losses, key=losses.__getitem__)
            axis.plot(
                rates,
                [losses[rate] for rate in rates],
                marker=".",
                color=color,
                label=f"width {width}",
            )
            axis.plot(
                [best], [losses[best]], marker="o", markersize=8, color=color, fillstyle="none"
            )
        axis.set(xscale="log", xlabel="learning rate", title=title)
    worst = max(row["loss"] for row in rows if row["lr"] == max(RATES))
    panels[0].set(ylabel=f"loss, mean of the last {LAST} steps", ylim=(None, worst + 0.1))
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, RESULTS.with_name("transfer.png"))


if __name__ == "__main__":
    main()
