"""Options of activation checkpointing and torch.compile (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from harness.config.fields import execution
from harness.util.errors import ConfigError

MODES = ("none", "full", "selective_op", "selective_layer", "memory_budget")
BACKENDS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "cudagraphs")
"""Backends that ship with torch; packages can add their own."""
COMPONENTS = ("blocks", "loss")


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block: equal blocks share compiled code, so depth adds no compile time."""

    enable: bool = execution(False)
    """Compile the components below."""
    components: list[str] = execution(factory=lambda: list(COMPONENTS), choices=COMPONENTS)
    """What is compiled: blocks, loss, or both."""
    backend: str = execution("inductor")
    """Backend of torch.compile: inductor, or aot_eager and eager, which need no C++ compiler."""
    fullgraph: bool = execution(True)
    """Make a graph break inside a block an error; false runs Python between the graphs."""

    @property
    def blocks(self) -> bool:
        """Whether blocks are compiled."""
        return self.enable and "blocks" in self.components

    @property
    def loss(self) -> bool:
        """Whether the loss is compiled."""
        return self.enable and "loss" in self.components

    def validate(self) -> None:
        """Raise ConfigError for an unknown backend, or no component."""
        if self.enable and not self.components:
            raise ConfigError("compile.components", "[]", "nothing is left to compile", "compile=off")
        if self.backend not in BACKENDS and self.backend not in _installed_backends():
            raise ConfigError("compile.backend", self.backend or "''", "no such choice", BACKENDS)


def _installed_backends() -> set[str]:
    """Backends that installed packages register with torch."""
    return {entry.name for entry in entry_points(group="torch_dynamo_backends")}


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activations that are recomputed in backward instead of saved (arXiv:1604.06174)."""

    mode: str = execution("none", choices=MODES)
    """What is recomputed. none; full: every block; selective_layer: every n-th block; selective_op: every
    block except expensive results (attention, collectives, every n-th matrix product); memory_budget: what
    torch's partitioner chooses, in compiled blocks only."""
    every_nth_layer: int = execution(2, least=1)
    """selective_layer: recompute the blocks whose index is a multiple of this."""
    save_every_nth_matmul: int = execution(2, least=0)
    """selective_op: save every n-th matrix product of a block; 0 saves none."""
    memory_budget: float = execution(0.5, least=0, most=1)
    """memory_budget: fraction of the activation memory that may be used, 0 (like full) to 1 (like none)."""

    def validate(self, compiler: CompileConfig, *, splits_backward: bool) -> None:
        """Raise ConfigError for a mode that the rest of the job does not allow.

        Args:
            compiler: what is compiled.
            splits_backward: whether the pipeline schedule takes gradients in two passes.
        """
        if self.mode == "selective_op" and splits_backward and not compiler.blocks:
            raise ConfigError(
                "activation_checkpoint.mode",
                self.mode,
                "saves results for one backward pass, and the pipeline schedule has two (inputs, weights)",
                "compile=on, activation_checkpoint=full, or another parallelism.pp_schedule",
            )
        if self.mode == "memory_budget" and not (compiler.blocks and compiler.backend != "eager"):
            raise ConfigError(
                "activation_checkpoint.mode",
                self.mode,
                "is applied by the compiler's partitioner, and blocks are not compiled",
                "compile=on, or activation_checkpoint=selective_op",
            )
