"""What ``harness generate`` makes with the models of an architecture. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.model import ModelConfig
from harness.config.registry import Registry

if TYPE_CHECKING:
    from harness.compose.verb import Result
    from harness.weights.detect import WeightFolder


@dataclass(frozen=True)
class Request:
    """A job of ``harness generate`` (with the group ``generate``), and what belongs to it.

    Attributes:
        job: the resolved job.
        overrides: those that composed it.
        found: the weights.
        prompts: texts; with generate.chat also conversations.
        run: ``run(job, "module:function", *arguments)`` calls ``function(job, device, load,
            *arguments)`` on all ranks, and returns the first one's result; None if this process is
            not to print. ``load(job)`` returns the job's model with its weights
            (``harness.tools.inference.model.InferenceModel``).
    """

    job: Any
    overrides: list[str]
    found: WeightFolder
    prompts: Sequence[Any]
    run: Callable[..., Any]


class Generator(ABC):
    """Generates with the models of an architecture. Instances have no state."""

    has_text = True
    """Whether it needs the tokenizer of the weights."""
    ignores: tuple[str, ...] = ()
    """Fields of ``generate`` that have no effect."""
    options: type | None = None
    """Dataclass of ``generate.options``; None: there are none."""

    @abstractmethod
    def generate(self, request: Request) -> int | Result:
        """Generate after each prompt."""


GENERATORS: Registry[type[Generator]] = Registry(
    "generator",
    {"decoder": "harness.tools.inference.generate:Texts"},
    field="model.architecture",
    expects="harness.compose.generator:Generator",
)
"""Generators by the name of the architecture."""


def generator_of(model: ModelConfig) -> Generator:
    return GENERATORS[model.architecture]()
