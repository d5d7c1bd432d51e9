"""Errors of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(error: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message matches and is one line, as every mistake is answered."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
