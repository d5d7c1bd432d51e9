"""The one description of a model's modules and tensors, computed from its config (no torch).

It defines how tensor parallelism splits every module, the shape and initial values of every tensor,
and the groups of FSDP. Layouts, initialization, checkpoints, precision, counts of parameters and
FLOPs, and the plan read it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.config.model import SAME_WIDTHS, ModelConfig, Widths, of_one_model
from harness.model.architecture import architecture_of, block_of

BALANCE_BIAS = "moe.balance_bias"
"""The only tensor that is saved with a model and not trained; always float32."""

Shapes = dict[str, tuple[int, ...]]


class Split(StrEnum):
    """How tensor parallelism splits a module. ``parallelism/tensor.py`` maps each word to collectives."""

    VOCABULARY = "vocabulary"
    """An embedding table, by rows; its output enters the residual stream."""
    COLUMN = "column"
    """A linear, by output features: full input, split output."""
    ROW = "row"
    """A linear, by input features; its partial output is summed into the residual stream."""
    NORM = "norm"
    """A norm on the residual stream: replicated; its input is split along the sequence when the
    stream is."""
    STREAM = "stream"
    """A linear on the residual stream, position by position: like ``NORM``."""
    HEAD_NORM = "head_norm"
    """A norm of each head, replicated; its input is split by heads."""
    HEADS_NORM = "heads_norm"
    """A norm of all heads together: its weight and its input are split by heads, and the ranks'
    squares are summed."""
    WHOLE = "whole"
    """Replicated inside a region: every rank computes the same from full inputs."""
    REGION = "region"
    """A module that needs the full residual stream as input (attention, feed-forward)."""
    SHARED_EXPERTS = "shared_experts"
    """Shared experts: a region, unless their mixture is one already."""
    MIXTURE = "mixture"
    """A mixture of experts: a region when its experts are split."""
    ROUTER = "router"
    """Scores tokens for the experts; replicated."""
    EXPERTS = "experts"
    """The stacked experts of a mixture; each of their tensors is ``COLUMN`` or ``ROW``."""
    HEAD = "head"
    """The output projection, by vocabulary; logits stay split for the parallel loss, else are
    gathered."""
    HEADS = "heads"
    """A parameter with one value per head, or some rows, split by heads."""
    ENTRY = "entry"
    """A linear from the model's inputs, which every rank has, to the residual stream;
    replicated."""
    REPLICATED = "replicated"
    """A linear on something that every rank has and computes alike; replicated."""
    MODULATION = "modulation"
    """A linear from one row per sample to shifts, scales and gates of the residual stream: by output
    features, gathered."""
    OUTPUT = "output"
    """The projection of the residual stream to the model's outputs: by output features,
    gathered."""


_BY_OUTPUT = (
    Split.VOCABULARY,
    Split.COLUMN,
    Split.HEAD,
    Split.HEADS,
    Split.HEADS_NORM,
    Split.MODULATION,
    Split.OUTPUT,
)


_OUTER = (Split.VOCABULARY, Split.HEAD, Split.ROUTER, Split.ENTRY, Split.REPLICATED, Split.OUTPUT)


@dataclass(frozen=True)
class Init:
    """Initial values: a normal of mean 0, truncated at +-``cut``; if ``std`` is 0, ``mean`` everywhere.

    With ``uniform`` they are uniform between two values, or with ``logarithm`` the logarithms of such.
    """

    std: float
    cut: float = math.inf
    mean: float = 0.0
    uniform: tuple[float, float] | None = None
    logarithm: bool = False


ZEROS = Init(0.0)
ONES = Init(0.0, mean=1.0)
DECAYS = Init(0.0, uniform=(0.01, 16.0), logarithm=True)
"""Of Gated DeltaNet's ``a_log``, as in Mamba 2 (arXiv:2405.21060): decays of a step of length 1."""
STEPS = Init(0.0, uniform=(-6.9, -2.25))
"""Of its ``dt_bias``: lengths of steps from 0.001 to 0.1, the inverse of softplus; with larger ones a head
forgets within a few positions."""


