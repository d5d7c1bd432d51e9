"""The optimizer and its learning-rate schedule."""

from harness.optimizer.config import OptimizerConfig, ScheduleConfig

__all__ = ["OptimizerConfig", "ScheduleConfig"]
