"""Draw the pictures of the documentation: ``python docs/pictures.py`` writes docs/pictures/*.svg.

Each picture is drawn twice, for light and for dark pages, on a transparent background.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from harness.compose.composer import compose_job
from harness.tools.plan.config import PlanJob
from harness.tools.plan.make import make_plan
from harness.tools.plan.picture import figure_of

FOLDER = Path(__file__).parent / "pictures"


@dataclass(frozen=True)
class Palette:
    """Colours of one scheme: page, text, lines, and (fill, edge) of each kind of box."""

    paper: str
    text: str
    soft: str
    line: str
    boxes: dict[str, tuple[str, str]]


LIGHT = Palette(
    paper="#ffffff",
    text="#1f2430",
    soft="#59606e",
    line="#6b7280",
    boxes={
        "plain": ("#f1f3f6", "#9aa2b1"),
        "blue": ("#dce8fb", "#3f74c4"),
        "green": ("#dcf2e3", "#2f8a55"),
        "orange": ("#fdebd3", "#c47a1c"),
        "purple": ("#ebe2fa", "#7a55bd"),
    },
)
DARK = Palette(
    paper="#1e2129",
    text="#e6e9ef",
    soft="#a8b0bd",
    line="#98a1b0",
    boxes={
        "plain": ("#2b303b", "#7d8696"),
        "blue": ("#1d3354", "#6fa3ee"),
        "green": ("#17402a", "#5cc288"),
        "orange": ("#4d3210", "#e2a04a"),
        "purple": ("#382958", "#b092ec"),
    },
)


class Canvas:
    """A figure in units of characters' widths, without axes."""

    def __init__(self, width: float, height: float, palette: Palette) -> None:
        self.palette = palette
        self.figure = plt.figure(figsize=(width / 10, height / 10))
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        title: str = "",
        lines: str = "",
    ) -> None:
        """A rounded box with a bold title and smaller lines, centred."""
        fill, edge = self.palette.boxes[kind]
        style = "round,pad=0,rounding_size=0.9"
        self.axes.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=1.2
            )
        )
        count = len(lines.splitlines())
        middle = y + height / 2
        self.text(x + width / 2, middle + 0.85 * count, title, weight="bold")
        if lines:
            self.text(
                x + width / 2, middle - 1.1 + 0.1 * count, lines, size=8.5, color=self.palette.soft
            )

    def text(self, x: float, y: float, text: str, *, size: float = 10, **style: str) -> None:
        """Text centred at a point; ``ha`` aligns it otherwise."""
        style = {"ha": "center", "va": "center", "color": self.palette.text, **style}
        self.axes.text(x, y, text, fontsize=size, linespacing=1.35, **style)  # type: ignore[arg-type]

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False
    ) -> None:
        """An arrow between two points."""
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=11,
                linewidth=1.3,
                color=self.palette.line,
                linestyle="--" if dashed else "-",
                shrinkA=0,
                shrinkB=0,
            )
        )


def flow(palette: Palette) -> Figure:
    """From the command line to tables: README and architecture."""
    c = Canvas(100, 43, palette)
    c.box(
        1,
        25,
        15,
        12,
        "plain",
        "overrides",
        "model=llama3_8b\nparallelism=fsdp_tp_pp\nprecision=bf16",
    )
    c.box(21, 25, 15, 12, "blue", "Job", "typed, checked,\nhashed;\nno torch so far")
    c.box(41, 22, 27, 18, "green")
    c.text(54.5, 38, "8 ranks on a mesh", weight="bold")
    for stage in range(2):
        left = 42.5 + 12.5 * stage
        c.box(left, 23.2, 11.5, 13, "plain")
        c.text(left + 5.75, 35, f"pp {stage}", size=8.5, color=palette.soft)
        for shard in range(2):
            for slice_ in range(2):
                rank = stage * 4 + shard * 2 + slice_
                x, y = left + 0.8 + 5.2 * slice_, 28.9 - 5.1 * shard
                c.box(x, y, 4.7, 4.6, "green", str(rank))
    c.box(73, 25, 12, 12, "orange", "run folder", "metrics.jsonl\ncheckpoints/\nresult.json")
    c.box(90, 25, 9, 12, "purple", "tables", "sweep\nreport")
    for start, end in ((16, 21), (36, 41), (68, 73), (85, 90)):
        c.arrow((start, 31), (end, 31))
    c.text(18.5, 32.6, "compose", size=7, color=palette.soft)
    c.text(38.5, 32.6, "start", size=8, color=palette.soft)
    c.text(70.5, 32.6, "write", size=8, color=palette.soft)
    c.text(
        54.5, 20.6, "rows: dp_shard (FSDP)   columns: tp   blocks: pp", size=8.5, color=palette.soft
    )
    below = (
        (3, "plan", "memory, time, MFU;\nseconds, no GPU"),
        (21, "rehearse", "the CUDA code on\na virtual GPU"),
        (39, "parity", "every layout against\none process"),
    )
    for x, title, lines in below:
        c.box(x, 4, 15, 9.5, "plain", f"harness {title}", lines)
    c.arrow((25, 25), (13, 13.8), dashed=True)
    c.arrow((28.5, 25), (28.5, 13.8), dashed=True)
    c.arrow((32, 25), (44, 13.8), dashed=True)
    c.text(
        57,
        8.7,
        "the same job, checked before it costs anything",
        size=9,
        ha="left",
        color=palette.soft,
    )
    return c.figure


