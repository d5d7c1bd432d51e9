"""Tokenizers of Hugging Face repositories: tokenizer.json, read by the tokenizers library.

tokenizer.json does not define bos and eos tokens. They come from tokenizer.bos and tokenizer.eos,
or from transformers' files in the same folder.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from harness.config.data import TokenizerConfig
from harness.data.tokenizer import (
    NUM_THREADS,
    Marked,
    Tokenizer,
    decode_known,
    fingerprint_of,
    read_tokenizer,
)
from harness.util.encoding import read_object
from harness.util.errors import DataError, one_line

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
# Other tokenizer files of a repository, copied together with tokenizer.json.
_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    SPECIAL_MAP,
    "tokenizer.model",
    "vocab.json",
)
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SHOWN = 6  # special tokens named in an error message


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json; gives the ids of ``AutoTokenizer`` with ``add_special_tokens=False``.

    Special tokens in a document are encoded as plain text, as with ``split_special_tokens=True``.
    Added tokens that are not special (Qwen's ``<think>``) are encoded as one token.

    Raises:
        DataError: the file is not a tokenizer.json, or its bos or eos token is unknown.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        # The library reads it once, when it starts its threads. A value set by the user takes
        # precedence.
        os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_THREADS))
        import tokenizers

        content = read_tokenizer(config.file)
        self.file = config.file
        with self._without_panic():
            try:
                self._model = tokenizers.Tokenizer.from_buffer(content)
            except Exception as error:  # the library raises nothing narrower
                reason = " ".join(str(error).split())
                raise DataError(
                    f"tokenizer file {config.file} is not a tokenizer.json: {reason}"
                ) from error
        self._model.no_truncation()
        self._model.no_padding()
        # Sampling of subwords would give other ids each time: dropout of BPE, and alpha of Unigram.
        for name in ("dropout", "alpha", "nbest_size"):
            if hasattr(self._model.model, name):
                setattr(self._model.model, name, None)
        ids = self._model.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"tokenizer file {config.file} has no tokens")
        bos, eos = self._find_bos_eos(config)
        for name, token in (("bos", bos), ("eos", eos)):
            if token and token not in ids:
                rule = f"has no token {token!r} for {name}"
                raise DataError(f"tokenizer file {config.file} {rule}; {self._works(name)}")
        # A document must not contain its own end, even if the file does not mark the token as
        # special.
        special = {token.content for token in self._special_tokens()}
        self._model.add_special_tokens(
            [token for token in (bos, eos) if token and token not in special]
        )
        self._model.encode_special_tokens = True
        self._known = frozenset(ids.values())
        self.vocab_size = max(self._known) + 1
        self.bos_id = ids[bos] if bos else None
        self.eos_id = ids[eos] if eos else None
        self.unknown_id = ids.get(getattr(self._model.model, "unk_token", None) or "")
        self.special_ids = {token.content: ids[token.content] for token in self._special_tokens()}
        self.fingerprint = fingerprint_of(f"huggingface/{bos}/{eos}", content)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._model.encode_special_tokens = True  # the library does not pickle it

    def encode(self, text: str) -> list[int]:
        with self._without_panic():
            return self._model.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        with self._without_panic():
            return self._with_special.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # Fast: without the position of each token in its text.
        with self._without_panic():
            encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    @cached_property
    def _with_special(self) -> Any:
        return type(self._model).from_str(self._model.to_str())

    def encode_marked(self, texts: Sequence[str]) -> list[Marked]:
        with self._without_panic():
            encoded = self._with_special.encode_batch(list(texts), add_special_tokens=False)
        return [Marked(encoding.ids, encoding.offsets) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(
            ids, self._known, partial(self._model.decode, skip_special_tokens=False)
        )

    @contextmanager
    def _without_panic(self) -> Iterator[None]:
        """Context manager in which a panic of the library is a DataError, as when a regex tries too much."""
        try:
            yield
        except (
            BaseException
        ) as error:  # Rust's PanicException is no Exception, and no module has it
            if type(error).__name__ != "PanicException":
                raise
            reason = one_line(str(error))
            raise DataError(
                f"tokenizer file {self.file}: its library cannot encode a text: {reason}"
            ) from error

    def _find_bos_eos(self, config: TokenizerConfig) -> tuple[str, str]:
        """Tokens before and after a document; empty for none."""
        if config.bos is not None and config.eos is not None:
            return config.bos, config.eos
        settings = read_transformers_settings(config.file)
        bos = config.bos if config.bos is not None else token_of(settings, "bos_token")
        eos = config.eos if config.eos is not None else token_of(settings, "eos_token")
        # A tokenizer_config.json without bos_token means no bos. Without eos_token documents would
        # not be separated, so that must be requested explicitly.
        for name, missing in (("bos", bos is None and not settings), ("eos", eos is None)):
            if missing:
                rule = f"no {CONFIG} in its folder defines {name}_token"
                raise DataError(f"tokenizer file {config.file}: {rule}; {self._works(name)}")
        return bos or "", eos or ""

    def _works(self, name: str) -> str:
        special = [token.content for token in self._special_tokens()]
        shown = [f"tokenizer.{name}=\"'{token}'\"" for token in special[:_SHOWN]]
        more = [f"{len(special) - _SHOWN} more"] if len(special) > _SHOWN else []
        return f"would work: {', '.join([*shown, *more, f'tokenizer.{name}= for none'])}"

    def _special_tokens(self) -> list[Any]:
        added = sorted(self._model.get_added_tokens_decoder().items())
        return [token for _, token in added if token.special]


def repository_of(file: Path) -> Path:
    """The folder with transformers' files; Meta's repositories have tokenizer.model in ``original/``."""
    return file.parent.parent if file.parent.name == "original" else file.parent


def read_transformers_settings(file: Path) -> dict[str, Any]:
    """Merge transformers' files in the same folder as transformers does: special_tokens_map.json,
    which older versions wrote, takes precedence unless tokenizer_config.json has the added tokens.
    """
    found: dict[str, Any] = {}
    for each in (CONFIG, SPECIAL_MAP):
        path = file.with_name(each)
        settings = read_object(path, DataError) if path.is_file() else {}
        for name in SPECIAL_NAMES:
            token = token_of(settings, name)
            if token is not None and not isinstance(token, str):
                rule = "must be a text, an object with the text as content, or null"
                raise DataError(f"{path}: {name} is {one_line(json.dumps(settings[name]))}: {rule}")
        if "added_tokens_decoder" not in found:
            found |= settings
    return found


def token_of(settings: dict[str, Any], name: str) -> Any:
    """A token in transformers' format: its text, or a mapping with it as ``content``; None without one."""
    token = settings.get(name)
    return token.get("content") if isinstance(token, dict) else token


def copy_tokenizer(config: TokenizerConfig, folder: Path) -> None:
    """Copy a tokenizer.json and transformers' files in its folder.

    The files stay as they are. Only if none of them names a bos or eos token, the copies get that
    of tokenizer.bos or tokenizer.eos. The ids that the model was trained with are in config.json.

    Raises:
        DataError: the tokenizer is invalid.
    """
    HuggingFaceTokenizer(config)  # raises if the file is invalid
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_bytes(config.file.read_bytes())
    for name in _COMPANIONS:
        if config.file.with_name(name).is_file():
            (folder / name).write_bytes(config.file.with_name(name).read_bytes())
    path = config.file.with_name(CONFIG)
    theirs = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if path.is_file():
        theirs = read_object(path, DataError)
    known = read_transformers_settings(config.file)
    ours = {"bos_token": config.bos, "eos_token": config.eos}
    missing = {name: token for name, token in ours.items() if token and name not in known}
    if path.is_file() and not missing:
        (folder / CONFIG).write_bytes(path.read_bytes())
        return
    text = json.dumps({**theirs, **missing}, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
