"""Options of a generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from harness.compose.generator import generator_of
from harness.compose.overrides import with_quoted_text
from harness.config.fields import label, part
from harness.config.registry import resolve_options
from harness.model.architecture import architecture_of
from harness.tools.inference.config import InferenceJob
from harness.train.objective import objective_of
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class GenerateConfig:
    """Weights, prompts, and how tokens are chosen."""

    checkpoint: str | None = label(None)
    """Weights: a run folder (its newest complete checkpoint), a DCP checkpoint, or a folder of safetensors.
    ``checkpoint=PATH`` is short for it."""
    prompts: list[str] = label(factory=list)
    """Several prompts; ``prompt=TEXT`` is one."""
    prompt_file: str | None = label(None)
    """File with a prompt on each line; of a .jsonl file, the field ``prompt`` of each line. ``-``: lines of
    standard input."""
    chat: str | None = label(None)
    """Chat template: ``own`` (that of the tokenizer's repository), ``chatml``, ``plain``, or the path of one.
    Each prompt is then a message of the user, or the field ``messages`` of a line of a .jsonl file, and the
    next turn of the assistant is generated. Null: prompts are text."""
    special_tokens: bool = label(True)
    """Whether the text of a special token (``<|im_start|>``) in a prompt is that token, as in transformers;
    false: plain text, as in training documents. In chat templates it always is."""
    max_new_tokens: int = label(100, least=1)
    """Largest number of tokens to generate after each prompt."""
    batch_size: int = label(8, least=1)
    """Prompts per data-parallel rank that are generated together."""
    temperature: float = label(0.0, least=0)
    """Logits are divided by it before sampling; 0: always the most probable token."""
    top_k: int | None = label(None, least=1)
    """Sample from this many most probable tokens; null: from all."""
    top_p: float = label(1.0, above=0, most=1)
    """Sample from the most probable tokens whose probabilities sum to this (arXiv:1904.09751)."""
    seed: int = label(0, least=0)
    """Seed of sampling. The result of the i-th prompt depends on the seed and i only."""
    stop: list[str] = label(factory=list)
    """Strings that end a text; they are not part of it."""
    stop_at_end: bool = label(True)
    """Whether the tokenizer's end-of-document token ends a text; with ``chat`` also the end of a turn."""
    json: bool = label(False)
    """Print one JSON object instead of text, as ``--json`` does."""
    options: dict[str, Any] = label(factory=dict)
    """Options of generating, for an architecture that another package has added."""


@dataclass(frozen=True)
class GenerateJob(InferenceJob):
    """A job plus the options of a generation."""

    WEIGHTS: ClassVar[str] = "generate.checkpoint"

    prompt: str | None = label(None)
    """The prompt, one line; brackets, commas and quotes in it need no quotes around."""
    generate: GenerateConfig = part(GenerateConfig)
    """Weights, prompts, and how tokens are chosen."""

    @classmethod
    def spelled_out(cls, overrides: Iterable[str]) -> list[str]:
        """Also quote the prompt, so that Hydra does not parse it."""
        return [with_quoted_text(each, "prompt") for each in super().spelled_out(overrides)]

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Return the job with derived fields set, after a check of every rule.

        Raises:
            ConfigError: naming the field, its value, the rule, and what would work.
        """
        if "" in self.generate.stop:
            raise ConfigError("generate.stop", self.generate.stop, "an empty string is in every text", "[]")
        if self.generate.chat and not self.generate.special_tokens:
            rule = f"has no effect with generate.chat={self.generate.chat}"
            raise ConfigError("generate.special_tokens", False, rule, "leave it out")
        generator, config = generator_of(self.model), self.generate
        self._refuse_fields(generator.ignores)
        owner = f"model.architecture={self.model.architecture}"
        options = resolve_options(config.options, generator.options, "generate.options", owner)
        job = replace(
            self,
            generate=replace(config, options=options),
            **objective_of(self.model).for_generation(self.data, self.training, self.model),
        )
        return super(GenerateJob, job).resolve(launched_ranks=launched_ranks, gpus=gpus)

    def _refuse_fields(self, names: Iterable[str]) -> None:
        """Refuse values of fields that have no effect for this kind of model."""
        default, makes = GenerateConfig(), architecture_of(self.model).makes
        for name in names:
            value = getattr(self.generate, name)
            if value != getattr(default, name):
                rule = f"has no effect: model={self.model.name} makes {makes}"
                raise ConfigError(f"generate.{name}", value, rule, "leave it out")

    @property
    def wants_json(self) -> bool:
        """Whether the job itself asks for JSON."""
        return self.generate.json
