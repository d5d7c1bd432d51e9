"""Model size, tokens and hyperparameters of a run from a few numbers."""

from harness.scale.config import ScaleConfig

__all__ = ["ScaleConfig"]
