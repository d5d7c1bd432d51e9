"""Export of a tokenizer to transformers, so that an exported model keeps its token ids.

A tokenizer.json is copied, also the one that came with a tiktoken file. Where there is none it is
made: of bytes, of a tiktoken file alone (Meta's, OpenAI's), and of a sentencepiece model.
transformers' converter of sentencepiece models gives other ids for a leading space and for the runs
of spaces of python_2k.

A tokenizer.json that is made gives exactly the ids of ``harness.data.tokenizer``, with one
exception: Meta's code for Llama 3 cuts a text every 400,000 characters, and runs of more than
25,000 characters with or without whitespace. transformers does not, so ids around such a cut may
differ. Text that looks like a special token is encoded as plain text (``split_special_tokens``);
turn that off when adding a chat template.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    parse_ranks,
    read_tokenizer,
)
from harness.data.tokenizer_json import TOKENIZER, copy_tokenizer, repository_of
from harness.util.errors import DataError

# Sentencepiece's piece types (sentencepiece_model.proto).
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_TEXT = (_NORMAL, _USER_DEFINED)
_SPACE_MARK = "▁"

# Text to compare two tokenizers: indentation, digits, a contraction, and characters of several
# bytes.
_SAMPLE = "def f(x):\n\treturn  x + 12345  # don't\r\n\n    é ☃ 𝔘𝔫𝔦 \u3000 Ωmega"


@dataclass
class _Export:
    tokenizer: FastTokenizer
    bos: str | None
    eos: str | None
    unk: str | None = None
    has_dummy_prefix: bool = False


def export_tokenizer(config: TokenizerConfig, folder: Path) -> None:
    """Write a folder for ``transformers.AutoTokenizer.from_pretrained(folder)``; nothing for kind ``none``.

    A tokenizer.json is copied with the files that belong to it. One that is made has a
    tokenizer_config.json, a special_tokens_map.json and, if the tokenizer has a file, its copy as
    tokenizer.model; encoding puts the bos token first, as is usual for Llama. With
    ``add_special_tokens=False`` encoding gives the ids of our ``encode``.
    """
    if config.kind == "none":
        return
    published = _published(config, build_tokenizer(config))
    if published is not None:
        copy_tokenizer(published, folder)
        return
    build = {"bytes": _of_bytes, "sentencepiece": _of_sentencepiece, "tiktoken": _of_tiktoken}[
        config.kind
    ]
    export = build(config)
    if export.bos is not None:
        export.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{export.bos} $A",
            pair=f"{export.bos} $A {export.bos}:1 $B:1",
            special_tokens=[(export.bos, export.tokenizer.token_to_id(export.bos))],
        )
    folder.mkdir(parents=True, exist_ok=True)
    export.tokenizer.save(str(folder / TOKENIZER))
    named = {"bos_token": export.bos, "eos_token": export.eos, "unk_token": export.unk}
    specials = {name: token for name, token in named.items() if token is not None}
    settings = {
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
    for name, content in {
        "special_tokens_map": specials,
        "tokenizer_config": {**settings, **specials},
    }.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if config.kind != "bytes":
        (folder / "tokenizer.model").write_bytes(read_tokenizer(config.file))


def _published(config: TokenizerConfig, ours: Tokenizer) -> TokenizerConfig | None:
    """The tokenizer.json that came with the tokenizer's file, if it gives the same ids."""
    if config.kind != "tiktoken":
        return config if config.kind == "huggingface" else None
    file = repository_of(config.file) / TOKENIZER
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


def _of_bytes(config: TokenizerConfig) -> _Export:
    tokenizer = _byte_level({bytes([byte]): byte for byte in range(256)}, pattern=None)
    _add_tokens(tokenizer, {"<s>": True, "</s>": True})
    return _Export(tokenizer, "<s>", "</s>")


def _of_tiktoken(config: TokenizerConfig) -> _Export:
    special = SETS[config.special]
    tokenizer = _byte_level(parse_ranks(read_tokenizer(config.file), config.file), special.pattern)
    _add_tokens(tokenizer, dict.fromkeys(special.tokens, True))
    return _Export(tokenizer, special.bos, special.eos)


