"""Degrees of parallelism and options of each axis; no field changes the numerics."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm, prod

from harness.config.fields import Switch, added_execution, execution
from harness.config.model import ModelConfig
from harness.config.pipeline import SCHEDULES, CsvSchedule, check_pipeline, read_csv_schedule
from harness.util.errors import ConfigError, divisors

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: ranks of the last axis have the fastest links."""

RESHARD = ("default", "always", "never")
KEPT_AFTER_FORWARD = ("head", "root")
"""FSDP groups that backward starts with: freed after forward only with
``reshard_after_forward=always``."""
FSDP_BUFFERS = ("default", "registered", "symmetric")
CP_METHODS = ("ring", "ulysses", "gather")
CP_ROTATE_METHODS = ("allgather", "alltoall")
DOCUMENTS = "documents"
CP_LOAD_BALANCES = (True, False, DOCUMENTS)
BLOCKS = 8
"""Most blocks of a row that a rank gets by documents. With log-normal lengths the fullest of 16
ranks has a few percent to a third more work than the mean, with 4 blocks up to three quarters
(docs/measurements.md). Flash attention over documents has a call per block."""


def _several(count: int) -> bool:
    return count > 1


TENSOR = Switch("parallelism.tp", "parallelism.tp=2", _several)
SEQUENCE = Switch("parallelism.sequence_parallel")
PIPELINE = Switch("parallelism.pp", "parallelism.pp=2", _several)
pipeline_execution = functools.partial(execution, needs=PIPELINE)
EXPERT_RANKS = Switch("parallelism.ep", "parallelism.ep=2", _several)
CONTEXT = Switch("parallelism.cp", "parallelism.cp=2", _several)
RING = Switch("parallelism.cp_method", on="ring")
PIECES = Switch(
    "parallelism.cp_method", "parallelism.cp_method=ring", ("ring", "gather").__contains__
)
SHARDS = Switch(
    "parallelism.dp_shard", "parallelism.dp_shard=2", _several, "parallelism.parameter_shards"
)


