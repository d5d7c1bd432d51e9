"""The first wrong place: the first value, in the order of computation, that departs where a layout differs.

The layout and one process run again, without the compiler, up to a step that differs. Forward hooks
record outputs of modules. A rank's part of one is compared with the same rows, positions and
columns of the one process, so nothing is gathered.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.checkpoint.load import CheckpointLoader
from harness.checkpoint.save import Saver
from harness.checkpoint.state import RankGroup
from harness.config.checkpoint import CheckpointConfig
from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.data.batch import AnyBatch
from harness.data.loader import Loader
from harness.data.tokenizer import build_tokenizer
from harness.model.architecture import architecture_of
from harness.model.decoder import Decoder
from harness.model.moe import Routing
from harness.model.spec import BALANCE_BIAS, ZEROS, tensors
from harness.optimizer.build import EMA
from harness.parallelism.context import local_positions, positions_by_documents
from harness.precision.swap import plain
from harness.tools.parity.formats import lowest_format
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.probe import STATISTICS, Probe
from harness.train.setup import set_up_process
from harness.train.step import StepOutcome
from harness.train.tensor_norms import NORMS, TensorNorms
from harness.weights import huggingface

TOKENS = "number of tokens"
LOSS = "loss"
FURTHER_LOSS = "loss of multi-token prediction"
GRADIENT = "gradient of "
SHARE = "share of "
NORM = "gradient norm"
UPDATE = "update of "
NORM_OF = "norm of "
STATISTIC = "statistic "
AVERAGE = "average of "
AFTER = " after the step"
VALIDATION = "validation loss"
UPDATE_TOLERANCE = 10  # times that of gradients
NORM_TOLERANCE = 0.1  # of that of gradients


@dataclass(frozen=True)
class Record:
    """One optimizer step of one rank.

    Attributes:
        values: by the words that name them, in the order of computation: parameters, outputs of
            modules, numbers of tokens and losses, gradients, shares of the squared norm, the norm,
            and ``results_of`` the update. Tensors are this rank's pieces.
        rows: this rank's rows of the global batch.
        documents_BT: document numbers of these, if there are any.
    """

    values: dict[str, Any]
    rows: range
    segments: tuple[int, ...]
    cp_rank: int
    tp_rank: int
    documents_BT: Tensor | None


@dataclass(frozen=True)
class Piece:
    """What a rank has of a tensor.

    Attributes:
        local: the piece.
        begin: where it begins in the whole tensor, per dimension.
    """

    local: Tensor
    begin: tuple[int, ...]

    def __sub__(self, other: "Piece") -> "Piece":
        return Piece(self.local - other.local, self.begin)


def piece_of(tensor: Tensor) -> Any:
    """Copy what this rank has of a tensor: a Piece if it is laid over several ranks, else all of it."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if tensor.device_mesh.size() == 1:
        return tensor.to_local().clone()
    # Private, read in torch 2.13; DCP saves by it.
    shape, begin = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert local.shape == shape, f"{tuple(local.shape)} of {shape}"
    return Piece(local.clone(), begin)


