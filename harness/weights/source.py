"""Common interface of all weight formats: a lazy source of tensors, and an atomically created target.

A source yields tensors under our names and in our layout, one at a time, in the decoder's order. A
writer is a function that takes a source and a path. Every source works with every writer:

    sources   harness.weights.{huggingface,dcp}, and those of other packages (harness.weights.format)
    writers   harness.weights.{huggingface,dcp}, write_torch, likewise
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from harness.config.failures import chain_of
from harness.config.model import ModelConfig
from harness.model.spec import Split, is_buffer, modules
from harness.util.errors import DISK_FULL, ConfigError, MachineError, UserError
from harness.util.files import require_space, sync_file, sync_folder

EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """The weights of one decoder."""

    tensors: Mapping[str, TensorFacts]
    """Every parameter and saved buffer by our name, in the decoder's order; no tied output
    projection."""

    def read(self, name: str) -> Tensor:
        """Return one tensor: on the CPU, contiguous, with a storage of its own."""
        ...


class Changed:
    """A source whose tensors are changed when they are read: ``tensors`` are their shapes and dtypes then."""

    def __init__(
        self,
        source: WeightSource,
        change: Callable[[str, Tensor], Tensor],
        tensors: Mapping[str, TensorFacts] | None = None,
    ) -> None:
        self._source = source
        self._change = change
        self.tensors: Mapping[str, TensorFacts] = source.tensors if tensors is None else tensors

    def read(self, name: str) -> Tensor:
        """Return one tensor, changed."""
        return self._change(name, self._source.read(name))


def cast(source: WeightSource, dtype: torch.dtype | None) -> WeightSource:
    """The source with floating-point parameters cast to ``dtype``, if given; buffers keep theirs.

    Reading raises UserError if a finite value overflows float16.
    """
    tensors = {
        name: replace(facts, dtype=dtype)
        if dtype and facts.dtype.is_floating_point and not is_buffer(name)
        else facts
        for name, facts in source.tensors.items()
    }

    def change(name: str, tensor: Tensor) -> Tensor:
        result = tensor.to(tensors[name].dtype)
        # The largest float16 is 65504; the other formats do not overflow in a sane model.
        if result.dtype == torch.float16 and result.isinf().sum() > tensor.isinf().sum():
            raise UserError(
                f"{name} has values that float16 cannot hold; would work: bfloat16, float32"
            )
        return result

    return Changed(source, change, tensors)


def watched(source: WeightSource, look: Callable[[str, Tensor], None]) -> WeightSource:
    """The source that calls ``look`` with every tensor it reads."""

    def change(name: str, tensor: Tensor) -> Tensor:
        look(name, tensor)
        return tensor

    return Changed(source, change)


def total_bytes(source: WeightSource) -> int:
    """Total size of a source's tensors in bytes."""
    return sum(facts.nbytes for facts in source.tensors.values())


def refuse_untied(embedding: Tensor, head: Tensor, where: str) -> None:
    """Refuse different values of the two tables of a model with tied embeddings, with a UserError."""
    if embedding.shape != head.shape or not torch.equal(embedding, head):
        raise UserError(
            f"{where}: the output projection differs from the embedding table; "
            "would work: a model with model.tied_embeddings=false"
        )


# -- muP's multipliers as a part of the weights: the files of other software have no field for them
# ----


def multipliers(model: ModelConfig) -> dict[str, float]:
    """Factors that fold muP's multipliers into the weights, by tensor; tensors without one have none.

    The factor of the logits is moved to the norm before the output projection, which may be tied;
    that of a router's logits to its weight; that of attention scores to the queries.
    """
    output = model.mup_multiplier
    scores = model.score_multiplier
    if scores != 1 and model.attention.qk_norm == "l2":
        rule = "model.attention.qk_norm=l2 removes the factor of queries that would replace muP's score scale"
        works = f"head_dim: {model.head_width}, or none"
        raise ConfigError("model.mup.base_widths", model.mup.base_widths, rule, works)
    queries = ("wq", "wq_b") if model.attention.qk_norm == "none" else ("q_norm",)
    found = {}
    for module in modules(model):
        inner = module.name.rpartition("attention.")[2]
        is_router = module.split is Split.ROUTER
        factor = output if module.name in ("norm", "mtp.norm") or is_router else 1.0
        factor = scores if inner in queries and inner != module.name else factor
        for tensor in module.tensors:
            # A bias of a router is added to scaled logits.
            if factor != 1 and (tensor.is_matrix or not is_router):
                found[tensor.name] = factor
    return found


