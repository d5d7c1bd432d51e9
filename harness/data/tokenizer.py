"""Tokenizers: text to token ids and back, from local files only; cuts of long texts that keep their ids."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.config.data import SETS, TokenizerConfig
from harness.config.registry import load_attribute
from harness.util.errors import ConfigError, DataError

NUM_THREADS = 4  # enough to be fast, few enough not to slow down a node's other ranks
# A tokenizer needs about 20 times a text's size in memory, and a corpus may be one file.
PIECE_CHARS = 1_000_000
_WINDOW_CHARS = 1_000
_TRIES = 64
# Nearly all tokenizers split a text into words first; a new word begins here.
_NEW_LINE = re.compile(r"(?<=\n)(?=\S)")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CLASSES = {
    "bytes": "tokenizer:BytesTokenizer",
    "none": "tokenizer:NoTokenizer",
    "sentencepiece": "tokenizer:SentencePieceTokenizer",
    "tiktoken": "tokenizer:TiktokenTokenizer",
    "huggingface": "tokenizer_json:HuggingFaceTokenizer",
}


class Marked(NamedTuple):
    """A text with special tokens, encoded: the ids, and the range of characters of each."""

    ids: list[int]
    ranges: Sequence[tuple[int, int]]


class Tokenizer(Protocol):
    """Maps text to ids in ``range(vocab_size)`` and back.

    Text that looks like a special token is encoded as plain text, so that a document cannot contain
    its own end; but not in prompts.
    """

    vocab_size: int
    bos_id: int | None
    """Id put before every document, or None."""
    eos_id: int | None
    """Id put after every document, or None."""
    fingerprint: str
    """Hash of everything that determines how text is encoded."""
    config: TokenizerConfig | None = None
    """What ``build_tokenizer`` built it from, so that another process can build the same one."""
    num_threads: int = NUM_THREADS
    """Threads of ``encode_batch``."""
    special_ids: Mapping[str, int] = MappingProxyType({})
    """Ids of the special tokens, by their text."""
    file: Path | None = None
    """The tokenizer's file, if it has one."""
    unknown_id: int | None = None
    """Id of unknown characters; None without one."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text in which special tokens have their own ids, as in transformers."""
        ids: list[int] = []
        for part, own in split_special(text, self.special_ids):
            if own is None:
                ids += self.encode(part)
            else:
                ids.append(own)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, in parallel where that is faster."""
        return [self.encode(text) for text in texts]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Any]:
        """Yield ``encode("".join(parts))`` in consecutive pieces, which needs less memory for a long text."""
        for piece in split_long_text(parts, self.encode):
            yield from self.encode_batch([piece])

    def encode_marked(self, texts: Sequence[str]) -> list[Marked]:
        """Encode the texts of chat templates, in which special tokens have their own ids.

        Raises:
            DataError: the tokenizer changes a text before it is encoded, so that its ids have no
                characters.
        """
        return [_marked(text, self) for text in texts]

    def num_bytes(self, ids: list[int]) -> list[int]:
        """Numbers of UTF-8 bytes of ids that are not special."""
        raise DataError(f"{type(self).__name__} encodes no conversations")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; invalid UTF-8 and ids outside the vocabulary become U+FFFD."""


def split_special(text: str, special_ids: Mapping[str, int]) -> list[tuple[str, int | None]]:
    """Cut a text into special tokens, each with its id, and what is between them, with None."""
    special = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
    parts = re.split(f"({special})", text) if special else [text]
    return [
        (part, special_ids[part] if index % 2 else None) for index, part in enumerate(parts) if part
    ]


