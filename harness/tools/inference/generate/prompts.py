"""Prompts from the command line, a file or standard input, as text and token ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from harness.data.chat_template import find_template, message_of, require_text
from harness.data.tokenizer import with_bos
from harness.data.tokenizer_base import Tokenizer
from harness.tools.inference.generate.config import GenerateJob
from harness.tools.inference.lines import STDIN, numbered_lines, parse_json
from harness.train.process import launched_ranks
from harness.util.errors import ConfigError, UserError

OWN = "own"
"""Value of generate.chat: the template of the tokenizer's repository."""
Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids, with the token that begins a document.

    Attributes:
        end_of_turn: id that ends the assistant's turn, or None.
    """

    text: str
    ids: list[int]
    end_of_turn: int | None = None


def read_prompts(job: GenerateJob, found: Sequence[str | Conversation], tokenizer: Tokenizer) -> list[Prompt]:
    """Tokenize all prompts, as ``read_texts`` returns them.

    Raises:
        UserError: one is empty, or has tokens that the model does not have.
    """
    config = job.generate
    if config.chat:
        prompts = _turns(config.chat, found, tokenizer)
    else:
        prompts = _texts(found, tokenizer, config.special_tokens)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.ids:
            raise UserError(f"prompt {number}: is empty, and the tokenizer has no token to begin with")
        if max(prompt.ids) >= job.model.vocab_size:
            raise UserError(
                f"prompt {number}: has token {max(prompt.ids)}, and model.vocab_size={job.model.vocab_size}; "
                "would work: the tokenizer that the model was trained with"
            )
    return prompts


def read_texts(job: GenerateJob) -> list[str | Conversation]:
    """Read all prompts, as text; with generate.chat also conversations.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    config = job.generate
    found: list[str | Conversation] = [*([] if job.prompt is None else [job.prompt]), *config.prompts]
    if config.prompt_file is not None:
        found += _lines(config.prompt_file, with_messages=config.chat is not None)
    if not found:
        works = "prompt=TEXT, generate.prompts=[A,B], generate.prompt_file=FILE, or generate.prompt_file=-"
        raise ConfigError("prompt", None, "there is no prompt", works)
    return found


def _texts(found: Sequence[Any], tokenizer: Tokenizer, special_tokens: bool) -> list[Prompt]:
    encode = tokenizer.encode_prompt if special_tokens else tokenizer.encode
    return [Prompt(text, with_bos(encode(text), tokenizer)) for text in found]


def _turns(chat: str, found: Sequence[str | Conversation], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts up to the beginning of the assistant's turn."""
    template = find_template(
        tokenizer, None if chat == OWN else chat, date.today().isoformat(), "generate.chat"
    )
    end = tokenizer.special_ids.get(template.end_of_turn or "")
    conversations = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in found]
    texts = [require_text(template.render(each, add_generation_prompt=True)) for each in conversations]
    encoded = tokenizer.encode_marked(texts)
    return [Prompt(text, each.ids, end) for text, each in zip(texts, encoded, strict=True)]


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


def _lines(name: str, *, with_messages: bool) -> list[str | Conversation]:
    """Prompts of a file or standard input."""
    ranks = launched_ranks() or 1
    if name == STDIN and ranks > 1:
        rule = f"{ranks} ranks of a launcher cannot share standard input"
        raise ConfigError("generate.prompt_file", name, rule, "a file")
    lines = numbered_lines(f"generate.prompt_file={name}", name, "a prompt on each line")
    if not name.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_prompt_of(line, where, with_messages) for where, line in lines]


def _prompt_of(line: str, where: str, with_messages: bool) -> str | Conversation:
    row = parse_json(line, where)
    if with_messages and isinstance(row, dict) and isinstance(row.get("messages"), list):
        return [message_of(each, f"{where}, message {i}") for i, each in enumerate(row["messages"], start=1)]
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where}: has no text in "prompt"; would work: {{"prompt": "..."}}')
    return prompt
