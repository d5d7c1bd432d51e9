"""What the ranks of each pipeline stage hold of the parameters, and what FSDP gathers at once (no torch).

Every tensor of ``model/shapes.py`` is cut as the code that shards it cuts it: by tensor and expert parallel
first (``parallelism/tensor.py``, ``expert.py``), then by FSDP (``fsdp.py``), each time as torch.chunk does:
pieces of equal length, ``ceil(length / ranks)``, while there are rows, then a shorter one, then none. So the
first rank of every axis is the fullest, and what is counted here is what it holds. FSDP2 pads the shards of
the other ranks to the same length in memory, and in what it gathers and reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from harness.job import Job
from harness.model.config import ModelConfig
from harness.model.shapes import Shapes, block_prefix, is_buffer, is_expert, linear_split, tensor_shapes
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.stages import split_modules, stages_of_rank

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes of a number in each format."""

HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b3": 1}
"""Dimension of an expert's tensors that ranks split which share it (``expert.py``, HIDDEN_DIMS)."""


@dataclass(frozen=True)
class HeldTensor:
    """A parameter, or a buffer that belongs to the model, as the fullest rank holds it."""

    name: str
    """In the whole model."""
    stage: int
    """The pipeline stage it belongs to."""
    group: str
    """The module whose tensors FSDP gathers together: ``layers.7``, ``layers.7.experts``, ``tok_embeddings``,
    ``head`` (norm and output), ``mtp``, ``root``."""
    whole: tuple[int, ...]
    """Shape in the whole model."""
    gathered: tuple[int, ...]
    """Shape that a rank computes with: cut by tensor and expert parallel only."""
    sharded: tuple[int, ...]
    """Shape that it holds between steps."""

    @property
    def held_elements(self) -> int:
        """Numbers held between steps."""
        return prod(self.sharded)

    @property
    def gathered_elements(self) -> int:
        """Numbers that are computed with."""
        return prod(self.gathered)

    @property
    def is_buffer(self) -> bool:
        """Whether no optimizer updates it."""
        return is_buffer(self.name)


@dataclass(frozen=True)
class RankParameters:
    """What the fullest rank of a pipeline rank holds between steps."""

    pp_rank: int
    stages: tuple[int, ...]
    tensors: tuple[HeldTensor, ...]
    """Parameters and buffers of all its stages, in the model's order."""
    master_bytes: int
    """Bytes of one number of a parameter, and of its gradient."""
    state_bytes: int
    """Bytes of one number of the optimizer's running means."""

    @cached_property
    def held(self) -> int:
        """Parameters that it holds, as numbers; buffers do not count."""
        return sum(tensor.held_elements for tensor in self.tensors if not tensor.is_buffer)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.held * self.master_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that balance experts, float32 always, whole on every rank."""
        return sum(4 * tensor.held_elements for tensor in self.tensors if tensor.is_buffer)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients once all are there, which have the parameters' format and shards."""
        return self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's state: two running means, and of every tensor the step, a float32."""
        tensors = sum(not tensor.is_buffer for tensor in self.tensors)
        return 2 * self.held * self.state_bytes + 4 * tensors

    def groups(self, stage: int) -> dict[str, list[HeldTensor]]:
        """The parameters of a stage by what FSDP gathers together, in the order of forward."""
        groups: dict[str, list[HeldTensor]] = {}
        for tensor in self.tensors:
            if tensor.stage == stage and not tensor.is_buffer:
                groups.setdefault(tensor.group, []).append(tensor)
        return groups


def shapes_by_module(model: ModelConfig) -> dict[str, Shapes]:
    """Every tensor's shape, by the modules that a pipeline's split names, and ``mtp``."""
    modules: dict[str, Shapes] = {}
    for name, shape in tensor_shapes(model).items():
        modules.setdefault(_module_of(name), {})[name] = shape
    return modules


def parameters_of(job: Job, pp_rank: int, by_module: Mapping[str, Shapes] | None = None) -> RankParameters:
    """What the fullest of the ranks of a pipeline rank holds.

    Args:
        job: the resolved job.
        pp_rank: the pipeline rank.
        by_module: what ``shapes_by_module`` gives, for who asks for many ranks.
    """
    model, layout = job.model, job.parallelism
    stages = tuple(stages_of_rank(layout, model.n_layers, pp_rank))
    modules = split_modules(layout, model.n_layers)
    shapes = shapes_by_module(model) if by_module is None else by_module
    tensors = []
    for stage in stages:
        for module in (*modules[stage], *(("mtp",) if len(modules) == 1 else ())):
            for name, shape in shapes.get(module, {}).items():
                tensors.append(_held(name, shape, stage, model, layout))
    state_dtype = job.optimizer.state_dtype or job.precision.master_dtype
    return RankParameters(
        pp_rank, stages, tuple(tensors), BYTES[job.precision.master_dtype], BYTES[state_dtype]
    )


def _held(
    name: str, shape: tuple[int, ...], stage: int, model: ModelConfig, layout: ParallelismConfig
) -> HeldTensor:
    group = fsdp_group(name, model, layout)
    if is_buffer(name):
        return HeldTensor(name, stage, group, shape, shape, shape)
    if not is_expert(name):
        local = _of_tensor_parallel(name, shape, layout.tp)
        return HeldTensor(name, stage, group, shape, local, _cut(local, 0, layout.parameter_shards))
    local = _of_expert_parallel(name, shape, layout)
    # fsdp.py, _expert_placements: whole experts where there are enough for all ranks, else a part of each.
    dim = 0 if local[0] % layout.expert_shards == 0 else 1
    return HeldTensor(name, stage, group, shape, local, _cut(local, dim, layout.expert_shards))


def _of_tensor_parallel(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    linear, _, kind = name.rpartition(".")
    split = linear_split(linear)
    if split == "row" and kind == "weight":
        return _cut(shape, 1, tp)
    of_table = name == "tok_embeddings.weight"
    return _cut(shape, 0, tp) if split == "column" or of_table or kind == "sinks" else shape


def _of_expert_parallel(name: str, shape: tuple[int, ...], layout: ParallelismConfig) -> tuple[int, ...]:
    local = _cut(shape, 0, layout.ep)
    dim = HIDDEN_DIM.get(name.rsplit(".", 1)[1])
    return _cut(local, dim, layout.tp) if layout.splits_experts and dim is not None else local


def _cut(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
    """The first, longest piece of a dimension shared out to ranks."""
    return (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])


def fsdp_group(name: str, model: ModelConfig, layout: ParallelismConfig) -> str:
    """The module with which ``parallelism/fsdp.py`` gathers a tensor."""
    in_block = name.startswith(("layers.", "mtp.block."))
    if in_block:
        block = _block_of(name, model)
        # Laid out in another way, they are a group of their own.
        return f"{block}.experts" if is_expert(name) and layout.lays_out_experts else block
    if name.startswith("mtp."):
        return "mtp"
    if model.tied_embeddings:
        return "root"
    return "tok_embeddings" if name.startswith("tok_embeddings") else "head"


def _module_of(name: str) -> str:
    """The module that a pipeline's split names: ``layers.7``, ``tok_embeddings``, ``mtp`` ..."""
    first, rest = name.split(".", 1)
    return f"{first}.{rest.split('.', 1)[0]}" if first == "layers" else first


def _block_of(name: str, model: ModelConfig) -> str:
    if name.startswith("mtp."):
        return block_prefix(model, model.n_layers).rstrip(".")
    return _module_of(name)
