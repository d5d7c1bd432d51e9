"""Meta's original checkpoints (consolidated.00.pth ...).

Their parameters have our names. Two things differ: each file has one model-parallel rank's shard of a
parameter, and the rows of wq and wk are ordered for rotating interleaved pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.errors import UserError
from harness.exchange.families.llama import hf_name
from harness.model.config import ModelConfig
from harness.model.spec import parameter_shapes

# O: rows of a projection (heads x head width), I: its input width

# How the files are sharded: by fairscale's layers in the reference code of Llama 2 and 3 (llama/model.py in
# meta-llama/llama and meta-llama/llama3). ColumnParallelLinear splits rows, RowParallelLinear columns.
_COLUMN_PARALLEL = ("wq", "wk", "wv", "w1", "w3", "output")
_ROW_PARALLEL = ("wo", "w2")
_BUFFERS = ("rope.freqs",)


def is_buffer(name: str) -> bool:
    """Whether a tensor of these files is a computed buffer, which can be ignored."""
    return name in _BUFFERS


def shard_dim(name: str, *, vocabulary_parallel: bool) -> int | None:
    """The dimension along which the files split a parameter; None: each file has the full parameter.

    Args:
        name: name of the parameter.
        vocabulary_parallel: whether the embedding is split by rows (fairscale's VocabParallelEmbedding, in
            Llama 3) or by columns (ParallelEmbedding, in Llama 2).

    Raises:
        ValueError: the decoder has no parameter of that name.
    """
    hf_name(name)  # raises ValueError
    module = name.split(".")[-2]
    if module == "tok_embeddings":
        return 0 if vocabulary_parallel else 1
    if module in _COLUMN_PARALLEL:
        return 0
    return 1 if module in _ROW_PARALLEL else None


def is_vocabulary_parallel(shape: Sequence[int], files: int, config: ModelConfig) -> bool:
    """Whether the embedding is split by rows, from its shape in one of ``files`` files.

    Raises:
        UserError: neither rows nor columns add up to the table.
    """
    rows, columns = shape
    if (rows * files, columns) == (config.vocab_size, config.dim):
        return True
    if (rows, columns * files) == (config.vocab_size, config.dim):
        return False
    raise _misfit("tok_embeddings.weight", [tuple(shape)] * files, config)


def permute_rope(weight_OI: Tensor, n_heads: int) -> Tensor:
    """Reorder rows of wq or wk from Meta's order to ours, [O, I].

    In a head of width D, Meta rotates rows (2i, 2i + 1) together, and we rotate (i, i + D/2). It is
    ``permute`` in transformers' models/llama/convert_llama_weights_to_hf.py.
    """
    rows, columns = weight_OI.shape
    pairs = weight_OI.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def interleave_rope(weight_OI: Tensor, n_heads: int) -> Tensor:
    """Reorder rows of wq or wk from our order to Meta's, [O, I]: the inverse of ``permute_rope``."""
    rows, columns = weight_OI.shape
    halves = weight_OI.reshape(n_heads, 2, rows // n_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads of wq or wk; None for other parameters."""
    return {"wq.weight": config.n_heads, "wk.weight": config.n_kv_heads}.get(name.rpartition("attention.")[2])


def merge(name: str, shards: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Merge the shards of one parameter, in our row order.

    Args:
        name: name of the parameter.
        shards: its tensors in the order of the files, at least one.
        config: the model.

    Raises:
        UserError: the shards do not add up to the model's parameter.
        ValueError: the decoder has no parameter of that name.
    """
    whole = _join(name, shards, config)
    if tuple(whole.shape) != _shape_of(name, config):
        raise _misfit(name, [tuple(shard.shape) for shard in shards], config)
    heads = rotated_heads(name, config)
    return whole if heads is None else permute_rope(whole, heads)


def _join(name: str, shards: Sequence[Tensor], config: ModelConfig) -> Tensor:
    if len(shards) == 1:
        return shards[0]
    by_rows = name == "tok_embeddings.weight" and is_vocabulary_parallel(shards[0].shape, len(shards), config)
    dim = shard_dim(name, vocabulary_parallel=by_rows)
    if dim is None:
        return shards[0]
    widths = {shard.shape[:dim] + shard.shape[dim + 1 :] for shard in shards}
    if len(widths) > 1:
        raise _misfit(name, [tuple(shard.shape) for shard in shards], config)
    return torch.cat(list(shards), dim=dim)


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...]:
    hf_name(name)
    if name == "output.weight":  # files of a tied model may have it
        return (config.vocab_size, config.dim)
    shapes = parameter_shapes(config)
    if name not in shapes:
        raise ValueError(f"model={config.name} has no parameter {name!r}")
    return shapes[name]


def _misfit(name: str, shapes: Sequence[tuple[int, ...]], config: ModelConfig) -> UserError:
    have = ", ".join(str(list(shape)) for shape in shapes)
    want = list(_shape_of(name, config))
    return UserError(
        f"{name}: shapes {have} of {len(shapes)} file(s) do not make up {want} of model={config.name}"
    )
