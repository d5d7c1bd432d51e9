"""The frozen encoders of a job, and the two for debugging, which have no weights."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.contrib.flux.pictures.config import PATCHES, WORDS, EncodersConfig
from harness.data.documents import describe
from harness.data.samples import random_stream
from harness.util.encoding import parse_object
from harness.util.errors import ConfigError

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


def fingerprint_of(config: EncodersConfig) -> str:
    """Text that changes with the latents and embeddings; loads no weights.

    Raises:
        ConfigError: a folder has no config.json.
    """
    pixels = f"patches of {config.patch}"
    words = f"words, {config.text_length} of width {config.width}"
    if config.autoencoder != PATCHES:
        pixels = fingerprint("data.options.autoencoder", config.autoencoder, config.dtype)
    if config.text != WORDS:
        settings = config.dtype, config.text_length
        words = " ".join(
            fingerprint(f"data.options.{name}", getattr(config, name), *settings)
            for name in ("t5", "clip")
        )
    return f"{pixels}, {words}"


@functools.lru_cache(maxsize=1)  # training and validation share them
def build_encoders(
    config: EncodersConfig, device: torch.device, *, shard: bool = False
) -> Encoders:
    """Build the encoders; with ``shard``, FSDP shards the text encoder's weights over all ranks, which then
    encode together."""
    return Encoders(
        build_autoencoder(config, device), build_text_encoder(config, device, shard=shard)
    )


def build_autoencoder(config: EncodersConfig, device: torch.device) -> Autoencoder:
    is_exact = config.autoencoder == PATCHES
    return Patches(config.patch) if is_exact else PretrainedAutoencoder(config, device)


def build_text_encoder(
    config: EncodersConfig, device: torch.device, *, shard: bool = False
) -> TextEncoder:
    is_fixed = config.text == WORDS
    return (
        Words(config.text_length, config.width)
        if is_fixed
        else T5AndClip(config, device, shard=shard)
    )


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


class Words:
    """A fixed random vector for each word, plus one for its position; their mean is the pooled embedding.

    The vectors depend on the word and the position only, so that no table is needed. For debugging.
    """

    def __init__(self, length: int, width: int) -> None:
        self._length = length
        self._width = width

    def encode(self, captions: Sequence[str]) -> Embeddings:
        """Encode captions, cut or padded to ``data.options.text_length`` tokens."""
        padding = [""] * self._length
        texts = [(caption.lower().split() + padding)[: self._length] for caption in captions]
        positions_LD = self._stacked([f"position {i}" for i in range(self._length)])
        words = []
        for text in texts:
            words.append(self._stacked([f"word {word}" for word in text]))
        text_BLD = torch.stack(words) + positions_LD
        return Embeddings(text_BLD, text_BLD.mean(1))

    def _stacked(self, names: Sequence[str]) -> Tensor:
        return torch.stack([_vector(name, self._width) for name in names])


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


WEIGHTS = ("*.safetensors", "*.bin")


class PretrainedAutoencoder:
    """An AutoencoderKL of diffusers."""

    def __init__(self, config: EncodersConfig, device: torch.device) -> None:
        import diffusers

        self._device = device
        self._dtype = getattr(torch, config.dtype)
        folder = Path(config.autoencoder).expanduser()
        load = partial(diffusers.AutoencoderKL.from_pretrained, low_cpu_mem_usage=False)
        model = _load(
            "data.options.autoencoder", folder, partial(load, folder, torch_dtype=self._dtype)
        )
        self._model = _frozen(model).to(device)
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

    def __init__(self, config: EncodersConfig, device: torch.device, *, shard: bool) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        assert config.t5 is not None and config.clip is not None, (
            "checked when the job was composed"
        )
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
            field = f"data.options.{name}"
            model = _load(field, folder, partial(kind.from_pretrained, folder, dtype=dtype))
            self._models[name] = _frozen(model)
            found = _tokenizer_folder(folder)
            self._tokenizers[name] = _load(
                field, found, partial(transformers.AutoTokenizer.from_pretrained, found)
            )
        if shard and dist.is_initialized() and dist.get_world_size() > 1:
            self._shard(device)
        for model in self._models.values():
            model.to(device)

    def _shard(self, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("encoders",))
        t5 = self._models["t5"]
        clip = self._models["clip"]
        layers = getattr(clip, "text_model", clip).encoder.layers
        for model, blocks in ((t5, t5.encoder.block), (clip, layers)):
            model.to(device)
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
TextEncoder = Words | T5AndClip


class Encoders(NamedTuple):
    """Both encoders of a job."""

    autoencoder: Autoencoder
    text: TextEncoder


def _frozen(model: nn.Module) -> Any:
    return model.eval().requires_grad_(False)


def _load(field: str, folder: Path, load: Callable[[], Any]) -> Any:
    if not folder.is_dir():
        raise ConfigError(field, folder, "there is no such folder", "the folder of a model")
    noise = logging.getLogger("transformers"), logging.getLogger("diffusers")
    levels = [each.level for each in noise]
    for each in noise:
        each.setLevel(logging.ERROR)
    try:
        return load()
    # The libraries and file readers raise many types; to the user all mean that it cannot be
    # loaded.
    except Exception as error:
        raise ConfigError(field, folder, f"cannot be loaded: {describe(error)}") from error
    finally:
        for each, level in zip(noise, levels, strict=True):
            each.setLevel(level)


def _tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a text encoder's tokenizer: the same, or its sibling in a diffusers repository."""
    if any(
        (folder / name).is_file()
        for name in ("tokenizer_config.json", "tokenizer.json", "spiece.model")
    ):
        return folder
    return folder.with_name(folder.name.replace("text_encoder", "tokenizer"))


def fingerprint(field: str, path: str, *settings: object) -> str:
    """Hash of a model's config, of the names and sizes of its weights, and of ``settings``.

    Raises:
        ConfigError: the folder has no config.json.
    """
    folder = Path(path).expanduser()
    try:
        config = parse_object((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        rule = f"its config.json cannot be read: {describe(error)}"
        works = "the folder of a model"
        raise ConfigError(field, path, rule, works) from error
    files: list[Path] = []
    for pattern in WEIGHTS:
        files += folder.glob(pattern)
    sizes = [[file.name, file.stat().st_size] for file in sorted(files)]
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    content = json.dumps([kept, sizes, *settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
