"""Word-splitting patterns and special tokens, which a tiktoken file does not contain."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialSet:
    """Special tokens and pattern of a tokenizer.

    Attributes:
        pattern: regular expression of the words within which byte pairs are joined.
        tokens: special tokens in the order of their ids; the first id follows the last byte pair's.
    """

    pattern: str
    tokens: tuple[str, ...]
    bos: str
    eos: str


_RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(251)]

# Meta's code for Llama 3 (llama3/llama/tokenizer.py, 2024); ids from 128,000.
LLAMA3 = SpecialSet(
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *_RESERVED[:4],
        "<|start_header_id|>",
        "<|end_header_id|>",
        _RESERVED[4],
        "<|eot_id|>",
        *_RESERVED[5:],
    ),
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
)
