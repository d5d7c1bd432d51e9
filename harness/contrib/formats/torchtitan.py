"""Weights in the layout of torchtitan's models, in a DCP checkpoint without a manifest.

Its dense models have our parameter names, but for the four of ``name_of`` since 0.3.0. Its Llama
rotates interleaved pairs, as Meta's code does, so the rows of wq and wk have another order
(``_permute`` in torchtitan/models/llama3/state_dict_adapter.py); its Qwen 3 rotates halves, as we
do. Its checkpoints hold both the embedding table and the output projection even if they are tied.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from harness.config.model import ModelConfig
from harness.contrib.formats.meta import interleave_rope, permute_rope, rotated_heads
from harness.util.errors import ConfigError
from harness.weights.config_json import family_of
from harness.weights.dcp import DistributedSource, write_distributed
from harness.weights.source import EMBEDDING, HEAD, Changed, TensorFacts, WeightSource

INTERLEAVES = {"llama": True, "qwen3": False}
"""Families that are converted, and whether torchtitan rotates interleaved pairs."""

_SCALINGS = {"llama": ("none", "llama3"), "qwen3": ("none",)}


def name_of(name: str) -> str:
    """torchtitan's name, since 0.3.0, of a parameter of ours."""
    return (
        "lm_head.weight"
        if name == HEAD
        else re.sub(r"\battention\.(w[qkv])\b", r"attention.qkv_linear.\1", name)
    )


def read_torchtitan(path: str, model: ModelConfig) -> WeightSource:
    """The weights in a checkpoint of torchtitan, in our row order; errors as of ``DistributedSource``."""
    return _reordered(DistributedSource(path, {}, model, name_of), model, permute_rope)


def write_torchtitan(source: WeightSource, model: ModelConfig, folder: Path) -> str:
    """Write a checkpoint for torchtitan; return what its user has to know."""
    write_distributed(Torchtitan(source, model), folder)
    return f"torchtitan's model needs {torchtitan_arguments(model)}"


def _reordered(
    source: WeightSource, model: ModelConfig, reorder: Callable[[Tensor, int], Tensor]
) -> WeightSource:
    """The source with the rows reordered that torchtitan has in another order."""

    def change(name: str, tensor: Tensor) -> Tensor:
        heads = rotated_heads(name, model)
        return tensor if heads is None else reorder(tensor, heads)

    return (
        Changed(source, change)
        if INTERLEAVES.get(model.family) and not model.rope.interleaved
        else source
    )


def check_torchtitan(model: ModelConfig) -> None:
    """Check that torchtitan has the model, with our parameter names, or raise UserError."""
    family = model.family
    if family not in INTERLEAVES:
        rule = f"only dense models can be written; torchtitan has other names for model.family={family}"
        raise ConfigError("convert.format", "torchtitan", rule, "dcp, hf, torch")
    family_of(model)
    if model.attention.qkv_bias or model.attention.output_bias:
        rule = "torchtitan's attention has no biases, and model.attention.qkv_bias=true"
        raise ConfigError("convert.format", "torchtitan", rule, "dcp, hf, torch")
    if model.rope.scaling not in _SCALINGS[family]:
        rule = f"torchtitan's {family} has no such scaling"
        raise ConfigError("model.rope.scaling", model.rope.scaling, rule, _SCALINGS[family])
    if family == "llama" and model.head_width * model.n_heads != model.dim:
        width = model.dim / model.n_heads
        rule = f"torchtitan's Llama has heads of width model.dim / model.n_heads={width:g}"
        raise ConfigError("model.head_dim", model.head_width, rule)


def torchtitan_arguments(model: ModelConfig) -> str:
    """Arguments of torchtitan's model that tensor shapes do not determine."""
    rope = model.rope
    common = f"theta={rope.theta:g}, eps={model.norm_eps:g}"
    if rope.scaling == "none":
        return common
    scaling = {
        "scaling_factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    return ", ".join(
        [common, 'scaling="llama"', *(f"{name}={value:g}" for name, value in scaling.items())]
    )


class Torchtitan:
    """A source under torchtitan's names and in its row order; UserError if torchtitan has no such model."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        check_torchtitan(model)
        self._source = _reordered(source, model, interleave_rope)
        head = EMBEDDING if model.tied_embeddings else HEAD
        self._ours = {**{name_of(name): name for name in source.tensors}, name_of(HEAD): head}
        self.tensors: Mapping[str, TensorFacts] = {
            name: source.tensors[ours] for name, ours in self._ours.items()
        }

    def read(self, name: str) -> Tensor:
        return self._source.read(self._ours[name])
