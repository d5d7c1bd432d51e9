"""Train the shipped tokenizer ``asset:python_2k.model`` on the standard library of CPython 3.11.

    python experiments/measure/python_tokenizer.py python_2k.model

A lossless sentencepiece BPE model: no normalization, no prefix, byte pieces for characters without a piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from harness.data.documents import find_files

INPUT = ["{stdlib}/**/*.py"]
_LEFT_OUT = (
    "site-packages",
    "**/test",
    "**/tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
)
EXCLUDE = [f"{{stdlib}}/{folder}/**" for folder in _LEFT_OUT]
# Newlines, tabs and runs of up to 24 spaces are pieces, so that indentation takes few tokens.
WHITESPACE = ["\n", "\t", *("▁" * length for length in range(2, 25))]


def train(texts: Iterable[str], vocab_size: int, output: Path) -> None:
    """Train ``vocab_size`` pieces and write the model. 0 is unk, 1 is bos, 2 is eos."""
    with output.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n")),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            byte_fallback=True,
            # Rare characters are encoded in bytes; a piece for each would take the place of words.
            character_coverage=0.9995,
            split_digits=True,
            user_defined_symbols=WHITESPACE,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # the same input gives the same file
            minloglevel=2,
        )


if __name__ == "__main__":
    files = find_files(INPUT, EXCLUDE)
    train((file.read_text(encoding="utf-8") for file in files), 2048, Path(sys.argv[1]))
