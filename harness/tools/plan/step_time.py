"""Time of a step: passes of blocks, FSDP's collectives, the pipeline's schedule, the update."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from harness.config.job import Job
from harness.config.optimizer import NEWTON_SCHULZ_STEPS
from harness.config.pipeline import split_modules, stages_of_rank
from harness.metrics.mfu import mfu
from harness.model.accounting import account
from harness.model.architecture import block_kinds
from harness.tools.plan.block_cost import BlockPasses, Worker
from harness.tools.plan.collectives import (
    Collective,
    Pass,
    Sharing,
    collective_of,
    hidden,
    sharing_of,
    sharing_of_block,
)
from harness.tools.plan.machine import Group, Machine, sent_share
from harness.tools.plan.order import gathering_passes, pipeline_order, simulate
from harness.tools.plan.parameters import BYTES, groups_of, held_modules, muon_update, parameters_of
from harness.tools.plan.plan import PARTS, Action, Speed, Traffic

# Memory traffic of norm and clipping per 32-bit parameter, in bytes: the norm reads the gradient,
# clipping reads and writes it.
CLIP_BYTES = 12


@dataclass(frozen=True)
class StageTimes:
    """One pipeline stage, or the full model: its passes of a microbatch, and FSDP's work around them."""

    passes: dict[str, Pass]
    """By kind of action: ``F``, ``B``, ``I``, ``W``."""
    gathers: dict[str, Pass]
    """What FSDP adds to a pass that finds the parameters freed by the forward pass before, by
    kind."""
    once: Pass
    """What FSDP exposes, and copies, once a step (or once a pass over a local batch)."""