def _byte_level(ranks: Mapping[bytes, int], pattern: str | None) -> FastTokenizer:
    """Byte-level BPE over GPT-2's alphabet, within the words that ``pattern`` matches."""
    # Printable bytes map to themselves, the others to the characters after them (encoder.py,
    # openai/gpt-2).
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letters[len(own) :])
    alphabet = [own.get(byte) or next(others) for byte in range(256)]
    spelled = {}
    for token, rank in ranks.items():
        spelled["".join(alphabet[byte] for byte in token)] = rank
    # ignore_merges: as in tiktoken, a word that is a token becomes that token, even if no merges
    # produce it.
    tokenizer = FastTokenizer(models.BPE(spelled, _merges(spelled), ignore_merges=True))
    words = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens whose concatenation is a token, ordered by that token's rank, then by their own.

    tiktoken and sentencepiece join the neighbours whose concatenation has the lowest rank. So all
    splits of a token are merges, not only the one it was learnt from.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _of_sentencepiece(config: TokenizerConfig) -> _Export:
    from sentencepiece import sentencepiece_model_pb2

    content = read_tokenizer(config.file)
    ours = SentencePieceTokenizer(config)
    proto = vars(sentencepiece_model_pb2)["ModelProto"].FromString(content)
    prefix = proto.normalizer_spec.add_dummy_prefix
    # If our encoding preserves U+2581, it must not replace a space here either: a space stays a
    # space.
    space = " " if ours._space_mark_ids is not None and not prefix else _SPACE_MARK
    kinds = [piece.type for piece in proto.pieces]
    pieces = [
        piece.piece.replace(_SPACE_MARK, space) if piece.type in _TEXT else piece.piece
        for piece in proto.pieces
    ]
    # Only normal pieces take part in merges: others, such as <s>, are never merged from characters.
    normal = [i for i, kind in enumerate(kinds) if kind == _NORMAL]
    by_score = sorted(normal, key=lambda i: (-proto.pieces[i].score, i))
    unk = pieces[kinds.index(_UNKNOWN)]
    bpe = models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        _merges({pieces[i]: rank for rank, i in enumerate(by_score)}),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )
    tokenizer = FastTokenizer(bpe)
    to_marks: list[Any] = [normalizers.Prepend(space)] if prefix else []
    to_text: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space != " ":
        to_marks.append(normalizers.Replace(" ", space))
        to_text.insert(0, decoders.Replace(space, " "))
    if prefix:
        to_text.append(decoders.Strip(" ", 1, 0))
    if to_marks:
        tokenizer.normalizer = normalizers.Sequence(to_marks)
    tokenizer.decoder = decoders.Sequence(to_text)
    added = {
        p: kind == _CONTROL
        for p, kind in zip(pieces, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    }
    _add_tokens(tokenizer, added)
    tokenizer.encode_special_tokens = True  # which files do not record
    texts = [piece.piece.replace(_SPACE_MARK, " ") for piece in proto.pieces if piece.type in _TEXT]
    for text in (_SAMPLE, "".join(texts), *texts):
        if tokenizer.encode(text, add_special_tokens=False).ids != ours.encode(text):
            raise DataError(
                f"tokenizer file {config.file}: a tokenizer.json would give other ids for {text[:40]!r}; "
                "exported are models of type bpe that change no characters and no spaces"
            )
    bos, eos = (None if i is None else pieces[i] for i in (ours.bos_id, ours.eos_id))
    return _Export(tokenizer, bos, eos, unk, has_dummy_prefix=prefix)


def _add_tokens(tokenizer: FastTokenizer, special_of: Mapping[str, bool]) -> None:
    """Add tokens that are matched before all others; special tokens only if the caller enables it."""
    added = [
        AddedToken(token, special=special, normalized=False)
        for token, special in special_of.items()
    ]
    tokenizer.add_tokens(added)
