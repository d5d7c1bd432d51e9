"""Checks of a job's nodes before its ranks start (``cluster.node_check``).

srun starts this module once on every node. Each process prints its node's faults: GPUs that are missing, in
use by others or have errors, memory that is not free, a run folder that cannot be written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.config.cluster import node_name
from harness.config.job import Job
from harness.launch import queue
from harness.util.errors import MachineError

CHECK_SECONDS = 120
# Fractions of a node's free memory and of a GPU's used memory. A driver uses less than 1 % of a GPU's memory.
LEAST_FREE, MOST_USED = 0.05, 0.05
_QUERY = "index,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"


class UnfitNodes(MachineError):
    """Nodes that failed the check."""

    kind = "node"

    def __init__(self, faults: dict[str, list[str]]) -> None:
        self.nodes = sorted(faults)
        super().__init__("; ".join(f"{node}: {', '.join(faults[node])}" for node in self.nodes))


def check_nodes(job: Job, run_dir: Path) -> None:
    """Check all nodes of this allocation."""
    nodes, ranks = job.cluster.nodes_for(job.world_size)
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--wait=0"]
    command += ["--mpi=none", "--export=ALL"]
    command += [sys.executable, "-m", "harness.launch.node_check", str(run_dir)]
    command += ["--gpus", str(ranks if job.cluster.device == "cuda" else 0)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
        complaint, answers = done.stderr, done.stdout
    except subprocess.TimeoutExpired as error:
        complaint, answers = "", error.stdout.decode() if isinstance(error.stdout, bytes) else ""
    found: dict[str, list[str]] = {}
    for line in answers.splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    silent = [node for node in queue.own_nodes() if node not in found]
    fault = " ".join(complaint.split()) or f"gave no answer within {CHECK_SECONDS} s"
    faults = {node: own for node, own in found.items() if own} | {node: [fault] for node in silent}
    if faults:
        raise UnfitNodes(faults)


def faults_here(run_dir: Path, gpus: int) -> list[str]:
    """Return this node's faults; empty if it is fit."""
    faults = [*_folder_faults(run_dir), *_memory_faults(Path("/proc/meminfo"))]
    return [*faults, *_gpu_faults(gpus)] if gpus else faults


def _folder_faults(run_dir: Path) -> list[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=run_dir / "logs", prefix=".node_check-") as file:
            file.write(b"written\n")
            file.flush()
    except OSError as error:
        return [f"cannot write into {run_dir}: {error.strerror}"]
    return []


def _memory_faults(meminfo: Path) -> list[str]:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, total = (int(lines[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    if free < LEAST_FREE * total:
        return [f"{free:.1f} GiB of {total:.1f} GiB of memory are free"]
    return []


def _gpu_faults(wanted: int) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")  # others may use the rest
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS / 2)
    except FileNotFoundError:
        return ["nvidia-smi not found"]
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi gave no answer within {CHECK_SECONDS // 2} s"]
    if done.returncode != 0:
        return [f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())}"]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    faults = [] if len(rows) >= wanted else [f"{len(rows)} of {wanted} GPUs found"]
    for index, used, total, errors in rows:
        if used.isdigit() and total.isdigit() and int(used) > MOST_USED * int(total):
            faults.append(f"GPU {index} has {int(used) / 1024:.1f} GiB of memory in use")
        if errors.isdigit() and int(errors) > 0:  # without error correction there is no number
            faults.append(f"GPU {index} has {errors} uncorrected memory errors")
    return faults


def main() -> None:
    """Entry point of the process on each node."""
    run_dir, _, gpus = sys.argv[1:]
    sys.stdout.write(json.dumps({node_name(): faults_here(Path(run_dir), int(gpus))}) + "\n")


if __name__ == "__main__":
    main()
