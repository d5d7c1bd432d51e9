"""Write weights to one ``torch.save`` file, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from harness.util.files import sync_file
from harness.weights.source import EMBEDDING, HEAD, Source, bytes_view


def write_torch(source: Source, file: Path, *, tied: bool) -> None:
    """Write a state dict for ``torch.load(file, weights_only=True)``, with and without ``mmap=True``.

    ``Decoder.load_state_dict`` accepts it: a tied embedding table is stored under both its names. The file is
    first written with gaps for the values (``skip_data``), which are then filled in at the offsets that
    loading under FakeTensorMode reports. The archive's checksums of the filled records stay empty, as with
    ``set_crc32_options(False)``: torch.load ignores them, unzip complains.

    Args:
        source: the weights.
        file: the file to write.
        tied: whether the output projection is the embedding table.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the same, raised by torch.save with the OSError in its context.
    """
    with FakeTensorMode():
        state = {name: torch.empty(facts.shape, dtype=facts.dtype) for name, facts in source.tensors.items()}
    if tied:
        state[HEAD] = state[EMBEDDING]
    with file.open("wb") as stream, skip_data(materialize_fake_tensors=True):
        torch.save(state, stream)
    with FakeTensorMode():
        offsets = torch.load(file, weights_only=True)
    with file.open("r+b") as stream:
        for name in source.tensors:
            stream.seek(offsets[name].untyped_storage()._checkpoint_offset)
            stream.write(bytes_view(source.read(name)))
        sync_file(stream)
