"""The frozen encoders of a job, and the two for debugging, which have no weights."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.config.data import DataConfig
from harness.data.documents import describe
from harness.data.samples import random_stream
from harness.util.encoding import json_digest
from harness.util.errors import ConfigError
from harness_flux.pictures.config import PATCHES, WORDS, PictureOptions, folders

# Latents are shifted and scaled for the model: `(latent - shift) * scale`, with the autoencoder's
# numbers. B is the number of pictures, L of a caption's tokens.


class Moments(NamedTuple):
    """Posterior of latents, float32; a standard deviation of None is 0."""

    mean_BCHW: Tensor
    std_BCHW: Tensor | None


class Embeddings(NamedTuple):
    """Embeddings of captions, float32."""

    text_BLD: Tensor
    pooled_BP: Tensor


def fingerprint_of(data: DataConfig) -> str:
    """Hash that changes with the encoders in folders: their configs, names and sizes of their weights.

    Raises:
        ConfigError: a folder has no config.json.
    """
    content: list[Any] = []
    for name, path in folders(data).items():
        if path is None:
            continue
        folder = Path(path).expanduser()
        try:
            content.append((folder / "config.json").read_text())
        except OSError as error:
            rule = f"its config.json cannot be read: {describe(error)}"
            field = f"data.options.{name}"
            raise ConfigError(field, path, rule, "the folder of a model") from error
        for file in sorted(folder.iterdir()):
            if file.suffix in (".safetensors", ".bin"):
                content.append([file.name, file.stat().st_size])
    return json_digest(content)[:16]


@functools.lru_cache(maxsize=1)  # training, validation and its sheet share them
def build_autoencoder(config: PictureOptions, device: torch.device) -> Autoencoder:
    is_exact = config.autoencoder == PATCHES
    return Patches(config.patch) if is_exact else PretrainedAutoencoder(config, device)


@functools.lru_cache(maxsize=1)
def build_text_encoder(config: PictureOptions, device: torch.device) -> Words | T5AndClip:
    """Build the text encoder. In a process group FSDP shards its weights over all ranks, which then
    encode together."""
    if config.text == WORDS:
        return Words(config.text_length, config.width)
    return T5AndClip(config, device)


class Patches:
    """The pixels of each square are the channels of one latent: exact, without weights, for debugging.

    Attributes:
        pixels: pixels of a picture per latent, in each direction.
        channels: channels of the latents.
    """

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self.channels = 3 * pixels**2

    def encode(self, pixels_B3HW: Tensor) -> Moments:
        """Encode pictures with values from -1 to 1."""
        return Moments(torch.nn.functional.pixel_unshuffle(pixels_B3HW, self.pixels), None)

    def decode(self, latents_BCHW: Tensor) -> Tensor:
        """Decode latents to pictures, whose values are clamped to -1 to 1."""
        return torch.nn.functional.pixel_shuffle(latents_BCHW, self.pixels).clamp(-1, 1)


@dataclass(frozen=True)
class Words:
    """A fixed random vector for each word, plus one for its position; their mean is the pooled embedding.

    The vectors depend on the word and the position only, so that no table is needed. For debugging.
    """

    length: int
    width: int

    def encode(self, captions: Sequence[str]) -> Embeddings:
        """Encode captions, cut or padded to ``data.options.text_length`` tokens."""
        padding = [""] * self.length
        positions_LD = self._stacked([f"position {i}" for i in range(self.length)])
        rows = []
        for caption in captions:
            words = (caption.lower().split() + padding)[: self.length]
            rows.append(self._stacked([f"word {word}" for word in words]))
        text_BLD = torch.stack(rows) + positions_LD
        return Embeddings(text_BLD, text_BLD.mean(1))

    def _stacked(self, names: Sequence[str]) -> Tensor:
        return torch.stack([_vector(name, self.width) for name in names])


@functools.lru_cache(maxsize=1 << 16)
def _vector(name: str, width: int) -> Tensor:
    random = random_stream("words", 0, zlib.crc32(name.encode()))
    return torch.from_numpy(random.standard_normal(width).astype(np.float32))


def as_floats(pictures: Sequence[np.ndarray]) -> Tensor:
    """Stack uint8 pictures [H, W, 3] to float32 [B, 3, H, W] with values from -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def as_bytes(pixels_B3HW: Tensor) -> np.ndarray:
    """Make uint8 pictures [B, H, W, 3] of float32 values from -1 to 1."""
    scaled = ((pixels_B3HW + 1) * 127.5).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


