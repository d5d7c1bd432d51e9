"""Options of a generation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from harness.config import label, part
from harness.errors import ConfigError
from harness.inference.config import InferenceJob

PROMPT = "prompt="


def _with_quotes(override: str) -> str:
    text = override.removeprefix(PROMPT)
    # As Hydra reads a quoted string: a quote inside has a backslash before it.
    is_quoted = re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", text, re.DOTALL) is not None
    if not override.startswith(PROMPT) or is_quoted or text == "null":
        return override
    # In quotes Hydra reads \' as ', and keeps all other backslashes but those before it and at the end.
    escaped = re.sub(
        r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), text.replace("${", "\\${")
    )
    return f"{PROMPT}'{escaped}'"


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
    """Seed of sampling. The i-th prompt's text depends on the seed and i only."""
    stop: list[str] = label(factory=list)
    """Strings that end a text; they are not part of it."""
    stop_at_end: bool = label(True)
    """Whether the tokenizer's end-of-document token ends a text; with ``chat`` also the end of a turn."""
    json: bool = label(False)
    """Print one JSON object instead of text, as ``--json`` does."""


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
        return [_with_quotes(each) for each in super().spelled_out(overrides)]

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Return the job with derived fields set, after a check of every rule.

        Raises:
            ConfigError: naming the field, its value, the rule, and what would work.
        """
        if "" in self.generate.stop:
            raise ConfigError("generate.stop", self.generate.stop, "an empty string is in every text", "[]")
        return super().resolve(launched_ranks=launched_ranks, gpus=gpus)

    @property
    def wants_json(self) -> bool:
        """Whether the job itself asks for JSON."""
        return self.generate.json
