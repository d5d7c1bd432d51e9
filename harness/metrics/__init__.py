"""Metrics of a run; ``metrics.jsonl`` is the primary record, and the console, W&B and TensorBoard are views of it."""
