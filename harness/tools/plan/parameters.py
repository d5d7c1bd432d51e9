"""Parameter shards of each pipeline rank, FSDP groups, and what Muon exchanges (no torch).

Every tensor of ``model/spec.py`` is split by tensor and expert parallel first
(``parallelism/tensor.py``, ``expert.py``), then by FSDP (``fsdp.py``), each time as torch.chunk
does: pieces of length ``ceil(length / ranks)``, then a shorter one, then empty ones. So the first
rank of every axis has the most, and this module computes its shards. FSDP2 pads the other ranks'
shards to the same length in memory and in collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil, prod
from typing import Any, TypeVar

from harness.config.job import Job
from harness.config.model import ModelConfig, of_one_model
from harness.config.optimizer import BLOCK, EIGHT_BIT, KINDS, OptimizerConfig
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import split_modules, stages_of_rank
from harness.config.precision import PrecisionConfig
from harness.model.architecture import architecture_of, block_kinds
from harness.model.spec import TensorSpec, tensors
from harness.optimizer.assignment import ROUND_VALUES
from harness.optimizer.settings import in_blocks, kind_of
from harness.tools.plan.costs import costs_of

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes per value of each format."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class HeldTensor:
    """A parameter, or a saved buffer, on the fullest rank."""

    spec: TensorSpec
    group: str
    """The FSDP group (``fsdp_groups``): ``layers.7``, ``layers.7.experts``, ``head`` ..."""
    gathered_elements: int
    """Number of its values during computation: split by tensor and expert parallel only."""
    sharded: tuple[int, ...]
    """Shape of the shard between steps."""
    shards: int

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def held_elements(self) -> int:
        return prod(self.sharded)

    @property
    def padded_elements(self) -> int:
        """Gathered values with padding: FSDP pads shards to the first one's length."""
        return self.held_elements * self.shards


class Memo:
    """Computes something once for each key: the values that it depends on."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # type: ignore[no-any-return]


class HeldModule:
    """The parameters and buffers of a module on the fullest rank; equal blocks share it, with the first
    one's names."""

    def __init__(
        self, name: str, tensors: tuple[HeldTensor, ...], optimizer: OptimizerConfig
    ) -> None:
        self.name = name
        self.tensors = tensors
        self.held = 0
        """Number of parameters in its shards, without buffers."""
        self.largest = max((tensor.held_elements for tensor in tensors), default=0)
        self.buffer_bytes = 0
        """The balancing biases of experts: float32, replicated."""
        self.optimizer_bytes = 0.0
        """The optimizer's state: tensors like the parameter, and the float32 step of some kinds."""
        self.update_bytes = 0.0
        """Traffic of the optimizer's update, if parameters have 32 bits."""
        self.groups: dict[str, list[HeldTensor]] = {}
        """The parameters by FSDP group."""
        self.exchanged = []
        """Those whose pieces the optimizer exchanges between ranks."""
        for tensor in tensors:
            spec = tensor.spec
            held = tensor.held_elements
            if spec.is_buffer:
                self.buffer_bytes += 4 * held
                continue
            self.held += held
            self.groups.setdefault(tensor.group, []).append(tensor)
            kind = KINDS[kind_of(optimizer, spec)]
            self.update_bytes += kind.moved_bytes * held
            if kind.exchanges:
                self.exchanged.append(spec)
            if optimizer.state_dtype == EIGHT_BIT:
                value_bytes = 1 + 4 / BLOCK if in_blocks(spec.shape) else 4.0
            else:
                value_bytes = BYTES[optimizer.state_dtype or "float32"]
            value_bytes *= len(kind.state)
            if optimizer.ema_decay > 0:
                value_bytes += 4
            self.optimizer_bytes += held * value_bytes + 4 * kind.counts_steps


class RankParameters:
    """Parameters and optimizer state of the fullest rank of a pipeline rank.

    ``modules`` are those of each stage by name, in the model's order.
    """

    def __init__(self, modules: dict[int, dict[str, HeldModule]], master_bytes: int) -> None:
        self.modules = modules
        self.held_modules = list(chain.from_iterable(stage.values() for stage in modules.values()))
        """The modules of all its stages, with the names of the first of equal blocks."""
        self.held = sum(module.held for module in self.held_modules)
        """Number of parameters in its shards, without buffers."""
        self.largest = max(module.largest for module in self.held_modules)
        self.parameter_bytes = self.held * master_bytes
        """Bytes of its parameters; their gradients take as many."""
        self.buffer_bytes = sum(module.buffer_bytes for module in self.held_modules)
        self.optimizer_bytes = sum(module.optimizer_bytes for module in self.held_modules)
        self.update_bytes = sum(module.update_bytes for module in self.held_modules)


@of_one_model
def tensors_by_module(model: ModelConfig) -> dict[str, list[TensorSpec]]:
    """Tensors by the modules that pipeline stages consist of (``layers.7`` ...), and ``mtp``."""
    modules: dict[str, list[TensorSpec]] = {}
    costs = costs_of(model)
    for tensor in tensors(model).values():
        first, second, *_ = tensor.name.split(".")
        module = f"layers.{second}" if first == "layers" else costs.stage_module(first)
        modules.setdefault(module, []).append(tensor)
    return modules