class StepModel:
    """A step of a job on a machine, in parts."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job = job
        self.machine = machine
        self.layout = job.parallelism
        self.worker = Worker(job, machine)
        known: dict[object, tuple[BlockPasses, Sharing]] = {}
        self.blocks = []
        keys = {}
        for layer, kind in enumerate(block_kinds(job.model)):
            key = kind, job.activation_checkpoint.covers(layer)
            if key not in known:
                known[key] = self.worker.block(layer), sharing_of_block(job, machine, layer)
            self.blocks.append(known[key])
            keys[f"layers.{layer}"] = key
        self.order = pipeline_order(self.layout, job.model.n_layers, job.microbatches)
        self.gathering = set[Action]()
        """Passes that find their stage's parameters freed."""
        if self.layout.pp > 1 and self.layout.reshards_after_forward:
            self.gathering.update(*map(gathering_passes, self.order))
        self.stages = []
        alike: dict[object, StageTimes] = {}
        for names in split_modules(self.layout, job.model.n_layers):
            stage = tuple(keys.get(name, name) for name in names)
            if stage not in alike:
                alike[stage] = self._stage(names)
            self.stages.append(alike[stage])

    def _stage(self, names: list[str]) -> StageTimes:
        """The passes of a stage, and FSDP around them.

        A block's parameters are gathered while the block before computes, its gradients reduced
        while the next one does (FSDP2's implicit prefetch): what takes longer than that is waited
        for, and so are the first gather and the last reduction. Before either half of a split
        backward the whole stage is gathered (parallelism/pipeline.py).
        """
        job = self.job
        layout = self.layout
        has_head = "output" in names
        layers = [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]
        if has_head:
            layers += range(job.model.n_layers, job.model.num_blocks)  # multi-token prediction's
        blocks = [self.blocks[layer][0] for layer in layers]
        sharing = [self.blocks[layer][1] for layer in layers]
        ends = held_modules(job, (name for name in names if not name.startswith("layers.")))
        # The head comes last.
        for group in groups_of(ends.values()).values():
            sharing.append(sharing_of(job, self.machine, [group]))
        forward = sum((block.forward for block in blocks), Pass())
        inputs = sum((block.recompute + block.inputs for block in blocks), Pass())
        weights = sum((block.weights for block in blocks), Pass())
        # Either half of a split backward pass calls all of a compiled block's backward; autograd
        # has no half for inputs of the first stage.
        repeats = job.compile.blocks and "tok_embeddings" not in names
        halves = (inputs + weights, weights + inputs) if repeats else (inputs, weights)
        back = Pass()
        for name, table in (("tok_embeddings", self.worker.table), ("output", self.worker.head)):
            if name in names:
                there, gradient = table()
                forward += there
                back += gradient
        # What hides FSDP's collectives, and those of one pass.
        there_seconds = [block.forward.seconds for block in blocks]
        half = [block.recompute.seconds + block.inputs.seconds for block in blocks]
        whole = [
            seconds + block.weights.seconds for seconds, block in zip(half, blocks, strict=True)
        ]
        groups = len(sharing)
        again = layout.reshards_after_forward
        freed = groups - (has_head and not layout.frees("head")) if again else 0
        in_forward = self._behind(there_seconds, sharing, gathers=groups)
        in_backward = self._behind(whole, sharing, gathers=freed, reduces=True)
        gathers: dict[str, Pass] = {}
        once = Pass()
        if layout.pp == 1:
            forward += in_forward
            back += in_backward
        elif again:
            before = self._behind([], sharing, gathers=groups)
            in_half = self._behind(half, sharing, gathers=groups)
            gathers = {"F": in_forward, "B": in_half, "I": before, "W": before}
            once = self._behind([], sharing, gathers=0, reduces=True)
        else:
            once = in_forward + in_backward
        passes = {"F": forward, "B": inputs + weights + back, "I": halves[0] + back, "W": halves[1]}
        return StageTimes(passes, gathers, once)

    def _behind(
        self,
        computing: Sequence[float],
        sharing: list[Sharing],
        *,
        gathers: int,
        reduces: bool = False,
    ) -> Pass:
        """Collectives of one pass that gathers the first of ``sharing``, behind the blocks' computing."""
        total = Pass()
        # The first one, and tables, have nothing beside them.
        rooms = [0.0, *computing, *([0.0] * len(sharing))]
        for i, (room, shared) in enumerate(zip(rooms, sharing, strict=False)):
            mine = shared.reduce if reduces else ()
            if i < gathers:
                mine = (*shared.gather, *mine)
                total += Pass(shared.copying)
            total += Pass(0.0, hidden(mine, room, lost=self.machine.contention))
        return total

    # -- a step ----

    def _update(self, rank: int) -> Pass:
        """The norm, clipping and the optimizer on a pipeline rank.

        Muon exchanges matrices behind its iterations.
        """
        job = self.job
        parameters = parameters_of(job, rank)
        moved = CLIP_BYTES * parameters.held + parameters.update_bytes
        width = BYTES[job.precision.master_dtype] / 4
        computing = self.machine.pass_seconds(moved * width)
        update = muon_update(job, parameters)
        dtype = job.optimizer.newton_schulz_dtype or job.precision.param_dtype
        iterating = 0.0
        for (short, long), count in update.shapes.items():
            for shape in ((short, long, short), (short, short, short), (short, short, long)):
                seconds = self.machine.product_seconds(*shape, dtype, BYTES[dtype])
                iterating += NEWTON_SCHULZ_STEPS * count * seconds
        if not update.sent:
            return Pass(computing + iterating)
        axes = ("dp_replicate", "dp_shard", "cp", "tp")
        ranks = job.world_size // self.layout.pp
        size = update.sent * ranks / (ranks - 1)
        exchange = collective_of(job, self.machine, "optimizer", "all_to_all", size, *axes)
        return Pass(computing + iterating, hidden([exchange], iterating))

    def _which(self, action: Action) -> tuple[int, str, bool]:
        """Stage and kind of a pass, and whether it gathers parameters: what its time depends on."""
        return action.stage, action.kind, bool(self.gathering) and action in self.gathering

    def _pass(self, stage: int, kind: str, gathers: bool) -> Pass:
        times = self.stages[stage]
        return times.passes[kind] + times.gathers[kind] if gathers else times.passes[kind]

    @property
    def _send(self) -> Collective:
        size = self.worker.stream_rows * self.job.model.dim * self.worker.value_bytes
        return replace(collective_of(self.job, self.machine, "pp", "send", size), exposed=0.0)

    def speed(self) -> tuple[Speed, list[Traffic]]:
        """The step's time and its parts, and the traffic of the slowest rank."""
        job = self.job
        sending = 0.0 if self.layout.pp == 1 else self._send.seconds
        seconds = cache(lambda *which: self._pass(*which).seconds)
        timeline = simulate(self.order, lambda action: seconds(*self._which(action)), sending)
        makespan = max(actions[-1].end for actions in timeline)
        ranks = [self._rank(rank, makespan)[0] for rank in range(len(timeline))]
        busy = [sum(parts.values()) - parts["bubble"] for parts in ranks]
        slowest = busy.index(max(busy))
        step = sum(ranks[slowest].values())
        rate = job.global_batch_size * job.training.seq_len / step / job.world_size
        peak = self.machine.device.peak_flops.get(job.precision.param_dtype)
        share = mfu(rate, account(job.model, job.training.seq_len).flops_per_token_full, peak)
        shown = timeline if self.layout.pp > 1 else []
        return Speed(step, ranks[slowest], rate, share, shown), self.traffic(slowest)

    def _rank(
        self, rank: int, makespan: float
    ) -> tuple[dict[str, float], list[tuple[Collective, float]]]:
        """Parts of the step time of one pipeline rank, and its collectives with their counts.

        With QK-clip a rank repeats its forward passes in some steps; here an average step has a part of them.
        """
        own = stages_of_rank(self.layout, self.job.model.n_layers, rank)
        times = self.job.accumulation_steps
        passes = Counter(map(self._which, self.order[rank]))
        work = [(self._pass(*which), float(count * times)) for which, count in passes.items()]
        parts = dict.fromkeys(PARTS, 0.0)
        parts["bubble"] = makespan * times - sum(one.seconds * count for one, count in work)
        if self.job.optimizer.qk_clip is not None:
            share = times / self.job.optimizer.qk_clip_interval
            forward = [which for which in passes if which[1] == "F"]
            work += [(self._pass(*which), passes[which] * share) for which in forward]
        work += [(self.stages[stage].once, times) for stage in own]
        update = self._update(rank)
        collectives = [(item, 1.0) for item in update.collectives]
        parts["optimizer"] = update.seconds
        for one, count in work:
            parts["compute"] += one.compute * count
            for item in one.collectives:
                parts[item.axis] += item.exposed * count
                collectives.append((item, count))
        # Activations to the next stage and gradients to the previous one, unless it is on this rank.
        neighbours = [each for stage in own for each in (stage - 1, stage + 1) if each not in own]
        sends = sum(each in range(len(self.stages)) for each in neighbours)
        if sends:
            collectives.append((self._send, sends * self.job.microbatches * times))
        return parts, collectives

    def traffic(self, rank: int) -> list[Traffic]:
        """The traffic of one pipeline rank: collectives of the same axis, kind and group together."""
        alike: dict[tuple[str, str, Group], list[tuple[Collective, float]]] = defaultdict(list)
        for item, times in self._rank(rank, 0.0)[1]:
            alike[item.axis, item.collective, item.group].append((item, times))
        traffic = []
        for (axis, collective, group), own in alike.items():
            size = sum(item.bytes * times for item, times in own)
            total = Traffic(
                axis,
                collective,
                group.ranks,
                count=round(sum(times for _, times in own)),
                bytes=size * sent_share(collective, group.ranks),
                link=self.machine.link_of(group),
                seconds=sum(item.seconds * times for item, times in own),
                exposed_seconds=sum(item.exposed * times for item, times in own),
            )
            traffic.append(total)
        return sorted(traffic, key=lambda each: (PARTS.index(each.axis), each.collective))