def start(job_json: str) -> tuple[Engine, Loader]:
    """Build the engine and the loader of this rank of a process group."""
    job = Job.from_json(job_json)
    set_up_process(job)
    engine = Engine(job, torch.device("cpu"))
    return engine, loader_of(job, build_tokenizer(job.tokenizer), engine.rows)


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Return gradients of this rank's parameters, laid out as these are."""
    gradients = {}
    for name, parameter in engine.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        # A partial gradient, which training has not reduced, is an error.
        assert getattr(gradient, "placements", None) == getattr(parameter, "placements", None), name
        gradients[name] = gradient
    return gradients


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """Full gradients of this rank's parameters, all-gathered over their shards; call on all ranks."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in gradients_of(engine).items()
    }


def values_of(engine: Engine, outcome: StepOutcome, *, whole: bool = True) -> dict[str, Any]:
    """What this rank has of a step before its update, by the words that name it.

    Args:
        whole: also gradients, and this rank's shares of their squared norms.
    """
    values: dict[str, Any] = {TOKENS: float(outcome.valid_tokens), LOSS: outcome.loss}
    if outcome.mtp_loss is not None:
        values[FURTHER_LOSS] = outcome.mtp_loss
    if whole:
        gradients = gradients_of(engine)
        # Backward goes from the last module to the first.
        for name in reversed(gradients):
            values[f"{GRADIENT}{name}"] = piece_of(gradients[name])
        for name, square in zip(gradients, outcome.squares.tolist(), strict=True):
            values[f"{SHARE}{name} in the {NORM}"] = square
    values[NORM] = outcome.grad_norm
    return values


def statistics_of(engine: Engine, outcome: StepOutcome) -> dict[str, Tensor]:
    """Statistics of the step's activations, of all ranks, by the words that name them.

    There are none in lower formats, where the order of sums changes them by more than most errors.
    """
    if lowest_format(engine.job) != "float32" or not isinstance(engine.parts[0], Decoder):
        return {}
    probe = Probe(engine)
    seen = outcome.activations or probe(outcome.batch)
    found = {}
    for what, row in zip(STATISTICS[:-1], seen.statistics, strict=False):
        for name, value in zip(probe.names, row, strict=True):
            # What the one process has not, the layouts need not have.
            if engine.job.world_size > 1 or not value.isnan():
                found[f"{STATISTIC}{what} of {name}"] = value
    for layer in engine.job.model.attention_layers:
        name = probe.names[1 + layer]
        heads = seen.max_logits[layer]
        found[f"{STATISTIC}{STATISTICS[-1]} of {name}"] = heads
    return found


def update(engine: Engine, outcome: StepOutcome) -> dict[str, float]:
    """Update the weights; return the norms of all tensors, of all ranks, by the words that name them."""
    norms = TensorNorms(engine)
    norms.before_update()
    engine.update(outcome.norm)
    found: dict[str, float] = {}
    for what, row in zip(NORMS, norms.after_update(outcome.squares).tolist(), strict=True):
        found |= {
            f"{NORM_OF}the {what} of {n}": value for n, value in zip(norms.names, row, strict=True)
        }
    # A weight that begins with zeros is the sum of its updates, which are as exact as gradients.
    for name, tensor in tensors(engine.job.model).items():
        if tensor.init == ZEROS:
            found.pop(f"{NORM_OF}the weight of {name}", None)
    return found


def weights_of(engine: Engine) -> dict[str, Any]:
    """Copy what this rank has of each weight."""
    return {
        name: piece_of(plain(parameter.detach())) for name, parameter in engine.named_parameters()
    }


def results_of(engine: Engine, start: dict[str, Any], batch: AnyBatch) -> dict[str, Any]:
    """What updates have left on this rank, by the words that name it; call on all ranks.

    Args:
        start: weights before the first update. What is compared is how far the weights have moved:
            an error of one update in a thousand is then as large as it is.
        batch: a batch to validate.
    """
    results = {}
    for name, weight in weights_of(engine).items():
        results[f"{UPDATE}{name}"] = weight - start[name]
    for name, parameter in engine.named_parameters():
        average = engine.optimizer.state.get(parameter, {}).get(EMA)
        if average is not None:
            results[f"{AVERAGE}{name}"] = piece_of(average) - start[name]
    model = engine.job.model
    for part in engine.parts:
        for layer, moe in part.mixtures.items():
            prefix = architecture_of(model).block_prefix(model, layer)
            assert engine.balance.load_ME is not None
            results[f"loads of {prefix}moe"] = engine.balance.load_ME[engine.balance.rows[layer]]
            if moe.balance_bias is not None:
                results[f"value of {prefix}{BALANCE_BIAS}{AFTER}"] = moe.balance_bias
    sums = [loss / tokens for loss, tokens in engine.evaluate(batch)]
    results[VALIDATION] = torch.tensor(sums, dtype=torch.float64)
    return results


def tolerance_of(what: str, tolerances: tuple[float, float]) -> float:
    """Tolerance of one of a record's values, of those of losses and of gradients.

    Numbers of tokens, loads and biases are integers, or computed from them, so equal. An update
    divides a gradient by its size, so where gradients are small it differs more than they do.
    """
    if what in (LOSS, FURTHER_LOSS, VALIDATION):
        return tolerances[0]
    if what == TOKENS or what.startswith("loads of ") or what.endswith(AFTER):
        return 0.0
    if what.startswith(STATISTIC):
        return tolerances[1] * NORM_TOLERANCE
    if what.startswith(NORM_OF):
        return tolerances[1] * (1 if UPDATE in what else NORM_TOLERANCE)
    return tolerances[1] * (UPDATE_TOLERANCE if what.startswith((UPDATE, AVERAGE)) else 1)


def resume(engine: Engine, loader: Loader, job_json: str, folder: str) -> tuple[Engine, Loader]:
    """Save a checkpoint, build the engine and the loader of this rank again, and load it."""
    job = dataclasses.replace(Job.from_json(job_json), checkpoint=CheckpointConfig())
    step = engine.schedule.last_epoch
    ranks = RankGroup(job.checkpoint.timeout_seconds)
    saver = Saver(job, Path(folder), engine, loader, ranks, huggingface, lambda _: None)
    saver.save(step, {"step": step}, final=True)
    saver.close()
    loader.close()
    engine.close()
    engine, loader = start(job_json)
    CheckpointLoader(job, Path(folder), engine, loader, ranks, huggingface).start()
    return engine, loader


def record(job_json: str, step: int) -> Record:
    """Train on this rank of a process group, and record step ``step``, counted from 0."""
    engine, loader = start(job_json)
    for _ in range(step):
        engine.update(engine.gradients(loader.next()).norm)
    weights = weights_of(engine)
    calls = defaultdict[str, list[Tensor]](list)
    for part in engine.parts:
        for name, module in part.named_modules():
            # With multi-token prediction these two process two tokens of a row at once.
            pairs = engine.job.model.mtp.depth > 0 and name in ("tok_embeddings", "output")
            if name:
                module.register_forward_hook(partial(_keep, calls, name, pairs))
    batch = loader.next()
    outcome = engine.gradients(batch)
    values: dict[str, Any] = {f"value of {name}": weights[name] for name in weights}
    phase = engine.job.sizes.at(step + 1)
    rows = phase.share(engine.rows, engine.job.global_batch_size)
    for name, each in calls.items():
        output = torch.cat(each)
        # The last rows may be empty. Experts have rows of another kind.
        is_filled = len(output) == engine.job.rows_per_rank(phase)
        values[f"output of {name}"] = output[: len(rows)] if is_filled else output
    values |= values_of(engine, outcome)
    values |= statistics_of(engine, outcome)
    values |= update(engine, outcome)
    values |= results_of(engine, weights, loader.next())
    return Record(
        values,
        rows,
        engine.parts[0].segments,
        engine.mesh.rank("cp"),
        engine.mesh.rank("tp"),
        getattr(batch, "documents_BT", None),
    )


def _keep(
    calls: dict[str, list[Tensor]],
    name: str,
    pairs: bool,
    _: Any,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    """Forward hook: keep a copy of a module's output [B, T, ...] or [B, ...]."""
    # Private, read in torch 2.13 to 2.15: not -1 inside of a backward pass, which recomputes
    # modules.
    if torch._C._current_graph_task_id() != -1:
        return
    if isinstance(output, Routing):
        # The order of a token's experts means nothing.
        output = output.weights_NK.detach().sort(-1).values.unflatten(0, inputs[0].shape[:2])
    output = output[0] if isinstance(output, tuple) else output
    output = output.to_local() if isinstance(output, DTensor) else output
    if isinstance(output, Tensor) and output.dim() > 1:
        output = output.detach().clone()
        calls[name].append(output.unflatten(0, (2, -1)).movedim(0, 2) if pairs else output)


