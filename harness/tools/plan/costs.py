"""Costs of each kind of model, by the names of ``model.architecture`` and ``model.block``.

A kind without costs trains; its memory and time are unknown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from harness.config.model import ModelConfig
from harness.config.registry import Registry
from harness.model.accounting import DELTA_CHUNK, attention_flops, delta_flops
from harness.model.spec import TensorSpec, block_tensors
from harness.tools.plan.activations import PartActivations, head_activations, pre_norm_activations
from harness.util.errors import MissingPackageError, UserError

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.data.batch import AnyBatch


@dataclass(frozen=True)
class AttentionCost:
    """The attention operation of one block."""

    heads: int
    kv_heads: int
    score_width: int
    """Width of a query and key head."""
    value_width: int
    flops: float
    """FLOPs over the positions that a token attends to, the mean over a sequence."""
    halo: int = 0
    """Of Gated DeltaNet: inputs that the convolutions need of earlier positions."""

    @property
    def state(self) -> int:
        """Values that Gated DeltaNet exchanges of a fragment: what it adds to a state, and its factor."""
        return self.heads * self.score_width * (self.score_width + self.value_width)


@dataclass(frozen=True)
class Operations:
    """The operations of one block, for one token and one forward pass, before any layout splits it."""

    products: tuple[TensorSpec, ...]
    """Matrices that tokens are multiplied by."""
    attention: AttentionCost
    norm_width: int
    """Inputs of norms before attention and feed-forward; the two residual sums have as many."""
    rotated_width: int
    """Values that are rotated, or normalized per head."""
    gate_width: int
    """Hidden width of the dense feed-forward or the shared experts."""
    expert_gate_width: int
    """Hidden widths of a token's experts, summed."""
    expert_width: int
    """Values of a token that are sorted by expert and back."""
    post_norm_width: int = 0
    """Inputs of norms after attention and feed-forward, if there are others before."""
    attention_gate_width: int = 0
    """Values of attention that are gated."""


T = TypeVar("T")


class Costs(ABC):
    """Costs of an architecture; without one of the methods, memory and time are unknown. No state."""

    sample = ""
    """What a sample is called if its cost and rate are shown beside those of a token, such as
    "image"."""

    @abstractmethod
    def kind(self, model: ModelConfig) -> str:
        """What such models are called where published figures are compared with the plan."""

    @abstractmethod
    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        """What a block saves for backward, per token, its input included."""

    def entry_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """What the modules before the blocks save; an embedding nothing but the batch."""
        return PartActivations(())

    @abstractmethod
    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """What the modules after the blocks save, without the outputs."""

    @abstractmethod
    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        """The operations of a block for one token."""

    def row_share(self, model: ModelConfig, tensor: TensorSpec, seq_len: int) -> float:
        """Rows that a matrix multiplies, as a fraction of a sequence's tokens."""
        return 1.0

    @abstractmethod
    def outputs(self, model: ModelConfig) -> int:
        """Outputs of the model for a token."""

    def stage_module(self, module: str) -> str:
        """The name in ``config/pipeline.py`` of a module outside of the blocks."""
        return module

    @abstractmethod
    def sample_bytes(self, model: ModelConfig, seq_len: int) -> float:
        """Bytes of one sample of a batch."""

    @abstractmethod
    def fake_batch(self, job: Job, rows: int) -> AnyBatch:
        """A batch of zeros with ``rows`` rows, for rehearsals."""


class DecoderCosts(Costs):
    """Costs of decoders; those of their blocks are ``BlockCosts``."""

    def kind(self, model: ModelConfig) -> str:
        return "mixtures of experts" if model.moe.enabled else "dense models"

    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        return block_costs_of(model).activations(model, layer, on_cpu=on_cpu)

    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        return head_activations(model)

    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        return block_costs_of(model).operations(model, layer, seq_len)

    def outputs(self, model: ModelConfig) -> int:
        return model.vocab_size

    def sample_bytes(self, model: ModelConfig, seq_len: int) -> float:
        return 2.0 * 8 * seq_len  # inputs and labels, int64

    def fake_batch(self, job: Job, rows: int) -> AnyBatch:
        import torch

        from harness.data.batch import Batch

        zeros = torch.zeros(rows, job.training.seq_len, dtype=torch.int64)
        return Batch(zeros, zeros.clone())


