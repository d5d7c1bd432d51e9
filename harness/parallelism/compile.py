"""torch.compile, block by block; how long it took, and whether it had to be done again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import calculate_time_spent, counters
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor

from harness.model.decoder import Decoder
from harness.parallelism.block_config import ActivationCheckpointConfig, CompileConfig
from harness.parallelism.config import ParallelismConfig

_seconds_before_reset = 0.0


def prepare_compiler(
    config: CompileConfig, recompute: ActivationCheckpointConfig, layout: ParallelismConfig
) -> None:
    """Sets what is global to the process, and forgets what was compiled for another job."""
    if not config.enable:
        return
    global _seconds_before_reset
    _seconds_before_reset = _seconds_so_far()
    torch._dynamo.reset()  # which also sets its own clock to zero
    budgeted = recompute.mode == "memory_budget"
    torch._functorch.config.activation_memory_budget = recompute.memory_budget if budgeted else 1.0
    # Tensor parallel has device meshes in the graph. torch 2.13 refuses to weigh them; they keep nothing.
    if hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    # With a zero bubble, gradients of inputs and of weights are taken in two passes over one graph.
    torch._functorch.config.donated_buffer = not layout.splits_backward
    torch._inductor.config._micro_pipeline_tp = layout.async_tp


def apply_compile(part: Decoder, config: CompileConfig, layout: ParallelismConfig) -> None:
    """Compiles the blocks of a model part, in place.

    Only ``forward`` is compiled, not the call around it, so names stay and FSDP's hooks run outside.
    """
    if not config.blocks:
        return
    if part.tok_embeddings is not None and layout.tp > 1:
        # A collective that is still under way cannot enter a compiled block: its backward pass would meet a
        # tensor of another kind than was traced (seen with torch 2.13).
        part.tok_embeddings.register_forward_hook(_wait)
    compiled = partial(torch.compile, backend=config.backend, fullgraph=config.fullgraph)
    for block in part.blocks.values():
        if block.moe is None or not layout.lays_out_experts:
            block.forward = compiled(block.forward)  # type: ignore[method-assign]
            continue
        # Where rows travel to experts the host has to know how many, and experts are a group of FSDP's with
        # hooks of its own: neither can be in a graph. What is dense around them is compiled.
        block.attend = compiled(block.attend)  # type: ignore[method-assign]
        if block.moe.shared_experts is not None:
            block.moe.shared_experts.forward = compiled(block.moe.shared_experts.forward)  # type: ignore[method-assign]


def _wait(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return wait_tensor(output) if isinstance(output, AsyncCollectiveTensor) else output


class CompileWatch:
    """Counts what the compiler has done in this process.

    Attributes:
        recompiles: graphs compiled again after the first step, as whoever watches has counted them.
    """

    def __init__(self) -> None:
        self._before = self._graphs_so_far(), _seconds_so_far()
        self.recompiles = 0
        self._settled = 0

    @property
    def graphs(self) -> int:
        """Graphs compiled since the watch began."""
        return self._graphs_so_far() - self._before[0]

    @property
    def seconds(self) -> float:
        """Time the compiler took since the watch began; it is part of the first step's."""
        return _seconds_so_far() - self._before[1]

    def settle(self) -> None:
        """Says that what is compiled by now was to be expected."""
        self._settled = self.graphs

    @property
    def unexpected(self) -> int:
        """Graphs compiled since then, which were not."""
        return self.graphs - self._settled

    @staticmethod
    def _graphs_so_far() -> int:
        return int(counters["stats"]["unique_graphs"])


def _seconds_so_far() -> float:
    return _seconds_before_reset + float(calculate_time_spent()["total_wall_time"])