def mesh(palette: Palette) -> Figure:
    """What each rank of fsdp_tp_pp holds: how-to on parallelism."""
    c = Canvas(100, 50, palette)
    c.text(
        2,
        47.5,
        "parallelism=fsdp_tp_pp: pp 2 x dp_shard 2 x tp 2 = 8 ranks",
        ha="left",
        weight="bold",
    )
    for stage, (layers, extra) in enumerate(
        (("layers 0-2", "embedding"), ("layers 3-5", "norm, head"))
    ):
        left = 2 + 51 * stage
        c.box(left, 4, 45, 40, "plain")
        c.text(left + 22.5, 41.5, f"pipeline stage {stage}: {layers}, {extra}", weight="bold")
        for shard in range(2):
            y = 24 - 17 * shard
            c.text(
                left + 3,
                y + 6.5,
                f"dp_shard {shard}",
                size=9,
                rotation="vertical",
                color=palette.soft,
            )
            for slice_ in range(2):
                rank = stage * 4 + shard * 2 + slice_
                x = left + 5.5 + 19.5 * slice_
                lines = (
                    f"slice {slice_} of 2 of each matrix,\nhalf {shard} of that slice's\n"
                    f"parameters and optimizer\nsequences of replica {shard}"
                )
                c.box(x, y, 18.5, 13.5, ("blue", "green")[slice_], f"rank {rank}", lines)
        for slice_ in range(2):
            c.text(left + 14.75 + 19.5 * slice_, 38.6, f"tp {slice_}", size=9, color=palette.soft)
    c.arrow((47.2, 24), (52.8, 24))
    c.text(50, 26, "activations", size=7, color=palette.soft)
    c.text(
        50,
        1.7,
        "tp: all-gather and reduce-scatter in every layer    dp_shard: gather parameters, scatter gradients"
        "    pp: send and receive",
        size=8.5,
        color=palette.soft,
    )
    return c.figure


def rooms() -> list[str]:
    """The rooms of harness/ from the ground up, as the table of architecture.md has them."""
    page = (FOLDER.parent / "architecture.md").read_text()
    return re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)


def floors(palette: Palette) -> Figure:
    """The rooms, the way of a job through them, and the borders of torch and Hydra: architecture."""
    c = Canvas(100, 71, palette)
    util, config, *of_all, train, compose, launch, tools, contrib = rooms()
    c.box(1, 58.5, 98, 11.5, "plain")
    c.text(
        3,
        68,
        "On top: looks at jobs and runs, adds kinds; the core names none of it",
        ha="left",
        size=9,
    )
    c.box(3, 60, 63, 6.3, "purple", tools, "plan  rehearse  parity  report  study  inference ...")
    c.box(68, 60, 29, 6.3, "purple", contrib, "formats")
    c.box(1, 1, 98, 56, "plain")
    c.text(3, 54.8, "The core: trains. A room imports the rooms below it", ha="left", size=9)
    for place, room in enumerate((util, config)):
        c.box(3, 2.5 + 5.5 * place, 94, 4.7, "orange", room)
    for place, room in enumerate(of_all[:4]):
        c.box(3 + 23.75 * place, 13.5, 22.75, 4.7, "orange", room)
    for place, room in enumerate(of_all[4:]):
        c.box(41 + 11.3 * place, 20.5, 10.8, 5.5, "green", room)
    c.box(41, 28, 56, 6.5, "green", train, "engine: one step    trainer: the loop    observers")
    c.box(3, 37, 32, 6.3, "blue", compose, "Hydra; rules between groups")
    c.box(3, 46.5, 32, 6.3, "blue", launch, "ranks here or on SLURM, sweeps")
    c.box(3, 23, 32, 6.3, "plain", "harness train", "model=llama3_8b parallelism=fsdp ...")
    c.box(52, 44, 34, 8, "plain", "run folder", "job.json  metrics.jsonl  checkpoints\nresult.json")
    c.arrow((19, 29.3), (19, 37))
    c.text(20, 33, "overrides", ha="left", size=8.5, color=palette.soft)
    c.arrow((19, 43.3), (19, 46.5))
    c.text(20, 44.8, "Job", ha="left", size=8.5, color=palette.soft)
    c.arrow((35, 49.7), (52, 49.7))
    c.arrow((62, 44), (62, 34.5))
    c.text(61, 39.2, "ranks read the job", ha="right", size=8.5, color=palette.soft)
    c.arrow((76, 34.5), (76, 44))
    c.text(77, 39.2, "rows, checkpoints", ha="left", size=8.5, color=palette.soft)
    c.arrow((60, 52), (60, 60))
    for x, kind in ((37.3, "green"), (38.7, "blue")):
        colour = palette.boxes[kind][1]
        c.axes.plot((x, x), (20.5, 47.5), color=colour, linewidth=1.6, linestyle=(0, (4, 2)))
    c.text(36.6, 35, "no torch", ha="right", size=8.5, color=palette.boxes["green"][1])
    c.text(39.4, 36.2, "no Hydra", ha="left", size=8.5, color=palette.boxes["blue"][1])
    return c.figure


