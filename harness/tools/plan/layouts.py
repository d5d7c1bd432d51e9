"""The layouts in which a job goes on when it loses nodes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from harness.config.job import Job
from harness.launch.layouts import Layout
from harness.metrics.console import progress
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import mesh_of
from harness.tools.plan.search import Search, search
from harness.tools.plan.space import LayoutPoint, Space
from harness.util.errors import ConfigError, UserError
from harness.util.tables import Column, Table, to_text
from harness.util.words import figure, gib, plural

KEPT = (
    "parallelism.pp",
    "parallelism.cp",
    "parallelism.tp",
    "parallelism.pp_schedule",
    "parallelism.pp_layers_per_stage",
    "activation_checkpoint.mode",
)
"""What a smaller layout keeps of the full one if it can.

Its kernels are then the same, and it is found in seconds.
"""


def find_layouts(job: Job) -> list[Layout]:
    """Find the fastest layout of a resolved job for each number of nodes that may be left.

    It has the job's numerics. Only the data-parallel ranks, ``ep`` and the passes of a step differ
    if such a layout is legal and fits; else all layouts are searched. On unknown hardware it is the
    simplest legal one, and whether it fits is not known.
    """
    nodes, ranks = job.cluster.nodes_to_lose(job.world_size)
    fewest = job.cluster.fewest_nodes(nodes)
    full = make_plan(job)
    layouts = []
    with progress(nodes - fewest, seconds=10.0) as begin:
        for left in range(nodes - 1, fewest - 1, -1):
            begin(f"layout for {plural(left, 'node')}")
            layouts.append(_find(full, left, left * ranks))
    return layouts


def _find(full: Plan, nodes: int, ranks: int) -> Layout:
    job = full.job
    cluster = replace(job.cluster, ranks=ranks, nodes=None if job.cluster.is_here else nodes)
    reason = ""
    for kept in (KEPT, ()):
        try:
            space = Space.of(replace(job, cluster=cluster), [], ranks)
            space = replace(space, typed=frozenset(kept))
            if full.speed is None:
                return Layout(nodes, _simplest(space))
            plan = search(space, top=1).best[0].plan
        except UserError as error:
            reason = str(error)
            continue
        assert plan.speed is not None, "a search knows its hardware"
        rate = plan.speed.tokens_per_second_per_rank * ranks
        whole = full.speed.tokens_per_second_per_rank * job.world_size
        return Layout(nodes, plan.job, "", plan.peak, rate, rate / whole)
    return Layout(nodes, None, reason)


def _simplest(space: Space) -> Job:
    """The legal point with the fewest axes that is most like the full layout."""
    base = space.base
    found = Search(space, 1)
    points = list(chain.from_iterable(found.legal_groups()))

    def unlike(point: LayoutPoint) -> tuple[Any, ...]:
        replicas = abs(point.dp_replicate - base.parallelism.dp_replicate)
        return point.complexity, replicas, abs(point.local_batch_size - base.local_batch_size)

    for point in sorted(points, key=unlike):
        try:
            return point.job(base)
        except ConfigError as error:
            found.rules.setdefault(error.field, error)
    raise next(iter(found.rules.values()))


_COLUMNS = [
    Column("nodes", "nodes", "d"),
    Column("layout", "layout"),
    Column("memory", "GiB", gib),
    Column("tokens_per_second", "tokens/s", figure),
    Column("share", "share of full speed", ".0%"),
]


def render_layouts(layouts: Sequence[Layout]) -> str:
    """Format the layouts as a table."""
    rows = []
    for row in layouts_as_dict(layouts):
        layout = row["layout"] or f"none: {row['reason']}"
        rows.append(row | {"layout": layout})
    table = to_text(Table(_COLUMNS, rows, missing=""), "  ")
    return f"layouts with fewer nodes\n{table}"


def layouts_as_dict(layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """The layouts as plain containers, for JSON: each with its mesh in words, without its job."""
    rows = []
    for layout in layouts:
        mesh = None if layout.job is None else mesh_of(layout.job.parallelism)
        facts = {name: value for name, value in vars(layout).items() if name != "job"}
        rows.append({**facts, "layout": mesh})
    return rows
