"""The ``checkpoint`` group: saving, resuming, conversion to other formats. Imports no torch."""

from harness.checkpoint.config import CheckpointConfig

__all__ = ["CheckpointConfig"]
