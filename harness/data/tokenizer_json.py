"""Tokenizers of Hugging Face's repositories: tokenizer.json, read by the tokenizers library.

What begins and ends a document does not stand there. It is found in the files that transformers keeps beside
it, unless tokenizer.bos and tokenizer.eos say it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.data.config import TokenizerConfig
from harness.data.tokenizer import _NUM_THREADS, Tokenizer, _decode_known, _fingerprint, _read
from harness.errors import DataError

TOKENIZER, CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# What a repository may keep beside tokenizer.json, and what goes where the tokenizer goes.
_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.json",
)
_SHOWN = 6  # special tokens in one line of error


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json; gives the ids of ``AutoTokenizer`` with ``add_special_tokens=False``.

    Special tokens in a text are plain text, as ``split_special_tokens=True`` has it. Tokens that were added
    and are not special (Qwen's ``<think>``) are themselves.

    Args:
        content: of the file.
        config: where it lies, and what its documents begin and end with.

    Raises:
        DataError: the file is none, or it is not known what begins and ends a document.
    """

    def __init__(self, content: bytes, config: TokenizerConfig) -> None:
        # Read once, when the library starts its threads; what the user has set stays.
        os.environ.setdefault("RAYON_NUM_THREADS", str(_NUM_THREADS))
        import tokenizers

        try:
            self._model = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise DataError(f"tokenizer file {config.file} is no tokenizer.json: {reason}") from error
        self._model.no_truncation()
        self._model.no_padding()
        ids = self._model.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"tokenizer file {config.file} has no tokens")
        bos, eos = self._find_ends(config)
        for name, token in (("bos", bos), ("eos", eos)):
            if token and token not in ids:
                rule = f"has no token {token!r}, which is to be {name}"
                raise DataError(f"tokenizer file {config.file} {rule}; {self._works(name)}")
        # A document must not end itself, also where the file does not call the token special.
        special = {token.content for token in self._special_tokens()}
        self._model.add_special_tokens([token for token in (bos, eos) if token and token not in special])
        self._model.encode_special_tokens = True
        self._known = frozenset(ids.values())
        self.vocab_size = max(self._known) + 1
        self.bos_id = ids[bos] if bos else None
        self.eos_id = ids[eos] if eos else None
        self.fingerprint = _fingerprint(f"huggingface/{bos}/{eos}", content)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [of_text.ids for of_text in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self._known, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)

    def _find_ends(self, config: TokenizerConfig) -> tuple[str, str]:
        """The tokens before and after a document; empty for none."""
        if config.bos is not None and config.eos is not None:
            return config.bos, config.eos
        said = _beside(config.file)
        bos = config.bos if config.bos is not None else _token(said, "bos_token")
        eos = config.eos if config.eos is not None else _token(said, "eos_token")
        # A tokenizer_config.json without bos_token means that there is none. Without eos_token nothing would
        # separate documents, which nobody should get unasked.
        for name, missing, does in (
            ("bos", bos is None and not said, "begins"),
            ("eos", eos is None, "ends"),
        ):
            if missing:
                rule = f"no {CONFIG} beside it says which token {does} a document"
                raise DataError(f"tokenizer file {config.file}: {rule}; {self._works(name)}")
        return bos or "", eos or ""

    def _works(self, name: str) -> str:
        """What tokenizer.bos or tokenizer.eos could be."""
        special = [token.content for token in self._special_tokens()]
        shown = [f"tokenizer.{name}=\"'{token}'\"" for token in special[:_SHOWN]]
        more = [f"{len(special) - _SHOWN} more"] if len(special) > _SHOWN else []
        return f"would work: {', '.join([*shown, *more, f'tokenizer.{name}= for none'])}"

    def _special_tokens(self) -> list[Any]:
        added = sorted(self._model.get_added_tokens_decoder().items())
        return [token for _, token in added if token.special]


def number_of_ids(content: bytes, file: Path) -> int:
    """Return the largest id of a tokenizer.json plus 1, without building the tokenizer.

    Raises:
        DataError: the file is no tokenizer.json.
    """
    try:
        plain = json.loads(content)
        vocabulary = plain["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in plain.get("added_tokens") or []]
        return int(max(ids)) + 1
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(f"tokenizer file {file} is no tokenizer.json: no vocabulary") from error


def _beside(file: Path) -> dict[str, Any]:
    """What transformers' files in the same folder say, the more important over the other."""
    said: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, CONFIG):
        path = file.with_name(name)
        if path.is_file():
            said |= _read_json(path)
    return said


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no object")
    return content


def _token(said: dict[str, Any], name: str) -> str | None:
    """A token as transformers writes it: its text, or a mapping with the text as ``content``."""
    token = said.get(name)
    return token.get("content") if isinstance(token, dict) else token


def copy_tokenizer(config: TokenizerConfig, folder: Path) -> None:
    """Copies a tokenizer.json and what lies beside it, for transformers to read.

    Where tokenizer.bos or tokenizer.eos named another token than the files do, the copies name that one: it
    is what the model has learnt.

    Args:
        config: the tokenizer, of kind ``huggingface``.
        folder: where to write; made where it is missing.

    Raises:
        DataError: the tokenizer cannot be used.
    """
    content = _read(config.file)
    HuggingFaceTokenizer(content, config)  # says what is wrong
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_bytes(content)
    for name in _COMPANIONS:
        if config.file.with_name(name).is_file():
            (folder / name).write_bytes(config.file.with_name(name).read_bytes())
    ours = {"bos_token": config.bos, "eos_token": config.eos}
    for name in (CONFIG, SPECIAL_TOKENS):
        path = config.file.with_name(name)
        if name == SPECIAL_TOKENS and not path.is_file():
            continue
        theirs = _read_json(path) if path.is_file() else {"tokenizer_class": "PreTrainedTokenizerFast"}
        changed = {key: token for key, token in ours.items() if token and token != _token(theirs, key)}
        if changed or not path.is_file():
            text = json.dumps({**theirs, **changed}, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        else:
            (folder / name).write_bytes(path.read_bytes())