def first_wrong(
    expected: Record,
    found: Sequence[Record],
    layout: ParallelismConfig,
    tolerances: tuple[float, float],
) -> str | None:
    """Describe the first value that departs by more than its relative tolerance; None: none does.

    Args:
        expected: the record of one process.
        found: those of all ranks of a layout.
        tolerances: of losses, and of everything else.
    """
    for what, whole in expected.values.items():
        holders = [each for each in found if what in each.values]
        if what.startswith("output of "):
            offs = [0.0]
            # Rows of experts have another order on every layout.
            for each in holders if len(whole) == len(expected.rows) else ():
                own = each.values[what]
                part = _part(whole, own, each, layout)
                if own.shape == part.shape:
                    offs.append(relative_difference(own, part))
            off = largest(offs)
        else:
            off = difference(what, whole, [each.values for each in holders])
        if not off <= tolerance_of(what, tolerances):
            return f"{what}, relative difference {off:.1e}"
    return None


def difference(what: str, whole: Any, found: Sequence[dict[str, Any]]) -> float:
    """Relative difference of a value from that of one process, the largest over the ranks that have it.

    Infinite if none has. Shares of ranks are added up, and pieces of a tensor make a whole one.
    """
    own = [each[what] for each in found if what in each]
    if own and isinstance(own[0], Piece):
        return _difference_of_pieces(own, whole)
    if what.startswith(SHARE):
        own = [math.sqrt(sum(own))]
        whole = math.sqrt(whole)
    return largest([relative_difference(each, whole) for each in own])


