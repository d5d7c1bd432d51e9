"""Encode pictures and captions once, for any number of jobs: ``harness encode``."""
