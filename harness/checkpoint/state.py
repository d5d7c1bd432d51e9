"""The state of a run as one flat dict of tensors, under names that do not depend on the layout.

    <parameter>                         weights, as DTensors if sharded
    <buffer>                            biases that balance experts
    optimizer.<...>                     what the optimizer keeps (optimizer_state.py)
    rng.<coordinates>                   random states of the rank at these mesh coordinates, as bytes

``RankGroup`` has the calls that all ranks make, and that fail on all ranks if they fail on one.
"""

import base64
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.checkpoint.catalog import CheckpointFolder, DamagedCheckpoint
from harness.checkpoint.resume import folder_of
from harness.config.checkpoint import CheckpointConfig
from harness.config.job import Job
from harness.config.model import ModelConfig
from harness.data.loader import Loader
from harness.model.part import ModelPart
from harness.model.spec import is_buffer
from harness.parallelism.mesh import Mesh
from harness.precision.swap import plain
from harness.util.errors import HarnessError, MachineError, UserError

OPTIMIZER = "optimizer."
RNG = "rng."
NAMES_SHOWN = 3  # in a warning
CHECKPOINT_GROUP = "checkpoint"
T = TypeVar("T")


class PeerFailed(MachineError):
    """Another rank failed; the message is that rank's."""

    kind = "peer"


_RAISED: dict[str, type[Exception]] = {"damaged": DamagedCheckpoint, "user": UserError}


class RankGroup:
    """The ranks of a job, with a process group of their own for saving and loading.

    Saving runs in a thread beside training's collectives, and needs a longer timeout than those.
    """

    def __init__(self, timeout_seconds: int) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds), group_desc=CHECKPOINT_GROUP
        )

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 and return its result on all ranks."""
        if self.rank == 0:
            try:
                value = function()
            except BaseException as error:
                self._broadcast(_sendable(error))
                raise
            self._broadcast(("value", value))
            return value
        kind, value = self._broadcast(None)
        if kind == "value":
            return value
        raise _RAISED.get(kind, PeerFailed)(value)

    def everywhere(self, function: Callable[[], Any]) -> None:
        """Call ``function`` on every rank; the first rank's error is raised on all, with that rank.

        It calls no collectives, because another rank may have failed before it.
        """
        failure = None
        try:
            function()
        except Exception as error:
            failure = error
        found = self.gather(None if failure is None else _sendable(failure))
        if failure is not None and not isinstance(failure, UserError | DamagedCheckpoint | OSError):
            raise failure
        for rank, first in enumerate(found):
            if first is not None:
                kind, text = first
                raise (_RAISED | {"os": OSError}).get(kind, PeerFailed)(
                    f"{text} (rank {rank})"
                ) from failure

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _sendable(error: BaseException) -> tuple[str, str]:
    """An exception as kind and text, because not every exception can be pickled."""
    if isinstance(error, HarnessError):
        return error.kind, str(error)
    if isinstance(error, DamagedCheckpoint):
        return "damaged", str(error)
    return ("os" if isinstance(error, OSError) else "bug"), str(error)


class HasWeights(Protocol):
    """A model on this rank."""

    @property
    def parts(self) -> Sequence[ModelPart]:
        """The model parts of this rank."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters (or shards) that this rank holds, under their names in the full model."""
        ...


class Trained(HasWeights, Protocol):
    """A model that is trained: the ``Engine``."""

    device: torch.device
    mesh: Mesh
    parameters: list[Tensor]
    optimizer: Any
    schedule: Any

    def set_schedule(self, steps: int) -> None:
        """Move the schedule to its state after ``steps`` updates."""
        ...


class WeightExchange(Protocol):
    """Load and export weights in another project's format, on all ranks (``weights.huggingface``)."""

    def check(self, path: str, model: ModelConfig) -> None: ...
    def load(
        self, path: str, model: ModelConfig, state: Mapping[str, Tensor], ranks: RankGroup
    ) -> None: ...
    def check_export(self, job: Job) -> None: ...
    def write_share(self, source: str, target: str, job: Job, share: tuple[int, int]) -> None: ...
    def finish(self, source: str, target: str, job: Job, manifest: dict[str, Any]) -> None: ...


@dataclass
class CheckpointedRun:
    """A run on this rank: what its checkpoints are taken from, and loaded into."""

    job: Job
    run_dir: Path
    engine: Trained
    loader: Loader
    ranks: RankGroup
    weights: WeightExchange

    @property
    def config(self) -> CheckpointConfig:
        return self.job.checkpoint

    @cached_property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(folder_of(self.job, self.run_dir))


def model_state(model: HasWeights, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """This rank's parameters, cast if ``dtype`` is given, and its saved buffers."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = plain(parameter.detach())
        weights[name] = weight if dtype is None else weight.to(dtype)
    for part in model.parts:
        weights |= {name: buffer for name, buffer in part.named_buffers() if is_buffer(name)}
    return weights


def rng_key(mesh: Mesh) -> str:
    """Name of this rank's random states: its mesh coordinate on every axis, and the size of the axis.

    In another layout no checkpoint entry has this name, and the rank keeps its initial states.
    """
    coordinates = [
        f"{axis}{mesh.rank(axis)}of{size}" for axis, size in mesh.degrees.items() if size > 1
    ]
    return RNG + ("_".join(coordinates) or "alone")


def rng_state(device: torch.device) -> Tensor:
    """States of this process's torch, numpy and Python generators, as a uint8 tensor."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def set_rng_state(packed: Tensor, device: torch.device) -> None:
    """Restore the generators from the result of ``rng_state``."""
    states = json.loads(packed.numpy().tobytes())
    torch.set_rng_state(_tensor(states["torch"]))
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    # min and max propagate NaN, and need no second tensor of this size.
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def non_finite_warning(names: Sequence[str], tensors: int) -> str | None:
    """Return a warning about ``names`` of so many ``tensors``, with non-finite values; None without any."""
    if not names:
        return None
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (
        f"WARNING {len(names)} of {tensors} tensors hold NaN or infinite values: "
        f"{', '.join(names[:NAMES_SHOWN])}{more}; they were written as they are"
    )