@dataclass(frozen=True)
class ParallelismConfig:
    """A layout. The product of dp_replicate, dp_shard, cp, tp and pp is the world size."""

    dp_replicate: int = execution(1, least=1)
    """Replicas of the (sharded) model: DDP with dp_shard=1, HSDP otherwise."""
    dp_shard: int = execution(1, least=1, also=-1)
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2); -1: all
    remaining."""
    tp: int = execution(1, least=1)
    """Ranks that every matrix multiplication is split over (tensor parallel)."""
    pp: int = execution(1, least=1)
    """Ranks that the layers are split over (pipeline parallel)."""
    cp: int = execution(1, least=1)
    """Ranks that the sequence is split over (context parallel)."""
    ep: int = execution(1, least=1)
    """Ranks that the experts are distributed over (expert parallel); divides dp_shard x cp, or with tp
    dp_shard x cp x tp unless expert_tensor_parallel."""
    expert_tensor_parallel: bool = execution(False, needs=TENSOR)
    """With tp: split every expert over the tensor-parallel ranks, like a dense feed-forward. Otherwise each
    of these ranks routes its part of the sequence to unsplit experts."""
    ep_capacity: float | None = added_execution(None, least=1, needs=EXPERT_RANKS)
    """With ep: fixed number of rows that a rank sends to each rank of experts, as a multiple of an even share
    of its rows (tokens of a microbatch x top_k / ep). 1.25: room for a quarter more than an even share. The
    host then never waits for their number. A step with more rows ends the run, and its update is not
    applied; no row is dropped. null: as many rows as there are."""
    cp_method: str | None = execution(None, choices=CP_METHODS, needs=CONTEXT, id_of_null="ring")
    """With cp: ``ring`` (keys and values rotate, arXiv:2310.01889; causal attention only), ``ulysses``
    (positions are exchanged for heads, arXiv:2309.14509; cp divides the key heads) or ``gather`` (each rank
    takes all keys and values, arXiv:2407.21783; any mask and any cp, and the memory of all of them). null:
    the ring if it supports the job, else which of the others sends less."""
    cp_rotate_method: str = execution("allgather", choices=CP_ROTATE_METHODS, needs=(CONTEXT, RING))
    """With the ring: gather keys and values at once (``allgather``) or pass them on step by step
    (``alltoall``)."""
    cp_load_balance: bool | str = execution(True, choices=CP_LOAD_BALANCES, needs=(CONTEXT, PIECES))
    """With ring and gather: give each rank a chunk of the sequence's head and one of its tail
    (true), equal work if every position sees all before it. ``documents``: with gather and
    data.attend_across_documents=false, blocks of equal work within documents, others in each row;
    for training.attention flex and varlen, as sdpa computes what documents hide too."""
    sequence_parallel: bool = execution(True, needs=TENSOR)
    """With tp: split norms and residuals along the sequence (arXiv:2205.05198)."""
    loss_parallel: bool = execution(True, needs=TENSOR)
    """With tp: compute the cross entropy on vocabulary shards; logits are never gathered."""
    async_tp: bool = execution(False, needs=(TENSOR, SEQUENCE))
    """With tp, sequence_parallel and compiled blocks: split matrix products and their collectives into
    pieces that overlap (torch's micro-pipeline pass over symmetric memory); GPUs of one node only."""
    reshard_after_forward: str = execution("default", choices=RESHARD)
    """Free gathered parameters, or copies of them in param_dtype, after forward: always, never, or default
    (those that are gathered, without a pipeline)."""
    fsdp_prefetch: int = added_execution(1, least=1, needs=SHARDS)
    """Blocks whose parameters FSDP gathers ahead, in forward and in backward. More hide gathers that take
    longer than a block computes, and take the memory of their parameters."""
    fsdp_buffers: str = added_execution("default", choices=FSDP_BUFFERS, needs=SHARDS)
    """Memory that FSDP's collectives use: of torch's allocator (default); registered with NCCL, for transfers
    without copies; or symmetric, for the GPU's copy engines on one node."""
    cpu_offload: bool = execution(False)
    """Keep parameters, gradients and optimizer state in host memory (FSDP2's CPUOffloadPolicy)."""
    pp_schedule: str = pipeline_execution("1F1B", choices=tuple(SCHEDULES))
    """Name of torch's pipeline schedule."""
    pp_schedule_csv: str | None = pipeline_execution(None)
    """A compute-only schedule in torch's CSV form (a row per rank, cells like 0F0); replaces
    pp_schedule."""
    pp_schedule_csv_digest: str | None = execution(None)
    """Digest of that file, set when the job is composed: another schedule is another job."""
    pp_microbatch_size: int = pipeline_execution(1, least=1)
    """Sequences per microbatch."""
    pp_layers_per_stage: int | None = pipeline_execution(None, least=1)
    """Layers per stage, counting embedding and head by their weights below; null makes as many stages as the
    schedule needs."""
    pp_first_stage_less_layers: int = pipeline_execution(1, least=0)
    """Weight of the embedding in the automatic split, in layers."""
    pp_last_stage_less_layers: int = pipeline_execution(1, least=0)
    """Weight of the final norm and head in the automatic split, in layers."""
    pp_modules_per_stage: list[list[str]] = pipeline_execution(factory=list)
    """Module names of every stage, e.g. [[tok_embeddings,layers.0],[layers.1,norm,output]]; empty means
    automatic."""

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every mesh axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks (after resolve)."""
        return prod(self.degrees.values())

    @property
    def csv_schedule(self) -> CsvSchedule | None:
        """The schedule in the file of pp_schedule_csv, if there is one."""
        path = self.pp_schedule_csv
        return None if path is None else read_csv_schedule(path, self.pp)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights may be taken in two passes (a CSV schedule may)."""
        if self.pp == 1:
            return False
        return self.pp_schedule_csv is not None or SCHEDULES[self.pp_schedule].splits_backward

    @property
    def data_parallel(self) -> int:
        """Ranks that get different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def parameter_shards(self) -> int:
        """Ranks that FSDP shards parameters over, including context-parallel ranks."""
        return self.dp_shard * self.cp

    @property
    def reshards_after_forward(self) -> bool:
        """Whether blocks free their gathered parameters after forward.

        Not by default under a pipeline, which would gather them again for every microbatch, nor
        without shards, where they are copies in param_dtype.
        """
        if self.reshard_after_forward == "default":
            return self.pp == 1 and self.parameter_shards > 1
        return self.reshard_after_forward == "always"

    def frees(self, group: str) -> bool:
        """Whether FSDP frees the gathered parameters of a group (``fsdp_groups``) after forward."""
        kept = group in KEPT_AFTER_FORWARD and self.reshard_after_forward != "always"
        return self.reshards_after_forward and not kept

    @property
    def splits_experts(self) -> bool:
        return self.tp > 1 and self.expert_tensor_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage's replica that experts are distributed over; ranks that split one count once."""
        return self.parameter_shards * (1 if self.splits_experts else self.tp)

    @property
    def fixes_messages(self) -> bool:
        """Whether ranks of experts exchange messages of a fixed size."""
        return self.ep > 1 and self.ep_capacity is not None

    def share_computed(self, rows: int) -> float:
        """Rows that a rank's experts compute if loads are even, empty places included, as a multiple of those
        (``rows``) that it routes."""
        return self.ep * self.room_of(rows) / rows if self.fixes_messages else 1.0

    def room_of(self, rows: int) -> int:
        """Rows that a message to one rank has room for with ``ep_capacity``, if a rank routes ``rows``."""
        assert self.ep_capacity is not None
        return ceil(self.ep_capacity * rows / self.ep)

    @property
    def expert_shards(self) -> int:
        """Ranks that hold the same experts; FSDP shards their parameters."""
        return self.expert_ranks // self.ep

    def expert_shard_dim(self, num_experts: int) -> int:
        """The dimension of experts' tensors that FSDP shards.

        The first one (experts) if it divides evenly; else the next one, so that every rank has a
        part.
        """
        return 0 if (num_experts // self.ep) % self.expert_shards == 0 else 1

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts, if any, are distributed differently from the other parameters."""
        return self.ep > 1 or (self.tp > 1 and not self.splits_experts)

    @property
    def compiles_in_pieces(self) -> bool:
        """Whether the host works in the middle of blocks with experts, which then cannot be one graph."""
        return self.has_expert_mesh and not self.fixes_messages

    @property
    def balances_context(self) -> bool:
        """Whether context-parallel ranks have positions from both ends of the sequence."""
        return self.cp_method != "ulysses" and self.cp_load_balance is True

    @property
    def balances_documents(self) -> bool:
        """Whether context-parallel ranks have other positions in each row, by its documents."""
        return self.cp > 1 and self.cp_load_balance == DOCUMENTS

    def document_blocks(self, length: int) -> int:
        """Blocks of a row that a rank gets by its documents."""
        return gcd(length // self.cp, BLOCKS)

    @property
    def gathers_keys(self) -> bool:
        """Whether attention takes the keys and values of all ranks of the sequence."""
        return self.cp > 1 and self.cp_method == "gather"

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.tp > 1 and self.sequence_parallel

    def resolve(
        self, world_size: int | None, default_world: int | None, origin: str = ""
    ) -> ParallelismConfig:
        """Check the product of the degrees; return the layout with dp_shard and the schedule's digest set.

        Args:
            world_size: number of ranks, if determined outside the layout.
            default_world: number of ranks that dp_shard=-1 fills otherwise; None means dp_shard=2.
            origin: what determined ``world_size``, for messages.
        """
        named = degrees_in_words(self.degrees, between="=", none="")
        if self.dp_shard == -1:
            others = prod(degree for axis, degree in self.degrees.items() if axis != "dp_shard")
            world = world_size or default_world or 2 * others
            if world % others:
                rule = f"{named} does not divide the world size {world}{origin}"
                works = (
                    f"a world size that is a multiple of {others}, or degrees that divide {world}"
                )
                raise ConfigError("parallelism.dp_shard", -1, rule, works)
            return replace(self, dp_shard=world // others).resolve(
                world_size, default_world, origin
            )
        if world_size is not None and self.world_size != world_size:
            rule = (
                f"the degrees multiply to {self.world_size}{f' ({named})' if named else ''}, "
                f"but there are {world_size} ranks{origin}"
            )
            works = f"-1, degrees that multiply to {world_size}, or {self.world_size} ranks"
            raise ConfigError("parallelism.dp_shard", self.dp_shard, rule, works)
        schedule = self.csv_schedule if self.pp > 1 else None
        return self if schedule is None else replace(self, pp_schedule_csv_digest=schedule.digest)

    def validate(self, model: ModelConfig, seq_len: int, local_batch_size: int, share: int) -> None:
        self._validate_tensor(model, seq_len)
        self._validate_experts(model)
        self._validate_context(model)
        self._validate_fragments(model, seq_len)
        unit = self.sequence_unit
        if seq_len % unit:
            rule = (
                f"must be a multiple of {unit}, for parallelism.cp={self.cp} and parallelism.tp={self.tp} "
                "with their options cp_load_balance and sequence_parallel"
            )
            raise ConfigError("training.seq_len", seq_len, rule, [seq_len // unit * unit or unit])
        check_pipeline(self, model, local_batch_size, share)

    def _validate_tensor(self, model: ModelConfig, seq_len: int) -> None:
        split = {"model.n_heads": model.n_heads, "model.n_kv_heads": model.n_kv_heads}
        if len(model.expert_layers) < model.num_blocks:
            split["model.ffn_hidden_dim"] = model.ffn_hidden_dim
        if model.has_delta:
            split["model.delta.key_heads"] = model.delta.key_heads
            split["model.delta.value_heads"] = model.delta.value_heads
        if model.moe.enabled and model.moe.shared_hidden_dim:
            split["model.moe.shared_hidden_dim"] = model.moe.shared_hidden_dim
        if model.moe.enabled and self.expert_tensor_parallel:
            split["model.moe.hidden_dim"] = model.moe.hidden_dim
        works = [
            degree
            for degree in divisors(*split.values())
            if seq_len % (degree * self.cp) == 0 or not self.sequence_parallel
        ]
        broken = [f"{name}={length}" for name, length in split.items() if length % self.tp]
        if broken:
            raise ConfigError("parallelism.tp", self.tp, f"must divide {', '.join(broken)}", works)

    def _validate_experts(self, model: ModelConfig) -> None:
        if not model.moe.enabled:
            if self.ep > 1:
                rule = f"model={model.name} has no experts"
                raise ConfigError("parallelism.ep", self.ep, rule, [1])
            return
        if self.tp > 1 and not self.expert_tensor_parallel and not self.sequence_parallel:
            rule = (
                "each tensor-parallel rank would route its part of the sequence, which "
                "parallelism.sequence_parallel=false does not split"
            )
            works = "true, or parallelism.sequence_parallel=true"
            raise ConfigError("parallelism.expert_tensor_parallel", False, rule, works)
        experts = model.moe.num_experts
        ranks = self.expert_ranks
        product = "dp_shard x cp" if self.tp == 1 or self.splits_experts else "dp_shard x cp x tp"
        if experts % self.ep or ranks % self.ep:
            rule = f"must divide model.moe.num_experts={experts} and {product} = {ranks}"
            raise ConfigError("parallelism.ep", self.ep, rule, divisors(experts, ranks))
        capacity = self.ep_capacity
        if self.ep > 1 and capacity is not None and capacity > self.ep:
            rule = (
                f"exceeds parallelism.ep={self.ep}, with which every message has room for all rows"
            )
            works = f"1 to {self.ep}, or null"
            raise ConfigError("parallelism.ep_capacity", capacity, rule, works)
        if not self._shards_experts(model, self.ep):
            fitting = [ep for ep in divisors(experts, ranks) if self._shards_experts(model, ep)]
            rule = (
                f"{experts // self.ep} experts cannot be sharded over {self.expert_shards} ranks, which "
                "divide neither their number nor their widths"
            )
            raise ConfigError("parallelism.ep", self.ep, rule, fitting)

    def _shards_experts(self, model: ModelConfig, ep: int) -> bool:
        shards = self.expert_ranks // ep
        hidden = model.moe.hidden_dim // (self.tp if self.splits_experts else 1)
        return (model.moe.num_experts // ep) % shards == 0 or not (
            hidden % shards or model.dim % shards
        )

    def can_exchange_heads(self, model: ModelConfig) -> bool:
        """Whether cp divides the heads of a tensor-parallel rank, as ``ulysses`` needs."""
        return gcd(model.n_heads, model.n_kv_heads) // self.tp % self.cp == 0

    def _validate_context(self, model: ModelConfig) -> None:
        if self.cp_method != "ulysses" or self.can_exchange_heads(model):
            return
        heads = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads}
        of_tp = f" / parallelism.tp={self.tp}" if self.tp > 1 else ""
        broken = [
            f"model.{name}={count}{of_tp}"
            for name, count in heads.items()
            if count // self.tp % self.cp
        ]
        works = ", ".join(map(str, divisors(*(count // self.tp for count in heads.values()))))
        rule = f"ulysses exchanges heads: it must divide {', '.join(broken)}"
        raise ConfigError(
            "parallelism.cp", self.cp, rule, f"{works}, or parallelism.cp_method=gather"
        )

    def _validate_fragments(self, model: ModelConfig, seq_len: int) -> None:
        """Check the fragments of a sequence that a rank's layers of Gated DeltaNet go through in order."""
        if self.cp == 1 or not model.has_delta:
            return
        if self.balances_documents:
            rule = "the state of delta layers goes through consecutive positions"
            raise ConfigError("parallelism.cp_load_balance", DOCUMENTS, rule, "true, false")
        fragments = self.cp * (2 if self.balances_context else 1)
        least = model.delta.kernel - 1
        if seq_len < fragments * least:
            rule = f"{fragments} fragments would be shorter than model.delta.kernel - 1 = {least}"
            works = f"training.seq_len of at least {fragments * least}"
            raise ConfigError("parallelism.cp", self.cp, rule, works)

    def padded(self, length: int) -> int:
        """The shortest sequence of at least ``length`` tokens that the layout can split evenly."""
        return -(-length // self.sequence_unit) * self.sequence_unit

    @property
    def sequence_unit(self) -> int:
        """Number that the sequence length must be a multiple of."""
        split = self.tp if self.sequence_parallel else 1
        balanced = self.balances_context and self.cp > 1
        return self.cp * (lcm(2, split) if balanced else split)


def degrees_in_words(
    degrees: Mapping[str, int], *, between: str = " ", none: str = "one rank"
) -> str:
    """Format the degrees above 1: ``pp 8 x dp_shard 8 x tp 8``; ``none`` if there are none."""
    return (
        " x ".join(f"{axis}{between}{degree}" for axis, degree in degrees.items() if degree > 1)
        or none
    )
