"""The training loop."""

from harness.loop.config import DebugConfig, TrainingConfig, ValidationConfig

__all__ = ["DebugConfig", "TrainingConfig", "ValidationConfig"]
