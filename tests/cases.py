"""Tables of cases as texts, with aligned columns."""

from __future__ import annotations

import re

import yaml


def rows(text):
    """Rows of a table, a line each: columns are two spaces or more apart, and values are YAML."""
    lines = (line.strip() for line in text.strip().splitlines())
    return [[yaml.safe_load(cell) for cell in re.split(" {2,}", line)] for line in lines]
