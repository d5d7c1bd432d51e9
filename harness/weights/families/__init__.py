"""Families of models at Hugging Face (no torch); ``harness.config.model.FAMILIES`` is the table of them."""
