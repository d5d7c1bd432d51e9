"""Two tiers: what every change is held against, and the rest of some tables, for ``make thorough``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = "THOROUGH" in os.environ


def rest_is_thorough(values: Iterable[Any], *core: Any) -> list[Any]:
    """Parameters of a test of which all but ``core`` are left to the thorough tier."""
    listed = list(values)
    assert set(core) <= set(listed), "the core is a part of the table"
    return [each if each in core else pytest.param(each, marks=pytest.mark.thorough) for each in listed]
