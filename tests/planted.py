"""Errors to plant on ranks, each in one function; ``docs/silent_errors.md`` has their origins."""

import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Partial, Replicate

from harness.checkpoint import load
from harness.config.parallelism import ParallelismConfig
from harness.data import batch
from harness.data.batch import IGNORE_INDEX, count_valid
from harness.launch.pool import RankPool
from harness.model import delta
from harness.model.decoder import Decoder
from harness.model.moe import Experts, Router
from harness.optimizer import qk_clip
from harness.optimizer.base import local
from harness.parallelism import (
    context,
    execute,
    expert,
    fsdp,
    loss,
    materialize,
    parallelize,
    tensor_styles,
)
from harness.parallelism.balance import Balance
from harness.parallelism.delta import FragmentedDelta
from harness.train import engine, probe, tensor_norms, watch
from harness.train.engine import Engine


def run_planted(plant, function, *arguments):
    with plant():
        return function(*arguments)


class PlantedPool(RankPool):
    """The ranks of another pool, on which jobs of several ranks run with an error."""

    def __init__(self, pool, plant):
        self.pool, self.plant = pool, plant

    def run(self, ranks, function, *arguments):
        planted = (run_planted, self.plant, function) if ranks > 1 else (function,)
        return self.pool.run(ranks, *planted, *arguments)


def denominator_of_own_tokens():
    """Every rank divides by its own number of tokens: a mean of means."""
    original = Engine.gradients

    def gradients(self, batch, **options):
        replicas = self.job.parallelism.data_parallel
        forward_backward = self.executor.forward_backward

        def divided(piece, *, last):
            self.loss.denominator = float(count_valid(batch) * replicas)
            return forward_backward(piece, last=last)

        with patch.object(self.executor, "forward_backward", divided):
            return original(self, batch, **options)

    return patch.object(Engine, "gradients", gradients)


def denominator_of_own_positions():
    """Every context-parallel rank divides by the tokens of its positions."""
    original = loss.TokenLoss.__call__

    def call(self, logits, labels_BT):
        self.denominator = float((labels_BT != IGNORE_INDEX).sum() * dist.get_world_size())
        return original(self, logits, labels_BT)

    return patch.object(loss.TokenLoss, "__call__", call)


def further_loss_by_own_tokens():
    """The loss of multi-token prediction is a mean over each rank's tokens, and the mean of these."""
    original = execute.DirectExecutor._losses

    def losses(self, batch, later, keywords):
        found = original(self, batch, later, keywords)
        if later is None:
            return found
        own, further = found
        tokens = (batch.labels_BT != IGNORE_INDEX).sum() * dist.get_world_size()
        return torch.stack([own, further * self.loss.denominator / tokens])

    return patch.object(execute.DirectExecutor, "_losses", losses)


def microbatches_average():
    """The pipeline divides gradients by its microbatches, as is torch's default."""
    original = schedules._PipelineSchedule.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        self.scale_grads = True

    return patch.object(schedules._PipelineSchedule, "__init__", init)


def gradients_average():
    """FSDP divides gradients by the data-parallel ranks, as is its default."""
    original = fsdp.FSDPModule.set_gradient_divide_factor
    return patch.object(
        fsdp.FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0)
    )


def gradients_of_experts_double():
    """Gradients of experts are divided by fewer ranks than those of the other parameters."""
    original = fsdp.FSDPModule.set_gradient_divide_factor

    def set_factor(self, factor):
        original(self, factor / 2 if isinstance(self, Experts) else factor)

    return patch.object(fsdp.FSDPModule, "set_gradient_divide_factor", set_factor)


def norm_of_own_stage():
    """Every rank clips by the norm of its own parameters."""
    original = Engine.world_total

    def world_total(self, values, *device):
        totals = original(self, values, *device)
        if not device:  # and not the number of tokens
            totals[0] = values[0]
        return totals

    return patch.object(Engine, "world_total", world_total)


def norm_without_sinks():
    """The norm has the sinks of the first tensor-parallel rank's heads only."""
    return _norm_of_first_rank("attention.sinks")


def norm_without_experts():
    """The norm has the experts of the first tensor-parallel rank only."""
    return _norm_of_first_rank("moe.experts.")


def _norm_of_first_rank(names):
    original = Engine._squares

    def squares(self):
        counted = original(self)
        for index, (name, _) in enumerate(self.named_parameters()):
            if names in name and self.mesh.rank("tp"):
                counted[index] = 0
        return counted

    return patch.object(Engine, "_squares", squares)


