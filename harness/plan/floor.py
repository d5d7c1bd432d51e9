"""Lower bounds of a point's memory, which a search checks before it plans the point.

They sum the memory of ``memory.py`` at two moments of the fullest rank, without simulating its passes.
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


class MemoryBounds:
    """Lower bounds for the points of one job."""

    def __init__(self, base: Job) -> None:
        self._base = base
        self._known: dict[tuple[Any, ...], Any] = {}
        model = base.model
        self._blocks = [block_weights(model, layer) for layer in range(model.num_blocks)]
        self._kinds = block_kinds(model)
        self._tables = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)

    def persistent_shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit with any batch split; 0 if it may fit."""
        layout = point.layout(self._base.parallelism)
        limit = self._limit(point, layout)
        return 0.0 if limit is None or layout.cpu_offload else max(0.0, self._mean(layout) - limit)

    def shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit with its own batch split; 0 if it may fit."""
        layout = point.layout(self._base.parallelism)
        limit = self._limit(point, layout)
        if limit is None or layout.cpu_offload:
            return 0.0
        return max(0.0, self._first(point, layout, limit) - limit)

    def _limit(self, point: Point, layout: ParallelismConfig) -> float | None:
        """The device's memory limit, which depends on the number of communicators."""
        key = ("limit", *(degree > 1 for degree in point.degrees), point.ep > 1)
        if key not in self._known:
            self._known[key] = memory_limit(replace(self._base, parallelism=layout))
        return self._known[key]  # type: ignore[no-any-return]

    def _mean(self, layout: ParallelismConfig) -> float:
        """Memory after the last pass, averaged over pipeline ranks: a lower bound for the fullest."""
        stages = num_stages(layout, self._base.model.n_layers)
        shared = (layout.parameter_shards, layout.tp, layout.ep, layout.dp_replicate > 1)
        key = ("mean", layout.pp, stages, *shared)
        if key not in self._known:
            experts, others = (sum(sizes) / layout.pp for sizes in zip(*self._blocks, strict=True))
            always, gradients, after = self._held(layout, experts, others + self._tables / layout.pp)
            self._known[key] = _with_fragments(layout, always + gradients, after)
        return self._known[key]  # type: ignore[no-any-return]

    def _held(self, layout: ParallelismConfig, experts: float, others: float) -> tuple[float, float, float]:
        """Bytes of a rank whose stages have so many expert parameters, and other parameters.

        Returns:
            Shards with optimizer state; a pipeline's unsharded gradients and gathered parameters; sharded
            gradients.
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
        """Memory with the most microbatches in flight, on the first pipeline ranks, which have the most."""
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
            # Any order has at least one microbatch in flight; real orders are slow to compute.
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
        # Every stage but the first receives activations, and every stage but the last receives gradients; the
        # last stage's output is not buffered.
        boundaries = streams * (2 * len(own) - 2) if layout.pp > 1 else 0.0
        slack = streams if layout.pp > 1 and len(modules) - 1 in own else 0.0
        return _with_fragments(layout, always + boundaries - slack + max(early, late + gradients), after)

    def _kept(self, point: Point, layout: ParallelismConfig) -> tuple[dict[Any, float], float]:
        """Bytes that a microbatch saves in each kind of block, and bytes of the stream between blocks."""
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
            # Blocks of one kind save the same, except with selective_layer: take the minimum.
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
    """Memory that the allocator reserves, with the sharded gradients (memory.py, _runtime)."""
    return (1 + fragmentation(layout)) * total + own


def _in_flight(actions: Sequence[Action], sizes: Mapping[int, float]) -> tuple[float, float]:
    """Peak bytes saved by microbatches in flight: over all time, and once every stage has gradients."""
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
