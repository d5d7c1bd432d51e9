"""Options of Flux: of the model, of the training objective, of validation, and of generating."""

import math
from dataclasses import dataclass

from harness.config.fields import label, numerics
from harness.config.job import Job
from harness.config.model import ModelConfig

PATCH = 2
"""Latents of PATCH x PATCH neighbouring positions are one token."""
PIXELS = 8
"""Pixels of a picture per latent of FLUX.1's autoencoder, in each direction."""


@dataclass(frozen=True)
class FluxConfig:
    """A diffusion transformer with double- and single-stream blocks (github.com/black-forest-labs/flux).

    ``model.dim``, ``n_layers``, ``n_heads`` and ``ffn_hidden_dim`` are those of its blocks. The
    sequence of ``training.seq_len`` tokens is that of the caption, ``text_length`` tokens, then
    that of the picture.
    """

    double_layers: int = numerics(0, least=0)
    """Number of first blocks with separate weights for caption and picture; the others are
    single-stream."""
    latent_channels: int = numerics(16, least=1)
    """Channels of the autoencoder's latents. A token of the picture has 2 x 2 of them."""
    text_length: int = numerics(512, least=1)
    """Tokens of a caption, padded."""
    context_dim: int = numerics(4096, least=1)
    """Width of the embedding of a caption's tokens (T5)."""
    pooled_dim: int = numerics(768, least=1)
    """Width of the embedding of a caption (CLIP)."""
    time_dim: int = numerics(256, least=2)
    """Width of the sinusoidal embedding of times and guidance, even."""
    axes_dims: list[int] = numerics(factory=lambda: [16, 56, 56], least=2)
    """Width of the rotation of a head by each of three positions: 0, row and column. Their sum is
    the width of a head."""
    guidance: bool = numerics(False)
    """Whether the model has an input for the strength of guidance (FLUX.1-dev)."""
    zero_init: bool = numerics(True)
    """Whether modulations and the output projection start at 0, so that every block starts as the
    identity (adaLN-Zero, arXiv:2212.09748). If false they start like other linears."""

    @property
    def token_width(self) -> int:
        """Values of a token of the picture."""
        return self.latent_channels * PATCH**2

    def latents_shape(self, seq_len: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents whose tokens follow a caption's in a sequence."""
        side = PATCH * math.isqrt(seq_len - self.text_length)
        return self.latent_channels, side, side


@dataclass(frozen=True)
class FlowConfig:
    """Rectified-flow matching: predict noise - data from a mix of both (arXiv:2403.03206)."""

    time_mean: float = numerics(0.0)
    """Mean of the normal distribution whose sigmoid is the time, in [0, 1]: the share of noise."""
    time_std: float = numerics(1.0, least=0)
    """Its standard deviation."""
    base_shift: float = numerics(0.5)
    """Times move towards noise by ``e^s t / (1 + (e^s - 1) t)``: s for pictures of 256 tokens (256
    x 256 pixels). 0 for both shifts leaves them."""
    max_shift: float = numerics(1.15)
    """s for pictures of 4096 tokens (1024 x 1024 pixels); linear in the number of tokens."""
    caption_dropout: float = numerics(0.1, least=0, most=1)
    """Fraction of the samples that are trained with the empty caption (classifier-free guidance,
    arXiv:2207.12598)."""
    guidance: float = numerics(1.0, least=0)
    """Strength of guidance given to a model with model.options.guidance."""


@dataclass(frozen=True)
class SheetConfig:
    """The sample sheet of a validation."""

    pictures: int = label(0, least=0)
    """Pictures of held-out captions that each validation samples, at most a global batch, into
    ``samples/step-<step>.png`` of the run folder."""
    picture_steps: int = label(28, least=1)
    """Euler steps from noise to these pictures."""


@dataclass(frozen=True)
class SamplingConfig:
    """How ``harness generate`` samples pictures."""

    output: str = label("pictures", written="folder")
    """Folder of the PNG files, 000.png for the first prompt."""
    size: int | None = label(None, least=1)
    """Height and width in pixels; null: those of training, which weights of other software do not
    record."""
    steps: int = label(28, least=1)
    """Euler steps from noise to the picture. FLUX.1-schnell needs 4."""
    guidance: float = label(3.5, least=0)
    """Strength of guidance for models with ``model.options.guidance``, such as FLUX.1-dev."""
    cfg: float = label(1.0, least=0)
    """Weight of classifier-free guidance (arXiv:2207.12598), with a second pass for the empty
    caption; 1: none."""
    shift: bool = label(True)
    """Whether times are shifted towards noise as in training (``training.objective_options``).
    FLUX.1-schnell needs false."""


def flux_of(model: ModelConfig) -> FluxConfig:
    """The options of a model."""
    return FluxConfig(**model.options)


def flow_of(job: Job) -> FlowConfig:
    """The options of a job's objective."""
    return FlowConfig(**job.training.objective_options)


def sheet_of(job: Job) -> SheetConfig:
    """The options of a job's validation."""
    return SheetConfig(**job.validation.options)
