"""Rows of tokens to score: of documents, and of the questions of lm-evaluation-harness. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from harness.config.data import DataConfig
from harness.data.documents import Source, source_of
from harness.data.tokenizer import Tokenizer, with_bos, with_bos_eos
from harness.data.tokenizing import is_held_out
from harness.run.result import LM_EVAL
from harness.util.errors import ConfigError, UserError

SPLITS = ("validation", "train", "all")
_LARGEST_EXPONENT = 700.0


class ScoredRow(NamedTuple):
    """Tokens of one pass. Those from ``start`` on are scored; ``start`` is at least 1."""

    tokens: np.ndarray
    start: int


@dataclass(frozen=True)
class Setting:
    """How text becomes rows.

    Attributes:
        data: the documents.
        split: which of them, one of SPLITS.
        window: most tokens of a pass.
        stride: tokens that each window of a document scores; None: the window.
        limit: number of documents; None: all.
    """

    tokenizer: Tokenizer
    data: DataConfig
    split: str
    window: int
    stride: int | None = None
    limit: int | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a question's text, after the token that begins a document, if there is one.

        The text of a special token (``<|im_start|>``) is that token, as in transformers.
        """
        return with_bos(self.tokenizer.encode_prompt(text) if text else [], self.tokenizer)

    @property
    def prefix(self) -> list[int]:
        """The token before a text: the one that begins a document, else the one that ends one."""
        ids = (self.tokenizer.bos_id, self.tokenizer.eos_id)
        return [id for id in ids if id is not None][:1]


class Documents:
    """Loss on documents: each token is scored once, in windows of one document."""

    def __init__(self, setting: Setting) -> None:
        self.rows: list[ScoredRow] = []
        self.documents = self.tokens = self.bytes = 0
        source, kept = _source(setting)
        self.source = source.name
        self.split = setting.split
        for index, document in enumerate(source.documents()):
            if not document or not kept(index):
                continue
            if self.documents == setting.limit:
                break
            text = document if isinstance(document, str) else "".join(document)
            tokens = with_bos_eos(setting.tokenizer.encode(text), setting.tokenizer)
            prefix = setting.prefix if setting.tokenizer.bos_id is None else []
            self.rows += windows([*prefix, *tokens], setting.window, setting.stride)
            self.documents += 1
            self.bytes += len(text.encode("utf-8"))
        if not self.rows:
            raise UserError(f"{source.name}: has no documents to evaluate in split {setting.split}")
        self.tokens = sum(len(row.tokens) - row.start for row in self.rows)

    def metrics(self, scores: np.ndarray) -> dict[str, Any]:
        """Metrics by name.

        Args:
            scores: of each row the log-probability (nats) of its scored tokens, and how many of
                them are not the most probable token; float64 [rows, 2].
        """
        nats = -float(scores[:, 0].sum())
        loss = nats / self.tokens
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf,
            "bits_per_byte": nats / math.log(2) / self.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "source": self.source,
            "split": self.split,
        }


def windows(tokens: Sequence[int], window: int, stride: int | None = None) -> Iterator[ScoredRow]:
    """Cut a document into rows of at most ``window`` inputs that score each token but the first once.

    The first row scores up to ``window`` tokens. Each later row ends ``stride`` tokens further and
    has ``window`` inputs, as in lm-evaluation-harness with a context of window - stride + 1.
    """
    end = min(window, len(tokens) - 1)
    if end < 1:
        return
    yield ScoredRow(np.asarray(tokens[: end + 1]), 1)
    while end < len(tokens) - 1:
        before = end
        end = min(end + (stride or window), len(tokens) - 1)
        first = end - window
        yield ScoredRow(np.asarray(tokens[first : end + 1]), before + 1 - first)


def encode_pair(context: str, continuation: str, setting: Setting) -> ScoredRow:
    """Tokens of a context and its continuation, which is scored.

    Both are encoded together, and spaces at the end of the context belong to the continuation, as
    in lm-evaluation-harness (``TemplateLM._encode_pair``).
    """
    ids = setting.encode(context + continuation)
    before = setting.encode(context.rstrip())
    if not before:
        before = setting.prefix
        ids = ids if ids[:1] == before else [*before, *ids]
    row = ScoredRow(np.asarray(ids), len(before))
    if row.start == 0:
        raise UserError(
            f"{LM_EVAL} a context is empty, and the tokenizer has no token to begin with"
        )
    if row.start >= len(ids):
        raise UserError(f"{LM_EVAL} the continuation {continuation!r} has no token of its own")
    return row


def _source(setting: Setting) -> tuple[Source, Any]:
    """The documents of a split: their source, and whether the one at an index belongs to it."""
    data = setting.data
    split = setting.split
    if not data.has_text or data.sources:
        rule = (
            "has several sources, and one is evaluated"
            if data.has_text
            else "has no text to evaluate"
        )
        raise ConfigError("data.kind", data.kind, rule, "data=local_text 'data.paths=[FILES]'")
    if split == "all":
        return source_of(data, "train")[0], lambda index: True
    try:
        source, fraction = source_of(data, split)
    except ConfigError as error:
        rule = "no documents are held out"
        works = "evaluate.split=all, or data.validation_paths"
        raise ConfigError("evaluate.split", split, rule, works) from error
    return (
        source,
        lambda index: fraction == 0 or is_held_out(index, fraction) == (split == "validation"),
    )
