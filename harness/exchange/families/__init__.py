"""Families of models at Hugging Face, one file for each or for a pair (no torch)."""

from harness.exchange.families.core import Family
from harness.exchange.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from harness.exchange.families.gpt_oss import GPT_OSS
from harness.exchange.families.llama import LLAMA
from harness.exchange.families.llama4 import LLAMA4
from harness.exchange.families.mistral import MISTRAL, MIXTRAL
from harness.exchange.families.qwen2 import QWEN2
from harness.exchange.families.qwen3 import QWEN3, QWEN3_MOE

ALL: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        MISTRAL,
        MIXTRAL,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GPT_OSS,
        LLAMA4,
    )
}

__all__ = ["ALL", "Family"]