def _marked(text: str, tokenizer: Tokenizer) -> Marked:
    ids: list[int] = []
    widths: list[int] = []
    for part, own in split_special(text, tokenizer.special_ids):
        length = len(part.encode())
        part_ids = [own] if own is not None else tokenizer.encode(part)
        part_widths = [length] if own is not None else tokenizer.num_bytes(part_ids)
        if sum(part_widths) != length:
            rule = "the tokenizer changes the text of a conversation, so that its ids have no characters"
            raise DataError(
                f"{rule}; would work: tokenizer.kind=huggingface with its tokenizer.json"
            )
        ids += part_ids
        widths += part_widths
    # A character belongs to every id that has one of its bytes.
    first_bytes = np.cumsum([0, *(len(character.encode()) for character in text)])
    ends = np.cumsum(widths, dtype=np.int64)
    begins = np.searchsorted(first_bytes, ends - widths, side="right") - 1
    return Marked(
        ids, list(zip(begins.tolist(), np.searchsorted(first_bytes, ends).tolist(), strict=True))
    )


def decode_known(
    ids: Sequence[int], vocabulary: Container[int], decode: Callable[[list[int]], str]
) -> str:
    """Decode ids; those outside the vocabulary (a model's vocabulary may be padded) become U+FFFD."""
    parts = []
    for known, group in groupby((int(i) for i in ids), key=lambda i: i in vocabulary):
        group_ids = list(group)
        parts.append(decode(group_ids) if known else _UNKNOWN * len(group_ids))
    return "".join(parts)


