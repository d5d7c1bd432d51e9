"""Parameter shards of each pipeline rank, and FSDP groups (no torch).

Every tensor of ``model/spec.py`` is split by tensor and expert parallel first (``parallelism/tensor.py``,
``expert.py``), then by FSDP (``fsdp.py``), each time as torch.chunk does: pieces of length
``ceil(length / ranks)``, then a shorter one, then empty ones. So the first rank of every axis has the most,
and this module computes its shards. FSDP2 pads the other ranks' shards to the same length in memory and in
collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from harness.job import Job
from harness.model.config import ModelConfig
from harness.model.spec import TensorSpec, fsdp_groups, tensors
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.stages import split_modules, stages_of_rank

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes per value of each format."""


@dataclass(frozen=True)
class HeldTensor:
    """A parameter, or a saved buffer, on the fullest rank."""

    spec: TensorSpec
    stage: int
    """Its pipeline stage."""
    group: str
    """The FSDP group (``fsdp_groups``): ``layers.7``, ``layers.7.experts``, ``head`` ..."""
    gathered: tuple[int, ...]
    """Shape during computation: split by tensor and expert parallel only."""
    sharded: tuple[int, ...]
    """Shape of the shard between steps."""
    shard_dim: int
    """Dimension that FSDP shards."""

    @property
    def name(self) -> str:
        """Name in the full model."""
        return self.spec.name

    @cached_property
    def held_elements(self) -> int:
        """Number of values in the shard."""
        return prod(self.sharded)

    @cached_property
    def gathered_elements(self) -> int:
        """Number of values during computation."""
        return prod(self.gathered)

    @property
    def is_buffer(self) -> bool:
        """Whether no optimizer updates it."""
        return self.spec.is_buffer


@dataclass(frozen=True)
class RankParameters:
    """Parameters, gradients and optimizer state of the fullest rank of a pipeline rank."""

    pp_rank: int
    stages: tuple[int, ...]
    tensors: tuple[HeldTensor, ...]
    """Parameters and buffers of all its stages, in the model's order."""
    master_bytes: int
    """Bytes per value of a parameter, and of its gradient."""
    state_bytes: int
    """Bytes per value of the optimizer's running means."""

    @cached_property
    def held(self) -> int:
        """Number of parameters in its shards, without buffers."""
        return sum(tensor.held_elements for tensor in self.tensors if not tensor.is_buffer)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.held * self.master_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the balancing biases of experts: float32, replicated."""
        return sum(4 * tensor.held_elements for tensor in self.tensors if tensor.is_buffer)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, which have the dtype and sharding of the parameters."""
        return self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's state: two running means, and one float32 step per tensor."""
        tensors = sum(not tensor.is_buffer for tensor in self.tensors)
        return 2 * self.held * self.state_bytes + 4 * tensors

    def groups(self, stage: int) -> dict[str, list[HeldTensor]]:
        """The parameters of a stage by FSDP group, in the order of forward."""
        groups: dict[str, list[HeldTensor]] = {}
        for tensor in self.tensors:
            if tensor.stage == stage and not tensor.is_buffer:
                groups.setdefault(tensor.group, []).append(tensor)
        return groups


def tensors_by_module(model: ModelConfig) -> dict[str, list[TensorSpec]]:
    """Tensors by the modules that pipeline stages consist of (``layers.7`` ...), and ``mtp``."""
    modules: dict[str, list[TensorSpec]] = {}
    for tensor in tensors(model).values():
        first, rest = tensor.name.split(".", 1)
        module = f"{first}.{rest.split('.', 1)[0]}" if first == "layers" else first
        modules.setdefault(module, []).append(tensor)
    return modules


def parameters_of_ranks(job: Job) -> list[RankParameters]:
    """The shards of the fullest rank of every pipeline rank."""
    specs = tensors_by_module(job.model)
    return [parameters_of(job, rank, specs) for rank in range(job.parallelism.pp)]


def parameters_of(
    job: Job, pp_rank: int, by_module: Mapping[str, list[TensorSpec]] | None = None
) -> RankParameters:
    """The shards of the fullest rank of a pipeline rank.

    Args:
        job: the resolved job.
        pp_rank: the pipeline rank.
        by_module: a precomputed ``tensors_by_module``, to reuse across ranks.
    """
    model, layout = job.model, job.parallelism
    stages = tuple(stages_of_rank(layout, model.n_layers, pp_rank))
    modules = split_modules(layout, model.n_layers)
    specs = tensors_by_module(model) if by_module is None else by_module
    groups = fsdp_groups(model, experts_apart=layout.has_expert_mesh)
    held = []
    for stage in stages:
        for module in (*modules[stage], *(("mtp",) if len(modules) == 1 else ())):
            held += [
                _held(spec, stage, _group_of(spec.name, groups), layout) for spec in specs.get(module, [])
            ]
    state_dtype = job.optimizer.state_dtype or job.precision.master_dtype
    return RankParameters(pp_rank, stages, tuple(held), BYTES[job.precision.master_dtype], BYTES[state_dtype])


def _held(spec: TensorSpec, stage: int, group: str, layout: ParallelismConfig) -> HeldTensor:
    if spec.is_buffer:
        return HeldTensor(spec, stage, group, spec.shape, spec.shape, 0)
    shards, dim, local = layout.parameter_shards, 0, spec.shape
    if spec.is_expert:
        shards, dim = layout.expert_shards, layout.expert_shard_dim(spec.experts)
        local = _cut(local, 0, layout.ep)
    if spec.split_dim is not None:
        local = _cut(local, spec.split_dim, layout.tp_of(spec))
    return HeldTensor(spec, stage, group, local, _cut(local, dim, shards), dim)


def _group_of(name: str, groups: Mapping[str, str]) -> str:
    """The FSDP group of a tensor: that of the innermost wrapped module around it."""
    while name not in groups:
        name = name.rpartition(".")[0]
    return groups[name]


def _cut(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
    """The first, longest piece of a dimension split over ranks."""
    return (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
