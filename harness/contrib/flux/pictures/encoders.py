"""The frozen encoders of a job, and the two for debugging, which have no weights."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.contrib.flux.pictures import pretrained
from harness.contrib.flux.pictures.config import PATCHES, WORDS, EncodersConfig
from harness.contrib.flux.pictures.encoder_base import Autoencoder, Embeddings, Moments, TextEncoder
from harness.data.samples import random_stream


class Encoders(NamedTuple):
    """Both encoders of a job."""

    autoencoder: Autoencoder
    text: TextEncoder


def fingerprint_of(config: EncodersConfig) -> str:
    """Text that changes with the latents and embeddings; loads no weights.

    Raises:
        ConfigError: a folder has no config.json.
    """
    pixels, words = f"patches of {config.patch}", f"words, {config.text_length} of width {config.width}"
    if config.autoencoder != PATCHES:
        pixels = pretrained.fingerprint("data.options.autoencoder", config.autoencoder, config.dtype)
    if config.text != WORDS:
        settings = config.dtype, config.text_length
        words = " ".join(
            pretrained.fingerprint(f"data.options.{name}", getattr(config, name), *settings)
            for name in ("t5", "clip")
        )
    return f"{pixels}, {words}"


@functools.lru_cache(maxsize=1)  # training and validation share them
def build_encoders(config: EncodersConfig, device: torch.device, *, shard: bool = False) -> Encoders:
    """Build the encoders.

    Args:
        config: which.
        device: where encoders with weights compute.
        shard: whether FSDP shards the weights over all ranks, which then encode together.

    Raises:
        UserError: a folder cannot be read, or a package is missing.
    """
    return Encoders(build_autoencoder(config, device), build_text_encoder(config, device, shard=shard))


def build_autoencoder(config: EncodersConfig, device: torch.device) -> Autoencoder:
    """Build the autoencoder alone; see ``build_encoders``."""
    if config.autoencoder == PATCHES:
        return Patches(config.patch)
    return pretrained.PretrainedAutoencoder(config, device)


def build_text_encoder(config: EncodersConfig, device: torch.device, *, shard: bool = False) -> TextEncoder:
    """Build the text encoder alone; see ``build_encoders``."""
    if config.text == WORDS:
        return Words(config.text_length, config.width)
    return pretrained.T5AndClip(config, device, shard=shard)


class Patches:
    """The pixels of each square are the channels of one latent: exact, without weights, for debugging."""

    def __init__(self, pixels: int) -> None:
        self.pixels, self.channels = pixels, 3 * pixels**2

    def encode(self, pixels_B3HW: Tensor) -> Moments:
        return Moments(torch.nn.functional.pixel_unshuffle(pixels_B3HW, self.pixels), None)

    def decode(self, latents_BCHW: Tensor) -> Tensor:
        return torch.nn.functional.pixel_shuffle(latents_BCHW, self.pixels).clamp(-1, 1)


class Words:
    """A fixed random vector for each word, plus one for its position; their mean is the pooled embedding.

    The vectors depend on the word and the position only, so that no table is needed. For debugging.
    """

    def __init__(self, length: int, width: int) -> None:
        self._length, self._width = length, width

    def encode(self, captions: Sequence[str]) -> Embeddings:
        text_BLD = torch.stack([self._encoded(caption) for caption in captions])
        return Embeddings(text_BLD, text_BLD.mean(1))

    def _encoded(self, caption: str) -> Tensor:
        words = (caption.lower().split() + [""] * self._length)[: self._length]
        return torch.stack([_vector(f"word {word}", self._width) for word in words]) + self._positions

    @functools.cached_property
    def _positions(self) -> Tensor:
        return torch.stack([_vector(f"position {i}", self._width) for i in range(self._length)])


@functools.lru_cache(maxsize=1 << 16)
def _vector(name: str, width: int) -> Tensor:
    random = random_stream("words", 0, zlib.crc32(name.encode()))
    return torch.from_numpy(random.standard_normal(width).astype(np.float32))


def as_floats(pictures: Sequence[np.ndarray]) -> Tensor:
    """Stack uint8 pictures [H, W, 3] to float32 [B, 3, H, W] with values from -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def as_bytes(pixels_B3HW: Tensor) -> np.ndarray:
    """Make uint8 pictures [B, H, W, 3] of values from -1 to 1."""
    scaled = ((pixels_B3HW.float().clamp(-1, 1) + 1) * 127.5).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
