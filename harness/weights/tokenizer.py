"""Export of a tokenizer to transformers, so that an exported model keeps its token ids.

A tokenizer.json is copied, also the one that came with a tiktoken file. Where there is none it is made: of
bytes, of a tiktoken file alone (Meta's, OpenAI's), and of a sentencepiece model. transformers reads
sentencepiece models too, but as LlamaTokenizer, which gives other ids for a leading space and for the runs of
spaces of python_2k.

A tokenizer.json that is made gives exactly the ids of ``harness.data.tokenizer``, with one exception: Meta's
code for Llama 3 cuts a text every 400,000 characters, and runs of more than 25,000 characters with or without
whitespace. transformers does not, so ids around such a cut may differ. Text that looks like a special token
is encoded as plain text (``split_special_tokens``); turn that off when adding a chat template.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer import SentencePieceTokenizer, Tokenizer, _parse_ranks, build_tokenizer
from harness.data.tokenizer_base import read_tokenizer
from harness.data.tokenizer_json import TOKENIZER, copy_tokenizer
from harness.util.errors import DataError, UserError

if TYPE_CHECKING:
    import tokenizers

# Sentencepiece's piece types and its model type for BPE (sentencepiece_model.proto).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_ADDED = (_CONTROL, _USER_DEFINED)
_BPE = 2
_SPACE_MARK = "▁"

# Text to compare two tokenizers: indentation, digits, a contraction, and characters of several bytes.
_SAMPLE = "def f(x):\n\treturn  x + 12345  # don't\r\n\n    é ☃ 𝔘𝔫𝔦 \u3000 Ωmega"

# Bytes that map to themselves in GPT-2's byte alphabet (encoder.py of openai/gpt-2), which the ByteLevel
# parts of the tokenizers library use. The other bytes map to characters from 256 on.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]


@dataclass
class _Export:
    """A tokenizer of the tokenizers library, and its special tokens."""

    tokenizer: tokenizers.Tokenizer
    bos: str | None
    eos: str | None
    unk: str | None = None
    has_dummy_prefix: bool = False


def export_tokenizer(config: TokenizerConfig, folder: Path) -> None:
    """Write a folder for ``transformers.AutoTokenizer.from_pretrained(folder)``.

    A tokenizer.json is copied with the files that belong to it. One that is made has a
    tokenizer_config.json, a special_tokens_map.json and, if the tokenizer has a file, its copy as
    tokenizer.model; encoding puts the bos token first, as is usual for Llama. With
    ``add_special_tokens=False`` encoding gives the ids of our ``encode``.

    Args:
        config: the tokenizer; of kind ``none`` nothing is written.
        folder: where to write; made if missing.

    Raises:
        UserError: the tokenizers library is missing.
        DataError: the tokenizer's file is invalid, or has a feature that tokenizer.json does not support.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(
            "writing a tokenizer for transformers needs its tokenizers library: pip install transformers"
        )
    if config.kind == "none":
        return
    published = _published(config, build_tokenizer(config))
    if published is not None:
        copy_tokenizer(published, folder)
        return
    build = {"bytes": _of_bytes, "sentencepiece": _of_sentencepiece, "tiktoken": _of_tiktoken}[config.kind]
    export = build(config)
    _put_bos_first(export)
    folder.mkdir(parents=True, exist_ok=True)
    export.tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": export.bos, "eos_token": export.eos, "unk_token": export.unk}
    specials = {name: token for name, token in named.items() if token is not None}
    _write_json(folder / "special_tokens_map.json", specials)
    _write_json(folder / "tokenizer_config.json", {**_transformers_config(export), **specials})
    if config.kind != "bytes":
        (folder / "tokenizer.model").write_bytes(read_tokenizer(config.file))


