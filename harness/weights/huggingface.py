"""Weights in Hugging Face's format: sharded safetensors, an index, config.json, a tokenizer.

The safetensors format (github.com/huggingface/safetensors, "Format"): eight bytes with the length
of the header, little-endian; the header, JSON with each tensor's dtype, shape and offsets; the
values without gaps. It is written here because the library's writers need two copies of a shard in
memory.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from harness.checkpoint.catalog import CHECKSUM, MANIFEST, encode_manifest, open_checkpoint
from harness.checkpoint.state import RankGroup
from harness.checkpoint.storage import write_last
from harness.config.data import TokenizerConfig
from harness.config.job import Job
from harness.config.model import FAMILIES, ModelConfig
from harness.model.spec import is_buffer, tensor_shapes
from harness.parallelism.materialize import local_ranges
from harness.util.errors import UserError
from harness.util.files import sync_file, sync_folder
from harness.util.store import file_digest
from harness.weights.config_json import (
    CONFIG,
    check_hf_config,
    decoder_part,
    hf_config,
    read_object,
)
from harness.weights.dcp import DistributedSource
from harness.weights.generation import GENERATION, Origin, special_ids, with_ends
from harness.weights.hf_tensors import (
    DTYPES,
    HF_HEAD,
    INDEX_ENDING,
    HuggingFaceNames,
    StoredTensors,
    check_hf_tensors,
    fill,
    our_tensors,
)
from harness.weights.quantization import quantization_of
from harness.weights.source import (
    EMBEDDING,
    TensorFacts,
    WeightSource,
    multipliers,
    total_bytes,
)

MAX_SHARD_GB = 5.0  # transformers' own default
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_UNIT = 8  # bytes; keeps the values aligned for every dtype


class HuggingFaceSource:
    """The weights in a folder in transformers' format: config.json, and safetensors with or without an index.

    ``dequantized``: dtype of quantized weights in ``tensors``; ``fill`` rounds their float32 values
    once.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, dequantized: torch.dtype = torch.bfloat16
    ) -> None:
        self._folder = folder
        self._tied = model.tied_embeddings
        config = read_object(folder / CONFIG)
        check_hf_config(model, config)
        decoder = decoder_part(FAMILIES[model.family], config)
        self._pieces = our_tensors(model)
        self._copies = our_tensors(model, copies=True)
        self._multipliers = multipliers(model)
        self._stored = StoredTensors(folder, model, quantization_of(decoder), dequantized)
        found = self._stored.tensors
        check_hf_tensors(model, {name: facts.shape for name, facts in found.items()}, str(folder))
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(
                shape,
                torch.float32 if is_buffer(name) else found[self._pieces[name][0].theirs].dtype,
            )
            for name, shape in tensor_shapes(model).items()
        }

    def read(self, name: str) -> Tensor:
        """Return one tensor, after comparing tied and copied tensors with it."""
        facts = self.tensors[name]
        tensor = torch.empty(facts.shape, dtype=facts.dtype)
        self.fill(name, tensor, [range(size) for size in facts.shape])
        return tensor

    def fill(self, name: str, out: Tensor, ranges: Sequence[range]) -> None:
        """Fill a slice of one tensor and compare it with its copies, reading only that slice if possible."""
        fill(out, self._pieces[name], self.tensors[name].shape, ranges, self._stored.read_slice)
        part = tuple(slice(each.start, each.stop) for each in ranges)
        copies = [copy.theirs for copy in self._copies.get(name, ())]
        if name == EMBEDDING and self._tied:
            copies.append(HF_HEAD)
        for copy in copies:
            if copy not in self._stored.tensors or not out.numel():
                continue
            if not torch.equal(out, self._stored.read_slice(copy, part).to(out)):
                works = "model.mtp.depth=0"
                if copy == HF_HEAD:
                    works = f"tie_word_embeddings false in {CONFIG}"
                raise UserError(
                    f"{self._folder}: {copy} differs from {self._pieces[name][0].theirs}, and the model "
                    f"has one tensor for both; would work: {works}"
                )
        if name in self._multipliers:
            out.div_(self._multipliers[name])


