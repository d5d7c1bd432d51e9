"""Frozen encoders of transformers and diffusers: T5 and CLIP for captions, an autoencoder for pictures."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.contrib.flux.pictures.config import EncodersConfig
from harness.contrib.flux.pictures.encoder_base import Embeddings, Moments, hash_of
from harness.data.documents import describe
from harness.util.encoding import parse_object
from harness.util.errors import ConfigError, UserError

INSTALL = "pip install -e '.[diffusion]'"
WEIGHTS = ("*.safetensors", "*.bin")


class PretrainedAutoencoder:
    """An AutoencoderKL of diffusers."""

    def __init__(self, config: EncodersConfig, device: torch.device) -> None:
        diffusers = _import("diffusers", "data.options.autoencoder")
        self._device, self._dtype = device, getattr(torch, config.dtype)
        folder = Path(config.autoencoder).expanduser()
        model = _load(
            "data.options.autoencoder",
            folder,
            partial(
                diffusers.AutoencoderKL.from_pretrained,
                folder,
                torch_dtype=self._dtype,
                low_cpu_mem_usage=False,
            ),
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

    Args:
        config: folders, length and format.
        device: where they compute.
        shard: whether FSDP shards the weights over all ranks, which then encode together.
    """

    def __init__(self, config: EncodersConfig, device: torch.device, *, shard: bool) -> None:
        transformers = _import("transformers", "data.options.text")
        transformers.utils.logging.disable_progress_bar()
        assert config.t5 is not None and config.clip is not None, "checked when the job was composed"
        self._device, self._length, dtype = device, config.text_length, getattr(torch, config.dtype)
        self._models, self._tokenizers = {}, {}
        for name, path, kind in (
            ("t5", config.t5, transformers.T5EncoderModel),
            ("clip", config.clip, transformers.CLIPTextModel),
        ):
            folder, field = Path(path).expanduser(), f"data.options.{name}"
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
        """Shard the blocks of both over all ranks."""
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("encoders",))
        t5, clip = self._models["t5"], self._models["clip"]
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
            list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        ids: Tensor = encoded.input_ids.to(self._device)
        return ids


def _frozen(model: nn.Module) -> Any:
    return model.eval().requires_grad_(False)


def _import(name: str, field: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{field}: needs the package {name}; would work: {INSTALL}") from error


def _load(field: str, folder: Path, load: Callable[[], Any]) -> Any:
    """Load a model or tokenizer from a local folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(field, folder, "there is no such folder", "the folder of a model")
    noise = logging.getLogger("transformers"), logging.getLogger("diffusers")
    levels = [each.level for each in noise]
    for each in noise:
        each.setLevel(logging.ERROR)
    try:
        return load()
    # The libraries and file readers raise many types; to the user all mean that it cannot be loaded.
    except Exception as error:
        raise ConfigError(field, folder, f"cannot be loaded: {describe(error)}") from error
    finally:
        for each, level in zip(noise, levels, strict=True):
            each.setLevel(level)


def _tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a text encoder's tokenizer: the same, or its sibling in a diffusers repository."""
    if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "spiece.model")):
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
        rule, works = f"its config.json cannot be read: {describe(error)}", "the folder of a model"
        raise ConfigError(field, path, rule, works) from error
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    sizes = [[file.name, file.stat().st_size] for file in files]
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    return hash_of([kept, sizes, *settings])
