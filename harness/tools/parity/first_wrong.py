"""The first wrong place: the first value, in the order of computation, that departs where a layout differs.

The layout and one process run again, without the compiler, up to a step that differs. Forward hooks record
outputs of modules. A rank's part of one is compared with the same rows, positions and columns of the one
process, so nothing is gathered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.data.loader import Loader
from harness.data.tokenizer import build_tokenizer
from harness.model.moe import Routing
from harness.model.spec import BALANCE_BIAS, block_prefix
from harness.parallelism.context import local_positions
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import set_up_process
from harness.train.step import StepOutcome


@dataclass(frozen=True)
class Record:
    """One optimizer step of one rank: full parameters before it, full gradients, and its part of the rest."""

    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    """Outputs of modules, in the order of the forward pass."""
    scalars: dict[str, float]
    """Number of tokens and losses."""
    gradients: dict[str, Tensor]
    squares: dict[str, float]
    norm: float
    biases: dict[str, Tensor]
    rows: range
    """This rank's rows of the global batch."""
    segments: tuple[int, ...]
    cp_rank: int
    tp_rank: int


def start(job_json: str) -> tuple[Engine, Loader]:
    """Build the engine and the loader of this rank of a process group."""
    job = Job.from_json(job_json)
    set_up_process(job)
    engine = Engine(job, torch.device("cpu"))
    return engine, loader_of(job, build_tokenizer(job.tokenizer), engine.rows)


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """Full gradients of this rank's parameters, all-gathered over their shards; call on all ranks."""
    full = {}
    for name, parameter in engine.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        # full_tensor would reduce a partial gradient, and hide that training does not.
        assert getattr(gradient, "placements", None) == getattr(parameter, "placements", None), name
        full[name] = _full(gradient)
    return full


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def squares_of(engine: Engine, outcome: StepOutcome) -> dict[str, float]:
    """This rank's share of the squared norm of each of its gradients."""
    names = (name for name, _ in engine.named_parameters())
    return dict(zip(names, outcome.squares.tolist(), strict=True))


def share_differences(expected: dict[str, float], found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Relative differences of the norms of gradients, as the ranks' shares add up to them."""
    sums = {name: sum(each.get(name, 0.0) for each in found) for name in expected}
    return {name: _off(math.sqrt(sums[name]), math.sqrt(expected[name])) for name in expected}


def biases_of(engine: Engine) -> dict[str, Tensor]:
    """Balancing biases of this rank's experts."""
    return {
        block_prefix(engine.job.model, layer) + BALANCE_BIAS: moe.balance_bias
        for part in engine.parts
        for layer, moe in part.mixtures.items()
        if moe.balance_bias is not None
    }


def record(job_json: str, step: int) -> Record:
    """Train on this rank of a process group, and record step ``step``, counted from 0."""
    engine, loader = start(job_json)
    for _ in range(step):
        engine.update(engine.gradients(loader.next()).norm)
    weights = {name: _full(parameter.detach()) for name, parameter in engine.named_parameters()}
    calls = defaultdict[str, list[Tensor]](list)
    for part in engine.parts:
        for name, module in part.named_modules():
            # With multi-token prediction these two process two tokens of a row at once.
            pairs = engine.job.model.mtp.depth > 0 and name in ("tok_embeddings", "output")
            if name:
                module.register_forward_hook(partial(_keep, calls, name, pairs))
    batch = loader.next()
    outcome, rows = engine.gradients(batch), batch.shape[0]
    scalars = {"number of tokens": float(outcome.valid_tokens), "loss": outcome.loss}
    scalars |= {} if outcome.mtp_loss is None else {"loss of multi-token prediction": outcome.mtp_loss}
    gradients, squares = full_gradients(engine), squares_of(engine, outcome)
    engine.update(outcome.norm)
    return Record(
        weights,
        {name: torch.cat(each) for name, each in calls.items()},
        scalars,
        gradients,
        squares,
        outcome.grad_norm,
        biases_of(engine),
        range(engine.mesh.data_rank * rows, (engine.mesh.data_rank + 1) * rows),
        engine.parts[0].segments,
        engine.mesh.rank("cp"),
        engine.mesh.rank("tp"),
    )


def _keep(
    calls: dict[str, list[Tensor]], name: str, pairs: bool, _: Any, inputs: tuple[Any, ...], output: Any
) -> None:
    """Forward hook: keep a copy of a module's output [B, T, ...] or [B, ...]."""
    # Private, read in torch 2.13 to 2.15: not -1 inside of a backward pass, which recomputes modules.
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
    expected: Record, found: Sequence[Record], layout: ParallelismConfig, tolerances: tuple[float, float]
) -> str | None:
    """Describe the first value that departs by more than its relative tolerance; None: none does.

    Args:
        expected: the record of one process.
        found: those of all ranks of a layout.
        tolerances: of losses, and of everything else.
    """
    for what, off in _in_order(expected, found, layout):
        if not off <= tolerances[what not in expected.scalars]:
            return f"{what}, relative difference {off:.1e}"
    return None


