"""Config of Flux: the numbers that a decoder does not have, and the training objective."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import numerics

PATCH = 2
"""Latents of PATCH x PATCH neighbouring positions are one token."""
PIXELS = 8
"""Pixels of a picture per latent of FLUX.1's autoencoder, in each direction."""


@dataclass(frozen=True)
class FluxConfig:
    """A diffusion transformer with double- and single-stream blocks (github.com/black-forest-labs/flux).

    ``model.dim``, ``n_layers``, ``n_heads`` and ``ffn_hidden_dim`` are those of its blocks. The sequence of
    ``training.seq_len`` tokens is that of the caption, ``text_length`` tokens, then that of the picture.
    """

    double_layers: int = numerics(0, least=0, id_omits_default=True)
    """Number of first blocks with separate weights for caption and picture; the others are single-stream."""
    latent_channels: int = numerics(16, least=1, id_omits_default=True)
    """Channels of the autoencoder's latents. A token of the picture has 2 x 2 of them."""
    text_length: int = numerics(512, least=1, id_omits_default=True)
    """Tokens of a caption, padded."""
    context_dim: int = numerics(4096, least=1, id_omits_default=True)
    """Width of the embedding of a caption's tokens (T5)."""
    pooled_dim: int = numerics(768, least=1, id_omits_default=True)
    """Width of the embedding of a caption (CLIP)."""
    time_dim: int = numerics(256, least=2, id_omits_default=True)
    """Width of the sinusoidal embedding of times and guidance, even."""
    axes_dims: list[int] = numerics(factory=lambda: [16, 56, 56], least=2, id_omits_default=True)
    """Width of the rotation of a head by each of three positions: 0, row and column. Their sum is the width
    of a head."""
    guidance: bool = numerics(False, id_omits_default=True)
    """Whether the model has an input for the strength of guidance (FLUX.1-dev)."""
    zero_init: bool = numerics(True, id_omits_default=True)
    """Whether modulations and the output projection start at 0, so that every block starts as the identity
    (adaLN-Zero, arXiv:2212.09748). If false they start like other linears."""

    @property
    def token_width(self) -> int:
        """Values of a token of the picture."""
        return self.latent_channels * PATCH**2


@dataclass(frozen=True)
class FlowConfig:
    """Rectified-flow matching: predict noise - data from a mix of both (arXiv:2403.03206)."""

    time_mean: float = numerics(0.0, id_omits_default=True)
    """Mean of the normal distribution whose sigmoid is the time, in [0, 1]: the share of noise."""
    time_std: float = numerics(1.0, least=0, id_omits_default=True)
    """Its standard deviation."""
    base_shift: float = numerics(0.5, id_omits_default=True)
    """Times move towards noise by ``e^s t / (1 + (e^s - 1) t)``: s for pictures of 256 tokens (256 x 256
    pixels). 0 for both shifts leaves them."""
    max_shift: float = numerics(1.15, id_omits_default=True)
    """s for pictures of 4096 tokens (1024 x 1024 pixels); linear in the number of tokens."""
    caption_dropout: float = numerics(0.1, least=0, most=1, id_omits_default=True)
    """Fraction of the samples that are trained with the empty caption (classifier-free guidance,
    arXiv:2207.12598)."""
    guidance: float = numerics(1.0, least=0, id_omits_default=True)
    """Strength of guidance given to a model with model.flux.guidance."""
