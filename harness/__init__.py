"""Harness: Hydra-composed pretraining of large language models on PyTorch's own parallelism."""
