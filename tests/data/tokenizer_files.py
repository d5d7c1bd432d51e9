"""Tokenizers of every kind: their files, and their exports loaded by transformers."""

import base64
import io
import json
import sysconfig
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import sentencepiece
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer import Tokenizer, build_tokenizer
from harness.weights.tokenizer import export_tokenizer

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "json/decoder.py", "textwrap.py")]
AWKWARD = [
    "",
    " ",
    "\n",
    "a\r\nb\rc\n\n\n",
    "\tif x:\n\t\t  y   =  1\n" + " " * 100 + "z   \n",
    "  leading and trailing  ",
    "☃ é ﷽ 𝔘𝔫𝔦 \u3000 \ufeff \x00 \x7f",
    "space mark ▁ and ▁▁ twice",
    "<s> </s> <unk> <0x0A> <|begin_of_text|> <|end_of_text|> a<think>b<|im_end|>",
    "HTTPServer's camelCase WE'LL 12345 ÉCOLE été a/b//\n\n  x = '\n// 東京タワー e\u0301",
    "x" * 30_000,
    " " * 60_000 + "x" + "\n" * 30_000,
    "word " * 20_000,
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"}
PIECES = ["sentencepiece", "sentencepiece_prefix", "sentencepiece_no_bytes"]
KINDS = ["bytes", *PIECES, *SETS, "huggingface"]


@cache
def sources(number):
    """Short files from all parts of the standard library."""
    files = (file for file in sorted(STDLIB.glob("**/*.py")) if "site-packages" not in file.parts)
    short = [file for file in files if 500 < file.stat().st_size < 30_000]
    chosen = short[:: len(short) // number][:number]
    return [file.read_bytes().decode("utf-8", errors="replace") for file in chosen]


def write_tiktoken(
    file,
    merges=(b"th", b"the", b"  ", b"\n\n", b"xx", b"xxxx"),
    special="llama3",
):
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return TokenizerConfig("tiktoken", str(file), special)


def write_sentencepiece(file, *, files=50, **options):
    """Write a model of 1,000 pieces of source code, by default with the options of Llama 2's."""
    model = io.BytesIO()
    like_llama2 = {
        "model_type": "bpe",
        "vocab_size": 1000,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.9995,
        "minloglevel": 2,
    }
    lines = (line for text in sources(files) for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **{**like_llama2, **options}
    )
    file.write_bytes(model.getvalue())
    return TokenizerConfig("sentencepiece", str(file))


@cache
def merges_of_source_code():
    """The multi-byte pieces of a sentencepiece model, in order, as merges of a tiktoken file."""
    with TemporaryDirectory() as folder:
        config = write_sentencepiece(
            Path(folder) / "pieces", vocab_size=4000, add_dummy_prefix=False
        )
        model = sentencepiece.SentencePieceProcessor(model_file=config.path)
    kinds = (model.is_control, model.is_byte, model.is_unknown)
    plain = (i for i in range(len(model)) if not any(is_kind(i) for is_kind in kinds))
    pieces = (model.id_to_piece(i).replace("▁", " ").encode() for i in plain)
    return [piece for piece in pieces if len(piece) > 1]


def write_huggingface(folder, config, *, pads=True):
    """Write a byte-level BPE of 1,000 tokens like Qwen's, with three special tokens and one added token.

    ``pads``: with the truncation and padding that some publishers leave enabled in the file.
    """
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    if pads:
        tokenizer.enable_truncation(max_length=16)
        tokenizer.enable_padding(length=16, pad_id=1000, pad_token=SPECIAL[0])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def huggingface(file, **fields):
    config = TokenizerConfig("huggingface", str(file), **fields)
    config.validate()
    return config


def config_of(kind, folder):
    if kind in SETS:
        return write_tiktoken(folder / "ranks", merges_of_source_code(), kind)
    if kind == "huggingface":
        return huggingface(write_huggingface(folder, CHAT))
    if kind == "sentencepiece_prefix":
        return write_sentencepiece(folder / "pieces")
    if kind == "sentencepiece_no_bytes":
        return write_sentencepiece(folder / "pieces", add_dummy_prefix=False, byte_fallback=False)
    return TokenizerConfig(kind, None if kind == "bytes" else "asset:python_2k.model")


class Pair(NamedTuple):
    """One of our tokenizers, and its export loaded by transformers."""

    config: TokenizerConfig
    ours: Tokenizer
    theirs: Any
    folder: Path
    kind: str = ""


def exported(config, folder, kind=""):
    export_tokenizer(config, folder / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    return Pair(config, build_tokenizer(config), theirs, folder / "exported", kind)