def _in_order(
    expected: Record, found: Sequence[Record], layout: ParallelismConfig
) -> Iterator[tuple[str, float]]:
    """Names of values and their largest relative differences, in the order of computation."""
    for name, whole in expected.weights.items():
        yield f"value of {name}", _worst(name, whole, [each.weights for each in found])
    for name, whole in expected.outputs.items():
        # Rows of experts have another order on every layout.
        holders = [each for each in found if name in each.outputs and len(whole) == len(expected.rows)]
        parts = [(each.outputs[name], _part(whole, each.outputs[name], each, layout)) for each in holders]
        offs = [_off(own, part) for own, part in parts if own.shape == part.shape]
        yield f"output of {name}", max(offs, default=0.0)
    for name, value in expected.scalars.items():
        yield name, max(_off(each.scalars[name], value) for each in found)
    # Backward goes from the last module to the first.
    for name, whole in reversed(expected.gradients.items()):
        yield f"gradient of {name}", _worst(name, whole, [each.gradients for each in found])
    for name, off in share_differences(expected.squares, [each.squares for each in found]).items():
        yield f"share of {name} in the gradient norm", off
    yield "gradient norm", max(_off(each.norm, expected.norm) for each in found)
    for name, whole in expected.biases.items():
        yield f"value of {name} after the step", _worst(name, whole, [each.biases for each in found])


def _worst(name: str, whole: Tensor, found: Sequence[dict[str, Tensor]]) -> float:
    return max((_off(each[name], whole) for each in found if name in each), default=math.inf)


def _part(whole: Tensor, own: Tensor, of: Record, layout: ParallelismConfig) -> Tensor:
    """The part of an output that a rank has: its rows and, by the shape, positions and columns."""
    whole, columns = whole[of.rows.start : of.rows.stop], 1
    length, total = whole.shape[1], sum(of.segments)
    if whole.dim() > 2 and length in (total, *of.segments):
        columns, lengths = 2, of.segments if length == total else (length,)
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        pieces = [at + local_positions(layout, n, of.cp_rank) for at, n in zip(starts, lengths, strict=True)]
        if own.shape[1] < len(torch.cat(pieces)):
            pieces = [_share(piece, 0, layout.tp, of.tp_rank) for piece in pieces]
        elif layout.uses_sequence_parallel and len(pieces) > 1:
            return whole[:0]  # gathered segment by segment, or rank by rank
        whole = whole[:, torch.cat(pieces)]
    for dim in range(columns, whole.dim()):
        if own.shape[dim] != whole.shape[dim]:
            whole = _share(whole, dim, layout.tp, of.tp_rank)
    return whole


def _share(whole: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    pieces = whole.chunk(ranks, dim)  # may be fewer
    return pieces[rank] if rank < len(pieces) else whole.narrow(dim, 0, 0)


def _off(own: Tensor | float, whole: Tensor | float) -> float:
    own, whole = (torch.as_tensor(each, dtype=torch.float64) for each in (own, whole))
    apart = (own - whole).norm()
    return float(apart / whole.norm()) if apart else 0.0
