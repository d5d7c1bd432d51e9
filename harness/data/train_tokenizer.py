"""Train a small lossless sentencepiece tokenizer for source code.

The shipped ``asset:python_2k.model`` was trained on CPython 3.11's standard library:

    python -m harness.data.train_tokenizer --input '{stdlib}/**/*.py' \\
        --exclude '{stdlib}/site-packages/**' '{stdlib}/**/test/**' '{stdlib}/**/tests/**' \\
        '{stdlib}/idlelib/**' '{stdlib}/lib2to3/**' '{stdlib}/encodings/**' '{stdlib}/pydoc_data/**' \\
        --vocab-size 2048 --output python_2k.model
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.arguments import Parser
from harness.data.sources import find_files
from harness.errors import DataError, UserError

LONGEST_INDENT = 24
"""Runs of up to this many spaces are one token."""


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a sentencepiece BPE model of ``vocab_size`` pieces; return the content of its file.

    Lossless: no normalisation, no prefix, byte pieces for characters without a piece. Newlines, tabs and runs
    of spaces are pieces, so that indentation takes few tokens. 0 is unk, 1 is bos, 2 is eos.

    Raises:
        DataError: there is too little text for so many pieces.
    """
    import sentencepiece

    whitespace = ["\n", "\t", *("▁" * length for length in range(2, LONGEST_INDENT + 1))]
    model = io.BytesIO()
    try:
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
            user_defined_symbols=whitespace,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(f"cannot train {vocab_size} pieces: {' '.join(str(error).split())}") from error
    return model.getvalue()


def _read(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 at byte {error.start}") from error


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m harness.data.train_tokenizer", description=__doc__.split("\n")[0])
    glob_help = "globs of the files to train on; {stdlib} is the running interpreter's standard library"
    parser.add_argument("--input", nargs="+", required=True, metavar="GLOB", help=glob_help)
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="GLOB", help="globs of files to leave out"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="number of pieces (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train on the files of the command line and write the model.

    Raises:
        DataError: no file matches, a file is not UTF-8, or there is too little text.
    """
    options = _parse(arguments)
    files = find_files(options.input, options.exclude)
    if not files:
        raise DataError(f"no file matches {' '.join(options.input)}")
    options.output.write_bytes(train(_read(files), options.vocab_size))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