def norms_of_shards():
    """Squares of weights are shared as if each rank had all of them: too small by the root of the shards."""
    original = tensor_norms.holders_of

    def holders_of(parameters, mesh):
        return tuple(dist.get_world_size() for _ in original(parameters, mesh))

    return patch.object(tensor_norms, "holders_of", holders_of)


def norms_of_own_stage():
    """Norms of tensors are not summed over the ranks, so each has those of its stage."""
    return patch.object(tensor_norms, "dist", SimpleNamespace(all_reduce=lambda _: None))


def norms_with_experts_twice():
    """Squares of experts are counted twice."""
    original = tensor_norms.share_of_squares

    def share_of_squares(shards, holders, device):
        twice = [2.0 if shard.dim() == 3 else 1.0 for shard in shards]
        return original(shards, holders, device) * torch.tensor(twice, dtype=torch.float64)

    return patch.object(tensor_norms, "share_of_squares", share_of_squares)


def norms_without_an_uneven_end():
    """The shard of the last rank is left out where it is smaller than the others."""
    original = tensor_norms.TensorNorms._shards

    def shards(self):
        return [
            shard.new_empty(0) if len(p) % dist.get_world_size() and dist.get_rank() else shard
            for p, shard in zip(self._engine.parameters, original(self), strict=True)
        ]

    return patch.object(tensor_norms.TensorNorms, "_shards", shards)


def statistics_of_own_stage():
    """Statistics of activations are not summed over the ranks."""
    alone = SimpleNamespace(all_reduce=lambda *_: None, ReduceOp=dist.ReduceOp)
    return patch.object(probe, "dist", alone)


def statistics_of_one_share():
    """A stream that is split is taken for a whole one: the first tensor-parallel rank's positions count."""
    original = watch.Watch._see

    def see(self, place, x_BTC):
        if self._mesh.rank("tp") == 0:
            original(self, place, x_BTC)

    return patch.object(watch.Watch, "_see", see)


def tokens_of_one_share():
    """Entropies of all tensor-parallel ranks are divided by the tokens of one."""
    original = watch.Watch._route

    def route(self, place, router, inputs):
        before = self.sums[-1, place].clone()
        original(self, place, router, inputs)
        if self._mesh.rank("tp"):
            self.sums[-1, place] = before

    return patch.object(watch.Watch, "_route", route)


def initialised_by_shard():
    """Every rank initializes its shard by itself, instead of taking its part of the full tensor."""
    original = materialize.local_ranges
    return patch.object(
        materialize, "local_ranges", lambda p: [range(len(indices)) for indices in original(p)]
    )


def named_by_stage():
    """A pipeline stage numbers its layers from 0, and takes the weights of these."""
    original, draw = parallelize.materialize, materialize.draw

    def materialize_part(part, *arguments):
        first = min(part.blocks, default=0)

        def own(name, *rest):
            return draw(
                re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - first}", name), *rest
            )

        with patch.object(materialize, "draw", own):
            original(part, *arguments)

    return patch.object(parallelize, "materialize", materialize_part)


def own_positions_from_zero():
    """Every context-parallel rank counts positions from 0 in its own share."""
    original = Decoder.set_length
    return patch.object(
        Decoder,
        "set_length",
        lambda self, length, positions: original(self, length, torch.arange(len(positions))),
    )


@contextmanager
def one_share_in_order():
    """Ranks take their shares in order, although the ring pairs head and tail chunks."""

    def in_order(layout, seq_len, rank):
        return torch.arange(seq_len).chunk(layout.cp)[rank]

    with patch.object(context, "local_positions", in_order):
        yield


def gathered_in_order_of_ranks():
    """Gathered keys stay in the order of the ranks, although these have head and tail chunks."""

    def in_order(by_rank, layout, places):
        return by_rank.transpose(0, 1).flatten(1, 2)

    return patch.object(context, "in_order", in_order)


def nothing_before_fragments():
    """Convolutions of a fragment begin with zeros, not with the end of the fragment before."""
    original = FragmentedDelta._inputs_before

    def zeros(self, streams):
        return tuple(map(torch.zeros_like, original(self, streams)))

    return patch.object(FragmentedDelta, "_inputs_before", zeros)


def states_of_own_fragments():
    """A fragment begins with an empty state: what the ranks to the left left is dropped."""
    original = FragmentedDelta._states_before
    return patch.object(
        FragmentedDelta, "_states_before", lambda self, last: original(self, last) * 0
    )


def states_across_documents():
    """States and convolutions go on from one document to the next."""
    return patch.object(delta.DeltaRule, "mask", lambda *_: None)


