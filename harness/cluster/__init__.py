"""Where a job runs: launchers, SLURM, and hardware facts."""

from harness.cluster.config import ClusterConfig

__all__ = ["ClusterConfig"]