@dataclass(frozen=True)
class TensorSpec:
    """A parameter, or a buffer that is saved with the model."""

    name: str
    module: str
    """Name of its module; for experts, of the stack."""
    shape: tuple[int, ...]
    """Matrices are [outputs, inputs]; tensors of experts have the experts as first dimension."""
    split: Split
    init: Init
    is_matrix: bool = False
    """Whether tokens are multiplied by it."""
    top_k: int = 0
    """For experts: how many of them a token goes to. 0 for other tensors."""
    widths: Widths = SAME_WIDTHS
    """Its widths divided by those of muP's base model."""

    @property
    def split_dim(self) -> int | None:
        """The dimension that tensor parallelism splits, if any; for experts, if it splits each of them."""
        if self.split in _BY_OUTPUT:
            return int(self.is_expert)
        return len(self.shape) - 1 if self.split is Split.ROW and self.is_matrix else None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def active_size(self) -> int:
        """Values that one token uses."""
        return self.size // self.experts * max(self.top_k, 1)

    @property
    def is_buffer(self) -> bool:
        """Whether it is saved with the model but not trained."""
        return is_buffer(self.name)

    @property
    def is_expert(self) -> bool:
        """Whether it stacks the values of all experts of a block."""
        return self.top_k > 0

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector; for experts, one for each of them."""
        return len(self.shape) - self.is_expert < 2

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it maps hidden features to hidden features: no table, output projection or router."""
        return self.is_matrix and self.split not in _OUTER

    @property
    def experts(self) -> int:
        """Number of stacked experts; 1 for other tensors."""
        return self.shape[0] if self.is_expert else 1

    @property
    def outputs(self) -> int:
        """Output features of a matrix."""
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        """Input features of a matrix."""
        return self.shape[-1]


@dataclass(frozen=True)
class ModuleSpec:
    """A module that tensor parallelism treats in some way, with its own tensors (not its submodules')."""

    name: str
    split: Split
    tensors: tuple[TensorSpec, ...] = ()
    fused: tuple[str, ...] = ()
    """Linears in it whose products can be one: they have the same input."""


def modules(config: ModelConfig) -> Iterator[ModuleSpec]:
    """Every module of the model, in order."""
    return architecture_of(config).modules(config)


def parametrized(
    config: ModelConfig, describe: Callable[[ModelConfig], Iterator[ModuleSpec]]
) -> Iterator[ModuleSpec]:
    """The modules of a model in its parametrization, the standard one or muP."""
    base = config.base
    if base is None:
        yield from describe(config)
        return
    stream = config.dim / base.dim
    for module, of_base in zip(describe(config), describe(base), strict=True):
        pairs = zip(module.tensors, of_base.tensors, strict=True)
        yield replace(module, tensors=tuple(_in_mup(own, other, stream) for own, other in pairs))


def _in_mup(tensor: TensorSpec, base: TensorSpec, stream: float) -> TensorSpec:
    """A tensor with the initial values of muP.

    They are the base model's. Those of hidden matrices are divided by the root of the ratio of
    their inputs (arXiv:2203.03466, table 8: variance 1 / fan_in for hidden weights, constant for
    input and output weights).
    """
    widths = Widths(stream=stream)
    init = base.init
    if tensor.is_matrix:
        widths = Widths(tensor.inputs / base.inputs, tensor.outputs / base.outputs, stream)
    if tensor.is_hidden_matrix:
        root = math.sqrt(widths.inputs)
        init = replace(init, std=init.std / root, cut=init.cut / root)
    return replace(tensor, widths=widths, init=init)


def decoder_modules(config: ModelConfig) -> Iterator[ModuleSpec]:
    """Every module of a decoder, in order, in the standard parametrization."""
    std = config.dim**-0.5
    head = Init(std, cut=3 * std)
    table = head if config.tied_embeddings else Init(config.embedding_std)
    embeddings = "tok_embeddings"
    shape = (config.vocab_size, config.dim)
    weight = TensorSpec(f"{embeddings}.weight", embeddings, shape, Split.VOCABULARY, table)
    yield ModuleSpec(embeddings, Split.VOCABULARY, (weight,))
    for layer in range(config.n_layers):
        yield from block_of(config).modules(config, layer)
    yield _norm(config, "norm", config.dim)
    # The weight of a tied output projection is the table.
    owner = embeddings if config.tied_embeddings else "output"
    weight = TensorSpec(f"{owner}.weight", "output", shape, Split.HEAD, head, is_matrix=True)
    yield ModuleSpec("output", Split.HEAD, (weight,))
    if config.mtp.depth:
        yield _norm(config, "mtp.embedding_norm", config.dim)
        yield _norm(config, "mtp.hidden_norm", config.dim)
        yield linear("mtp.proj", config.dim, 2 * config.dim, Split.STREAM, _linear_init())
        yield from block_of(config).modules(config, config.n_layers)
        yield _norm(config, "mtp.norm", config.dim)


@of_one_model
def tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every tensor by name, in the model's order; a tied table once."""
    return {tensor.name: tensor for module in modules(config) for tensor in module.tensors}


