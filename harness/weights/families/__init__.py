"""Families of models at Hugging Face, one file for each or for a pair (no torch).

``harness.config.model.FAMILIES`` is the table of them.
"""