def _published(config: TokenizerConfig, ours: Tokenizer) -> TokenizerConfig | None:
    """The tokenizer.json that came with the tokenizer's file, if it gives the same ids."""
    if config.kind != "tiktoken":
        return config if config.kind == "huggingface" else None
    folder = config.file.parent
    file = (folder.parent if folder.name == "original" else folder) / TOKENIZER  # original/ is Meta's
    if not file.is_file():
        return None
    special = SETS[config.special]
    found = TokenizerConfig("huggingface", str(file), bos=special.bos, eos=special.eos)
    try:
        theirs = build_tokenizer(found)
    except DataError:
        return None  # of another tokenizer
    same_ends = (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id)
    return found if same_ends and gives_same_ids(ours, theirs) else None


def gives_same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have as many tokens, and give the same ids for a sample of text."""
    return one.vocab_size == other.vocab_size and one.encode(_SAMPLE) == other.encode(_SAMPLE)


def _transformers_config(export: _Export) -> dict[str, Any]:
    return {
        # This class uses tokenizer.json unchanged; LlamaTokenizer would rebuild it from the pieces.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": export.bos is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        # llama.cpp puts a space before the text unless this is false; it ignores the normalizer.
        "add_prefix_space": export.has_dummy_prefix,
        # Without token_type_ids, which Llama models do not accept.
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,
    }


def _put_bos_first(export: _Export) -> None:
    from tokenizers import processors

    if export.bos is None:
        return
    export.tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{export.bos} $A",
        pair=f"{export.bos} $A {export.bos}:1 $B:1",
        special_tokens=[(export.bos, export.tokenizer.token_to_id(export.bos))],
    )


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_bytes(config: TokenizerConfig) -> _Export:
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = _byte_level(vocabulary, merges=[], pattern=None)
    bos, eos = "<s>", "</s>"
    _add_tokens(tokenizer, {bos: True, eos: True})
    return _Export(tokenizer, bos, eos)


def _of_tiktoken(config: TokenizerConfig) -> _Export:
    ranks = _parse_ranks(read_tokenizer(config.file), config.file)
    alphabet = _byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[left], spelled[right]) for left, right in _merges_of_ranks(ranks)]
    special = SETS[config.special]
    tokenizer = _byte_level(vocabulary, merges, special.pattern)
    _add_tokens(tokenizer, dict.fromkeys(special.tokens, True))
    return _Export(tokenizer, special.bos, special.eos)


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: str | None
) -> tokenizers.Tokenizer:
    """Byte-level BPE over GPT-2's alphabet, within the words that ``pattern`` matches."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # ignore_merges: as in tiktoken, a word that is a token becomes that token, even if no merges produce it.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pattern is None:
        tokenizer.pre_tokenizer = to_bytes
    else:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_alphabet() -> list[str]:
    """Character for each byte."""
    printable = set(_PRINTABLE)
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def _merges_of_ranks(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield every pair of tokens whose concatenation is a token, ordered by that token's rank.

    tiktoken joins the neighbours whose concatenation has the lowest rank. So all splits of a token are
    merges, not only the one it was learnt from.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        yield from _splits(token, ranks)


def _splits(token: Any, parts: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """All splits of a token into two of ``parts``, in the order of transformers' converters."""
    cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
    both = [cut for cut in cuts if cut[0] in parts and cut[1] in parts]
    return sorted(both, key=lambda cut: (parts[cut[0]], parts[cut[1]]))


def _of_sentencepiece(config: TokenizerConfig) -> _Export:
    from sentencepiece import sentencepiece_model_pb2

    content = read_tokenizer(config.file)
    ours = SentencePieceTokenizer(content, config.file)
    proto = vars(sentencepiece_model_pb2)["ModelProto"].FromString(content)
    for reason in _unsupported_features(proto):
        raise DataError(f"tokenizer file {config.file} {reason}, which tokenizer.json does not support")
    prefix = proto.normalizer_spec.add_dummy_prefix
    # If our encoding preserves U+2581, it must not replace a space here either: a space stays a space.
    space = " " if ours._space_mark_ids is not None and not prefix else _SPACE_MARK
    pieces = [_spelled(piece, space) for piece in proto.pieces]
    unk = next(piece for piece, of in zip(pieces, proto.pieces, strict=True) if of.type == _UNKNOWN)
    tokenizer = _piece_pairs(proto, pieces, unk)
    _set_spaces(tokenizer, space, prefix)
    added = {p: of.type == _CONTROL for p, of in zip(pieces, proto.pieces, strict=True) if of.type in _ADDED}
    _add_tokens(tokenizer, added)
    bos, eos = (None if i is None else pieces[i] for i in (ours.bos_id, ours.eos_id))
    return _Export(tokenizer, bos, eos, unk, has_dummy_prefix=prefix)


def _unsupported_features(proto: Any) -> Iterator[str]:
    """Features of a sentencepiece model that this export does not support."""
    if proto.trainer_spec.model_type != _BPE:
        yield "is not of type bpe"
    normalizer = proto.normalizer_spec
    if normalizer.precompiled_charsmap:
        yield f"normalizes characters ({normalizer.name})"
    if normalizer.remove_extra_whitespaces:
        yield "removes repeated spaces"
    if not normalizer.escape_whitespaces or proto.trainer_spec.treat_whitespace_as_suffix:
        yield "treats spaces in an unusual way"
    by_type = {kind: [p.piece for p in proto.pieces if p.type == kind] for kind in range(1, 7)}
    if by_type[_UNUSED]:
        yield "has unused pieces"
    if normalizer.add_dummy_prefix and by_type[_USER_DEFINED]:
        yield "has both a dummy prefix and user defined symbols"
    if any(" " in piece for piece in (*by_type[_NORMAL], *by_type[_USER_DEFINED])):
        yield "has pieces with plain spaces"
    if not set("".join(by_type[_NORMAL])) <= {*by_type[_NORMAL], *by_type[_USER_DEFINED]}:
        yield "has pieces with characters that are not pieces"


def _spelled(piece: Any, space: str) -> str:
    return piece.piece.replace(_SPACE_MARK, space) if piece.type in (_NORMAL, _USER_DEFINED) else piece.piece


def _piece_pairs(proto: Any, pieces: list[str], unk: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    return Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            _merges_of_pieces(proto, pieces),
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )


def _merges_of_pieces(proto: Any, pieces: list[str]) -> list[tuple[str, str]]:
    """All pairs of pieces whose concatenation is a piece, by that piece's score, as in sentencepiece.

    Only normal pieces take part: others, such as ``<s>``, are never merged from characters.
    """
    ids = {pieces[i]: i for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    by_score = sorted(ids, key=lambda piece: (-proto.pieces[ids[piece]].score, ids[piece]))
    return [cut for piece in by_score for cut in _splits(piece, ids)]


def _set_spaces(tokenizer: tokenizers.Tokenizer, space: str, dummy_prefix: bool) -> None:
    """Set the normalizer that maps spaces to the space mark, and the decoder that maps them back."""
    from tokenizers import decoders, normalizers

    to_marks: list[Any] = [normalizers.Prepend(space)] if dummy_prefix else []
    to_text: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space != " ":
        to_marks.append(normalizers.Replace(" ", space))
        to_text.insert(0, decoders.Replace(space, " "))
    if dummy_prefix:
        to_text.append(decoders.Strip(" ", 1, 0))
    if to_marks:
        tokenizer.normalizer = normalizers.Sequence(to_marks)
    tokenizer.decoder = decoders.Sequence(to_text)


def _add_tokens(tokenizer: tokenizers.Tokenizer, special_of: Mapping[str, bool]) -> None:
    """Add tokens that are matched before all others; special tokens only if the caller enables it."""
    from tokenizers import AddedToken

    added = [AddedToken(token, special=special, normalized=False) for token, special in special_of.items()]
    tokenizer.add_tokens(added)
