"""Whether a tokenizer's tokens fit into a model's vocabulary, before ranks are started. Imports no torch."""

from __future__ import annotations

from functools import cache

from harness.data.config import TokenizerConfig
from harness.data.tiktoken_sets import SETS
from harness.data.tokenizer import BytesTokenizer, SentencePieceTokenizer, _parse_ranks, _read
from harness.errors import ConfigError
from harness.job import Job


def require_vocabulary(job: Job) -> None:
    """Check that the tokens of the job's data fit into its model, where the tokenizer's file is here.

    Raises:
        ConfigError: they do not.
        DataError: the tokenizer's file is malformed.
    """
    if job.data.kind != "synthetic":
        tokenizer = job.tokenizer
        num_tokens = _vocabulary_size(tokenizer.kind, tokenizer.path, tokenizer.special)
        require_room(num_tokens or 0, job.model.vocab_size)


@cache
def _vocabulary_size(kind: str, path: str | None, special: str) -> int | None:
    """The same for the points of a sweep."""
    return vocabulary_size(TokenizerConfig(kind, path, special))


def vocabulary_size(config: TokenizerConfig) -> int | None:
    """Return the number of tokens of a tokenizer, quicker than building it; None where its file is not here.

    Raises:
        DataError: its file is malformed.
    """
    if config.kind == "bytes":
        return BytesTokenizer.vocab_size
    if not config.file.is_file():
        return None
    content = _read(config.file)
    if config.kind == "tiktoken":
        return len(_parse_ranks(content, config.file)) + len(SETS[config.special].tokens)
    if config.kind == "huggingface":
        from harness.data.tokenizer_json import number_of_ids

        return number_of_ids(content, config.file)
    return SentencePieceTokenizer(content, config.file).vocab_size


def require_room(num_tokens: int, vocab_size: int) -> None:
    """Check that the model's vocabulary has room for the tokenizer's tokens.

    Raises:
        ConfigError: it has not.
    """
    if num_tokens > vocab_size:
        rule = f"the tokenizer has {num_tokens} tokens, which the model's vocabulary must hold"
        raise ConfigError("model.vocab_size", vocab_size, rule, f"{num_tokens} and more, another tokenizer")