def convolutions_split_as_one():
    """A rank's convolutions are its slice of those of queries, keys and values one after another."""
    original = delta.local_shard
    names = ["conv_q", "conv_k", "conv_v"]

    def local_shard(module, name):
        if name not in names:
            return original(module, name)
        widths = [len(original(module, each)) for each in names]
        whole = torch.cat([getattr(module, each).full_tensor() for each in names])
        own = whole.chunk(dist.get_world_size())[dist.get_rank()]
        return own.split(widths)[names.index(name)]

    return patch.object(delta, "local_shard", local_shard)


def labels_in_reverse():
    """A rank's labels have another order than its inputs."""
    original = execute.local_positions_of

    def apart(batch, positions):
        own = original(batch, positions)
        return own._replace(labels_BT=own.labels_BT.flip(1))

    return patch.object(execute, "local_positions_of", apart)


def tokens_of_every_context_rank():
    """Ranks that share a sequence all count its tokens."""
    return patch.object(Engine, "counts_tokens", Engine.has_loss)


def loss_of_one_context_rank():
    """The reported loss is that of one share of the sequence."""
    original = Engine.world_total

    def world_total(self, values, *device):
        if not device and self.mesh.rank("cp"):
            values = [values[0], 0.0]
        return original(self, values, *device)

    return patch.object(Engine, "world_total", world_total)


def normalizer_of_own_vocabulary():
    """The loss takes each rank's part of the vocabulary for all of it."""
    original = loss._cross_entropy
    return patch.object(
        loss,
        "_cross_entropy",
        lambda logits, labels, scale, group, **others: original(
            logits, labels, scale, None, **others
        ),
    )


def gathered_logits_as_shards():
    """Every rank has all logits, and the loss takes them for shards."""
    original = loss.build_loss

    def build(job, mesh, parts):
        built = original(job, mesh, parts)
        built.mesh = mesh.axis("tp") if mesh.size("tp") > 1 else None
        return built

    return patch.object(loss, "build_loss", build)


def gathered_over_the_wrong_axis():
    """Sequences are gathered from replicas, and not from the ranks that split them."""
    return _gathering_wrongly(lambda: True)


def recomputed_over_the_wrong_axis():
    """Only recomputation gathers sequences from replicas."""
    return _gathering_wrongly(lambda: torch._C._current_graph_task_id() != -1)


def _gathering_wrongly(now):
    def apply(self, module, mesh):
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "own"))["other"]

        def gather(_module, inputs):
            local = tensor_styles._placed(inputs[0], other if now() else mesh, self.stream)
            whole = local.redistribute(placements=(Replicate(),)).to_local()
            placed = tensor_styles._placed(whole, mesh, Replicate())
            return (
                placed.to_local(grad_placements=(Partial(),)),
                *inputs[1:],
            )

        module.register_forward_pre_hook(gather)
        return module

    return patch.object(tensor_styles.RegionParallel, "_apply", apply)


def head_norms_not_summed():
    """Every rank keeps the gradient that its own heads give a norm of heads, such as Gated DeltaNet's."""
    original = tensor_styles.Plain._apply

    def apply(self, module, device_mesh):
        original(self, module, device_mesh)
        if self.spec.split is tensor_styles.Split.HEAD_NORM:
            module.partial_gradients = {"weight": [Replicate()]}
        return module

    return patch.object(tensor_styles.Plain, "_apply", apply)


def router_gradients_not_summed():
    """Every tensor-parallel rank keeps the gradient that its own tokens give the router."""
    original = parallelize.apply_expert_parallel

    def apply(part, *arguments, **options):
        original(part, *arguments, **options)
        for moe in part.mixtures.values():
            moe.router.partial_gradients = {"weight": [Replicate()], "bias": [Replicate()]}

    return patch.object(parallelize, "apply_expert_parallel", apply)


def auxiliary_loss_of_own_tokens():
    """The auxiliary loss mixes loads of the full sequence with the number of this rank's tokens."""
    original = parallelize.apply_expert_parallel

    def apply(part, *arguments, **options):
        original(part, *arguments, **options)
        for moe in part.mixtures.values():
            moe.router.sequence_parts = 1

    return patch.object(parallelize, "apply_expert_parallel", apply)


def loads_not_summed():
    """Biases of experts follow the loads of this rank's tokens."""
    original = Balance.update_biases

    def update(self, norm):
        with patch.object(dist, "all_reduce", lambda *_, **__: None):
            original(self, norm)

    return patch.object(Balance, "update_biases", update)


