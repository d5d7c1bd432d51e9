"""Kinds of data with pictures and captions, and their options: of pictures, and of their encoders."""

from dataclasses import dataclass
from functools import partial

from harness.config.data import DataConfig
from harness.config.data_kinds import DataKind, check_synthetic
from harness.config.fields import numerics
from harness.util.errors import ConfigError

PATCHES = "patches"
WORDS = "words"
T5_CLIP = "t5_clip"


@dataclass(frozen=True)
class PictureOptions:
    """Options of the kinds with pictures: of pictures before they are encoded, and of the frozen encoders."""

    size: int = numerics(32, least=1)
    """Height and width in pixels. The shorter side is resized to it, and the longer side is
    cropped."""
    crop: str = numerics("center", choices=("center", "random"))
    """The part of the longer side that is kept: the center, or a random part, which depends on the
    seed and the sample number. Validation keeps the center."""
    image_field: str = numerics("image", nonempty=True)
    """hub_pictures: the column with the pictures."""
    caption_field: str = numerics("text", nonempty=True)
    """hub_pictures: the column with the captions. pictures: the field of a .json file beside a
    picture, which is read if there is no .txt file."""
    on_error: str = numerics("strict", choices=("strict", "skip"))
    """A picture that cannot be decoded: `strict` ends the run with an error, `skip` takes the next
    one."""
    autoencoder: str = numerics(PATCHES, nonempty=True)
    """`patches` (each square of pixels is a latent: exact and without weights, for debugging), or
    the folder of an AutoencoderKL of diffusers."""
    patch: int = numerics(4, least=1)
    """patches: side of a square in pixels. A latent has 3 * patch ** 2 channels."""
    text: str = numerics(WORDS, choices=(WORDS, T5_CLIP))
    """`words` (a fixed random vector for each word and for each position, for debugging) or
    `t5_clip` (T5 for the text embeddings, CLIP for the pooled one)."""
    t5: str | None = numerics(None)
    """t5_clip: folder of a T5EncoderModel of transformers. Its tokenizer is in the same folder, or
    in that of the same name with `tokenizer` in place of `text_encoder`."""
    clip: str | None = numerics(None)
    """t5_clip: folder of a CLIPTextModel of transformers, likewise."""
    text_length: int = numerics(16, least=1)
    """Number of text embeddings: longer captions are cut, shorter ones padded. Published: 256 for
    FLUX.1-schnell, 512 for FLUX.1-dev."""
    width: int = numerics(64, least=1)
    """words: width of the text embeddings and of the pooled one."""
    dtype: str = numerics("bfloat16", choices=("float32", "bfloat16"))
    """Format in which encoders with weights compute."""
    format: str = numerics("auto", choices=("auto", "files", "webdataset"))
    """pictures: `files` (pictures with a .txt or .json file beside each), `webdataset` (.tar with
    the same files), or `auto` (by extension)."""

    @property
    def has_weights(self) -> bool:
        """Whether an encoder is read from a folder, and computes on the job's device."""
        return self.text == T5_CLIP or self.autoencoder != PATCHES


def pictures_of(data: DataConfig) -> PictureOptions:
    """The options of the data."""
    return PictureOptions(**data.options)


def folders(data: DataConfig) -> dict[str, str | None]:
    """The folders of encoders, by option."""
    options = pictures_of(data)
    autoencoder = None if options.autoencoder == PATCHES else options.autoencoder
    return {"autoencoder": autoencoder, "t5": options.t5, "clip": options.clip}


def check_pictures(data: DataConfig) -> None:
    """Check the fields of pictures and encoders."""
    options = pictures_of(data)
    is_encoded = data.kind in ("latents", "latents_synthetic")
    for name in ("t5", "clip"):
        path = getattr(options, name)
        if options.text == T5_CLIP and not path and not is_encoded:
            rule = "data.options.text=t5_clip needs the folder of this encoder"
            raise ConfigError(
                f"data.options.{name}", path, rule, "the folder that transformers saved"
            )
        if options.text == WORDS and path:
            rule = "is read only with data.options.text=t5_clip"
            raise ConfigError(f"data.options.{name}", path, rule, "data.options.text=t5_clip")
    if options.autoencoder == PATCHES and options.size % options.patch and not is_encoded:
        rule = f"must be a multiple of data.options.patch={options.patch}"
        works = [max(1, options.size // options.patch) * options.patch]
        raise ConfigError("data.options.size", options.size, rule, works)
    if data.kind != "pictures" and options.format != "auto":
        rule = f"has no effect with data.kind={data.kind}; only data.kind=pictures uses it"
        raise ConfigError("data.options.format", options.format, rule, "auto")
    if data.kind == "latents" and len(data.paths) > 1:
        rule = "is one folder of harness encode"
        raise ConfigError("data.paths", data.paths, rule, f"'data.paths=[{data.paths[0]}]'")
    if data.kind in ("latents_synthetic", "drawn_shapes"):
        check_synthetic(data)


_kind = partial(
    DataKind,
    batches="images",
    options=PictureOptions,
    check=f"{__name__}:check_pictures",
    folders=f"{__name__}:folders",
)
PICTURES = _kind(fields=("paths", "validation_paths", "exclude"), example="photos/**/*.jpg")
HUB_PICTURES = _kind(fields=("dataset", "subset", "split", "validation_split", "data_files"))
DRAWN_SHAPES = _kind(holds_out=True)
LATENTS = _kind(fields=("paths",), example="latents/photos", holds_out=True)
LATENTS_SYNTHETIC = _kind(holds_out=True)
