"""Weights in one file of torch.save, written one tensor at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from harness.checkpoint.formats import EMBEDDING, HEAD, Source, octets


def write_torch(source: Source, file: Path, *, tied: bool) -> None:
    """Writes what ``torch.load(file, weights_only=True)`` reads, with and without ``mmap=True``.

    It is a state dict that ``Decoder.load_state_dict`` takes: with tied embeddings the table stands in it
    under both its names. First the file is made with holes for the values, then they are filled in, for which
    torch has ``skip_data`` and, loading under FakeTensorMode, places in the file. The archive's own checksums
    of the filled records stay empty, as with ``set_crc32_options(False)``: torch.load does not look at them,
    unzip complains.

    Args:
        source: the weights.
        file: where to write.
        tied: whether the output projection is the embedding table.

    Raises:
        OSError: it cannot be written; RuntimeError with one in its context, from torch.save.
    """
    with FakeTensorMode():
        state = {name: torch.empty(facts.shape, dtype=facts.dtype) for name, facts in source.tensors.items()}
    if tied:
        state[HEAD] = state[EMBEDDING]
    with file.open("wb") as stream, skip_data(materialize_fake_tensors=True):
        torch.save(state, stream)
    with FakeTensorMode():
        places = torch.load(file, weights_only=True)
    with file.open("r+b") as stream:
        for name in source.tensors:
            stream.seek(places[name].untyped_storage()._checkpoint_offset)
            stream.write(octets(source.read(name)))
        stream.flush()
        os.fsync(stream.fileno())
