"""The least memory that a point can need, without walking through its passes: what a search asks first.

It adds up what ``memory.py`` has at two moments of the fullest rank, and leaves out what needs a closer look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.job import Job
from harness.model.accounting import block_weights
from harness.model.operations import block_kinds
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.stages import num_stages, split_modules, stages_of_rank
from harness.plan.memory import STAGES_GATHERED, fragmentation, memory_limit
from harness.plan.memory_activations import ActivationBytes
from harness.plan.order import pipeline_order
from harness.plan.parameters import BYTES
from harness.plan.plan import Action
from harness.plan.space import Point


class Floors:
    """Floors of many points of one job."""

    def __init__(self, base: Job) -> None:
        self._base = base
        self._known: dict[tuple[Any, ...], Any] = {}
        model = base.model
        self._blocks = [block_weights(model, layer) for layer in range(model.num_blocks)]
        self._kinds = block_kinds(model)
        self._tables = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)

    def held_lacks(self, point: Point) -> float:
        """Bytes that a legal point lacks whatever its microbatches; 0 where it may fit."""
        layout = point.layout(self._base.parallelism)
        limit = self._limit(point, layout)
        return 0.0 if limit is None or layout.cpu_offload else max(0.0, self._mean(layout) - limit)

    def lacks(self, point: Point) -> float:
        """Bytes that it lacks at least with what its microbatches leave behind; 0 where it may fit."""
        layout = point.layout(self._base.parallelism)
        limit = self._limit(point, layout)
        if limit is None or layout.cpu_offload:
            return 0.0
        return max(0.0, self._first(point, layout, limit) - limit)

    def _limit(self, point: Point, layout: ParallelismConfig) -> float | None:
        """The device's limit, which depends on what communicators there are."""
        key = ("limit", *(degree > 1 for degree in point.degrees), point.ep > 1)
        if key not in self._known:
            self._known[key] = memory_limit(replace(self._base, parallelism=layout))
        return self._known[key]  # type: ignore[no-any-return]

    def _mean(self, layout: ParallelismConfig) -> float:
        """What stands after the last pass, of the mean pipeline rank, which the fullest has at least."""
        stages = num_stages(layout, self._base.model.n_layers)
        shared = (layout.parameter_shards, layout.tp, layout.ep, layout.dp_replicate > 1)
        key = ("mean", layout.pp, stages, *shared)
        if key not in self._known:
            experts, others = (sum(sizes) / layout.pp for sizes in zip(*self._blocks, strict=True))
            always, gradients, after = self._held(layout, experts, others + self._tables / layout.pp)
            self._known[key] = _with_fragments(layout, always + gradients, after)
        return self._known[key]  # type: ignore[no-any-return]

    def _held(self, layout: ParallelismConfig, experts: float, others: float) -> tuple[float, float, float]:
        """Bytes of a rank whose stages have so many parameters, those of experts and all others.

        Returns:
            shards and optimizer; a pipeline's whole gradients and what it has gathered; gradients of shards.
        """
        precision, optimizer = self._base.precision, self._base.optimizer
        splits = layout.tp if layout.splits_experts else 1
        whole = others / layout.tp + experts / layout.ep / splits
        held = others / layout.tp / layout.parameter_shards + experts / splits / layout.expert_ranks
        state = BYTES[optimizer.state_dtype or precision.master_dtype]
        always = held * (BYTES[precision.master_dtype] + 2 * state)
        after = 0.0 if optimizer.in_backward else held * BYTES[precision.master_dtype]
        if layout.pp == 1 or not replace(self._base, parallelism=layout).uses_fsdp:
            return always, 0.0, after
        stages = num_stages(layout, self._base.model.n_layers) / layout.pp
        computes = 1 if precision.enable_fsdp_float8_all_gather else BYTES[precision.param_dtype]
        gathered = computes * min(1.0, STAGES_GATHERED / stages)
        return always, whole * (BYTES[precision.reduce_dtype] + gathered), after

    def _first(self, point: Point, layout: ParallelismConfig, limit: float) -> float:
        """What stands with the most microbatches in flight, of the first pipeline ranks, which have most."""
        n_layers = self._base.model.n_layers
        pipeline = (layout.pp, layout.pp_schedule, num_stages(layout, n_layers), point.local_batch_size)
        shared = (layout.parameter_shards, layout.tp, layout.cp, layout.ep, layout.dp_replicate > 1)
        key = ("first", *pipeline, *shared, point.rows, point.mode)
        if key not in self._known:
            kept, stream = self._kept(point, layout)
            modules = split_modules(layout, n_layers)
            microbatches = point.local_batch_size // point.microbatch_size if layout.pp > 1 else 1
            ranks = range(min(2, layout.pp))
            owned = [stages_of_rank(layout, n_layers, rank) for rank in ranks]
            # One microbatch is in flight in any order, and orders take a while to make.
            orders = [[Action(stage, "F", 0) for stage in own] for own in owned]
            for whole in (False, True):
                if whole:
                    orders = pipeline_order(layout, n_layers, microbatches)
                self._known[key] = max(
                    self._of_rank(layout, owned[rank], orders[rank], modules, kept, stream * microbatches)
                    for rank in ranks
                )
                if self._known[key] > limit:
                    break
        return self._known[key]  # type: ignore[no-any-return]

    def _of_rank(
        self,
        layout: ParallelismConfig,
        own: Sequence[int],
        actions: Sequence[Action],
        modules: Sequence[Sequence[str]],
        kept: Mapping[Any, float],
        streams: float,
    ) -> float:
        layers = {stage: [int(n[7:]) for n in modules[stage] if n.startswith("layers.")] for stage in own}
        sizes = {stage: sum(kept[self._kinds[layer]] for layer in held) for stage, held in layers.items()}
        weights = [self._blocks[layer] for held in layers.values() for layer in held]
        experts, others = sum(w[0] for w in weights), sum(w[1] for w in weights)
        always, gradients, after = self._held(layout, experts, others)
        early, late = _in_flight(actions, sizes)
        # Every stage but the first receives what microbatches bring, and every one but the last is sent back
        # their gradients; the output of a last stage does not wait.
        boundaries = streams * (2 * len(own) - 2) if layout.pp > 1 else 0.0
        slack = streams if layout.pp > 1 and len(modules) - 1 in own else 0.0
        return _with_fragments(layout, always + boundaries - slack + max(early, late + gradients), after)

    def _kept(self, point: Point, layout: ParallelismConfig) -> tuple[dict[Any, float], float]:
        """What a microbatch leaves behind in each kind of block, and the stream between blocks, in bytes."""
        passes = (point.rows, point.mode, layout.splits_backward, layout.pp > 1)
        key = ("kept", layout.tp, layout.cp, layout.ep, *passes)
        if key not in self._known:
            job = replace(
                self._base,
                parallelism=layout,
                training=replace(self._base.training, local_batch_size=point.local_batch_size),
                activation_checkpoint=replace(self._base.activation_checkpoint, mode=point.mode),
            )
            sizes = ActivationBytes(job)
            # Blocks of one kind keep the same, but for those that selective_layer picks: the least counts.
            firsts = dict.fromkeys(self._kinds, 0.0)
            nth = job.activation_checkpoint.every_nth_layer if point.mode == "selective_layer" else 1
            for kind in firsts:
                layers = [layer for layer, other in enumerate(self._kinds) if other == kind][:nth]
                firsts[kind] = min(sizes.block(layer).kept for layer in layers)
            kept = firsts
            split = layout.tp if layout.uses_sequence_parallel else 1
            width = self._base.model.dim * BYTES[self._base.precision.param_dtype]
            self._known[key] = kept, sizes.tokens * width / split
        return self._known[key]  # type: ignore[no-any-return]


def _with_fragments(layout: ParallelismConfig, total: float, own: float) -> float:
    """What the allocator reserves for so much and the gradients of shards (memory.py, _runtime)."""
    return (1 + fragmentation(layout)) * total + own


def _in_flight(actions: Sequence[Action], sizes: Mapping[int, float]) -> tuple[float, float]:
    """The most that microbatches in flight keep: ever, and once every stage has gradients."""
    now = early = late = 0.0
    waiting = set(sizes)
    for action in actions:
        if action.kind == "F":
            now += sizes[action.stage]
            early = max(early, now)
            late = late if waiting else max(late, now)
        elif action.kind in "BW":
            now -= sizes[action.stage]
            waiting.discard(action.stage)
    return early, late