def clipped_by_own_norm():
    """Every rank clips by the norm of its own shards; the norm that it reports is right."""
    original = engine.clip_gradients

    def clip(parameters, _norm, max_norm):
        shards = [local(parameter.grad) for parameter in parameters]
        original(parameters, float(sum(shard.square().sum() for shard in shards) ** 0.5), max_norm)

    return patch.object(engine, "clip_gradients", clip)


def unclipped_stage():
    """The first pipeline rank does not clip."""
    original = engine.clip_gradients

    def clip(*arguments):
        if dist.get_rank():
            original(*arguments)

    return patch.object(engine, "clip_gradients", clip)


def clipped_as_first_heads():
    """QK-clip takes the rows of each shard for those of the first heads."""
    original = qk_clip.local_ranges

    def local_ranges(parameter):
        return [range(len(each)) for each in original(parameter)]

    return patch.object(qk_clip, "local_ranges", local_ranges)


def average_of_earlier_weights():
    """The average takes the weights of before the update."""
    original = Engine.update

    def update(self, norm):
        before = [local(parameter).clone() for parameter in self.parameters]
        original(self, norm)
        weight = 1 - self.job.optimizer.ema_decay
        with torch.no_grad():
            for parameter, old in zip(self.parameters, before, strict=True):
                local(self.optimizer.state[parameter]["ema"]).add_(
                    old - local(parameter), alpha=weight
                )

    return patch.object(Engine, "update", update)


def validation_too_large():
    """The loss of validation is one percent too large."""
    original = Engine.evaluate

    def evaluate(self, batch):
        return [sums._replace(loss=1.01 * sums.loss) for sums in original(self, batch)]

    return patch.object(Engine, "evaluate", evaluate)


def loads_of_copies():
    """Loads count the tokens of every tensor-parallel rank."""
    original = Balance.update_biases

    def update(self, norm):
        original(self, norm)
        self.load_ME *= 2

    return patch.object(Balance, "update_biases", update)


def counted_from_the_resume():
    """A resume does not load how many steps the optimizer has counted."""
    original = load.tensors_to_load

    def wanted(*arguments):
        tensors = original(*arguments)
        return {name: value for name, value in tensors.items() if not name.endswith(".step")}

    return patch.object(load, "tensors_to_load", wanted)


def auxiliary_loss_of_own_counts():
    """The auxiliary loss has the loads of this rank's part of a sequence."""
    return patch.object(expert, "_summed", lambda _groups, counts: counts)


def biases_of_every_rank():
    """Every rank adds the bias of a product whose parts are then summed."""
    return patch.object(
        Experts, "output_shares", property(lambda _: 1, lambda *_: None), create=True
    )


def rows_by_rank():
    """Rows that experts receive stay ordered by rank, and not by expert."""
    return patch.object(expert, "transposed", lambda x_SC, _lengths: x_SC)


@contextmanager
def rows_over_capacity_left_out():
    """Messages have room for half of the rows, and nobody asks for more."""

    def none_needed(_self, load_E, _rows):
        return torch.zeros_like(load_E[:1])

    def half(self, rows):
        return rows // (2 * self.ep)

    needed = patch.object(expert.FixedExchange, "capacity_needed", none_needed)
    with needed, patch.object(ParallelismConfig, "room_of", half):
        yield


def empty_places_have_rows():
    """Empty places of messages are copies of a row, in both directions, and get its gradient."""

    def taken(x_RC, row_P, _is_empty_P1):
        return x_RC.index_select(0, row_P)

    return patch.object(expert, "_taken", taken)


def router_gradients_too_large():
    """A tenth too large: less than other choices of experts change them, which rounding causes."""
    original = Router.forward

    def forward(self, *inputs):
        routing = original(self, *inputs)
        if routing.weights_NK.requires_grad:
            routing.weights_NK.register_hook(lambda gradient: 1.1 * gradient)
        return routing

    return patch.object(Router, "forward", forward)


def documents_forgotten():
    """The executor loses the documents on its way to the model."""
    original = execute.local_positions_of
    return patch.object(
        execute, "local_positions_of", lambda *batch: original(*batch)._replace(documents_BT=None)
    )


def empty_rows_have_labels():
    """Rows that fill up a rank's passes learn to predict token 0."""
    return patch.object(batch, "IGNORE_INDEX", 0)


def empty_rows_are_routed():
    """Rows that fill up a rank's passes go to experts."""
    return patch.object(Decoder, "_places", lambda *_: None)


def empty_rows_are_counted():
    """The auxiliary loss is a mean over all rows of the passes."""

    def count_tokens(filled):
        rows, length = filled.shape
        return rows * length, rows

    return patch.object(engine, "count_tokens", count_tokens)
