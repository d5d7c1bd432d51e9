"""Hugging Face's safetensors as a place to start training from and to end it in, for all ranks together."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from harness.checkpoint.catalog import MANIFEST, encode_manifest, open_checkpoint
from harness.checkpoint.distributed import DistributedSource
from harness.checkpoint.formats import TensorFacts
from harness.checkpoint.huggingface import HuggingFaceSource, finish_huggingface, write_huggingface
from harness.checkpoint.storage import CHECKSUM, write_last
from harness.job import Job
from harness.model.config import ModelConfig
from harness.model.huggingface import hf_name, parameter_shapes

MAX_SHARD_GB = 5.0  # transformers' own default
_CHUNK = 1 << 24


def check(path: str, model: ModelConfig) -> None:
    """Checks that a folder holds the model's weights.

    Raises:
        UserError: it does not; the message says what differs.
    """
    HuggingFaceSource(Path(path), model)


def load(path: str, state: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Loads weights into this rank's parameters, whatever their format and layout.

    Args:
        path: a folder of safetensors.
        state: this rank's parameters by our names.
        group: the ranks.
    """
    theirs: dict[str, Any] = {hf_name(name): weight for name, weight in state.items()}
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(path), process_group=group)


class _Announced:
    """The weights there will be, as a source that nothing can be read from yet."""

    def __init__(self, job: Job) -> None:
        dtype = getattr(torch, job.checkpoint.export_dtype)
        shapes = parameter_shapes(job.model)
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(shape, dtype) for name, shape in shapes.items()
        }

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is read before it was trained")


def rehearse(job: Job) -> None:
    """Writes what lies beside the weights, at the start: what cannot be written must not show at the end.

    Raises:
        UserError: transformers has no such model, or the tokenizer cannot be exported.
    """
    with tempfile.TemporaryDirectory() as folder:
        finish_huggingface(_Announced(job), job.model, job.tokenizer, Path(folder), None, MAX_SHARD_GB)


def write_share(between: str, target: str, job: Job, share: tuple[int, int]) -> None:
    """Writes this rank's share of the safetensors files.

    Args:
        between: a DCP checkpoint of the weights.
        target: the folder they go to.
        job: says what they are of.
        share: this rank, and how many there are.

    Raises:
        OSError: they cannot be written.
    """
    write_huggingface(
        _source(between, job), job.model, None, Path(target), None, MAX_SHARD_GB, share=share, finish=False
    )


def finish(between: str, target: str, job: Job, manifest: dict[str, Any]) -> None:
    """Writes what lies beside the weights, and at last the manifest; on one rank, after all have written.

    Raises:
        OSError: they cannot be written.
        UserError: the tokenizer cannot be exported.
    """
    folder = Path(target)
    finish_huggingface(_source(between, job), job.model, job.tokenizer, folder, None, MAX_SHARD_GB)
    files = {
        file.name: {"size": file.stat().st_size, CHECKSUM: _checksum(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    write_last(FileSystem(), folder, MANIFEST, encode_manifest({**manifest, "files": files}))


def _source(path: str, job: Job) -> DistributedSource:
    return DistributedSource(path, open_checkpoint(path).manifest, job.model)


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