def plan(palette: Palette) -> Figure:
    """What picture= draws of the first job of a tutorial."""
    page = (FOLDER.parent / "tutorials" / "plan_a_cluster.md").read_text()
    typed = page.partition("$ harness plan ")[2].replace("\\\n", "").splitlines()[0]
    job = compose_job(typed.split(), config_name="plan", schema=PlanJob)
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(ink, palette.text) | {"figure.facecolor": palette.paper}):
        return figure_of(make_plan(job.plain))


def losses(palette: Palette) -> Figure:
    """A run that moved between three layouts, on the curve of a run that did not: the first page.

    losses.csv has the printed losses of ``harness train data=tokens data.paths=[corpus/python]
    tokenizer=python_2k training.steps=90 training.global_batch_size=4`` (docs/workflows.md has the corpus)
    with ``name=whole``, and with ``name=chain``: stopped by SIGTERM after steps 32 and 62, each time typed
    again with the next layout.
    """
    labels = {"single": "one rank", "fsdp_tp": "FSDP 2 x TP 2", "fsdp": "FSDP 4"}
    return curves(palette, "losses.csv", labels, "never stopped")


def lost_ranks(palette: Palette) -> Figure:
    """A run that lost two ranks, on the curve of a run that did not: docs/tutorials/lose_ranks.md, with
    ``metrics.log_interval=1``. lost_ranks.csv has the layout that each step counts of."""
    labels = {"4": "4 ranks", "3": "3 ranks", "2": "2 ranks"}
    return curves(palette, "lost_ranks.csv", labels, "no rank lost")


def curves(palette: Palette, name: str, labels: dict[str, str], about: str) -> Figure:
    """The losses of two runs, one of which changes its layout twice."""
    with (FOLDER / name).open() as file:
        rows = list(csv.DictReader(file))
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(ink, palette.text)):
        figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
        steps = [int(row["step"]) for row in rows]
        axes.plot(
            steps,
            [float(row["whole"]) for row in rows],
            color=palette.soft,
            linewidth=4,
            alpha=0.45,
        )
        axes.annotate(about, (6, 7.3), (12, 7.6), color=palette.soft)
        for layout, kind in zip(labels, ("blue", "orange", "green"), strict=True):
            part = [row for row in rows if row["layout"] == layout]
            x = [int(row["step"]) for row in part]
            colour = palette.boxes[kind][1]
            axes.plot(x, [float(row["chain"]) for row in part], ".", markersize=5, color=colour)
            axes.text(
                (x[0] + x[-1]) / 2, 7.0, labels[layout], color=colour, ha="center", weight="bold"
            )
            if x[0] > 1:
                axes.axvline(x[0] - 0.5, color=palette.line, linestyle="--", linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.set_xlim(0, steps[-1] + 1)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES = {
    "flow": flow,
    "mesh": mesh,
    "floors": floors,
    "plan": plan,
    "losses": losses,
    "lost_ranks": lost_ranks,
}


def main() -> None:
    """Write every picture in both colour schemes."""
    plt.rcParams.update(
        {"svg.hashsalt": "harness", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    )
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        for scheme, palette in (("light", LIGHT), ("dark", DARK)):
            figure = draw(palette)
            path = FOLDER / f"{name}-{scheme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)
            path.write_text(
                "\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n"
            )


if __name__ == "__main__":
    main()
