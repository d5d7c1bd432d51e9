"""Names of the formats of token files and weights: our own ones, and those of other packages."""

from __future__ import annotations

from typing import Any

from harness.config.registry import Registry

TOKEN_FORMATS: Registry[Any] = Registry(
    "token_format",
    dict.fromkeys(("auto", "corpus")),
    field="data.format",
    expects="harness.data.tokens:TokenFormat",
)
"""Formats of ``data.kind=tokens``."""

WEIGHT_FORMATS: Registry[Any] = Registry(
    "weight_format",
    dict.fromkeys(("dcp", "hf", "torch")),
    field="convert.format",
    expects="harness.weights.format:WeightFormat",
)
"""Formats of weights that are read or written."""
