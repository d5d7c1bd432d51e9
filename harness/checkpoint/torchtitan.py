"""Weights as torchtitan's models have them (0.2.2), in a DCP checkpoint without a manifest.

The dense models have our names. Its Llama rotates interleaved pairs, as Meta's code does, so the rows of wq
and wk have another order (``_permute`` in torchtitan/models/llama3/model/state_dict_adapter.py); its
Qwen 3 rotates halves, as we do. A checkpoint has the embedding table and the output projection
even where they are tied.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.checkpoint.formats import EMBEDDING, HEAD, Source, TensorFacts
from harness.errors import ConfigError
from harness.model.config import ModelConfig
from harness.model.huggingface import family_of
from harness.model.llama_original import interleave_rope, permute_rope, rotated_heads

INTERLEAVES = {"llama": True, "qwen3": False}
"""The families that torchtitan names as we do, and whether it rotates interleaved pairs."""


_SCALINGS = {"llama": ("none", "llama3"), "qwen3": ("none",)}


def from_torchtitan(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    """One of torchtitan's parameters in our order of rows."""
    heads = _interleaved_heads(name, model)
    return tensor if heads is None else permute_rope(tensor, heads)


def _interleaved_heads(name: str, model: ModelConfig) -> int | None:
    """The number of heads of a parameter whose rows have another order there; None: it has ours."""
    if not INTERLEAVES.get(model.family) or model.rope.interleaved:
        return None
    return rotated_heads(name, model)


def check_torchtitan(model: ModelConfig) -> None:
    """Refuses a model that torchtitan does not have under our names.

    Raises:
        UserError: the line says what differs.
    """
    family = model.family
    if family not in INTERLEAVES:
        rule = f"dense models are written, and torchtitan has other names for model.family={family}"
        raise ConfigError("convert.format", "torchtitan", rule, "dcp, hf, torch")
    family_of(model)
    if model.attention.qkv_bias or model.attention.output_bias:
        rule = "torchtitan's attention has no biases, and model.attention.qkv_bias=true"
        raise ConfigError("convert.format", "torchtitan", rule, "dcp, hf, torch")
    if model.rope.scaling not in _SCALINGS[family]:
        rule = f"torchtitan's {family} does not scale so"
        raise ConfigError("model.rope.scaling", model.rope.scaling, rule, _SCALINGS[family])
    if family == "llama" and model.head_width * model.n_heads != model.dim:
        rule = (
            f"torchtitan's Llama has heads of width model.dim / model.n_heads={model.dim / model.n_heads:g}"
        )
        raise ConfigError("model.head_dim", model.head_width, rule)


def torchtitan_arguments(model: ModelConfig) -> str:
    """Arguments of torchtitan's model that no tensor's shape shows."""
    rope = model.rope
    said = f"rope_theta={rope.theta:g}, norm_eps={model.norm_eps:g}"
    if model.family != "llama":
        return said
    # Its Llama always stretches: left out, the factor is 8.
    scaling = {"scaling_factor": 1.0}
    if rope.scaling == "llama3":
        scaling = {
            "scaling_factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    inner = ", ".join(f"{name}={value:g}" for name, value in scaling.items())
    return f"{said}, rope_scaling_args=RoPEScalingArgs({inner})"


class Torchtitan:
    """A source under torchtitan's names and in its order of rows.

    Args:
        source: the weights in our order.
        model: the model.

    Raises:
        UserError: torchtitan has no such model.
    """

    def __init__(self, source: Source, model: ModelConfig) -> None:
        check_torchtitan(model)
        self._source, self._model = source, model
        self.tensors: Mapping[str, TensorFacts] = {
            **source.tensors,
            HEAD: source.tensors[EMBEDDING if model.tied_embeddings else HEAD],
        }

    def read(self, name: str) -> Tensor:
        """One parameter.

        Raises:
            UserError, DamagedCheckpoint: what the source raises.
        """
        if name == HEAD and self._model.tied_embeddings:
            name = EMBEDDING
        tensor, heads = self._source.read(name), _interleaved_heads(name, self._model)
        return tensor if heads is None else interleave_rope(tensor, heads)
