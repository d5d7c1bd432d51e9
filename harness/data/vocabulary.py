"""The number of a tokenizer's tokens, which a model's vocabulary must hold (no torch)."""

from __future__ import annotations

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer import BytesTokenizer, SentencePieceTokenizer, _parse_ranks
from harness.data.tokenizer_base import read_tokenizer
from harness.util.errors import ConfigError


def vocabulary_size(config: TokenizerConfig) -> int | None:
    """Return a tokenizer's number of tokens, faster than building it; None if its file does not exist here.

    Raises:
        DataError: the file is malformed.
    """
    if config.kind == "bytes":
        return BytesTokenizer.vocab_size
    if config.kind == "none":
        return 0
    if not config.file.is_file():
        return None
    content = read_tokenizer(config.file)
    if config.kind == "tiktoken":
        return len(_parse_ranks(content, config.file)) + len(SETS[config.special].tokens)
    if config.kind == "huggingface":
        from harness.data.tokenizer_json import number_of_ids

        return number_of_ids(content, config.file)
    return SentencePieceTokenizer(content, config.file).vocab_size


def check_vocab_size(num_tokens: int, vocab_size: int) -> None:
    """Check that the model's vocabulary is at least as large as the tokenizer's.

    Raises:
        ConfigError: it is smaller.
    """
    if num_tokens > vocab_size:
        rule = f"the tokenizer has {num_tokens} tokens, which the model's vocabulary must hold"
        raise ConfigError("model.vocab_size", vocab_size, rule, f"{num_tokens} and more, another tokenizer")
