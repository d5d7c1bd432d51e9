"""Run conversions, compare weights, and make files of Meta's format."""

import json

import pytest
import torch

from harness.compose.composer import compose_job
from harness.tools.convert import ConvertJob, convert
from harness.util.errors import EXIT_OK, UserError


def run(source, target, *overrides):
    """Convert in this process."""
    typed = [*overrides, f"convert.source={source}", f"convert.target={target}"]
    assert convert(compose_job(typed, config_name="convert", schema=ConvertJob), typed) == EXIT_OK


def refused(source, target, *overrides):
    """The one-line error of a conversion; checks that no file is left behind."""
    before = {path: path.stat().st_mtime_ns for path in target.parent.rglob("*")}
    with pytest.raises(UserError) as caught:
        run(source, target, *overrides)
    assert {path: path.stat().st_mtime_ns for path in target.parent.rglob("*")} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def model_of(*overrides):
    """The model that overrides of a conversion name."""
    return compose_job(list(overrides), config_name="convert", schema=ConvertJob).model


def require_same(found, expected):
    """Fail unless names, their order, dtypes and values agree."""
    read = found if isinstance(found, dict) else {name: found.read(name) for name in found.tensors}
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def to_meta(state, model):
    """Our tensors in Meta's row order: rows 2i and 2i + 1 of a head are our i and i + D/2."""
    width = model.head_width
    order = [row for i in range(width // 2) for row in (i, i + width // 2)]
    return {
        name: tensor.view(-1, width, tensor.shape[1])[:, order].reshape(tensor.shape)
        if name.endswith((".wq.weight", ".wk.weight"))
        else tensor
        for name, tensor in state.items()
    }


def consolidated(weights, files, by_rows=True):
    """Shards of Meta's model-parallel ranks: rows of some weights, columns of others, and complete norms.

    Args:
        weights: the weights in Meta's row order.
        files: number of ranks.
        by_rows: whether the embedding table is split by rows, as in Llama 3; else by columns.
    """
    rows = ["wq", "wk", "wv", "w1", "w3", "output"] + ["tok_embeddings"] * by_rows
    columns = ["wo", "w2"] + ["tok_embeddings"] * (not by_rows)
    shards = [{"rope.freqs": torch.ones(4)} for _ in range(files)]
    for name, weight in weights.items():
        module = name.split(".")[-2]
        dim = 0 if module in rows else 1 if module in columns else None
        parts = [weight] * files if dim is None else weight.chunk(files, dim)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


def save_meta(folder, shards, params=None):
    """Write a folder as Meta publishes it."""
    folder.mkdir()
    for i, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{i:02}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
