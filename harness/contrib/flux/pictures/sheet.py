"""PNG files: single pictures, and a sheet of several with their captions."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.util.files import write_atomically

LEAST_WIDTH = 128
"""Smaller pictures are enlarged on a sheet, in pixels."""
_COLUMNS, _MARGIN, _LINE = 8, 8, 12
_CHARACTERS_PER_PIXEL = 1 / 6


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 of shape (H, W, 3), as PNG.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    from PIL import Image

    write_atomically(path, _png(Image.fromarray(picture)))


def write_sheet(path: Path, pictures: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write pictures of one size, uint8 of shape (H, W, 3), in rows with a caption below each, as PNG.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    from PIL import Image, ImageDraw

    height, width = pictures[0].shape[:2]
    factor = -(-LEAST_WIDTH // width)
    wide, high = width * factor, height * factor
    texts = [textwrap.wrap(caption, max(1, int(wide * _CHARACTERS_PER_PIXEL)))[:4] for caption in captions]
    below = max(map(len, texts)) * _LINE
    columns = min(_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    cell = wide + _MARGIN, high + below + _MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN), "white")
    drawing = ImageDraw.Draw(sheet)
    for i, (picture, lines) in enumerate(zip(pictures, texts, strict=True)):
        left, top = _MARGIN + i % columns * cell[0], _MARGIN + i // columns * cell[1]
        sheet.paste(Image.fromarray(picture).resize((wide, high), Image.Resampling.NEAREST), (left, top))
        for line, text in enumerate(lines):
            drawing.text((left, top + high + line * _LINE), text, fill="black")
    write_atomically(path, _png(sheet))


def _png(picture: object) -> bytes:
    from PIL import Image

    assert isinstance(picture, Image.Image)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
