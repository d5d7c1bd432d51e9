"""Common interface of all weight formats: a lazy source of tensors, and an atomically created target.

A source yields tensors under our names and in our layout, one at a time, in the decoder's order. A writer is
a function that takes a source and a path. Every source works with every writer:

    sources   harness.weights.{huggingface,dcp}, and those of other packages (harness.weights.format)
    writers   harness.weights.{huggingface,dcp,torch_file}, likewise
"""

from __future__ import annotations

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

from harness.checkpoint.state import is_finite, non_finite_warning
from harness.config.failures import chain_of
from harness.model.spec import is_buffer
from harness.util.errors import DISK_FULL, MachineError, UserError
from harness.util.files import require_space, sync_folder

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(Protocol):
    """The weights of one decoder."""

    tensors: Mapping[str, TensorFacts]
    """Every parameter and saved buffer by our name, in the decoder's order; no tied output projection."""

    def read(self, name: str) -> Tensor:
        """Return one tensor: on the CPU, contiguous, with a storage of its own.

        Raises:
            UserError: its values are invalid for the model.
            DamagedCheckpoint: its values are not those that were written.
        """
        ...


class Cast:
    """A source that casts floating-point parameters; buffers keep their dtype.

    Args:
        source: the source to read from.
        dtype: the target dtype; None leaves every tensor as it is.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None) -> None:
        self._source = source
        self.tensors: Mapping[str, TensorFacts] = {
            name: replace(facts, dtype=dtype) if dtype and _is_cast(name, facts) else facts
            for name, facts in source.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one tensor, cast.

        Raises:
            UserError: a finite value overflows float16.
        """
        tensor, dtype = self._source.read(name), self.tensors[name].dtype
        cast = tensor.to(dtype)
        # The largest float16 is 65504; the other formats do not overflow in a sane model.
        if dtype == torch.float16 and cast.isinf().sum() > tensor.isinf().sum():
            raise UserError(f"{name} has values that float16 cannot hold; would work: bfloat16, float32")
        return cast


def _is_cast(name: str, facts: TensorFacts) -> bool:
    return facts.dtype.is_floating_point and not is_buffer(name)


class ProgressSource:
    """A source that reports the bytes of each read.

    Args:
        source: the source to read from.
        advance: called with the number of bytes of every tensor before it is returned.
    """

    def __init__(self, source: Source, advance: Callable[[int], None]) -> None:
        self._source, self._advance = source, advance
        self.tensors = source.tensors

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        tensor = self._source.read(name)
        self._advance(tensor.nbytes)
        return tensor


class FiniteCheckSource:
    """A source that records which tensors have non-finite values.

    Args:
        source: the source to read from.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.tensors = source.tensors
        self._not_finite: list[str] = []

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        tensor = self._source.read(name)
        if not is_finite(tensor):
            self._not_finite.append(name)
        return tensor

    def warning(self) -> str | None:
        """Warning for the tensors read so far; None if all values were finite."""
        return non_finite_warning(self._not_finite, len(self.tensors), "written")


def total_bytes(source: Source) -> int:
    """Total size of a source's tensors in bytes."""
    return sum(facts.nbytes for facts in source.tensors.values())


def refuse_untied(embedding: Tensor, head: Tensor, where: str) -> None:
    """Check that the output projection of a model with tied embeddings equals its embedding table.

    Raises:
        UserError: they differ.
    """
    if embedding.shape != head.shape or not torch.equal(embedding, head):
        raise UserError(
            f"{where}: the output projection differs from the embedding table; "
            "would work: a model with model.tied_embeddings=false"
        )


def bytes_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def atomic_target(target: Path, nbytes: int) -> Iterator[Path]:
    """Context with a temporary path beside the target, for a file or a folder.

    On success the temporary path is renamed to the target. On an error it is removed, together with the
    parent folders that this call created.

    Args:
        target: a path that does not exist, or an empty folder.
        nbytes: at least this many bytes will be written.

    Raises:
        MachineError: the disk is full, or has less free space than ``nbytes``.
        UserError: the target cannot be written.
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
        _remove(temporary)
        for folder in created:  # innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    """Turn errors of the file system into one-line errors."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save hides an exception of the stream, ^C too, behind "unexpected pos".
        chain = chain_of(error, suppressed=True)
        if any(isinstance(each, KeyboardInterrupt) for each in chain):
            raise KeyboardInterrupt from error
        cause = next((each for each in chain if isinstance(each, OSError) and each.errno is not None), None)
        if cause is None:
            raise
        if cause.errno in DISK_FULL:
            raise MachineError(f"{target}: the disk is full, or a quota is; nothing was written") from error
        # An error without a file name comes from the target.
        place = target if cause.filename is None else cause.filename
        raise UserError(f"{target}: cannot be written: {place}: {cause.strerror}") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it does not exist, or was removed above
        path.unlink()
