"""Versions of packages, without importing them."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def torch_version() -> str:
    """Return the version of torch without importing it; empty if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
