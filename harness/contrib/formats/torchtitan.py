"""Weights in the layout of torchtitan's models (0.2.2), in a DCP checkpoint without a manifest.

Its dense models have our parameter names. Its Llama rotates interleaved pairs, as Meta's code does, so the
rows of wq and wk have another order (``_permute`` in torchtitan/models/llama3/model/state_dict_adapter.py);
its Qwen 3 rotates halves, as we do. Its checkpoints hold both the embedding table and the output projection
even if they are tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from harness.config.model import ModelConfig
from harness.contrib.formats.meta import interleave_rope, permute_rope, rotated_heads
from harness.util.errors import ConfigError
from harness.weights.config_json import family_of
from harness.weights.dcp import DistributedSource, write_plain
from harness.weights.source import EMBEDDING, HEAD, Changed, TensorFacts, WeightSource

INTERLEAVES = {"llama": True, "qwen3": False}
"""Families with our parameter names in torchtitan, and whether torchtitan rotates interleaved pairs."""

_SCALINGS = {"llama": ("none", "llama3"), "qwen3": ("none",)}


def read_torchtitan(path: str, model: ModelConfig) -> WeightSource:
    """The weights in a checkpoint of torchtitan, in our row order; errors as of ``DistributedSource``."""
    return _reordered(DistributedSource(path, {}, model), model, permute_rope)


def write_torchtitan(source: WeightSource, model: ModelConfig, folder: Path) -> str:
    """Write a checkpoint for torchtitan; return what its user has to know."""
    write_plain(Torchtitan(source, model), folder)
    return f"torchtitan's model needs {torchtitan_arguments(model)}"


def _reordered(
    source: WeightSource, model: ModelConfig, reorder: Callable[[Tensor, int], Tensor]
) -> WeightSource:
    """The source with the rows reordered that torchtitan has in another order."""

    def change(name: str, tensor: Tensor) -> Tensor:
        heads = rotated_heads(name, model)
        return tensor if heads is None else reorder(tensor, heads)

    return Changed(source, change) if INTERLEAVES.get(model.family) and not model.rope.interleaved else source


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
    common = f"rope_theta={rope.theta:g}, norm_eps={model.norm_eps:g}"
    if model.family != "llama":
        return common
    # torchtitan's Llama always scales RoPE; the factor's default is 8.
    scaling = {"scaling_factor": 1.0}
    if rope.scaling == "llama3":
        scaling = {
            "scaling_factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    inner = ", ".join(f"{name}={value:g}" for name, value in scaling.items())
    return f"{common}, rope_scaling_args=RoPEScalingArgs({inner})"


class Torchtitan:
    """A source under torchtitan's names and in its row order; UserError if torchtitan has no such model."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        check_torchtitan(model)
        self._source, self._model = _reordered(source, model, interleave_rope), model
        self.tensors: Mapping[str, TensorFacts] = {
            **source.tensors,
            HEAD: source.tensors[EMBEDDING if model.tied_embeddings else HEAD],
        }

    def read(self, name: str) -> Tensor:
        return self._source.read(EMBEDDING if name == HEAD and self._model.tied_embeddings else name)
