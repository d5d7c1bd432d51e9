"""What a run measures and where it writes it down.

``metrics.jsonl`` is the truth; the console, W&B and TensorBoard are views of it. This module is imported
while a job is composed, so it brings in neither torch nor any of the views.
"""

from harness.metrics.config import MetricsConfig, ProfilingConfig

__all__ = ["MetricsConfig", "ProfilingConfig"]
