"""Tokenizers: text to token ids and back, from local files only."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer_base import (
    Tokenizer,
    decode_known,
    fingerprint_of,
    in_pieces,
    read_tokenizer,
)
from harness.data.tokenizer_json import HuggingFaceTokenizer, number_of_ids
from harness.util.errors import ConfigError, DataError


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build a tokenizer; DataError if its file is missing, empty or malformed."""
    tokenizer = _build(config)
    tokenizer.config = config
    return tokenizer


def _build(config: TokenizerConfig) -> Tokenizer:
    if config.kind == "bytes":
        return BytesTokenizer()
    if config.kind == "none":
        return NoTokenizer(config)
    content = read_tokenizer(config.file)
    if config.kind == "sentencepiece":
        return SentencePieceTokenizer(content, config.file)
    if config.kind == "tiktoken":
        return TiktokenTokenizer(content, config.file, config.special)
    if config.kind == "huggingface":
        return HuggingFaceTokenizer(content, config)
    raise ValueError(f"unknown tokenizer kind {config.kind}")


def with_bos_eos(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Ids of one document, [bos] text [eos], with the ends that the tokenizer has."""
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [*before, *ids, *after]


def with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt after bos, if the tokenizer has it and they do not begin with it."""
    return ids if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes; 256 is bos and 257 is eos."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    special_ids = MappingProxyType({"<s>": 256, "</s>": 257})
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        return (part.encode("utf-8") for part in parts)

    def num_bytes(self, ids: list[int]) -> list[int]:
        return [1] * len(ids)

    def decode(self, ids: Sequence[int]) -> str:
        def decode(known: list[int]) -> str:
            return bytes(i for i in known if i < 256).decode("utf-8", errors="replace")

        return decode_known(ids, range(self.vocab_size), decode)


class NoTokenizer(Tokenizer):
    """No tokenizer: token ids without text, of which only bos and eos are known."""

    vocab_size = 0
    fingerprint = "none"

    def __init__(self, config: TokenizerConfig) -> None:
        self.bos_id, self.eos_id = (int(end) if end else None for end in (config.bos, config.eos))

    def encode(self, text: str) -> list[int]:
        raise DataError(_NO_TEXT)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise DataError(_NO_TEXT)

    def decode(self, ids: Sequence[int]) -> str:
        raise DataError(_NO_TEXT)


_NO_TEXT = "tokenizer=none has token ids but no text; would work: the tokenizer that made the ids"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model.

    Sentencepiece writes a space as U+2581, so a U+2581 in a document would be decoded as a space. If the
    model has byte pieces, the character is encoded in bytes instead. A model with a dummy prefix, such as
    Llama 2's, alters the text anyway and is not changed.
    """

    def __init__(self, content: bytes, file: Path) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size: int = self._model.vocab_size()
        except (RuntimeError, OSError) as error:
            raise DataError(f"tokenizer file {file} is not a sentencepiece model") from error
        self.bos_id = _none_if_negative(self._model.bos_id())
        self.eos_id = _none_if_negative(self._model.eos_id())
        control = [id for id in range(self.vocab_size) if self._model.is_control(id)]
        self.special_ids = {self._model.id_to_piece(id): id for id in control}
        self.file = file
        self.fingerprint = fingerprint_of("sentencepiece", content)
        self._space_mark_ids = self._spell_space_mark()

    def encode(self, text: str) -> list[int]:
        if self._space_mark_ids is None or "▁" not in text:
            return self._model.encode(text)
        ids: list[int] = []
        for index, part in enumerate(text.split("▁")):
            ids += self._space_mark_ids if index else []
            ids += self._model.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._space_mark_ids is not None and any("▁" in text for text in texts):
            return [self.encode(text) for text in texts]
        return self._model.encode(list(texts), num_threads=self.num_threads)

    def num_bytes(self, ids: list[int]) -> list[int]:
        pieces = zip(ids, self._model.id_to_piece(ids), strict=True)
        return [
            1 if self._model.is_byte(id) else len(piece.replace("▁", " ").encode()) for id, piece in pieces
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(ids, range(self.vocab_size), self._model.decode)

    def _spell_space_mark(self) -> list[int] | None:
        """Byte pieces of U+2581; None if the model has no byte pieces or prefixes the text with a space."""
        # normalize() shows a dummy prefix. Decoding a text would not: it removes one space.
        if self._model.normalize("a") != "a" or self._model.decode(self._model.encode("▁a")) != " a":
            return None
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]
        return ids if all(self._model.is_byte(i) for i in ids) else None


# Lengths at which Meta's code for Llama 3 and 4 cuts a text (llama3/llama/tokenizer.py, 2024), because the
# pattern matcher recurses and overflows its stack on very long runs.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_HAS_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1}}}|(?<!\s)\s{{{_MAX_RUN + 1}}}")
_RUN = re.compile(r"\S+|\s+")


class TiktokenTokenizer(Tokenizer):
    """Ranked byte pairs of a tiktoken file, followed by a named set of special tokens.

    The file is read here: tiktoken's own reader caches a copy by path in a temporary folder, and would use it
    even after the file has changed.
    """

    def __init__(self, content: bytes, file: Path, special: str) -> None:
        import tiktoken

        special_set = SETS[special]
        ranks = parse_ranks(content, file)
        special_ids = {token: len(ranks) + i for i, token in enumerate(special_set.tokens)}
        self.special_ids, self.file = special_ids, file
        self._encoding = tiktoken.Encoding(
            special, pat_str=special_set.pattern, mergeable_ranks=ranks, special_tokens=special_ids
        )
        self.vocab_size = len(ranks) + len(special_ids)
        self.bos_id = special_ids[special_set.bos]
        self.eos_id = special_ids[special_set.eos]
        self.fingerprint = fingerprint_of(f"tiktoken/{special}", content)

    def encode(self, text: str) -> list[int]:
        return [i for part in _cut_long_runs(text) for i in self._encoding.encode_ordinary(part)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [list(_cut_long_runs(text)) for text in texts]
        flat = [part for text_parts in parts for part in text_parts]
        encoded = iter(self._encoding.encode_ordinary_batch(flat, num_threads=self.num_threads))
        return [[i for _ in text_parts for i in next(encoded)] for text_parts in parts]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        for piece in in_pieces(parts, _MAX_CHARS):
            yield from map(self._encoding.encode_ordinary, _cut_long_runs(piece))

    def num_bytes(self, ids: list[int]) -> list[int]:
        return [len(token) for token in self._encoding.decode_tokens_bytes(ids)]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(ids, range(self.vocab_size), self._encoding.decode)


def parse_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    """Parse the ranked byte pairs of a tiktoken file: lines of a base64 token, a space and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"tokenizer file {file}, line {number}: not a base64 token and its rank"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"tokenizer file {file}: the ranks are not 0 to {len(ranks) - 1}, each once")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise DataError(
            f"tokenizer file {file}: not every single byte is a token, so some text has no encoding"
        )
    return ranks