def folded(source: WeightSource, model: ModelConfig) -> WeightSource:
    """The weights for software without muP's multipliers."""
    return _multiplied(source, model, multipliers(model))


def unfolded(source: WeightSource, model: ModelConfig) -> WeightSource:
    """The weights of software without muP's multipliers, for a model that has them."""
    factors = {name: 1 / factor for name, factor in multipliers(model).items()}
    return _multiplied(source, model, factors)


def _multiplied(
    source: WeightSource, model: ModelConfig, factors: Mapping[str, float]
) -> WeightSource:
    def change(name: str, tensor: Tensor) -> Tensor:
        factor = factors.get(name)
        if factor is None:
            return tensor
        if model.norm_zero_centred and name.endswith("norm.weight"):
            return ((tensor.float() + 1) * factor - 1).type_as(tensor)
        return tensor * factor  # in float32, and the result is rounded once

    return Changed(source, change)


# -- targets ----


@contextmanager
def atomic_target(target: Path, nbytes: int) -> Iterator[Path]:
    """Context with a temporary path beside the target, for a file or a folder.

    On success the temporary path is renamed to the target, which must not exist or be an empty
    folder. On an error, such as less free space than ``nbytes``, it is removed, together with the
    parent folders that this call created.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    created = [folder for folder in target.parents if not folder.exists()]
    try:
        with _storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            require_space(target, nbytes)
            yield temporary
            os.rename(temporary, target)
            sync_folder(target.parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # it does not exist, or was removed above
            temporary.unlink()
        for folder in created:  # innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save hides an exception of the stream, ^C too, behind "unexpected pos".
        chain = chain_of(error, suppressed=True)
        if any(isinstance(each, KeyboardInterrupt) for each in chain):
            raise KeyboardInterrupt from error
        cause = next(
            (each for each in chain if isinstance(each, OSError) and each.errno is not None), None
        )
        if cause is None:
            raise
        if cause.errno in DISK_FULL:
            raise MachineError(
                f"{target}: the disk is full, or a quota is; nothing was written"
            ) from error
        # An error without a file name comes from the target.
        place = target if cause.filename is None else cause.filename
        raise UserError(f"{target}: cannot be written: {place}: {cause.strerror}") from error


def write_torch(source: WeightSource, file: Path, *, tied: bool) -> None:
    """Write a state dict for ``torch.load(file, weights_only=True)``, with one tensor in memory at a time.

    ``Decoder.load_state_dict`` accepts it: a ``tied`` embedding table is stored under both its
    names. The file is first written with gaps for the values (``skip_data``), which are then filled
    in at the offsets that loading under FakeTensorMode reports. The archive's checksums of the
    values stay empty: torch.load ignores them, unzip complains.
    """
    with FakeTensorMode():
        state = {
            name: torch.empty(facts.shape, dtype=facts.dtype)
            for name, facts in source.tensors.items()
        }
    if tied:
        state[HEAD] = state[EMBEDDING]
    with file.open("wb") as stream, skip_data(materialize_fake_tensors=True):
        torch.save(state, stream)
    with FakeTensorMode():
        state = torch.load(file, weights_only=True)
    with file.open("r+b") as stream:
        for name in source.tensors:
            stream.seek(state[name].untyped_storage()._checkpoint_offset)
            stream.write(source.read(name).reshape(-1).view(torch.uint8).numpy().data)
        sync_file(stream)