class BlockCosts(ABC):
    """Costs of a kind of decoder block. Instances have no state."""

    @abstractmethod
    def activations(self, model: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
        """What a block saves for backward, its input included."""

    @abstractmethod
    def operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        """The operations of a block for one token."""


def _attention_cost(model: ModelConfig, layer: int, seq_len: int) -> AttentionCost:
    return AttentionCost(
        model.n_heads,
        model.n_kv_heads,
        model.head_width,
        model.value_width,
        attention_flops(model, model.span(layer).mean_reach(seq_len)),
    )


def _delta_cost(model: ModelConfig) -> AttentionCost:
    """Gated DeltaNet in chunks: products with the state, and of positions with those of their chunk."""
    of = model.delta
    keys = of.key_head_dim
    values = of.value_head_dim
    # Scores and the system of each key head; two solutions and the sum of values for each value head.
    in_chunk = 4 * of.key_heads * keys + of.value_heads * (keys + values + 2 * values)
    return AttentionCost(
        of.value_heads,
        of.key_heads,
        keys,
        values,
        delta_flops(model) + DELTA_CHUNK * in_chunk,
        halo=(of.kernel - 1) * (2 * of.key_width + of.value_width),
    )


class PreNormCosts(BlockCosts):
    """Costs of pre-norm blocks, from which those of other blocks derive."""

    def activations(self, model: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
        return pre_norm_activations(model, layer, on_cpu=on_cpu)

    def operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        of = model.moe
        top_k = of.top_k if model.has_experts(layer) else 0
        rotated = (model.n_heads + model.n_kv_heads) * model.rotated_width
        if model.is_delta(layer):
            # Convolutions, norms and gates move about as much.
            rotated = 2 * (model.delta.key_width + model.delta.value_width)
        return Operations(
            tuple(tensor for tensor in block_tensors(model, layer) if tensor.is_matrix),
            _delta_cost(model) if model.is_delta(layer) else _attention_cost(model, layer, seq_len),
            norm_width=2 * model.dim,
            rotated_width=rotated,
            gate_width=of.shared_hidden_dim if top_k else model.ffn_hidden_dim,
            expert_gate_width=top_k * of.hidden_dim,
            expert_width=top_k * model.dim,
            post_norm_width=2 * model.dim if model.norm_position == "around" else 0,
            attention_gate_width=model.n_heads * model.value_width * model.attention.output_gate,
        )


COSTS: Registry[type[Costs]] = Registry(
    "costs",
    {"decoder": DecoderCosts},
    field="model.architecture",
    expects="harness.tools.plan.costs:Costs",
)
"""Costs by the name of the architecture."""
BLOCK_COSTS: Registry[type[BlockCosts]] = Registry(
    "block_costs",
    {"pre_norm": PreNormCosts},
    field="model.block",
    expects="harness.tools.plan.costs:BlockCosts",
)
"""Costs by the name of the block."""


def costs_of(model: ModelConfig) -> Costs:
    """Return the costs of a model; UserError if they are unknown."""
    return _entry(COSTS, model.architecture)


def block_costs_of(model: ModelConfig) -> BlockCosts:
    """Return the costs of a model's blocks; UserError if they are unknown."""
    return _entry(BLOCK_COSTS, model.block)


def _entry(table: Registry[type[T]], name: str) -> T:
    works = "training without a plan, or a package that declares them (docs/howto/extend.md)"
    try:
        found = table[name]
    except MissingPackageError as error:
        rule = "memory and time are unknown: its costs are not declared"
        raise MissingPackageError(error.field, error.value, rule, works) from None
    if left_out := sorted(getattr(found, "__abstractmethods__", ())):
        rule = f"memory and time are unknown: {found.__name__} leaves out {', '.join(left_out)}"
        raise UserError(f"{table.field}={name}: {rule}; would work: {works}")
    return found()
