"""The contract of formats of weights, which other packages add. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.config.registry import WEIGHT_FORMATS


@dataclass(frozen=True)
class WeightFormat:
    """Weights that other software writes. Functions that need torch are named: ``module:function``."""

    files: str
    """Files of this format, for errors, such as ``consolidated.*.pth``."""
    recognizes: Callable[[str], bool]
    """Whether a folder, or an fsspec URL, holds such weights. Formats are asked in the order of
    their names, if there are no safetensors and no manifest of ours."""
    read: str
    """Returns the weights under our names and in our row order, a ``Source``
    (``harness/weights/source.py``), for the path and the ``ModelConfig``. Reads one tensor at a
    time."""
    note: str = ""
    """What ``harness convert`` says of each path in this format, after the path."""
    write: str | None = None
    """Writes a ``Source`` of a ``ModelConfig`` to a new path (``convert.format``); returns what a
    user has to know of it, or an empty string. None: the format is only read."""


def weight_formats() -> dict[str, WeightFormat]:
    """Return the formats of installed packages by name, sorted."""
    return {name: WEIGHT_FORMATS[name] for name in WEIGHT_FORMATS.plugins}
