"""Evaluate weights: loss on documents, local JSONL tasks, tasks of lm-evaluation-harness."""
