"""The interface of frozen encoders.

Latents are shifted and scaled for the model: ``(latent - shift) * scale``, with the autoencoder's numbers. B
is the number of pictures, L of a caption's tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Moments(NamedTuple):
    """Posterior of latents, float32; a standard deviation of None is 0."""

    mean_BCHW: Tensor
    std_BCHW: Tensor | None


class Embeddings(NamedTuple):
    """Embeddings of captions, float32."""

    text_BLD: Tensor
    pooled_BP: Tensor


class Autoencoder(Protocol):
    """Makes latents of pictures, and pictures of latents."""

    pixels: int
    """Pixels of a picture per latent, in each direction."""
    channels: int
    """Channels of the latents."""

    def encode(self, pixels_B3HW: Tensor) -> Moments:
        """Encode pictures with values from -1 to 1."""
        ...

    def decode(self, latents_BCHW: Tensor) -> Tensor:
        """Decode latents to pictures, whose values are clamped to -1 to 1."""
        ...


class TextEncoder(Protocol):
    """Makes embeddings of captions."""

    def encode(self, captions: Sequence[str]) -> Embeddings:
        """Encode captions, cut or padded to ``data.options.text_length`` tokens."""
        ...


def hash_of(content: object) -> str:
    """Short hash of something JSON-serializable."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
