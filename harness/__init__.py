"""Harness: Hydra-composed pretraining of large language models on PyTorch's own parallelism."""

__version__ = "0.1.0"
