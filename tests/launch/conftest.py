"""Fixtures of tests that start jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Starts jobs in the test's own folder, and kills them when the test ends."""
    started: list[Launch] = []

    def start(*overrides: str, **options: Any) -> Launch:
        started.append(Launch(tmp_path, *overrides, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()
