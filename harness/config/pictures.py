"""Configuration of pictures with captions, and of the encoders that make latents and embeddings of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config.fields import leaves, numerics
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.config.data import DataConfig

PICTURE_KINDS = ("drawn_shapes", "pictures", "hub_pictures", "latents", "latents_synthetic")
"""Kinds of data whose samples are pictures with captions."""
ENCODED = ("latents", "latents_synthetic")
"""Those that need no encoders for training."""
CROPS = ("center", "random")
ON_ERROR = ("strict", "skip")
PATCHES = "patches"
WORDS, T5_CLIP = "words", "t5_clip"
DTYPES = ("float32", "bfloat16")
PICTURE_FORMATS = ("auto", "files", "webdataset")


@dataclass(frozen=True)
class ImagesConfig:
    """Pictures and captions, before they are encoded."""

    size: int = numerics(32, least=1, id_omits_default=True)
    """Height and width in pixels. The shorter side is resized to it, and the longer side is cropped."""

    crop: str = numerics("center", choices=CROPS, id_omits_default=True)
    """The part of the longer side that is kept: the center, or a random part, which depends on the seed and
    the sample number. Validation keeps the center."""

    image_field: str = numerics("image", nonempty=True, id_omits_default=True)
    """hub_pictures: the column with the pictures."""

    caption_field: str = numerics("text", nonempty=True, id_omits_default=True)
    """hub_pictures: the column with the captions. pictures: the field of a .json file beside a picture, which
    is read if there is no .txt file."""

    on_error: str = numerics("strict", choices=ON_ERROR, id_omits_default=True)
    """A picture that cannot be decoded: `strict` ends the run with an error, `skip` takes the next one."""


@dataclass(frozen=True)
class EncodersConfig:
    """Frozen encoders of pictures and captions."""

    autoencoder: str = numerics(PATCHES, nonempty=True, id_omits_default=True)
    """`patches` (each square of pixels is a latent: exact and without weights, for debugging), or the folder
    of an AutoencoderKL of diffusers."""

    patch: int = numerics(4, least=1, id_omits_default=True)
    """patches: side of a square in pixels. A latent has 3 * patch ** 2 channels."""

    text: str = numerics(WORDS, choices=(WORDS, T5_CLIP), id_omits_default=True)
    """`words` (a fixed random vector for each word and for each position, for debugging) or `t5_clip` (T5 for
    the text embeddings, CLIP for the pooled one)."""

    t5: str | None = numerics(None, id_omits_default=True)
    """t5_clip: folder of a T5EncoderModel of transformers. Its tokenizer is in the same folder, or in that of
    the same name with `tokenizer` in place of `text_encoder`."""

    clip: str | None = numerics(None, id_omits_default=True)
    """t5_clip: folder of a CLIPTextModel of transformers, likewise."""

    text_length: int = numerics(16, least=1, id_omits_default=True)
    """Number of text embeddings: longer captions are cut, shorter ones padded. Published: 256 for
    FLUX.1-schnell, 512 for FLUX.1-dev."""

    width: int = numerics(64, least=1, id_omits_default=True)
    """words: width of the text embeddings and of the pooled one."""

    dtype: str = numerics("bfloat16", choices=DTYPES, id_omits_default=True)
    """Format in which encoders with weights compute."""

    @property
    def has_weights(self) -> bool:
        """Whether an encoder is read from a folder, and computes on the job's device."""
        return self.text == T5_CLIP or self.autoencoder != PATCHES


def check_pictures(data: DataConfig) -> None:
    """Check the fields of pictures and encoders.

    Raises:
        ConfigError: a field would have no effect, or two contradict each other.
    """
    if data.kind not in PICTURE_KINDS:
        _refuse_all(data)
        return
    encoders, images = data.encoders, data.images
    for name in ("t5", "clip"):
        path = getattr(encoders, name)
        if encoders.text == T5_CLIP and not path and data.kind not in ENCODED:
            rule = "data.encoders.text=t5_clip needs the folder of this encoder"
            raise ConfigError(f"data.encoders.{name}", path, rule, "the folder that transformers saved")
        if encoders.text == WORDS and path:
            rule = "is read only with data.encoders.text=t5_clip"
            raise ConfigError(f"data.encoders.{name}", path, rule, "data.encoders.text=t5_clip")
    if encoders.autoencoder == PATCHES and images.size % encoders.patch and data.kind not in ENCODED:
        rule = f"must be a multiple of data.encoders.patch={encoders.patch}"
        works = [max(1, images.size // encoders.patch) * encoders.patch]
        raise ConfigError("data.images.size", images.size, rule, works)
    if data.kind == "latents" and len(data.paths) > 1:
        rule = "is one folder of harness encode"
        raise ConfigError("data.paths", data.paths, rule, f"'data.paths=[{data.paths[0]}]'")
    if data.kind == "drawn_shapes" and data.validation_fraction:
        rule = "drawn shapes hold captions out by themselves"
        raise ConfigError("data.validation_fraction", data.validation_fraction, rule, "0")
    if data.kind == "hub_pictures" and data.streaming:
        rule = "pictures are read by number, so that a run resumes exactly"
        raise ConfigError("data.streaming", True, rule, "false, which downloads the dataset")


def _refuse_all(data: DataConfig) -> None:
    for part in ("images", "encoders"):
        found, default = getattr(data, part), type(getattr(data, part))()
        for (name, _, value), (_, _, usual) in zip(leaves(found), leaves(default), strict=True):
            if value != usual:
                rule = f"is read only by data.kind={', '.join(PICTURE_KINDS)}, and data.kind is {data.kind}"
                raise ConfigError(f"data.{part}.{name}", value, rule, "leave it out")
