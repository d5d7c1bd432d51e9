"""Word-splitting patterns and special tokens, which a tiktoken file does not contain."""

from __future__ import annotations

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


def _named(names: str) -> list[str]:
    return [f"<|{name}|>" for name in names.split()]


def _reserved(name: str, first: int, last: int) -> list[str]:
    return [f"<|{name}reserved_special_token_{i}|>" for i in range(first, last + 1)]


# Meta's code for Llama 3 (llama3/llama/tokenizer.py, 2024); ids from 128,000.
LLAMA3 = SpecialSet(
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    tokens=(
        *_named("begin_of_text end_of_text"),
        *_reserved("", 0, 3),
        *_named("start_header_id end_header_id"),
        *_reserved("", 4, 4),
        "<|eot_id|>",
        *_reserved("", 5, 250),
    ),
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
)

# openai/tiktoken, tiktoken_ext/openai_public.py, o200k_base; Meta's code for Llama 4 has the same
# one.
_O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Meta's code for Llama 4 (meta-llama/llama-models, models/llama4/tokenizer.py, 2025); 2,048 ids
# from 200,000.
LLAMA4 = SpecialSet(
    pattern=_O200K_PATTERN,
    tokens=(
        *_named("begin_of_text end_of_text fim_prefix fim_middle fim_suffix"),
        # Text, from 200,005. Numbers 6 and 7 of the reserved tokens do not exist.
        *_named("header_start header_end eom eot step"),
        *_reserved("text_post_train_", 0, 5),
        *_named("python_start python_end finetune_right_pad"),
        *_reserved("text_post_train_", 8, 68),
        # Images, from 200,080.
        *_named("image_start image_end"),
        *_reserved("vision_", 0, 1),
        *_named("tile_x_separator tile_y_separator"),
        *_reserved("vision_", 2, 5),
        "<|image|>",
        *_reserved("vision_", 6, 6),
        "<|patch|>",
        *_reserved("vision_", 7, 1047),
        # Reasoning, from 201,134.
        *_reserved("reasoning_", 0, 7),
        *_named("reasoning_thinking_start reasoning_thinking_end"),
        # The rest of the 2,048.
        *_reserved("", 0, 903),
    ),
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
)

# GPT-OSS: openai/tiktoken, tiktoken_ext/openai_public.py, o200k_harmony; ids from 199,998 to
# 201,087. Its file is o200k_base.tiktoken. <|return|> ends an answer in a chat; documents end with
# <|endoftext|>.
O200K_HARMONY = SpecialSet(
    pattern=_O200K_PATTERN,
    tokens=(
        *_named(
            "startoftext endoftext reserved_200000 reserved_200001 return constrain reserved_200004"
        ),
        *_named("channel start end message reserved_200009 reserved_200010 reserved_200011 call"),
        *(f"<|reserved_{i}|>" for i in range(200_013, 200_018)),
        "<|endofprompt|>",  # of o200k_base; tiktoken also calls it <|reserved_200018|>
        *(f"<|reserved_{i}|>" for i in range(200_019, 201_088)),
    ),
    bos="<|startoftext|>",
    eos="<|endoftext|>",
)
