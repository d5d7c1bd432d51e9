"""muP's multipliers as a part of the weights: the files of other software have no field for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.config.model import ModelConfig
from harness.model.spec import Split, modules
from harness.util.errors import ConfigError
from harness.weights.source import Source


def multipliers(model: ModelConfig) -> dict[str, float]:
    """The factors that make the weights of a muP model those of the same function without multipliers.

    The factor of the logits is moved to the norm before the output projection, which may be tied; that of a
    router's logits to its weight; that of attention scores to the queries.

    Returns:
        The factor of a tensor by its name; tensors without one have none.

    Raises:
        ConfigError: queries are normalized without weights, which would remove a factor.
    """
    output, scores = model.output_multiplier, model.score_multiplier
    if scores != 1 and model.attention.qk_norm == "l2":
        rule = "model.attention.qk_norm=l2 removes the factor of queries that would replace muP's score scale"
        works = f"head_dim: {model.head_width}, or none"
        raise ConfigError("model.mup.base_widths", model.mup.base_widths, rule, works)
    norms = ("norm", "mtp.norm")
    queries = ("q_norm",) if model.attention.qk_norm == "learned" else ("wq", "wq_b")
    found = {}
    for module in modules(model):
        inner = module.name.rpartition("attention.")[2]
        factor = output if module.name in norms or module.split is Split.ROUTER else 1.0
        factor = scores if inner in queries and inner != module.name else factor
        for tensor in module.tensors:
            # A bias of a router is added to scaled logits.
            is_added = module.split is Split.ROUTER and not tensor.is_matrix
            if factor != 1 and not is_added:
                found[tensor.name] = factor
    return found


class Multiplied:
    """A source whose tensors are multiplied by factors, in float32, and rounded once.

    Args:
        source: the weights.
        factors: factor of a tensor by name.
    """

    def __init__(self, source: Source, factors: Mapping[str, float]) -> None:
        self._source, self._factors, self.tensors = source, factors, source.tensors

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        tensor = self._source.read(name)
        return tensor * self._factors[name] if name in self._factors else tensor


def folded(source: Source, model: ModelConfig) -> Source:
    """The weights for software without muP's multipliers."""
    return Multiplied(source, multipliers(model))


def unfolded(source: Source, model: ModelConfig) -> Source:
    """The weights of software without muP's multipliers, for a model that has them."""
    return Multiplied(source, {name: 1 / factor for name, factor in multipliers(model).items()})
