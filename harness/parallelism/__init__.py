"""How a model is distributed over ranks: a file per kind of parallelism; ``parallelize.py`` applies them."""

from harness.parallelism.config import ParallelismConfig

__all__ = ["ParallelismConfig"]
