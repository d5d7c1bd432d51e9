"""Read and write weights in torch's distributed checkpoints (DCP): ours, with a manifest, and foreign ones.

Uses DCP's planners and storage directly, one tensor at a time, in a single process. ``dcp.save``
and ``dcp.load`` would read the metadata again for every tensor and wrap every error, ^C included,
in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from harness.checkpoint.catalog import CHECKSUM, METADATA, DamagedCheckpoint
from harness.checkpoint.metadata import first_line
from harness.checkpoint.storage import Reader, Writer
from harness.config.model import ModelConfig
from harness.model.spec import is_buffer, tensor_shapes
from harness.util.files import sync_file
from harness.weights.hf_tensors import check_tensors
from harness.weights.source import EMBEDDING, HEAD, TensorFacts, WeightSource, refuse_untied


def average_of(name: str) -> str:
    """Name in our checkpoints of the moving average of a tensor; buffers have none."""
    return name if is_buffer(name) else f"optimizer.state.{name}.ema"


class DistributedSource:
    """The weights in a DCP checkpoint; the optimizer and other content are ignored.

    The manifest of other software is empty. ``key_of`` gives the checkpoint's name of a parameter
    of ours.
    """

    def __init__(
        self,
        path: str,
        manifest: Mapping[str, Any],
        model: ModelConfig,
        key_of: Callable[[str], str] = str,
    ) -> None:
        self._path = path
        self._model = model
        foreign = not manifest
        self._reader = Reader(path, dict(manifest))
        try:
            self._metadata = self._reader.read_metadata()
        except OSError as error:
            raise DamagedCheckpoint(f"{METADATA} cannot be read: {first_line(error)}") from error
        if foreign and any(
            hasattr(place, CHECKSUM) for place in self._metadata.storage_data.values()
        ):
            raise DamagedCheckpoint(
                "the harness did not finish writing it: the manifest is missing"
            )
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._found = {
            name: TensorFacts(tuple(entry.size), entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        # Some software keeps the model beside the optimizer, as {"model": ..., "optimizer": ...}.
        nested = foreign and EMBEDDING not in self._found
        prefix = "model." if nested else ""
        shapes = tensor_shapes(model)
        keys = {name: prefix + key_of(name) for name in (*shapes, HEAD)}
        if foreign:
            keys = {n: key if key in self._found else prefix + n for n, key in keys.items()}
        self._keys = keys
        found = {
            name: self._found[keys[name]].shape for name in shapes if keys[name] in self._found
        }
        check_tensors(path, model, found, shapes)
        self.tensors: Mapping[str, TensorFacts] = {name: self._found[keys[name]] for name in shapes}

    def read(self, name: str) -> Tensor:
        """Return one parameter, after comparing its checksum and a tied output projection."""
        tensor = self._read(self._keys[name])
        if name == EMBEDDING and self._model.tied_embeddings and self._keys[HEAD] in self._found:
            refuse_untied(tensor, self._read(self._keys[HEAD]), self._path)
        return tensor

    def _read(self, key: str) -> Tensor:
        facts = self._found[key]
        tensor = torch.empty(facts.shape, dtype=facts.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except OSError as error:
            raise DamagedCheckpoint(f"{key} cannot be read: {first_line(error)}") from error
        return tensor


def write_distributed(
    source: WeightSource, folder: Path, manifest: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint that training can start from on any layout; one tensor is in memory at a time.

    The folder must not hold a checkpoint; ``manifest`` has no ``files``. Without it the checkpoint
    is as torch's own writer makes it, without checksums.
    """
    writer = _OneByOne(str(folder))
    if manifest is not None:
        writer = _StreamingWriter(str(folder), manifest)
    planner = _LazyPlanner(source)
    planner.set_up_planner(
        {
            name: torch.empty(f.shape, dtype=f.dtype, device="meta")
            for name, f in source.tensors.items()
        },
        writer.storage_meta(),
        is_coordinator=True,
    )
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


class _LazyPlanner(DefaultSavePlanner):
    """Plan with meta tensors; read each tensor only when it is written."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._source.read(write_item.index.fqn)


class _OneByOne(FileSystemWriter):
    """Free each tensor once it is written; torch's loop keeps all tensors of a file until the end."""

    fs: Any

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"  # type: ignore[attr-defined]
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, file), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                torch.save(planner.resolve_data(item), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(file, start, length)))
            sync_file(stream)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _StreamingWriter(Writer, _OneByOne):
    """``_OneByOne`` with checksums and a manifest."""
