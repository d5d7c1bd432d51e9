"""Resize a model in its own proportions, and count its parameters (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from harness.config.fields import with_value
from harness.config.model import PROPORTIONAL, ModelConfig
from harness.model.architecture import architecture_of, block_kinds
from harness.model.spec import Split, TensorSpec, block_tensors, tensors
from harness.util.errors import ConfigError

TABLES = (Split.VOCABULARY, Split.HEAD)
WIDTH_MULTIPLE = 16
"""Scaled hidden widths are multiples of it, as float8 products need (docs/howto/precision.md)."""
CLOSE, FAR = 1.1, 1.5
"""Models within a factor CLOSE of the wanted size are chosen by their proportions; none is off by FAR."""
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
        counted: ``non_embedding``: all but the tables of vocabulary, as in arXiv:2001.08361; ``all``, as in
            arXiv:2203.15556; ``active``: those of non_embedding that one token uses.
    """
    # Blocks of a kind are equal, so one of each is counted.
    one, kinds = replace(model, n_layers=1), block_kinds(model)
    outside = _size(tensors(one).values(), counted) - sum(
        _size(block_tensors(one, layer), counted) for layer in range(one.num_blocks)
    )
    return outside + sum(
        kinds.count(kind) * _size(block_tensors(model, kinds.index(kind)), counted) for kind in set(kinds)
    )


def _size(of: Iterable[TensorSpec], counted: str) -> int:
    trained = (each for each in of if not each.is_buffer and (counted == "all" or each.split not in TABLES))
    return sum(each.active_size if counted == "active" else each.size for each in trained)


def resized(model: ModelConfig, parameters: int, counted: str) -> ModelConfig:
    """Return a model of the same family with about this many parameters.

    Heads keep their width, and query heads per key head stay. All other widths grow with the number of heads,
    and depth grows with width, because the loss depends weakly on the ratio of the two (arXiv:2001.08361,
    section 3). Among the models within 10 % of the wanted size the one whose dim / n_layers is closest to
    the model's own is chosen; if there is none, the closest in size.

    Args:
        model: a resolved model, whose proportions are kept.
        parameters: the wanted number.
        counted: which parameters count, one of ``COUNTED``.

    Raises:
        ConfigError: no model of these proportions is within a factor 1.5 of the number, or it is above 100T.
    """
    if parameters > LARGEST:
        raise ConfigError("scale.parameters", f"{parameters:,}", "must be at most 100T", "100T")
    aspect = model.dim / model.n_layers
    found = [
        (abs(math.log(size / parameters)), abs(math.log(each.dim / each.n_layers / aspect)), each)
        for each, size in _candidates(model, parameters, counted)
    ]
    closest = min(found, key=lambda one: one[:2], default=None)
    close = [one for one in found if one[0] <= math.log(CLOSE)]
    if closest is None or closest[0] > math.log(FAR):
        least = count(_shaped(model, _heads_per_key(model), _period(model)), counted)
        wanted = f"{parameters:,} parameters within a factor {FAR}"
        rule = f"no model with the proportions of {model.name} has {wanted}"
        raise ConfigError("scale.parameters", parameters, rule, f"at least {least:,}")
    return min(close, key=lambda one: one[1])[2] if close else closest[2]


def _candidates(model: ModelConfig, parameters: int, counted: str) -> Iterator[tuple[ModelConfig, int]]:
    """Yield, for every width, the models whose depths are closest to the wanted size, with their sizes."""
    period = _period(model)
    step = _heads_per_key(model)
    # At equal proportions the size grows with the third power of the width; with large tables, more slowly.
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
        for each in range(max(period, depth - 1), depth + 2):
            if each <= max(deepest, period):
                made = _shaped(model, heads, each)
                yield made, count(made, counted)


def _heads_per_key(model: ModelConfig) -> int:
    return model.n_heads // model.n_kv_heads


def _period(model: ModelConfig) -> int:
    """Return the fewest layers that a model of these kinds of layers has."""
    return model.moe.every_nth_layer if model.moe.enabled else 1


def _shaped(model: ModelConfig, heads: int, n_layers: int) -> ModelConfig:
    """Return the model with another number of heads, and of layers."""
    wider = heads / model.n_heads
    made = replace(
        architecture_of(model).at_depth(model, n_layers),
        dim=2 * round(model.dim * wider / 2),
        head_dim=model.head_width,
    )
    for name in PROPORTIONAL:
        width = attrgetter(name)(model)
        multiple = 1 if name in ("n_heads", "n_kv_heads") else WIDTH_MULTIPLE
        if width:
            made = with_value(made, name, max(1, round(width * wider / multiple)) * multiple)
    return made
