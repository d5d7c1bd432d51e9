"""A checkpoint's model on this rank of any layout, without an optimizer."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.checkpoint.catalog import DamagedCheckpoint, open_checkpoint
from harness.checkpoint.load import opened
from harness.checkpoint.state import RankGroup, model_state
from harness.config.job import Job
from harness.config.registry import load_attribute
from harness.data.batch import Batch, place
from harness.parallelism.execute import Executor
from harness.parallelism.materialize import allocate, local_ranges
from harness.parallelism.mesh import build_mesh
from harness.parallelism.parallelize import build_on_meta
from harness.parallelism.tensor import to_plain
from harness.train.objective import objective_of
from harness.util.errors import UserError
from harness.weights import huggingface
from harness.weights.dcp import average_of
from harness.weights.detect import WeightFolder, open_source


class InferenceModel:
    """A model with weights of a checkpoint; all ranks construct it together.

    Args:
        job: the resolved job.
        device: where this rank computes.

    Raises:
        ConfigError: the device does not support training.attention.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        job.training.check_device(on_cpu=device.type == "cpu")
        self.job = job
        self.device = device
        self.mesh = build_mesh(job.parallelism, device, has_experts=job.model.moe.enabled)
        self.ranks = RankGroup(job.cluster.start_timeout_seconds)
        layout = job.parallelism
        # What is split along the sequence or the vocabulary needs the hooks of training.
        self.is_plain = not (
            layout.sequence_parallel or layout.loss_parallel or job.training.loss_in_head
        )
        self.parts = build_on_meta(job, self.mesh, device, plain=self.is_plain)
        for part in self.parts:
            allocate(part, device, torch.device("cpu") if job.parallelism.cpu_offload else device)
            part.requires_grad_(False)

    @property
    def part(self) -> Any:
        """The model part of a layout without pipeline."""
        [part] = self.parts
        return part

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters (or shards) that this rank holds."""
        for part in self.parts:
            yield from part.named_parameters()

    @cached_property
    def _executor(self) -> Executor:
        objective = objective_of(self.job.model)
        loss = objective.build_loss(self.job, self.mesh, self.parts)
        return objective.build_executor(self.job, self.mesh, self.parts, loss, self.device)

    def score(self, batch: Batch) -> Tensor:
        """Score each row of a batch of ``local_batch_size`` rows in host memory, as ``Executor.score``."""
        return self._executor.score(place(batch, self.device))

    def load(self, found: WeightFolder) -> None:
        """Load weights; each rank reads what it holds.

        Raises:
            UserError: on all ranks, if any found a damaged file, or the files hold another model.
        """
        state = model_state(self)
        try:
            if found.kind == "hf":
                huggingface.load(found.path, self.job.model, state, self.ranks)
            elif found.kind == "dcp" and found.manifest:
                named = dict(state)
                if found.ema:
                    named = {average_of(name): tensor for name, tensor in state.items()}
                with opened(open_checkpoint(found.path), self.ranks) as reader:
                    dcp.load(named, storage_reader=reader, process_group=self.ranks.group)
            else:
                self.ranks.everywhere(lambda: self._read(found, state))
        except DamagedCheckpoint as error:
            raise UserError(f"{found.path}: {error}") from error
        for part in self.parts if self.is_plain else ():
            to_plain(part)

    def _read(self, found: WeightFolder, state: Mapping[str, Tensor]) -> None:
        source = open_source(found, self.job.model)
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            full = source.read(name)
            local.copy_(full[tuple(slice(r.start, r.stop) for r in local_ranges(tensor))])


def with_model(
    job: Job, device: torch.device, function: str, found: WeightFolder, *arguments: Any
) -> Any:
    """Call a function on this rank, as ``harness.compose.generator.Request.run``."""

    def load(job: Job) -> InferenceModel:
        model = InferenceModel(job, device)
        model.load(found)
        return model

    return load_attribute(function)(job, device, load, *arguments)
