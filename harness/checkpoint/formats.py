"""What every format of weights is read and written through: a lazy source, and a target that appears whole.

A source gives tensors under our names and in our layout, one at a time and in the decoder's order; a writer
is a function that takes a source and a path. Any source goes to any writer:

    sources   harness.checkpoint.{huggingface,distributed,llama}
    writers   harness.checkpoint.{huggingface,distributed,torch_file}
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from harness.errors import DISK_FULL, MachineError, UserError
from harness.model.spec import is_buffer

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
# Tensors that a warning lists.
NAMES_SHOWN = 3


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the values take."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(Protocol):
    """The weights of one decoder."""

    tensors: Mapping[str, TensorFacts]
    """Every parameter and kept buffer by our name, in the decoder's order; no tied output projection."""

    def read(self, name: str) -> Tensor:
        """One tensor: on the CPU, contiguous, and with a storage that holds nothing else.

        Raises:
            UserError: its values are not what they must be.
            DamagedCheckpoint: they are not those that were written.
        """
        ...


class Cast:
    """A source whose floating-point parameters come out in another format; buffers keep theirs.

    Args:
        source: what is read.
        dtype: the format; None leaves every tensor as it is.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None) -> None:
        self._source = source
        self.tensors: Mapping[str, TensorFacts] = {
            name: replace(facts, dtype=dtype) if dtype and _is_cast(name, facts) else facts
            for name, facts in source.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor in its new format.

        Raises:
            UserError: a finite value is too large for the format.
        """
        tensor, dtype = self._source.read(name), self.tensors[name].dtype
        cast = tensor.to(dtype)
        # float16 ends at 65504, the others do not overflow within a sane model.
        if dtype == torch.float16 and cast.isinf().sum() > tensor.isinf().sum():
            raise UserError(f"{name} has values that float16 cannot hold; would work: bfloat16, float32")
        return cast


def _is_cast(name: str, facts: TensorFacts) -> bool:
    return facts.dtype.is_floating_point and not is_buffer(name)


class Watched:
    """A source that tells how many bytes each read was.

    Args:
        source: what is read.
        tell: called with the bytes of every tensor, before it is handed out.
    """

    def __init__(self, source: Source, tell: Callable[[int], None]) -> None:
        self._source, self._tell = source, tell
        self.tensors = source.tensors

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self._source.read(name)
        self._tell(tensor.nbytes)
        return tensor


class Inspected:
    """A source that notes which tensors have values that are not finite.

    Args:
        source: what is read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.tensors = source.tensors
        self._not_finite: list[str] = []

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self._source.read(name)
        if not is_finite(tensor):
            self._not_finite.append(name)
        return tensor

    def warning(self) -> str | None:
        """A warning of the tensors read so far; None where all values were finite."""
        return non_finite_warning(self._not_finite, len(self.tensors), "written")


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    # The extremes of a tensor with a NaN are NaN. They need no second tensor of this size.
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def non_finite_warning(names: Sequence[str], tensors: int, what: str) -> str | None:
    """Returns a warning of tensors with values that are not finite; None without any.

    Args:
        names: the tensors.
        tensors: how many there are in all.
        what: what was done with them.
    """
    if not names:
        return None
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (
        f"WARNING {len(names)} of {tensors} tensors hold NaN or infinite values: "
        f"{', '.join(names[:NAMES_SHOWN])}{more}; they were {what} as they are"
    )


def total_bytes(source: Source) -> int:
    """Bytes of all tensors of a source."""
    return sum(facts.nbytes for facts in source.tensors.values())


def refuse_untied(embedding: Tensor, head: Tensor, where: str) -> None:
    """Refuses an output projection that a model with tied embeddings would lose.

    Raises:
        UserError: it is not the embedding table.
    """
    if embedding.shape != head.shape or not torch.equal(embedding, head):
        raise UserError(
            f"{where}: the output projection is not the embedding table; "
            "would work: a model with model.tied_embeddings=false"
        )


def octets(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def written_whole(target: Path, nbytes: int) -> Iterator[Path]:
    """A path beside the target to write to, file or folder.

    It becomes the target when the block ends well. Otherwise it is removed, and so are folders above it that
    were not there before.

    Args:
        target: must not be there, or be an empty folder.
        nbytes: what will be written at least.

    Raises:
        MachineError: the disk is full, or too small to begin with.
        UserError: the place cannot be written to.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        with _storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _require_space(target, nbytes)
            yield temporary
            os.rename(temporary, target)
            sync_folder(target.parent)
    except BaseException:
        _remove(temporary)
        for folder in made:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    """Says on one line what the file system refused."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports what a stream raised, ^C too, as a position that it did not expect.
        chain = list(_chain(error))
        if any(isinstance(each, KeyboardInterrupt) for each in chain):
            raise KeyboardInterrupt from error
        cause = next((each for each in chain if isinstance(each, OSError) and each.errno is not None), None)
        if cause is None:
            raise
        if cause.errno in DISK_FULL:
            raise MachineError(f"{target}: the disk is full, or a quota is; nothing was written") from error
        # Where nothing else is named it is the target that failed.
        place = target if cause.filename is None else cause.filename
        raise UserError(f"{target}: cannot be written: {place}: {cause.strerror}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _require_space(target: Path, nbytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise MachineError(
            f"{target}: needs {nbytes / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left"
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not there, or nothing can be
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
