"""Rows, throughput and MFU. ``metrics.jsonl`` is the record, consoles and trackers are views of it."""
