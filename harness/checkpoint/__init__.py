"""The ``checkpoint`` group: saving, resuming, exchange with other formats. Imports no torch."""

from harness.checkpoint.config import CheckpointConfig

__all__ = ["CheckpointConfig"]
