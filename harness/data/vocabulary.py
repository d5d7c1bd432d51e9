"""Check that a tokenizer's tokens fit into a model's vocabulary, before ranks are started (no torch)."""

from __future__ import annotations

from functools import cache

from harness.config.data import SETS, TokenizerConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.job import Job
from harness.config.mixture import sources_of
from harness.data.chat_template import template_of
from harness.data.tokenizer import BytesTokenizer, SentencePieceTokenizer, _parse_ranks, build_tokenizer
from harness.data.tokenizer_base import read_tokenizer
from harness.util.errors import ConfigError


def require_vocabulary(job: Job) -> None:
    """Check that the job's tokenizer fits into its model's vocabulary, if the tokenizer's file exists here.

    For conversations, also check that there is a chat template.

    Raises:
        ConfigError: it does not fit.
        DataError: the tokenizer's file is malformed, or missing where the ranks run on this machine; or there
            is no chat template.
    """
    if job.cluster.is_here and job.tokenizer.has_file:
        read_tokenizer(job.tokenizer.file)
    if {kind for kind in job.data.kinds - {"synthetic", "mixture"} if DATA_KINDS[kind].batches == "tokens"}:
        tokenizer = job.tokenizer
        num_tokens = _vocabulary_size(tokenizer.kind, tokenizer.path, tokenizer.special)
        check_vocab_size(num_tokens or 0, job.model.vocab_size)
        for source, errors in sources_of(job.data):
            if source.kind == "chat" and num_tokens is not None:
                with errors:
                    template_of(source, build_tokenizer(tokenizer))


@cache
def _vocabulary_size(kind: str, path: str | None, special: str) -> int | None:
    """``vocabulary_size``, cached for the points of a sweep."""
    return vocabulary_size(TokenizerConfig(kind, path, special))


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
