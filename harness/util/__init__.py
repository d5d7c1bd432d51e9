"""Text, tables, files, locks and facts of hardware, for every room. Imports nothing of the harness."""

import functools
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""


@functools.cache
def torch_version() -> str:
    """Return the version of torch without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
