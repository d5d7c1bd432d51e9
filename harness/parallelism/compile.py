"""torch.compile, block by block; compile time and recompilation counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import calculate_time_spent, counters
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.training import CompileConfig
from harness.model.part import ModelPart

_seconds_before_reset = 0.0


GRAPHS_PER_LENGTH = 8
"""Largest number of graphs of a function for one length of sequences: with and without gradients, two masks,
two sizes of a batch. torch's own limit is enough for one length."""


def prepare_compiler(job: Job, device: torch.device) -> None:
    """Set torch's process-wide compiler options, and drop code compiled for another job."""
    if not job.compiles(on_gpu=device.type == "cuda"):
        return
    global _seconds_before_reset
    _seconds_before_reset = _seconds_so_far()
    torch._dynamo.reset()  # this also sets torch's clock of compile time to zero
    options = torch._dynamo.config
    config = job.compile
    layout = job.parallelism
    # Gathered keys are attended to by each piece of a rank's queries, and their numbers differ.
    pieces = 2 if layout.gathers_keys and layout.balances_context else 1
    graphs = GRAPHS_PER_LENGTH * pieces * len(job.sizes.lengths)
    options.recompile_limit = max(options.recompile_limit, graphs)
    options.accumulated_recompile_limit = max(
        options.accumulated_recompile_limit, options.recompile_limit
    )
    # Beyond the limit torch would run eagerly, and FlexAttention would hold all scores in memory.
    # So the job fails, unless its user suppresses errors.
    options.fail_on_recompile_limit_hit = not options.suppress_errors
    recompute = job.activation_checkpoint
    budgeted = recompute.mode == "memory_budget"
    torch._functorch.config.activation_memory_budget = recompute.memory_budget if budgeted else 1.0
    # Tensor parallel puts device meshes into the graph. torch 2.13 refuses to estimate their size;
    # it is 0. Before 2.13 there is no such option.
    if hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    if layout.tp > 1:
        # torch 2.13 finds a traced graph by the mesh of its DTensors, which is the same on all ranks.
        # In the loss of a split vocabulary each rank has its own rows, so it would get another
        # rank's graph (github.com/pytorch/pytorch/issues/188390). Kernels stay cached: they are
        # found by their source.
        torch._functorch.config.enable_autograd_cache = False
        torch._functorch.config.enable_remote_autograd_cache = False
    # A zero-bubble schedule takes gradients of inputs and of weights in two passes over one graph.
    torch._functorch.config.donated_buffer = not layout.splits_backward
    torch._inductor.config._micro_pipeline_tp = layout.async_tp
    if config.mode != "default":  # the default leaves both to torch's environment variables
        torch._inductor.config.coordinate_descent_tuning = True
        torch._inductor.config.max_autotune = config.mode == "max-autotune-no-cudagraphs"


def apply_compile(
    part: ModelPart, config: CompileConfig, layout: ParallelismConfig, lengths: int = 1
) -> None:
    """Compile the blocks of a model part, in place.

    With several ``lengths`` of sequences, each block is compiled once for each length. Only
    ``forward`` is compiled, not ``__call__``, so names stay and FSDP's hooks run outside.
    """
    if not config.blocks:
        return
    if layout.tp > 1:
        # A compiled block must not take the result of an unfinished collective: backward would get
        # a type of tensor that was not traced (torch 2.13).
        for entry in part.entries:
            entry.register_forward_hook(_wait)
    # None lets torch compile a second length for all lengths, which is slower; False compiles each.
    dynamic = None if lengths == 1 else False
    compiled = partial(torch.compile, backend=config.backend, fullgraph=True, dynamic=dynamic)
    originals = []
    for block in part.blocks.values():
        if block.moe is None or not layout.compiles_in_pieces:
            originals.append((block, "forward", block.forward))
            block.forward = compiled(block.forward)  # type: ignore[method-assign]
            continue
        # Such a block cannot be one graph: the host reads the number of rows to exchange, and
        # experts are an FSDP group with its own hooks. The parts around the exchange are compiled.
        # The choice of experts stays outside of them: recomputation finds it saved.
        moe = block.moe
        pieces = [(block, "attend"), (moe.router, "score"), (moe.router, "weigh"), (moe, "arrange")]
        if moe.shared_experts is not None:
            pieces.append((moe.shared_experts, "forward"))
        for owner, name in pieces:
            originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, compiled(getattr(owner, name)))
        # An expert's number of rows differs in every step.
        originals.append((moe.experts, "gate", moe.experts.gate))
        moe.experts.gate = _of_several_rows(
            moe.experts.gate, compiled(moe.experts.gate, dynamic=True)
        )
    part.uncompiled = originals


@contextmanager
def uncompiled(part: ModelPart) -> Iterator[None]:
    """Context manager in which blocks run as they are written, so that hooks inside of them are called.

    What was compiled stays compiled, for after it.
    """
    compiled = [getattr(owner, name) for owner, name, _ in part.uncompiled]
    for owner, name, original in part.uncompiled:
        setattr(owner, name, original)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(part.uncompiled, compiled, strict=True):
            setattr(owner, name, function)


def _of_several_rows(
    gate: Callable[..., Tensor], compiled: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a gate that is compiled for two rows or more.

    For 0 rows and for 1 torch would compile again, on the one rank that has so few.
    """

    def chosen(rows: Tensor, other: Tensor) -> Tensor:
        if len(rows) > 1:
            return compiled(rows, other)
        return gate(rows, other)

    return chosen


def _wait(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output


class CompileWatch:
    """Counters of the compiler in this process.

    Attributes:
        recompiles: graphs compiled again after the first step; counted by the caller.
    """

    def __init__(self) -> None:
        self._graphs_before = self._graphs_so_far()
        self._seconds_before = _seconds_so_far()
        self.recompiles = 0
        self._expected = 0

    @property
    def graphs(self) -> int:
        """Graphs compiled since the watch began."""
        return self._graphs_so_far() - self._graphs_before

    @property
    def seconds(self) -> float:
        """Compile time since the watch began; part of the first step's time."""
        return _seconds_so_far() - self._seconds_before

    def mark_expected(self) -> None:
        """Mark all graphs compiled so far as expected."""
        self._expected = self.graphs

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Context manager in which the graphs that are compiled are expected."""
        before = self.graphs
        yield
        self._expected += self.graphs - before

    @property
    def unexpected(self) -> int:
        """Graphs compiled since the last ``mark_expected()``."""
        return self.graphs - self._expected

    @staticmethod
    def _graphs_so_far() -> int:
        return int(counters["stats"]["unique_graphs"])


def _seconds_so_far() -> float:
    return _seconds_before_reset + float(calculate_time_spent()["total_wall_time"])
