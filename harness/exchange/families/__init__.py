"""Families of models at Hugging Face, one file for each or for a pair (no torch).

``harness.model.config.FAMILIES`` is the table of them.
"""
