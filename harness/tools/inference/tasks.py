"""Tasks of an evaluation: rows of tokens to score, and metrics of the scores. Imports no torch.

A JSONL file has one example per line:

    {"context": "...", "continuation": "..."}
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.config.data import DataConfig
from harness.config.training import DATA
from harness.data.documents import Source, source_of
from harness.data.tokenizer import Tokenizer, check_vocab_size, with_bos, with_bos_eos
from harness.data.tokenizing import is_held_out
from harness.util.encoding import parse
from harness.util.errors import ConfigError, UserError

STDIN = "-"
LONGEST_LINE = 4_000_000
"""Characters of a line, about a million tokens; a tokenizer takes a hundred bytes for each."""


def numbered_lines(name: str, file: str, works: str) -> list[tuple[str, str]]:
    """Return the lines that are not blank, each after its place for messages, ``<name>, line <i>``.

    Args:
        name: name of the input, for messages.
        file: its path, or ``-`` for standard input.
        works: a valid input, for messages.
    """
    lines = []
    try:
        with nullcontext(sys.stdin) if file == STDIN else open(file, encoding="utf-8") as opened:
            # Not splitlines(), which also splits at separators that JSON allows inside of a text.
            for i, line in enumerate(iter(partial(opened.readline, LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    rule = f"has more than {LONGEST_LINE} characters"
                    raise UserError(f"{name}, line {i}: {rule}; would work: {works}")
                line.encode("utf-8")  # standard input has surrogates for bytes that are not UTF-8
                if line.strip():
                    lines.append((f"{name}, line {i}", line.removesuffix("\n")))
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{name}: is not UTF-8 text") from error
    if not lines:
        raise UserError(f"{name}: is empty; would work: {works}")
    return lines


def parse_json(line: str, where: str) -> Any:
    """Parse a line."""
    try:
        row = parse(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half a surrogate pair, which no tokenizer can read") from error
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    return row


EXAMPLE = '{"context": "...", "continuation": "..."}'


class ScoredRow(NamedTuple):
    """Tokens of one pass. Those from ``start`` on are scored; ``start`` is at least 1."""

    tokens: np.ndarray
    start: int


class Task(Protocol):
    """Rows to score, and metrics of their scores."""

    name: str
    """As typed in the list of tasks."""
    rows: list[ScoredRow]

    def metrics(self, scores: np.ndarray) -> dict[str, Any]:
        """Metrics by name.

        Args:
            scores: of each row the log-probability (nats) of its scored tokens, and how many of them are not
                the most probable token; float64 [rows, 2].
        """


@dataclass(frozen=True)
class Setting:
    """Inputs of every task.

    Attributes:
        data: documents of the task ``data``.
        split: which of them, one of SPLITS.
        window: most tokens of a pass.
        window_field: the field with the window, for messages.
        stride: tokens that each window of a document scores; None: the window.
        limit: number of examples or documents; None: all.
        special_tokens: whether the text of a special token in a question is that token.
    """

    tokenizer: Tokenizer
    vocab_size: int
    data: DataConfig
    split: str
    window: int
    window_field: str
    stride: int | None = None
    limit: int | None = None
    special_tokens: bool = True

    def encode(self, text: str) -> list[int]:
        """Ids of a question's text, after the token that begins a document, if there is one."""
        tokens: list[int] = []
        if text and self.special_tokens:
            tokens = self.tokenizer.encode_prompt(text)
        elif text:
            tokens = self.tokenizer.encode(text)
        return with_bos(tokens, self.tokenizer)

    @property
    def prefix(self) -> list[int]:
        """The token before a text: the one that begins a document, else the one that ends one."""
        of = self.tokenizer
        return [each for each in (of.bos_id, of.eos_id) if each is not None][:1]


def open_task(name: str, setting: Setting) -> Task:
    """Read and tokenize a task; not one of lm-evaluation-harness."""
    check_vocab_size(setting.tokenizer.vocab_size, setting.vocab_size)
    if name == DATA:
        return Documents(setting)
    return Continuations(name, setting)