def _difference_of_pieces(pieces: Sequence[Piece], whole: Tensor) -> float:
    """Relative difference of a tensor whose pieces ranks have; infinite if these do not make a whole one.

    Of ranks that have the same piece, the one that differs most counts.
    """
    apart: dict[tuple[int, ...], float] = {}
    is_seen = torch.zeros(whole.shape, dtype=torch.bool)
    for piece in pieces:
        shape = piece.local.shape
        ends = [begin + length for begin, length in zip(piece.begin, shape, strict=True)]
        place = tuple(map(slice, piece.begin, ends))
        expected = whole[place]
        if expected.shape != shape:
            return math.inf
        is_seen[place] = True
        off = float((piece.local.double() - expected.double()).norm())
        ranges = (*piece.begin, *ends)
        apart[ranges] = largest([apart.get(ranges, 0.0), off])
    if not is_seen.all():
        return math.inf
    total = torch.tensor(math.hypot(*apart.values()), dtype=torch.float64)
    return float(total / whole.double().norm()) if total else 0.0


def largest(values: Sequence[float]) -> float:
    """The largest of some values; NaN if any is, and infinity without any."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.inf)


def _part(whole: Tensor, own: Tensor, holder: Record, layout: ParallelismConfig) -> Tensor:
    """The part of an output that a rank has: its rows and, by the shape, positions and columns."""
    whole = whole[holder.rows.start : holder.rows.stop]
    columns = 1
    length = whole.shape[1]
    total = sum(holder.segments)
    if whole.dim() > 2 and length in (total, *holder.segments):
        columns = 2
        lengths = holder.segments if length == total else (length,)
        pieces = []
        start = 0
        for segment in lengths:
            piece_S = local_positions(layout, segment, holder.cp_rank)
            pieces.append(start + piece_S.unsqueeze(0))
            start += segment
        if layout.balances_documents:
            assert holder.documents_BT is not None
            pieces = [positions_by_documents(layout, holder.documents_BT, holder.cp_rank)]
        if own.shape[1] < torch.cat(pieces, 1).shape[1]:
            pieces = [_share(piece, 1, layout.tp, holder.tp_rank) for piece in pieces]
        elif layout.uses_sequence_parallel and len(pieces) > 1:
            return whole[:0]  # gathered segment by segment, or rank by rank
        index_BS = torch.cat(pieces, 1)
        others = [1] * (whole.dim() - 2)
        whole = whole.take_along_dim(index_BS.view(*index_BS.shape, *others), 1)
    for dim in range(columns, whole.dim()):
        if own.shape[dim] != whole.shape[dim]:
            whole = _share(whole, dim, layout.tp, holder.tp_rank)
    return whole


def _share(whole: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    pieces = whole.chunk(ranks, dim)  # may be fewer
    return pieces[rank] if rank < len(pieces) else whole.narrow(dim, 0, 0)


def relative_difference(own: Tensor | float, whole: Tensor | float) -> float:
    """The 2-norm of the difference over that of ``whole``; 0 where both are equal."""
    own, whole = (torch.as_tensor(each, dtype=torch.float64) for each in (own, whole))
    apart = (own - whole).norm()
    return float(apart / whole.norm()) if apart else 0.0
