"""Errors of one line."""

from __future__ import annotations

from types import TracebackType

import pytest


class one_line:
    """Expect an error whose message matches and is one line, as every mistake is answered.

    A class, because the frame of a generator would keep the error, and what its frames hold open, alive.
    """

    def __init__(self, error: type[Exception], match: str) -> None:
        self.raises = pytest.raises(error, match=match)

    def __enter__(self) -> pytest.ExceptionInfo[Exception]:
        return self.raises.__enter__()

    def __exit__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType
    ) -> bool:
        expected = self.raises.__exit__(kind, error, trace)
        assert "\n" not in str(error)
        return expected
