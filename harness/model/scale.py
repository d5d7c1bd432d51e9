"""Apply ``scale``: model size, tokens and hyperparameters from a few numbers (no torch)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from harness.config.fields import with_value
from harness.config.model import PROPORTIONAL, ModelConfig
from harness.config.optimizer import OptimizerConfig
from harness.config.training import ScaleConfig, TrainingConfig, parse_count
from harness.model.accounting import account
from harness.model.architecture import architecture_of, block_kinds
from harness.model.spec import Split, TensorSpec, block_tensors, tensors
from harness.util.errors import ConfigError

SIZES = ("parameters", "tokens_per_parameter", "flops")
# Step Law (arXiv:2503.04715): lr = 1.79 N^-0.713 D^0.307, and a batch of 0.58 D^0.571 tokens.
STEP_LAW_LR = (1.79, -0.713, 0.307)
STEP_LAW_BATCH = (0.58, 0.571)
ROUNDS = 6


def apply_scale(
    scale: ScaleConfig, model: ModelConfig, training: TrainingConfig, optimizer: OptimizerConfig
) -> tuple[ModelConfig, TrainingConfig, OptimizerConfig]:
    """Return the parts of a job with the values that follow from these fields, but for the warm-up."""
    _validate(scale, training)
    model = _sized(scale, model, training.seq_len)
    tokens: float | None = None
    if scale.flops is not None:
        tokens = scale.flops / account(model, training.seq_len).flops_per_token_full
    elif scale.tokens_per_parameter is not None:
        tokens = scale.tokens_per_parameter * count(model, scale.counted)
    if tokens is not None:
        training = replace(training, tokens=max(1, round(tokens)))
    if scale.hyperparameters == "step_law":
        if training.tokens is None:
            rule = "needs the number of tokens"
            works = "scale.tokens_per_parameter=20, scale.flops=1e19 or training.tokens=20B"
            raise ConfigError("scale.hyperparameters", scale.hyperparameters, rule, works)
        counted = parse_count("training.tokens", training.tokens)
        factor, of_parameters, of_tokens = STEP_LAW_LR
        lr = factor * count(model, "non_embedding") ** of_parameters * counted**of_tokens
        optimizer = replace(optimizer, lr=float(f"{lr:.4g}"))
        factor, of_tokens = STEP_LAW_BATCH
        sequences = factor * counted**of_tokens / training.seq_len
        size = 2 ** max(0, round(math.log2(sequences)))
        training = replace(training, global_batch_size=size)
    return model, training, optimizer


def _validate(scale: ScaleConfig, training: TrainingConfig) -> None:
    sizes = [name for name in SIZES if getattr(scale, name) is not None]
    if len(sizes) == len(SIZES):
        rule = "two of scale.parameters, scale.tokens_per_parameter and scale.flops determine the third"
        raise ConfigError("scale.flops", f"{scale.flops:g}", rule, "one of them null")
    if scale.counted != ScaleConfig.counted and not {"parameters", "tokens_per_parameter"} & {
        *sizes
    }:
        rule = "counts the parameters of scale.parameters or scale.tokens_per_parameter"
        raise ConfigError("scale.counted", scale.counted, rule, "scale.tokens_per_parameter=20")


def _sized(scale: ScaleConfig, model: ModelConfig, seq_len: int) -> ModelConfig:
    if scale.parameters is not None:
        return resized(model, parse_count("scale.parameters", scale.parameters), scale.counted)
    if scale.flops is None or scale.tokens_per_parameter is None:
        return model
    # C = N (C per token and N) (tokens per N) N, where the factor in the middle hardly depends on
    # N.
    made = model
    for _ in range(ROUNDS):
        per_parameter = account(made, seq_len).flops_per_token_full / count(made, scale.counted)
        wanted = max(
            1, round(math.sqrt(scale.flops / (per_parameter * scale.tokens_per_parameter)))
        )
        try:
            before = made
            made = resized(model, wanted, scale.counted)
        except ConfigError as error:
            rule = f"with scale.tokens_per_parameter={scale.tokens_per_parameter:g}, {error.rule}"
            raise ConfigError("scale.flops", f"{scale.flops:g}", rule, "more FLOPs") from None
        if made == before:
            break
    return made


TABLES = (Split.VOCABULARY, Split.HEAD)
WIDTH_MULTIPLE = 16
"""Scaled hidden widths are multiples of it, as float8 products need (docs/howto/precision.md)."""
CLOSE = 1.1
FAR = 1.5
"""Models within a factor CLOSE of the wanted size are chosen by their proportions; none is off by
FAR."""
LARGEST = 10**14
"""Most parameters of a resized model; the search takes longer for larger ones."""
WIDTHS = 256
"""Number of widths that are tried at most."""
DEEPER = 4
"""No model has more than this many times the layers for its width."""


def count(model: ModelConfig, counted: str) -> int:
    """Count the trained parameters of a model.

    Args:
        model: a resolved model.
        counted: ``non_embedding``: all but the tables of vocabulary, as in arXiv:2001.08361;
            ``all``, as in arXiv:2203.15556; ``active``: those of non_embedding that one token uses.
    """
    # Blocks of a kind are equal, so one of each is counted.
    one = replace(model, n_layers=1)
    kinds = block_kinds(model)
    outside = _size(tensors(one).values(), counted) - sum(
        _size(block_tensors(one, layer), counted) for layer in range(one.num_blocks)
    )
    return outside + sum(
        kinds.count(kind) * _size(block_tensors(model, kinds.index(kind)), counted)
        for kind in set(kinds)
    )


def _size(specs: Iterable[TensorSpec], counted: str) -> int:
    trained = [tensor for tensor in specs if not tensor.is_buffer]
    if counted != "all":
        trained = [tensor for tensor in trained if tensor.split not in TABLES]
    return sum(tensor.active_size if counted == "active" else tensor.size for tensor in trained)


def resized(model: ModelConfig, parameters: int, counted: str) -> ModelConfig:
    """Return a model of the same family with about this many parameters.

    Heads keep their width, and query heads per key head stay. All other widths grow with the number
    of heads, and depth grows with width, because the loss depends weakly on the ratio of the two
    (arXiv:2001.08361, section 3). Among the models within 10 % of the wanted size the one whose dim
    / n_layers is closest to the model's own is chosen; if there is none, the closest in size.
    """
    if parameters > LARGEST:
        raise ConfigError("scale.parameters", f"{parameters:,}", "must be at most 100T", "100T")
    aspect = model.dim / model.n_layers
    found = []
    for candidate, size in _candidates(model, parameters, counted):
        from_size = abs(math.log(size / parameters))
        from_aspect = abs(math.log(candidate.dim / candidate.n_layers / aspect))
        found.append((from_size, from_aspect, candidate))
    closest = min(found, key=lambda one: one[:2], default=None)
    close = [one for one in found if one[0] <= math.log(CLOSE)]
    if closest is None or closest[0] > math.log(FAR):
        least = count(_shaped(model, _heads_per_key(model), _period(model)), counted)
        wanted = f"{parameters:,} parameters within a factor {FAR}"
        rule = f"no model with the proportions of {model.name} has {wanted}"
        raise ConfigError("scale.parameters", parameters, rule, f"at least {least:,}")
    return min(close, key=lambda one: one[1])[2] if close else closest[2]


def _candidates(
    model: ModelConfig, parameters: int, counted: str
) -> Iterator[tuple[ModelConfig, int]]:
    """Yield, for every width, the models whose depths are closest to the wanted size, with their sizes."""
    period = _period(model)
    step = _heads_per_key(model)
    # At equal proportions the size grows with the third power of the width; with large tables, more
    # slowly.
    most = 2 * model.n_heads * (parameters / count(model, counted)) ** (1 / 3) + step
    for heads in range(step, int(most) + 1, step * math.ceil(most / step / WIDTHS)):
        shallow = _shaped(model, heads, period)
        least = count(shallow, counted)
        if least > FAR * parameters and heads > step:
            return
        deep = max(2 * period, model.n_layers)
        layer = (count(_shaped(model, heads, deep), counted) - least) / (deep - period)
        depth = period + int((parameters - least) / layer)
        deepest = DEEPER * shallow.dim * model.n_layers / model.dim
        for layers in range(max(period, depth - 1), depth + 2):
            if layers <= max(deepest, period):
                made = _shaped(model, heads, layers)
                yield made, count(made, counted)


def _heads_per_key(model: ModelConfig) -> int:
    return model.n_heads // model.n_kv_heads


def _period(model: ModelConfig) -> int:
    """Return the fewest layers that a model of these kinds of layers has."""
    kinds = len(model.layer_kinds or [None])
    return math.lcm(kinds, model.moe.every_nth_layer if model.moe.enabled else 1)


def _shaped(model: ModelConfig, heads: int, n_layers: int) -> ModelConfig:
    wider = heads / model.n_heads
    made = replace(
        architecture_of(model).at_depth(model, n_layers),
        dim=2 * round(model.dim * wider / 2),
        head_dim=model.head_width,
    )
    for name in PROPORTIONAL:
        width = attrgetter(name)(model)
        multiple = 1 if name.endswith("heads") else WIDTH_MULTIPLE
        if name == "delta.value_heads":
            multiple = made.delta.key_heads
        if width:
            made = with_value(made, name, max(1, round(width * wider / multiple)) * multiple)
    return made
