"""What is done to every block besides sharding it: recomputing its activations, compiling it (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from harness.config import execution
from harness.errors import ConfigError

MODES = ("none", "full", "selective_op", "selective_layer", "memory_budget")
BACKENDS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "cudagraphs")
"""Compilers that torch brings along; packages can add their own."""
COMPONENTS = ("blocks", "loss")


@dataclass
class CompileConfig:
    """torch.compile, block by block: equal blocks share their compiled code, so depth costs no time."""

    enable: bool = execution(False)
    """Whether anything is compiled."""
    components: list[str] = execution(factory=lambda: list(COMPONENTS))
    """What is compiled: blocks, loss, or both."""
    backend: str = execution("inductor")
    """torch's name of the compiler: inductor, or aot_eager and eager, which need no C++ compiler."""
    fullgraph: bool = execution(True)
    """Whether a graph break inside a block is an error; false lets Python run between the pieces."""

    @property
    def blocks(self) -> bool:
        """Whether blocks are compiled."""
        return self.enable and "blocks" in self.components

    @property
    def loss(self) -> bool:
        """Whether the loss is compiled."""
        return self.enable and "loss" in self.components

    def validate(self) -> None:
        """Raises ConfigError for components that are not known, or none."""
        unknown = [name for name in self.components if name not in COMPONENTS]
        if unknown:
            raise ConfigError("compile.components", unknown[0], "no such component", COMPONENTS)
        if self.enable and not self.components:
            raise ConfigError("compile.components", "[]", "nothing is left to compile", "compile=off")
        if self.backend not in BACKENDS and self.backend not in _installed_backends():
            raise ConfigError("compile.backend", self.backend or "''", "no such backend", BACKENDS)


def _installed_backends() -> set[str]:
    """Compilers that installed packages offer to torch."""
    return {entry.name for entry in entry_points(group="torch_dynamo_backends")}


@dataclass
class ActivationCheckpointConfig:
    """Activations that are recomputed in backward instead of being kept (arXiv:1604.06174)."""

    mode: str = execution("none")
    """What is recomputed. none; full: every block; selective_layer: every n-th block; selective_op: every
    block but for results that are dear to compute (attention, collectives, every n-th matrix product);
    memory_budget: what torch's partitioner chooses, in compiled blocks only."""
    every_nth_layer: int = execution(2)
    """selective_layer: blocks whose index is a multiple of it are recomputed."""
    save_every_nth_matmul: int = execution(2)
    """selective_op: of the matrix products of a block every n-th is kept; 0 keeps none."""
    memory_budget: float = execution(0.5)
    """memory_budget: share of the activations' memory that may be kept, 0 (as full) to 1 (as none)."""

    def validate(self, compiler: CompileConfig, *, splits_backward: bool) -> None:
        """Raises ConfigError for a mode that is not known, or that the rest of the job does not allow.

        Args:
            compiler: what is compiled.
            splits_backward: whether the pipeline schedule takes gradients in two passes.
        """
        if self.mode not in MODES:
            raise ConfigError("activation_checkpoint.mode", self.mode, "no such mode", MODES)
        if self.every_nth_layer < 1:
            raise ConfigError(
                "activation_checkpoint.every_nth_layer", self.every_nth_layer, "must be at least 1"
            )
        if self.save_every_nth_matmul < 0:
            raise ConfigError(
                "activation_checkpoint.save_every_nth_matmul",
                self.save_every_nth_matmul,
                "must not be negative; 0 keeps none",
            )
        if not 0 <= self.memory_budget <= 1:
            raise ConfigError("activation_checkpoint.memory_budget", self.memory_budget, "must be in [0, 1]")
        if self.mode == "selective_op" and splits_backward and not compiler.blocks:
            raise ConfigError(
                "activation_checkpoint.mode",
                self.mode,
                "keeps results for one backward pass, and the pipeline schedule takes two (inputs, weights)",
                "compile=on, activation_checkpoint=full, or another parallelism.pp_schedule",
            )
        if self.mode == "memory_budget" and not (compiler.blocks and compiler.backend != "eager"):
            raise ConfigError(
                "activation_checkpoint.mode",
                self.mode,
                "is a choice of the compiler's partitioner, and blocks are not compiled",
                "compile=on, or activation_checkpoint=selective_op",
            )
