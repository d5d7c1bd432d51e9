"""How a model is laid out over ranks: one file per parallelism, one order in which they are applied."""

from harness.parallelism.config import ParallelismConfig

__all__ = ["ParallelismConfig"]