class PretrainedAutoencoder:
    """An AutoencoderKL of diffusers."""

    def __init__(self, config: PictureOptions, device: torch.device) -> None:
        import diffusers

        self._device = device
        self._dtype = getattr(torch, config.dtype)
        model = _load(
            "autoencoder",
            diffusers.AutoencoderKL,
            Path(config.autoencoder).expanduser(),
            low_cpu_mem_usage=False,
            torch_dtype=self._dtype,
        )
        self._model = model.eval().requires_grad_(False).to(device)
        self._shift = model.config.shift_factor or 0.0
        self._scale = model.config.scaling_factor
        self.pixels = 2 ** (len(model.config.block_out_channels) - 1)
        self.channels = model.config.latent_channels

    @torch.no_grad()
    def encode(self, pixels_B3HW: Tensor) -> Moments:
        posterior = self._model.encode(pixels_B3HW.to(self._device, self._dtype)).latent_dist
        mean = (posterior.mean.float() - self._shift) * self._scale
        return Moments(mean, posterior.std.float() * self._scale)

    @torch.no_grad()
    def decode(self, latents_BCHW: Tensor) -> Tensor:
        latents = latents_BCHW.to(self._device) / self._scale + self._shift
        pixels: Tensor = self._model.decode(latents.to(self._dtype)).sample
        return pixels.float().clamp(-1, 1)


class T5AndClip:
    """A T5 encoder for the tokens of a caption, and a CLIP text model for the caption, of transformers.

    As Flux's pipeline does, T5 attends to the padding, too.
    """

    def __init__(self, config: PictureOptions, device: torch.device) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        assert config.t5 and config.clip, "checked when the job was composed"
        self._device = device
        self._length = config.text_length
        dtype = getattr(torch, config.dtype)
        self._models = {}
        self._tokenizers = {}
        for name, path, kind in (
            ("t5", config.t5, transformers.T5EncoderModel),
            ("clip", config.clip, transformers.CLIPTextModel),
        ):
            folder = Path(path).expanduser()
            model = _load(name, kind, folder, dtype=dtype)
            self._models[name] = model.eval().requires_grad_(False).to(device)
            # Of a diffusers repository it is in another folder.
            found = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
            found = found if found.is_dir() else folder
            self._tokenizers[name] = _load(name, transformers.AutoTokenizer, found)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._shard()

    def _shard(self) -> None:
        ranks = (dist.get_world_size(),)
        mesh = init_device_mesh(self._device.type, ranks, mesh_dim_names=("encoders",))
        t5 = self._models["t5"]
        clip = self._models["clip"]
        layers = getattr(clip, "text_model", clip).encoder.layers
        for model, blocks in ((t5, t5.encoder.block), (clip, layers)):
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Embeddings:
        clip = self._models["clip"]
        longest = clip.config.max_position_embeddings
        text_BLD = self._models["t5"](self._ids("t5", captions, self._length)).last_hidden_state
        pooled_BP = clip(self._ids("clip", captions, longest)).pooler_output
        return Embeddings(text_BLD.float(), pooled_BP.float())

    def _ids(self, name: str, captions: Sequence[str], length: int) -> Tensor:
        encoded = self._tokenizers[name](
            list(captions),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        ids: Tensor = encoded.input_ids.to(self._device)
        return ids


Autoencoder = Patches | PretrainedAutoencoder


def _load(option: str, kind: Any, folder: Path, **settings: Any) -> Any:
    """Load what transformers or diffusers saved in a folder."""
    field = f"data.options.{option}"
    if not folder.is_dir():
        raise ConfigError(field, folder, "there is no such folder", "the folder of a model")
    for name in ("transformers", "diffusers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return kind.from_pretrained(folder, **settings)
    # The libraries and file readers raise many types; to the user all mean that it cannot be
    # loaded.
    except Exception as error:
        raise ConfigError(field, folder, f"cannot be loaded: {describe(error)}") from error
