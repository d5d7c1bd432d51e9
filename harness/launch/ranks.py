"""What all starters of ranks share: the store where ranks meet, and the environment of a rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.job import Job
from harness.train.process import STARTED, importing_torch


@contextmanager
def rendezvous_store() -> Iterator[int]:
    """Keep the store where the ranks meet; yield its port.

    The store is in the controller and not in rank 0, on a port that the system picks: no other process can
    take it.
    """
    with importing_torch():
        from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def rank_environment(job: Job, port: int, started: float) -> dict[str, str]:
    """Return the environment variables that all ranks of a job share.

    Args:
        job: the resolved job.
        port: port of the store, on this node.
        started: time.monotonic() of this machine at which the job was started.
    """
    nodes, local = job.cluster.nodes_for(job.world_size)
    # A node may be unable to resolve its own name; without a network that takes minutes to fail.
    address = "127.0.0.1" if nodes == 1 else socket.gethostname()
    if job.cluster.kind == "slurm":
        address = job.cluster.env.get("MASTER_ADDR", address)
    return {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STARTED: str(started),
        **openmp_environment(job),
    }


def threads_per_rank(job: Job) -> int:
    """Return a rank's CPU threads: the job's, those that SLURM reserves, or a share of this machine's."""
    config = job.cluster
    _, local = config.nodes_for(job.world_size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reserved = config.cpus_per_rank if config.kind == "slurm" else None
    return config.threads_per_rank or reserved or max(1, cores // local)


def openmp_environment(job: Job) -> dict[str, str]:
    """Return OpenMP's thread count and spin count for a rank; set them before torch is imported.

    GNU's OpenMP threads spin for milliseconds at every barrier. On cores shared with other processes they
    take time from the thread they wait for: on two shared cores steps took up to ten times as long. A spin
    count of 1000 is as fast on an idle machine (experiments/LOG.md). Variables set by the user are kept.
    """
    wanted = {"OMP_NUM_THREADS": str(threads_per_rank(job)), "GOMP_SPINCOUNT": "1000"}
    from_job = "OMP_NUM_THREADS" if job.cluster.threads_per_rank is not None else ""
    return {name: value for name, value in wanted.items() if name == from_job or name not in os.environ}