def write_huggingface(
    source: WeightSource,
    model: ModelConfig,
    tokenizer: TokenizerConfig | None,
    folder: Path,
    max_shard_gb: float = MAX_SHARD_GB,
    *,
    origin: Origin = Origin(),  # noqa: B008 - it is frozen
    share: tuple[int, int] | None = None,
) -> None:
    """Write a folder for ``from_pretrained(folder)`` of transformers; few tensors are in memory at once.

    Several processes can share the work. All compute the same shards from the source and the
    arguments; process r of n, whose ``share`` is (r, n), writes shards r, r + n, ... and nothing
    else. A file has at most ``max_shard_gb`` (10^9 bytes) of values; a larger tensor gets a file of
    its own. Existing files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if share is None:  # first, because the user's errors show here
        finish_huggingface(source, model, tokenizer, folder, origin, max_shard_gb)
    rank, ranks = share or (0, 1)
    renamed = HuggingFaceNames(source, model)
    shards = plan_shards(renamed, max_shard_gb, FAMILIES[model.family].stem)
    for file, names in list(shards.items())[rank::ranks]:
        _write_safetensors(renamed, names, folder / file)
    sync_folder(folder)


def finish_huggingface(
    source: WeightSource,
    model: ModelConfig,
    tokenizer: TokenizerConfig | None,
    folder: Path,
    origin: Origin,
    max_shard_gb: float = MAX_SHARD_GB,
) -> None:
    """Write everything except the weights: the index, config.json, generation_config.json, the tokenizer."""
    from harness.weights.tokenizer import (
        export_tokenizer,
    )  # training without an export needs no such library

    # config.json has one dtype; if the source mixes several, it is the embedding table's, the first
    # tensor.
    first = next(iter(tensor_shapes(model)))
    family = FAMILIES[model.family]
    name = str(source.tensors[first].dtype).removeprefix("torch.")
    tokenizer = None if family.is_diffusers else tokenizer
    bos, ends = special_ids(model, tokenizer, origin)
    content = hf_config(model, name)
    if not family.is_diffusers:
        kept = origin.config(model)
        content = {**kept, **content, "bos_token_id": kept.get("bos_token_id", bos)}
        content["eos_token_id"] = with_ends(ends, kept.get("eos_token_id"))
        generation = origin.read(GENERATION)
        if not generation:
            ids = ("bos_token_id", "eos_token_id", "pad_token_id")
            generation = {each: content[each] for each in ids if content.get(each) is not None}
        if generation:
            generation["eos_token_id"] = with_ends(ends, generation.get("eos_token_id"))
            _write_json(folder / GENERATION, generation)
    _write_json(folder / CONFIG, content)
    renamed = HuggingFaceNames(source, model)
    shards = plan_shards(renamed, max_shard_gb, family.stem)
    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        for file, names in shards.items():
            weight_map |= dict.fromkeys(names, file)
        _write_json(
            folder / f"{family.stem}.{INDEX_ENDING}",
            {"metadata": {"total_size": total_bytes(renamed)}, "weight_map": weight_map},
        )
    if tokenizer is not None:
        export_tokenizer(tokenizer, folder)


def plan_shards(
    source: WeightSource, max_shard_gb: float, stem: str = "model"
) -> dict[str, list[str]]:
    """The tensors of each file, filling files of ``max_shard_gb`` one after another as transformers does."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, facts in source.tensors.items():
        if shards[-1] and filled + facts.nbytes > max_shard_gb * 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += facts.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {
        f"{stem}-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, start=1)
    }


def _write_safetensors(source: WeightSource, names: list[str], file: Path) -> None:
    # transformers requires the framework in the metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        facts = source.tensors[name]
        start = end
        end += facts.nbytes
        header[name] = {
            "dtype": _NAMES[facts.dtype],
            "shape": facts.shape,
            "data_offsets": (start, end),
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_UNIT)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            stream.write(source.read(name).reshape(-1).view(torch.uint8).numpy().data)
        sync_file(stream)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with file.open("wb") as stream:
        stream.write(json.dumps(content, indent=2).encode() + b"\n")
        sync_file(stream)


# -- on all ranks: checkpoint.state.Exchange ----


def check(path: str, model: ModelConfig) -> None:
    """Check that a folder holds the model's weights."""
    HuggingFaceSource(Path(path), model)


def load(path: str, model: ModelConfig, state: Mapping[str, Tensor], ranks: RankGroup) -> None:
    """Load a folder of safetensors into this rank's tensors; each rank reads only its local shards.

    ``state`` has the tensors by our names, with any dtype and placement. A damaged file that one
    rank finds is a UserError on all.
    """

    def load_own() -> None:
        source = HuggingFaceSource(Path(path), model)
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            source.fill(name, local, local_ranges(tensor))

    ranks.everywhere(load_own)


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
    """Try to write config.json, index and tokenizer, so that errors appear before training and not after."""
    with tempfile.TemporaryDirectory() as folder:
        finish_huggingface(_Announced(job), job.model, job.tokenizer, Path(folder), _origin(job))


def _origin(job: Job) -> Origin:
    path = job.checkpoint.initial_load_path if job.checkpoint.initial_load_in_hf else None
    return Origin(None if path is None else Path(path), job.data)


def write_share(source: str, target: str, job: Job, share: tuple[int, int]) -> None:
    """Write the share (rank, number of ranks) of safetensors files from a DCP checkpoint to a folder."""
    write_huggingface(_source(source, job), job.model, None, Path(target), share=share)


def finish(source: str, target: str, job: Job, manifest: dict[str, Any]) -> None:
    """Write config.json, index and tokenizer, then the manifest; on one rank, after all shares."""
    folder = Path(target)
    finish_huggingface(_source(source, job), job.model, job.tokenizer, folder, _origin(job))
    files = {
        file.name: {"size": file.stat().st_size, CHECKSUM: file_digest(file, xxhash.xxh3_128)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    write_last(FileSystem(), folder, MANIFEST, encode_manifest({**manifest, "files": files}))


def _source(path: str, job: Job) -> DistributedSource:
    return DistributedSource(path, open_checkpoint(path).manifest, job.model)