def block_tensors(config: ModelConfig, layer: int) -> list[TensorSpec]:
    """Every tensor of one block, in the block's order."""
    found = architecture_of(config).block_modules(config, layer)
    return [tensor for module in found for tensor in module.tensors]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Shapes of all parameters and saved buffers by name, in the model's order."""
    return {name: tensor.shape for name, tensor in tensors(config).items()}


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shapes of all parameters by name, in the model's order. A tied output projection is not listed."""
    return {name: shape for name, shape in tensor_shapes(config).items() if not is_buffer(name)}


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer, not a parameter."""
    return name.endswith(BALANCE_BIAS)


class PreNormBlock:
    """The modules of one block of a decoder, in the standard parametrization.

    Linears are initialized as in torchtitan's Llama 3: a normal of std 0.02 truncated at +-2. Those
    that write to the residual stream (wo, w2) or gate it (w3) have std 0.02 / sqrt(2 (layer + 1)),
    so that its variance does not grow with depth. Sinks are initialized as linears (openai/gpt-oss
    leaves them to training). Convolutions have the variance of torch's.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.config = config
        self.layer = layer
        self.prefix = architecture_of(config).block_prefix(config, layer)
        self.init = _linear_init()
        self.deep = _linear_init(2 * (layer + 1))

    def modules(self) -> Iterator[ModuleSpec]:
        config = self.config
        at = self.prefix
        before = config.norm_position != "after"
        after = config.norm_position != "before"
        if before:
            yield _norm(config, f"{at}attention_norm", config.dim)
        if config.is_delta(self.layer):
            yield from self._delta()
        else:
            yield from self._latent_attention() if config.attention.is_latent else self._attention()
        if after:
            yield _norm(config, f"{at}attention_post_norm", config.dim)
        if before:
            yield _norm(config, f"{at}ffn_norm", config.dim)
        if config.has_experts(self.layer):
            yield from self._mixture()
        else:
            yield from self._feed_forward(f"{at}feed_forward", config.ffn_hidden_dim)
        if after:
            yield _norm(config, f"{at}ffn_post_norm", config.dim)

    def _attention(self) -> Iterator[ModuleSpec]:
        config = self.config
        of = self.config.attention
        at = f"{self.prefix}attention"
        dim = config.dim
        width = config.head_width
        q_width = config.n_heads * width
        kv_width = config.n_kv_heads * width
        sinks = TensorSpec(f"{at}.sinks", at, (config.n_heads,), Split.HEADS, self.init)
        own = (sinks,) if of.sinks else ()
        outputs_of = {"wq": q_width, "wk": kv_width, "wv": kv_width}
        if of.output_gate:
            outputs_of["wg"] = q_width
        yield ModuleSpec(at, Split.REGION, own, fused=tuple(outputs_of))
        for name, outputs in outputs_of.items():
            yield linear(f"{at}.{name}", outputs, dim, Split.COLUMN, self.init, bias=of.qkv_bias)
        yield linear(f"{at}.wo", dim, q_width, Split.ROW, self.deep, bias=of.output_bias)
        if of.qk_norm == "learned":
            yield _norm(config, f"{at}.q_norm", width, Split.HEAD_NORM)
            yield _norm(config, f"{at}.k_norm", width, Split.HEAD_NORM)
        elif of.qk_norm == "all_heads":
            yield _norm(config, f"{at}.q_norm", q_width, Split.HEADS_NORM)
            yield _norm(config, f"{at}.k_norm", kv_width, Split.HEADS_NORM)

    def _latent_attention(self) -> Iterator[ModuleSpec]:
        config = self.config
        of = self.config.attention
        at = f"{self.prefix}attention"
        dim = config.dim
        heads = config.n_heads
        rank = of.kv_lora_rank
        q_width = heads * config.head_width
        down = rank + of.qk_rope_head_dim
        up = heads * (of.qk_nope_head_dim + of.v_head_dim)
        of_input = "wq" if of.q_lora_rank is None else "wq_a"
        yield ModuleSpec(at, Split.REGION, fused=(of_input, "wkv_a"))
        if of.q_lora_rank is None:
            yield linear(f"{at}.wq", q_width, dim, Split.COLUMN, self.init)
        else:
            yield linear(f"{at}.wq_a", of.q_lora_rank, dim, Split.WHOLE, self.init)
            yield _norm(config, f"{at}.q_norm", of.q_lora_rank, Split.WHOLE)
            yield linear(f"{at}.wq_b", q_width, of.q_lora_rank, Split.COLUMN, self.init)
        yield linear(f"{at}.wkv_a", down, dim, Split.WHOLE, self.init)
        yield _norm(config, f"{at}.kv_norm", rank, Split.WHOLE)
        yield linear(f"{at}.wkv_b", up, rank, Split.COLUMN, self.init)
        yield linear(f"{at}.wo", dim, heads * of.v_head_dim, Split.ROW, self.deep)

    def _delta(self) -> Iterator[ModuleSpec]:
        of = self.config.delta
        at = f"{self.prefix}delta"
        dim = self.config.dim
        convolution = Init((3 * of.kernel) ** -0.5)
        own = [
            TensorSpec(f"{at}.{name}", at, (width, 1, of.kernel), Split.HEADS, convolution)
            for name, width in of.convolutions.items()
        ]
        own.append(TensorSpec(f"{at}.a_log", at, (of.value_heads,), Split.HEADS, DECAYS))
        own.append(TensorSpec(f"{at}.dt_bias", at, (of.decays,), Split.HEADS, STEPS))
        yield ModuleSpec(at, Split.REGION, tuple(own))
        for name, (outputs, inputs) in of.linears(dim).items():
            # Every rank computes the latents; only what comes from them has heads.
            split = Split.WHOLE if name.endswith("_a") else Split.COLUMN
            yield linear(f"{at}.{name}", outputs, inputs, split, self.init)
        # Zero-centred in no model.
        norm = replace(self.config, norm_zero_centred=False)
        yield _norm(norm, f"{at}.norm", of.value_head_dim, Split.HEAD_NORM)
        yield linear(f"{at}.wo", dim, of.value_width, Split.ROW, self.deep)

    def _feed_forward(
        self, at: str, hidden: int, region: Split = Split.REGION
    ) -> Iterator[ModuleSpec]:
        dim = self.config.dim
        yield ModuleSpec(at, region)
        yield linear(f"{at}.w1", hidden, dim, Split.COLUMN, self.init)
        yield linear(f"{at}.w2", dim, hidden, Split.ROW, self.deep)
        yield linear(f"{at}.w3", hidden, dim, Split.COLUMN, self.deep)

    def _mixture(self) -> Iterator[ModuleSpec]:
        of = self.config.moe
        at = f"{self.prefix}moe"
        dim = self.config.dim
        hidden = of.hidden_dim
        experts = of.num_experts
        stack = f"{at}.experts"
        balance = TensorSpec(self.prefix + BALANCE_BIAS, at, (experts,), Split.MIXTURE, ZEROS)
        yield ModuleSpec(at, Split.MIXTURE, (balance,) if of.balance_coeff else ())
        yield linear(f"{at}.router", experts, dim, Split.ROUTER, self.init, bias=of.router_bias)
        shapes = {
            1: (hidden, dim, Split.COLUMN, self.init),
            2: (dim, hidden, Split.ROW, self.deep),
            3: (hidden, dim, Split.COLUMN, self.deep),
        }
        weights = []
        biases = []
        for i, (outputs, inputs, split, init) in shapes.items():
            shape = experts, outputs, inputs
            weights.append(TensorSpec(f"{stack}.w{i}", stack, shape, split, init, True, of.top_k))
            biases.append(
                TensorSpec(f"{stack}.b{i}", stack, shape[:2], split, ZEROS, False, of.top_k)
            )
        yield ModuleSpec(stack, Split.EXPERTS, (*weights, *(biases if of.expert_bias else ())))
        if of.shared_hidden_dim:
            yield from self._feed_forward(
                f"{at}.shared_experts", of.shared_hidden_dim, Split.SHARED_EXPERTS
            )
            if of.shared_gate:
                yield linear(f"{at}.shared_experts.gate", 1, dim, Split.WHOLE, self.init)


def _linear_init(depth: int = 1) -> Init:
    return Init(0.02 / math.sqrt(depth), cut=2.0)


def linear(
    name: str, outputs: int, inputs: int, split: Split, init: Init, *, bias: bool = False
) -> ModuleSpec:
    """A linear, whose bias begins with zeros."""
    weight = TensorSpec(f"{name}.weight", name, (outputs, inputs), split, init, is_matrix=True)
    of_bias = TensorSpec(f"{name}.bias", name, (outputs,), split, ZEROS)
    return ModuleSpec(name, split, (weight, of_bias) if bias else (weight,))


def _norm(config: ModelConfig, name: str, width: int, split: Split = Split.NORM) -> ModuleSpec:
    init = ZEROS if config.norm_zero_centred else ONES
    return ModuleSpec(name, split, (TensorSpec(f"{name}.weight", name, (width,), split, init),))
