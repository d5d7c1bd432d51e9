"""Go on without lost nodes (``cluster.on_node_loss=continue``): what is lost, and what follows.

| how an attempt ended | lost |
|---|---|
| here, SIGKILL or SIGTERM from outside ended a rank | its node |
| a rank recorded an error of kind ``node``: of an accelerator, a link, a disk | its node |
| ranks waited in a collective, until its timeout, for a rank that never came | its node |
| on SLURM, ranks failed, and a node is down, does not answer or fails its check | the node |
| a rank ran out of memory: ranks of fewer nodes need more | nothing |
| another signal, an exit code, any other error: the next attempt would meet it again | nothing |
| a stop request, a cancelled job, a job that SLURM requeues | nothing |

A node of ``cluster=local`` is a rank. Layouts for fewer nodes are made when a run begins
(``layouts.py``).
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checkpoint.resume import find_start
from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.launch.begin import begin_again
from harness.launch.faults import RankDied
from harness.launch.layouts import Layout, read_layouts
from harness.run.folder import LAYOUT, RunFolder
from harness.run.result import write_json_atomically
from harness.train.finish import find_cause, finish_run
from harness.util.words import plural


@dataclass(frozen=True)
class Loss:
    """Nodes that an attempt has lost.

    Attributes:
        words: which, and why.
        nodes: how many.
        left: how many the next attempt can have.
    """

    words: str
    nodes: int
    left: int


def lost_ranks(folder: RunFolder, dead: Sequence[tuple[int, RankDied]]) -> tuple[list[int], str]:
    """Return the ranks whose nodes count as lost, and how they were; none if the cause is another.

    Args:
        dead: ranks that recorded no error, as the process that started them found them.
    """
    cause = find_cause(folder)
    if cause is None:
        return [], ""
    if cause["kind"] == "node" and cause["rank"] is not None:
        return [cause["rank"]], cause["message"].splitlines()[0]
    if "absent_ranks" in cause:
        return cause["absent_ranks"], "never came to a collective"
    ended = {rank: died.how for rank, died in dead if died.is_from_outside}
    if cause["rank"] not in ended:
        return [], ""
    return list(ended), ended[cause["rank"]]


def go_on(job: Job, folder: RunFolder, code: int, loss: Loss) -> Job | None:
    """End this attempt, and begin one on the nodes that are left; return its job.

    None, and nothing is done, if no layout is prepared for so few.

    Args:
        code: exit code of the attempt.
    """
    layouts = read_layouts(folder.path)
    whole = folder.read_job()
    nodes, _ = whole.cluster.nodes_to_lose(whole.world_size)
    fitting = [
        each
        for each in (Layout(nodes, whole), *layouts.values())
        if each.nodes <= loss.left and each.job is not None
    ]
    smaller = max(fitting, key=lambda each: each.nodes, default=None)
    unit = "rank" if job.cluster.is_here else "node"
    if smaller is None or smaller.job is None:
        why = "fewer than cluster.min_nodes allows"
        if loss.left in layouts:
            why = layouts[loss.left].reason
        sys.stderr.write(f"{loss.words}; {plural(loss.left, unit)} left: {why}\n")
        return None
    errors = folder.errors.all()
    before = folder.layout
    last = folder.last_metrics
    steps = [each["step"] or 0 for each in errors]
    # A row of an earlier attempt is still there if this one did not come to its first step.
    if last.get("time", 0.0) > before.get("moments", {}).get("decided", 0.0):
        steps.append(last["step"])
    reached = max(steps, default=0)
    candidates = find_start(job, folder.path).candidates
    step = candidates[0].step if candidates else 0
    now = time.time()
    moments = {"lost": min([now, *(each["time"] for each in errors)]), "ended": now}
    finish_run(job, folder, code, quiet=True)
    begin_again(folder, job)
    layout = {
        "id": before.get("id", job.id),
        "nodes": smaller.nodes,
        "reason": loss.words,
        "losses": before.get("losses", 0) + loss.nodes,
        "lost_steps": before.get("lost_steps", 0) + max(0, reached - step),
        "moments": {**moments, "decided": time.time()},
        "job": smaller.job.to_dict(),
    }
    write_json_atomically(folder.path / LAYOUT, layout)
    degrees = degrees_in_words(smaller.job.parallelism.degrees)
    sys.stderr.write(
        f"{loss.words} after step {reached}; going on from step {step} on "
        f"{plural(smaller.nodes, unit)}: {degrees}\n"
    )
    return smaller.job
