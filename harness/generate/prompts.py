"""Prompts from the command line, a file or standard input, as text and token ids. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.data.tokenizer_base import Tokenizer
from harness.errors import ConfigError, UserError
from harness.generate.config import GenerateJob
from harness.inference.lines import numbered_lines, parse_json
from harness.launched import launched_ranks

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids, with the token that begins a document."""

    text: str
    ids: list[int]


def read_prompts(job: GenerateJob, tokenizer: Tokenizer) -> list[Prompt]:
    """Read and tokenize all prompts.

    Raises:
        UserError: there is none, one cannot be read, is empty, or has tokens that the model does not have.
    """
    config = job.generate
    texts = [*([] if job.prompt is None else [job.prompt]), *config.prompts]
    if config.prompt_file is not None:
        texts += _lines(config.prompt_file)
    if not texts:
        works = "prompt=TEXT, generate.prompts=[A,B], generate.prompt_file=FILE, or generate.prompt_file=-"
        raise ConfigError("prompt", None, "there is no prompt", works)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompts = [Prompt(text, [*begin, *tokenizer.encode(text)]) for text in texts]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.ids:
            raise UserError(f"prompt {number}: is empty, and the tokenizer has no token to begin with")
        if max(prompt.ids) >= job.model.vocab_size:
            raise UserError(
                f"prompt {number}: has token {max(prompt.ids)}, and model.vocab_size={job.model.vocab_size}; "
                "would work: the tokenizer that the model was trained with"
            )
    return prompts


def require_room(prompts: Sequence[Prompt], job: GenerateJob) -> int:
    """Return the longest sequence: the longest prompt and all new tokens.

    Raises:
        ConfigError: it is longer than the model supports.
    """
    longest, most = max(len(prompt.ids) for prompt in prompts), job.model.max_seq_len
    if longest >= most:
        number = next(i for i, prompt in enumerate(prompts, start=1) if len(prompt.ids) == longest)
        raise UserError(
            f"prompt {number}: has {longest} tokens, and model.max_seq_len={most}; "
            f"would work: at most {most - 1}"
        )
    new = job.generate.max_new_tokens
    if longest + new > most:
        rule = f"with a prompt of {longest} tokens exceeds model.max_seq_len={most}"
        raise ConfigError("generate.max_new_tokens", new, rule, f"at most {most - longest}")
    return longest + new


def _lines(name: str) -> list[str]:
    """Prompts of a file or standard input."""
    ranks = launched_ranks() or 1
    if name == STDIN and ranks > 1:
        rule = f"{ranks} ranks of a launcher cannot share standard input"
        raise ConfigError("generate.prompt_file", name, rule, "a file")
    lines = numbered_lines(
        f"generate.prompt_file={name}",
        sys.stdin.read if name == STDIN else lambda: Path(name).read_text(encoding="utf-8"),
        "a prompt on each line",
    )
    return [_prompt_of(line, where) if name.endswith(".jsonl") else line for where, line in lines]


def _prompt_of(line: str, where: str) -> str:
    row = parse_json(line, where)
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where}: has no text in "prompt"; would work: {{"prompt": "..."}}')
    return prompt
