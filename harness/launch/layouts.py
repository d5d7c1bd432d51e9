"""The layouts in which a job goes on with fewer nodes.

They are chosen before it begins, and kept in its run folder.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.config.job import Job
from harness.config.registry import load_attribute
from harness.run.result import write_json_atomically
from harness.util.encoding import read_object
from harness.util.errors import UserError

LAYOUTS = "layouts.json"
FIND = "harness.tools.plan.layouts:find_layouts"
"""Where the function is that chooses them: it gets the job, and returns a list of ``Layout``."""


@dataclass(frozen=True)
class Layout:
    """How a job goes on with some of its nodes."""

    nodes: int
    """Nodes that are left; on this machine, ranks."""
    job: Job | None
    """The job in this layout, with the same numerics; None: none is legal and fits."""
    reason: str = ""
    """Why there is none."""
    memory: float | None = None
    """Planned peak memory of the fullest rank in bytes; None on unknown hardware."""
    tokens_per_second: float | None = None
    """Planned speed of all ranks together; None on unknown hardware."""
    share: float | None = None
    """Planned speed as a fraction of that of the full layout; None on unknown hardware."""


def prepare(job: Job, run_dir: Path) -> None:
    """Choose the layouts for fewer nodes, and write them into the run folder.

    Jobs with ``cluster.on_node_loss=requeue`` have none.
    """
    if job.cluster.on_node_loss != "continue":
        return
    find: Callable[[Job], list[Layout]] = load_attribute(FIND)
    layouts = [asdict(layout) for layout in find(job)]
    write_json_atomically(run_dir / LAYOUTS, {"layouts": layouts})


def read_layouts(run_dir: Path) -> dict[int, Layout]:
    """Return the layouts that ``prepare`` wrote, by number of nodes.

    Raises:
        UserError: the file is damaged.
        FileNotFoundError: there is none.
    """
    path = run_dir / LAYOUTS
    layouts = {}
    try:
        for plain in read_object(path)["layouts"]:
            stored = plain["job"]
            job = None if stored is None else Job.from_stored(stored)
            layouts[plain["nodes"]] = Layout(**{**plain, "job": job})
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {error!r}") from None
    return layouts
