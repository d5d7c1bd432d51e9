"""Metrics of a run, and where they are written.

``metrics.jsonl`` is the primary record; the console, W&B and TensorBoard are views of it. This module is
imported while a job is composed, so it imports neither torch nor any of the views.
"""

from harness.metrics.config import MetricsConfig, ProfilingConfig

__all__ = ["MetricsConfig", "ProfilingConfig"]
