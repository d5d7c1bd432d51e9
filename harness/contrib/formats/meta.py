"""Meta's original checkpoints: params.json, and one consolidated.*.pth per model-parallel rank.

Their parameters have our names. Two things differ: each file has one rank's shard of a parameter,
and the rows of wq and wk are ordered for rotating interleaved pairs.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.metadata import load_failure
from harness.config.model import ModelConfig
from harness.model.spec import parameter_shapes
from harness.util.errors import UserError
from harness.weights.config_json import read_object
from harness.weights.hf_tensors import check_tensors
from harness.weights.source import EMBEDDING, HEAD, TensorFacts, refuse_untied

PATTERN = "consolidated.*.pth"
PARAMS = "params.json"

# Defaults of ModelArgs in llama/model.py of meta-llama/llama and meta-llama/llama3.
_DEFAULTS: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "vocab_size": -1,
    "multiple_of": 256,
    "ffn_dim_multiplier": None,
    "norm_eps": 1e-5,
    "use_scaled_rope": False,
}
# rope_theta of Llama 2 (llama/model.py), whose files do not record it; those of Llama 3 do.
_OLD_THETA = 10000.0

_BUFFER = "rope.freqs"  # computed, so it is ignored

# O: rows of a projection (heads x head width), I: its input width


class LlamaSource:
    """The weights in a folder in Meta's format: consolidated.*.pth, and usually params.json.

    Raises:
        UserError: the folder holds another model, or is incomplete.
    """

    def __init__(self, path: str | Path, model: ModelConfig) -> None:
        folder = Path(path)
        if model.family != "llama":
            raise UserError(
                f"{folder}: Meta's files are read for model.family=llama, not {model.family}"
            )
        self._folder = folder
        self._model = model
        self._files = sorted(folder.glob(PATTERN))
        if (folder / PARAMS).exists():
            check_params(model, folder / PARAMS)
        shards = [_load(file) for file in self._files]
        expected = parameter_shapes(model)
        if HEAD in shards[0]:
            expected |= {HEAD: _shape_of(HEAD, model)}
        for file, shard in zip(self._files, shards, strict=True):
            # Shapes are checked when the shards are merged.
            found = {name: expected.get(name, ()) for name in shard}
            check_tensors(str(file), model, found, expected)
        # On meta, to check shapes with the function that will merge the values.
        merged = {}
        for name in shards[0]:
            merged[name] = merge(name, [shard[name].to("meta") for shard in shards], model)
        self._has_head = HEAD in merged
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(shape, merged[name].dtype)
            for name, shape in parameter_shapes(model).items()
        }

    def read(self, name: str) -> Tensor:
        """Return one parameter, merged from all shards, with rotary pairs in our order."""
        tensor = self._read(name)
        if name == EMBEDDING and self._model.tied_embeddings and self._has_head:
            refuse_untied(tensor, self._read(HEAD), str(self._folder))
        return tensor

    def _read(self, name: str) -> Tensor:
        # Map the files for every tensor: pages of a mapped file stay in memory while it is mapped.
        shards = [_load(file)[name] for file in self._files]
        merged = merge(name, shards, self._model)
        return merged.clone() if merged.data_ptr() == shards[0].data_ptr() else merged


def _load(file: Path) -> dict[str, Tensor]:
    """Map the parameters of a file without reading them; code in the file is not run."""
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make torch raise almost anything
        raise UserError(f"{file}: {load_failure(error)}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UserError(f"{file}: is not a dict of tensors by name")
    return {name: tensor for name, tensor in content.items() if name != _BUFFER}


def check_params(model: ModelConfig, file: Path) -> None:
    """Check that params.json describes the model."""
    params = {**_DEFAULTS, **read_object(file)}
    try:
        # As FeedForward in Meta's llama/model.py.
        hidden = int(2 * 4 * params["dim"] / 3)
        if params["ffn_dim_multiplier"] is not None:
            hidden = int(params["ffn_dim_multiplier"] * hidden)
        unit = params["multiple_of"]
        hidden = unit * ((hidden + unit - 1) // unit)
    except (TypeError, ArithmeticError) as error:
        raise UserError(f"{file}: the width of its feed-forward is unknown ({error})") from None
    found = {
        "dim": params["dim"],
        "n_layers": params["n_layers"],
        "n_heads": params["n_heads"],
        "n_kv_heads": params.get("n_kv_heads") or params["n_heads"],
        "ffn_hidden_dim": hidden,
        "norm_eps": params["norm_eps"],
        "rope.theta": params.get("rope_theta", _OLD_THETA),
        "rope.scaling": "llama3" if params["use_scaled_rope"] else "none",
    }
    if params["vocab_size"] != -1:  # -1 in Llama 2's files: the tokenizer's
        found["vocab_size"] = params["vocab_size"]
    differing = []
    for name, theirs in found.items():
        ours = attrgetter(name)(model)
        if ours != theirs:
            differing.append(f"model.{name}={ours}: {PARAMS} has {theirs}")
    if differing:
        raise UserError(f"{file.parent}: {'; '.join(differing)}")


# -- shards and rows ----


def permute_rope(weight_OI: Tensor, n_heads: int) -> Tensor:
    """Reorder rows of wq or wk from Meta's order to ours, [O, I].

    In a head of width D, Meta rotates rows (2i, 2i + 1) together, and we rotate (i, i + D/2). It is
    ``permute`` in transformers' models/llama/convert_llama_weights_to_hf.py.
    """
    return weight_OI.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def interleave_rope(weight_OI: Tensor, n_heads: int) -> Tensor:
    """Reorder rows of wq or wk from our order to Meta's, [O, I]: the inverse of ``permute_rope``."""
    return weight_OI.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads of wq or wk; None for other parameters."""
    return {"wq.weight": config.n_heads, "wk.weight": config.n_kv_heads}.get(
        name.rpartition("attention.")[2]
    )


def merge(name: str, shards: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Merge the shards of one parameter, in the order of the files, into a tensor in our row order.

    Raises:
        UserError: the shards do not add up to the model's parameter.
    """
    shape = shards[0].shape
    wanted = _shape_of(name, config)
    whole = shards[0]
    # fairscale's layers split a matrix by rows (ColumnParallelLinear, and the embedding of Llama 3)
    # or by columns (RowParallelLinear, and the embedding of Llama 2), and repeat vectors.
    if len(shards) > 1 and len(shape) > 1 and all(shard.shape == shape for shard in shards):
        whole = torch.cat(list(shards), dim=1 if shape[0] == wanted[0] else 0)
    if tuple(whole.shape) != wanted or any(shard.shape != shape for shard in shards):
        have = ", ".join(str(list(shard.shape)) for shard in shards)
        rule = f"do not make up {list(wanted)} of model={config.name}"
        raise UserError(f"{name}: shapes {have} of {len(shards)} file(s) {rule}")
    heads = rotated_heads(name, config)
    return whole if heads is None else permute_rope(whole, heads)


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...]:
    # Files of a tied model may have the output projection.
    return (config.vocab_size, config.dim) if name == HEAD else parameter_shapes(config)[name]