class Documents:
    """Loss on documents: each token is scored once, in windows of one document."""

    def __init__(self, setting: Setting) -> None:
        self.name = DATA
        self.rows: list[ScoredRow] = []
        self.documents = self.tokens = self.bytes = 0
        source, kept = _source(setting)
        self.source, self.split = source.name, setting.split
        for index, text in enumerate(source.documents()):
            if not text or not kept(index):
                continue
            if self.documents == setting.limit:
                break
            tokens = with_bos_eos(setting.tokenizer.encode(text), setting.tokenizer)
            prefix = setting.prefix if setting.tokenizer.bos_id is None else []
            self.rows += windows([*prefix, *tokens], setting.window, setting.stride)
            self.documents += 1
            self.bytes += len(text.encode("utf-8"))
        if not self.rows:
            raise UserError(f"{source.name}: has no documents to evaluate in split {setting.split}")
        self.tokens = sum(len(row.tokens) - row.start for row in self.rows)

    def metrics(self, scores: np.ndarray) -> dict[str, Any]:
        nats = -float(scores[:, 0].sum())
        loss = nats / self.tokens
        return {
            "loss": loss,
            "perplexity": _exp(loss),
            "bits_per_byte": nats / math.log(2) / self.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "source": self.source,
            "split": self.split,
        }


def windows(tokens: Sequence[int], window: int, stride: int | None = None) -> Iterator[ScoredRow]:
    """Cut a document into rows of at most ``window`` inputs that score each token but the first once.

    The first row scores up to ``window`` tokens. Each later row ends ``stride`` tokens further and has
    ``window`` inputs, as in lm-evaluation-harness with a context of window - stride + 1.
    """
    end = min(window, len(tokens) - 1)
    if end < 1:
        return
    yield ScoredRow(np.asarray(tokens[: end + 1]), 1)
    while end < len(tokens) - 1:
        before, end = end, min(end + (stride or window), len(tokens) - 1)
        first = end - window
        yield ScoredRow(np.asarray(tokens[first : end + 1]), before + 1 - first)


class Continuations:
    """Log-likelihood of one continuation after each context."""

    def __init__(self, name: str, setting: Setting) -> None:
        lines = numbered_lines(name, name, f"lines such as {EXAMPLE}")[: setting.limit]
        self.name, self.rows = name, [self._row(line, where, setting) for where, line in lines]

    @staticmethod
    def _row(line: str, where: str, setting: Setting) -> ScoredRow:
        row = parse_json(line, where)
        if isinstance(row, dict) and "choices" in row:
            raise UserError(
                f"{where}: has choices, as tasks of lm-evaluation-harness; would work: lm_eval:NAME"
            )
        for name in ("context", "continuation"):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise UserError(f'{where}: has no text in "{name}"; would work: {EXAMPLE}')
        return pair_row(row["context"], row["continuation"], setting, where)

    def metrics(self, scores: np.ndarray) -> dict[str, Any]:
        mean = float(scores[:, 0].mean())
        return {
            "acc": float((scores[:, 1] == 0).mean()),
            "log_likelihood": mean,
            "perplexity": _exp(-mean),
            "examples": len(scores),
        }


def pair_row(context: str, continuation: str, setting: Setting, where: str) -> ScoredRow:
    """Tokens of a context and its continuation, which is scored."""
    row = encode_pair(context, continuation, setting, where)
    inputs = len(row.tokens) - 1
    if inputs > setting.window:
        raise UserError(
            f"{where}: has {inputs} tokens, and {setting.window_field}={setting.window}; would work: "
            f"{setting.window_field}={inputs}, or shorter examples"
        )
    return row


def encode_pair(context: str, continuation: str, setting: Setting, where: str) -> ScoredRow:
    """Like ``pair_row``, of any length.

    Both are encoded together, and spaces at the end of the context belong to the continuation, as in
    lm-evaluation-harness (``TemplateLM._encode_pair``).
    """
    ids, before = setting.encode(context + continuation), setting.encode(context.rstrip())
    if not before:
        before = setting.prefix
        ids = ids if ids[:1] == before else [*before, *ids]
    row = ScoredRow(np.asarray(ids), len(before))
    if row.start == 0:
        raise UserError(f"{where}: the context is empty, and the tokenizer has no token to begin with")
    if row.start >= len(ids):
        raise UserError(f"{where}: the continuation {continuation!r} has no token of its own")
    return row


def _source(setting: Setting) -> tuple[Source, Any]:
    """The documents of a split: their source, and whether the one at an index belongs to it."""
    data, split = setting.data, setting.split
    if not data.has_text or data.sources:
        rule = "has several sources, and one is evaluated" if data.has_text else "has no text to evaluate"
        raise ConfigError("data.kind", data.kind, rule, "data=local_text 'data.paths=[FILES]'")
    if split == "all":
        return source_of(data, "train")[0], lambda index: True
    try:
        source, fraction = source_of(data, split)
    except ConfigError as error:
        rule, works = "no documents are held out", "evaluate.split=all, or data.validation_paths"
        raise ConfigError("evaluate.split", split, rule, works) from error
    return source, lambda index: fraction == 0 or is_held_out(index, fraction) == (split == "validation")


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
