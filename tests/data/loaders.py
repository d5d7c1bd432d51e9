"""Loaders of small samples, and what the ranks of a layout read."""

import torch

from harness.config.data import TokenizerConfig
from harness.data.loader import build_loader
from harness.data.tokenizer import build_tokenizer

BYTES = build_tokenizer(TokenizerConfig("bytes"))
T, B = 16, 8


def loader(data, rows=None, *, tokenizer=BYTES, **settings):
    data.validate()
    settings = {"seq_len": T, "global_batch_size": B, "seed": 0, "model_vocab_size": 300, **settings}
    rows = range(settings["global_batch_size"]) if rows is None else rows
    return build_loader(data, tokenizer, rows=rows, **settings)


def split_rows(ranks, batch_size=B):
    return [range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks) for rank in range(ranks)]


def steps(loaders, count):
    """Inputs, labels and document numbers of every step, ``[2 or 3, rows, T]``, of one or all ranks."""
    loaders = loaders if isinstance(loaders, list) else [loaders]
    batches = [
        [torch.stack([t for t in each.next() if t is not None]) for each in loaders] for _ in range(count)
    ]
    return [torch.cat(parts, dim=1) for parts in batches]
