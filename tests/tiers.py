"""Two tiers of tests: those run for every change, and the rest of some tables, for ``make thorough``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = "THOROUGH" in os.environ


def rest_is_thorough(values: Iterable[Any], *core: Any) -> list[Any]:
    """Mark all values but ``core`` as thorough."""
    listed = list(values)
    assert set(core) <= set(listed), "the core is a part of the table"
    return [each if each in core else pytest.param(each, marks=pytest.mark.thorough) for each in listed]