def _cut_long_runs(text: str) -> Iterator[str]:
    """Yield pieces of at most 400,000 characters with no run of (non-)whitespace longer than 25,000."""
    for start in range(0, len(text), _MAX_CHARS):
        piece = text[start : start + _MAX_CHARS]
        if not _HAS_LONG_RUN.search(piece):
            yield piece
            continue
        begin = 0
        for run in _RUN.finditer(piece):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]


def _none_if_negative(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def vocabulary_size(config: TokenizerConfig) -> int | None:
    """Return a tokenizer's number of tokens without building it; None if its file is not here."""
    if config.kind == "bytes":
        return BytesTokenizer.vocab_size
    if config.kind == "none":
        return 0
    if not config.file.is_file():
        return None
    content = read_tokenizer(config.file)
    if config.kind == "tiktoken":
        return len(parse_ranks(content, config.file)) + len(SETS[config.special].tokens)
    if config.kind == "huggingface":
        return number_of_ids(content, config.file)
    return SentencePieceTokenizer(content, config.file).vocab_size


def check_vocab_size(num_tokens: int, vocab_size: int) -> None:
    """Check that the model's vocabulary is at least as large as the tokenizer's."""
    if num_tokens > vocab_size:
        rule = f"the tokenizer has {num_tokens} tokens, which the model's vocabulary must hold"
        raise ConfigError("model.vocab_size", vocab_size, rule, f"{num_tokens} and more, another tokenizer")