def read_tokenizer(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DataError(
            f"tokenizer file {file}: {reason}; set tokenizer.path to the file"
        ) from error
    if not content.strip():
        raise DataError(f"tokenizer file {file} is empty")
    return content


def fingerprint_of(kind: str, content: bytes) -> str:
    return f"{kind}/{hashlib.sha256(content).hexdigest()}"


def split_long_text(parts: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Yield a text that comes in parts in pieces of about ``PIECE_CHARS`` characters.

    A cut is made at the beginning of a line if the 1,000 characters on either side encode to the
    same ids separately and together. Text without such a line is one piece.
    """
    text = ""
    for part in parts:
        text += part
        begin = 0
        while len(text) - begin > 2 * PIECE_CHARS:
            end = _find_cut(text, begin + PIECE_CHARS, encode)
            if end is None:
                break
            yield text[begin:end]
            begin = end
        text = text[begin:]
    yield text


def _find_cut(text: str, first: int, encode: Callable[[str], list[int]]) -> int | None:
    """Return the first possible cut from ``first`` on; None if none of ``_TRIES`` lines can be cut."""
    for line in islice(_NEW_LINE.finditer(text, first), _TRIES):
        cut = line.start()
        before = text[cut - _WINDOW_CHARS : cut]
        after = text[cut : cut + _WINDOW_CHARS]
        if encode(before) + encode(after) == encode(before + after):
            return cut
    return None


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build a tokenizer; DataError if its file is missing, empty or malformed."""
    tokenizer: Tokenizer = load_attribute(f"harness.data.{_CLASSES[config.kind]}")(config)
    tokenizer.config = config
    return tokenizer


def with_bos_eos(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Ids of one document, [bos] text [eos], with the ends that the tokenizer has."""
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [*before, *ids, *after]


def with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt after bos, if the tokenizer has it and they do not begin with it."""
    return (
        ids
        if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]
        else [tokenizer.bos_id, *ids]
    )


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes; 256 is bos and 257 is eos."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    special_ids = MappingProxyType({"<s>": 256, "</s>": 257})
    fingerprint = "bytes"

    def __init__(self, config: TokenizerConfig | None = None) -> None:
        """``config`` has nothing more to say."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Any]:
        return (np.frombuffer(part.encode(), dtype=np.uint8) for part in parts)

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

    def decode(self, ids: Sequence[int]) -> str:
        raise DataError(_NO_TEXT)


_NO_TEXT = "tokenizer=none has token ids but no text; would work: the tokenizer that made the ids"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model.

    Sentencepiece writes a space as U+2581, so a U+2581 in a document would be decoded as a space.
    If the model has byte pieces, the character is encoded in bytes instead. A model with a dummy
    prefix, such as Llama 2's, alters the text anyway and is not changed.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        import sentencepiece

        content = read_tokenizer(config.file)
        self.file = config.file
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size: int = self._model.vocab_size()
        except (RuntimeError, OSError) as error:
            raise DataError(f"tokenizer file {self.file} is not a sentencepiece model") from error
        self.bos_id = _none_if_negative(self._model.bos_id())
        self.eos_id = _none_if_negative(self._model.eos_id())
        self.unknown_id = _none_if_negative(self._model.unk_id())
        control = [id for id in range(self.vocab_size) if self._model.is_control(id)]
        self.special_ids = {self._model.id_to_piece(id): id for id in control}
        self.fingerprint = fingerprint_of("sentencepiece", content)
        self._space_mark_ids = self._spell_space_mark()

    def encode(self, text: str) -> list[int]:
        if self._space_mark_ids is None or "▁" not in text:
            return self._model.encode(text)
        ids: list[int] = []
        for index, part in enumerate(text.split("▁")):
            if index:
                ids += self._space_mark_ids
            ids += self._model.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._space_mark_ids is not None and any("▁" in text for text in texts):
            return [self.encode(text) for text in texts]
        return self._model.encode(list(texts), num_threads=self.num_threads)

    def num_bytes(self, ids: list[int]) -> list[int]:
        pieces = zip(ids, self._model.id_to_piece(ids), strict=True)
        return [
            1 if self._model.is_byte(id) else len(piece.replace("▁", " ").encode())
            for id, piece in pieces
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(ids, range(self.vocab_size), self._model.decode)

    def _spell_space_mark(self) -> list[int] | None:
        """Byte pieces of U+2581; None if the model has no byte pieces or prefixes the text with a space."""
        # normalize() shows a dummy prefix. Decoding a text would not: it removes one space.
        if (
            self._model.normalize("a") != "a"
            or self._model.decode(self._model.encode("▁a")) != " a"
        ):
            return None
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]
        return ids if all(self._model.is_byte(i) for i in ids) else None


# Lengths at which Meta's code for Llama 3 and 4 cuts a text (llama3/llama/tokenizer.py, 2024),
# because the pattern matcher recurses and overflows its stack on very long runs.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_HAS_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1}}}|(?<!\s)\s{{{_MAX_RUN + 1}}}")
_RUN = re.compile(r"\S+|\s+")


class TiktokenTokenizer(Tokenizer):
    """Ranked byte pairs of a tiktoken file, followed by a named set of special tokens.

    The file is read here: tiktoken's own reader caches a copy by path in a temporary folder, and
    would use it even after the file has changed.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        import tiktoken

        content = read_tokenizer(config.file)
        self.file = config.file
        special = SETS[config.special]
        ranks = parse_ranks(content, config.file)
        ids = {token: len(ranks) + i for i, token in enumerate(special.tokens)}
        self.special_ids = ids
        self._encoding = tiktoken.Encoding(
            config.special, pat_str=special.pattern, mergeable_ranks=ranks, special_tokens=ids
        )
        self.vocab_size = len(ranks) + len(ids)
        self.bos_id = ids[special.bos]
        self.eos_id = ids[special.eos]
        self.fingerprint = fingerprint_of(f"tiktoken/{config.special}", content)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _cut_long_runs(text):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [list(_cut_long_runs(text)) for text in texts]
        flat = list(chain.from_iterable(parts))
        encoded = iter(self._encoding.encode_ordinary_batch(flat, num_threads=self.num_threads))
        return [list(chain.from_iterable(islice(encoded, len(cut)))) for cut in parts]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Any]:
        text = ""
        for part in parts:
            text += part
            end = len(text) - len(text) % _MAX_CHARS
            yield from map(self._encoding.encode_ordinary, _cut_long_runs(text[:end]))
            text = text[end:]
        yield from map(self._encoding.encode_ordinary, _cut_long_runs(text))

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
        raise DataError(
            f"tokenizer file {file}: the ranks are not 0 to {len(ranks) - 1}, each once"
        )
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


def check_vocab_size(num_tokens: int, vocab_size: int) -> None:
    """Check that the model's vocabulary is at least as large as the tokenizer's."""
    if num_tokens > vocab_size:
        rule = f"the tokenizer has {num_tokens} tokens, which the model's vocabulary must hold"
        raise ConfigError(
            "model.vocab_size", vocab_size, rule, f"{num_tokens} and more, another tokenizer"
        )
