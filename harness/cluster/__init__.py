"""Where a job runs, and the facts about that hardware."""

from harness.cluster.config import ClusterConfig

__all__ = ["ClusterConfig"]