class HeldModules(Memo):
    """The modules of a model on the fullest rank of any layout, computed once for each way to shard them."""

    def __init__(
        self, model: ModelConfig, precision: PrecisionConfig, optimizer: OptimizerConfig
    ) -> None:
        super().__init__()
        self.specs = tensors_by_module(model)
        self._model = model
        self._optimizer = optimizer.resolve(precision.master_dtype, precision.param_dtype)
        self._first = {}
        kinds: dict[object, str] = {}
        # Options may select tensors by their names.
        parts = precision.filter_fqns if precision.enable_fsdp_float8_all_gather else ()
        for layer, kind in enumerate(block_kinds(model)):
            name = f"layers.{layer}"
            specs = self.specs.get(name, ())
            updates = tuple(kind_of(optimizer, spec) for spec in specs)
            filtered = tuple(part in spec.module for spec in specs for part in parts)
            self._first[name] = kinds.setdefault((kind, updates, filtered), name)

    def of(self, name: str, layout: ParallelismConfig) -> HeldModule:
        first = self._first.get(name, name)

        def make() -> HeldModule:
            architecture = architecture_of(self._model)
            groups = architecture.fsdp_groups(self._model, layout.has_expert_mesh)
            tensors = tuple(_held(spec, groups, layout) for spec in self.specs.get(first, ()))
            return HeldModule(first, tensors, self._optimizer)

        key = (first, layout.parameter_shards, layout.tp, layout.ep, layout.expert_tensor_parallel)
        return self.once(key, make)


# Jobs share them that differ in their layouts and batches.
_held_modules = of_one_model(HeldModules)


def parameters_of(job: Job, pp_rank: int) -> RankParameters:
    """The shards of the fullest rank of a pipeline rank."""
    layout = job.parallelism
    n_layers = job.model.n_layers
    names = split_modules(layout, n_layers)
    # Models with multi-token prediction have no pipeline.
    more = ["mtp"] if job.model.mtp.depth else []
    held = {
        stage: held_modules(job, names[stage] + more)
        for stage in stages_of_rank(layout, n_layers, pp_rank)
    }
    return RankParameters(held, BYTES[job.precision.master_dtype])


def held_modules(job: Job, names: Iterable[str]) -> dict[str, HeldModule]:
    """Modules of a job on the fullest rank, by name."""
    known = _held_modules(job.model, job.precision, job.optimizer)
    return {name: known.of(name, job.parallelism) for name in names}


def groups_of(modules: Iterable[HeldModule]) -> dict[str, list[HeldTensor]]:
    """The parameters of modules by FSDP group, which may span several of them."""
    groups: dict[str, list[HeldTensor]] = {}
    for module in modules:
        for group, held in module.groups.items():
            groups.setdefault(group, []).extend(held)
    return groups


def _held(spec: TensorSpec, groups: Mapping[str, str], layout: ParallelismConfig) -> HeldTensor:
    # The group of the innermost wrapped module around it.
    name = spec.name
    while name not in groups:
        name = name.rpartition(".")[0]
    shards = 1 if spec.is_buffer else layout.parameter_shards
    dim = 0
    local = list(spec.shape)
    if spec.is_expert:
        shards = layout.expert_shards
        dim = layout.expert_shard_dim(spec.experts)
        local[0] //= layout.ep
    if spec.split_dim is not None:
        local[spec.split_dim] = ceil(local[spec.split_dim] / tp_of(layout, spec))
    gathered = prod(local)
    local[dim] = ceil(local[dim] / shards)
    return HeldTensor(spec, groups[name], gathered, tuple(local), shards)


def tp_of(layout: ParallelismConfig, tensor: TensorSpec) -> int:
    """Tensor-parallel ranks that split a tensor of the model."""
    split = tensor.split_dim is not None and (layout.expert_tensor_parallel or not tensor.is_expert)
    return layout.tp if split else 1


@dataclass(frozen=True)
class MuonUpdate:
    """Muon's update on a rank, as if the ranks that hold pieces of matrices shared them equally."""

    shapes: Mapping[tuple[int, int], float]
    """Number of matrices that it orthogonalizes by shape, the shorter side first."""
    sent: float
    """Bytes that it sends: pieces to the owners of their matrices, and results back."""
    buffers: float
    """Bytes of buffers and of the iterations' temporary matrices."""


def muon_update(job: Job, parameters: RankParameters) -> MuonUpdate:
    """What a rank orthogonalizes and sends; nothing with other optimizers."""
    shapes: dict[tuple[int, int], float] = defaultdict(float)
    sent = 0.0
    values = 0.0
    largest = ROUND_VALUES
    copies = 1
    for module in parameters.held_modules:
        for spec in module.exchanged:
            count, replicas, shards = _holders(job.parallelism, spec)
            own = count / (replicas * shards)
            short, long = sorted((spec.outputs, spec.inputs))
            size = short * long
            shapes[short, long] += own
            # Pieces of the matrices of others in this replica, then results for all holders.
            sent += own * size * (replicas + 1 - 2 / shards)
            if replicas * shards > 1:
                values += own * size
                largest = max(largest, size)
                copies = max(copies, replicas)
    value_bytes = BYTES[job.optimizer.newton_schulz_dtype or job.precision.param_dtype]
    # While a round is orthogonalized, pieces of the next one arrive and results of the one before
    # return.
    around = 2 * copies + 2 if values > largest else 0
    buffers = min(values, largest) * (around + max(3, 1 + 2 * copies)) * value_bytes
    return MuonUpdate(shapes, sent * value_bytes, buffers)


def _holders(layout: ParallelismConfig, spec: TensorSpec) -> tuple[int, int, int]:
    """Matrices of a tensor that the same ranks hold, and on how many replicas of how many shards."""
    tp = tp_of(layout, spec)
    if not spec.is_expert:
        return 1, layout.dp_replicate * layout.tp // tp, layout.parameter_shards * tp
    count = spec.experts // layout.ep
    if layout.expert_shard_dim(spec.experts) == 0:
        return count // layout.expert_shards, layout.dp_replicate, tp
    return count, layout.dp_replicate, layout.expert_shards * tp
