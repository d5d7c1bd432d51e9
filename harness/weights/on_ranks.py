"""Load initial weights from Hugging Face safetensors and export trained ones, on all ranks in parallel."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from harness.checkpoint.catalog import CHECKSUM, MANIFEST, encode_manifest, open_checkpoint
from harness.checkpoint.rank_group import RankGroup
from harness.checkpoint.storage import write_last
from harness.config.job import Job
from harness.config.model import ModelConfig
from harness.model.spec import is_buffer, tensor_shapes
from harness.parallelism.materialize import local_ranges
from harness.weights.dcp import DistributedSource
from harness.weights.huggingface import HuggingFaceSource, finish_huggingface, write_huggingface
from harness.weights.source import TensorFacts

_CHUNK = 1 << 24


def check(path: str, model: ModelConfig) -> None:
    """Check that a folder holds the model's weights.

    Raises:
        UserError: naming what differs.
    """
    HuggingFaceSource(Path(path), model)


def load(path: str, model: ModelConfig, state: Mapping[str, Tensor], ranks: RankGroup) -> None:
    """Load weights into this rank's tensors; each rank reads only its local shards.

    Args:
        path: a folder of safetensors.
        model: the model they belong to.
        state: this rank's tensors by our names, with any dtype and placement.
        ranks: the ranks.

    Raises:
        UserError: on all ranks, if any found a damaged file.
    """
    ranks.everywhere(lambda: _load(path, model, state))


def _load(path: str, model: ModelConfig, state: Mapping[str, Tensor]) -> None:
    source = HuggingFaceSource(Path(path), model)
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        source.fill(name, local, local_ranges(tensor))


class _Announced:
    """Names, shapes and dtypes of the weights that the job will export; they cannot be read yet."""

    def __init__(self, job: Job) -> None:
        dtype = getattr(torch, job.checkpoint.export_dtype)
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(shape, torch.float32 if is_buffer(name) else dtype)
            for name, shape in tensor_shapes(job.model).items()
        }

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is read before it was trained")


def check_export(job: Job) -> None:
    """Try to write config.json, index and tokenizer, so that errors appear before training and not after.

    Raises:
        UserError: transformers has no such model, or the tokenizer cannot be exported.
    """
    with tempfile.TemporaryDirectory() as folder:
        finish_huggingface(_Announced(job), job.model, job.tokenizer, Path(folder))


def write_share(source: str, target: str, job: Job, share: tuple[int, int]) -> None:
    """Write this rank's share of the safetensors files.

    Args:
        source: a DCP checkpoint of the weights.
        target: the folder to write to.
        job: the job that trained them.
        share: (rank, number of ranks).

    Raises:
        OSError: a file cannot be written.
    """
    write_huggingface(_source(source, job), job.model, None, Path(target), share=share, finish=False)


def finish(source: str, target: str, job: Job, manifest: dict[str, Any]) -> None:
    """Write config.json, index and tokenizer, then the manifest; on one rank, after all shares are written.

    Raises:
        OSError: a file cannot be written.
        UserError: the tokenizer cannot be exported.
    """
    folder = Path(target)
    finish_huggingface(_source(source, job), job.model, job.tokenizer, folder)
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
