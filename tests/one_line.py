"""Errors of one line."""

import pytest


class one_line:
    """Expect an error whose message matches and is one line, as every mistake is answered.

    A class, because the frame of a generator would keep the error, and what its frames hold open, alive.
    """

    def __init__(self, error, match):
        self.raises = pytest.raises(error, match=match)

    def __enter__(self):
        return self.raises.__enter__()

    def __exit__(self, kind, error, trace):
        expected = self.raises.__exit__(kind, error, trace)
        assert "\n" not in str(error)
        return expected
