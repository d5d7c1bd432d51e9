"""Options of Flux: of the model, of the training objective, of validation, and of generating."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.config.fields import label, numerics
from harness.config.job import Job
from harness.config.model import ModelConfig
from harness.model.spec import ONES, ZEROS, Init, ModuleSpec, Split, TensorSpec

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
    """Width of the rotation of a head by each of three positions: 0, row and column. Their sum is the width
    of a head."""
    guidance: bool = numerics(False)
    """Whether the model has an input for the strength of guidance (FLUX.1-dev)."""
    zero_init: bool = numerics(True)
    """Whether modulations and the output projection start at 0, so that every block starts as the identity
    (adaLN-Zero, arXiv:2212.09748). If false they start like other linears."""

    @property
    def token_width(self) -> int:
        """Values of a token of the picture."""
        return self.latent_channels * PATCH**2


@dataclass(frozen=True)
class FlowConfig:
    """Rectified-flow matching: predict noise - data from a mix of both (arXiv:2403.03206)."""

    time_mean: float = numerics(0.0)
    """Mean of the normal distribution whose sigmoid is the time, in [0, 1]: the share of noise."""
    time_std: float = numerics(1.0, least=0)
    """Its standard deviation."""
    base_shift: float = numerics(0.5)
    """Times move towards noise by ``e^s t / (1 + (e^s - 1) t)``: s for pictures of 256 tokens (256 x 256
    pixels). 0 for both shifts leaves them."""
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
    """Weight of classifier-free guidance (arXiv:2207.12598), with a second pass for the empty caption; 1:
    none."""
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


# Every module and tensor of Flux, computed from its config (no torch). See `harness.model.spec`.

STREAMS = ("img", "txt")


def modules(model: ModelConfig) -> Iterator[ModuleSpec]:
    """Every module, in order."""
    flux = flux_of(model)
    dim = model.dim
    yield _linear("img_in", dim, flux.token_width, Split.ENTRY)
    yield _linear("txt_in", dim, flux.context_dim, Split.ENTRY)
    embedded = {"time_in": flux.time_dim, "vector_in": flux.pooled_dim}
    if flux.guidance:
        embedded["guidance_in"] = flux.time_dim
    for name, width in embedded.items():
        yield _linear(f"{name}.w1", dim, width, Split.REPLICATED)
        yield _linear(f"{name}.w2", dim, dim, Split.REPLICATED)
    for layer in range(model.n_layers):
        yield from block_modules(model, layer)
    yield _modulation("final_mod", 2, model)
    yield _linear("output", flux.token_width, dim, Split.OUTPUT, zero=flux.zero_init)


def block_modules(model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
    """Every module of one block."""
    prefix = f"layers.{layer}."
    if layer >= flux_of(model).double_layers:
        yield _modulation(f"{prefix}mod", 3, model)
        yield from _attention(f"{prefix}attn", model)
        # One linear takes the results of both; it is stored as two, because tensor parallel splits
        # each.
        yield from _feed_forward(f"{prefix}mlp", model, output_bias=False)
        return
    for stream in STREAMS:
        yield _modulation(f"{prefix}{stream}_mod", 6, model)
        yield from _attention(f"{prefix}{stream}_attn", model)
        yield from _feed_forward(f"{prefix}{stream}_mlp", model)


def _attention(prefix: str, model: ModelConfig) -> Iterator[ModuleSpec]:
    width = model.n_heads * model.head_width
    yield ModuleSpec(prefix, Split.REGION)
    for name in ("wq", "wk", "wv"):
        yield _linear(f"{prefix}.{name}", width, model.dim, Split.COLUMN)
    yield _linear(f"{prefix}.wo", model.dim, width, Split.ROW)
    for name in ("q_norm", "k_norm"):
        weight = TensorSpec(
            f"{prefix}.{name}.weight",
            f"{prefix}.{name}",
            (model.head_width,),
            Split.HEAD_NORM,
            ONES,
        )
        yield ModuleSpec(f"{prefix}.{name}", Split.HEAD_NORM, (weight,))


def _feed_forward(
    prefix: str, model: ModelConfig, *, output_bias: bool = True
) -> Iterator[ModuleSpec]:
    yield ModuleSpec(prefix, Split.REGION)
    yield _linear(f"{prefix}.w1", model.ffn_hidden_dim, model.dim, Split.COLUMN)
    yield _linear(f"{prefix}.w2", model.dim, model.ffn_hidden_dim, Split.ROW, bias=output_bias)


def _modulation(name: str, vectors: int, model: ModelConfig) -> ModuleSpec:
    return _linear(
        name, vectors * model.dim, model.dim, Split.MODULATION, zero=flux_of(model).zero_init
    )


def _linear(
    name: str, outputs: int, inputs: int, split: Split, *, zero: bool = False, bias: bool = True
) -> ModuleSpec:
    """A linear whose initial values are 0, or normal with Glorot's standard deviation."""
    init = ZEROS if zero else Init(math.sqrt(2 / (inputs + outputs)))
    weight = TensorSpec(f"{name}.weight", name, (outputs, inputs), split, init, is_matrix=True)
    of_bias = TensorSpec(f"{name}.bias", name, (outputs,), split, ZEROS)
    return ModuleSpec(name, split, (weight, of_bias) if bias else (weight,))


def rows_of(model: ModelConfig, tensor: TensorSpec, seq_len: int) -> int:
    """Rows of one sample that a matrix multiplies: tokens of one stream or both, or one for the sample."""
    if tensor.split in (Split.MODULATION, Split.REPLICATED):
        return 1
    text = flux_of(model).text_length
    if tensor.module == "txt_in" or ".txt_" in tensor.module:
        return text
    joined = tensor.module.startswith("layers.") and ".img_" not in tensor.module
    return seq_len if joined else seq_len - text


def is_double(model: ModelConfig, layer: int) -> bool:
    """Whether a block has separate weights for captions and pictures."""
    return layer < flux_of(model).double_layers
