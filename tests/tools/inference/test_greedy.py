"""Greedy text equals that of transformers: every family, with and without a cache, on several ranks."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from families_table import CASES, random_model, to_transformers
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.launch.pool import RankPool
from harness.model.cache import CachedPass
from harness.tools.inference.generate import GenerateJob, Prompt
from harness.tools.inference.model import with_model
from harness.train.setup import process_group
from harness.weights.detect import find_source

NEW = 40
FEW = 8  # with transformers' own loop, which takes most of the time
LENGTHS = (20, 3, 37)
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4")
LAYOUTS = {
    "tp": ["parallelism=tp", "parallelism.tp=2"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=2"],
    "ep": ["parallelism=fsdp", "parallelism.dp_shard=2", "parallelism.ep=2"],
    "tp_ep": ["parallelism=tp", "parallelism.tp=2", "parallelism.dp_shard=2", "parallelism.ep=2"],
}
CORE = (
    "llama",
    "qwen2",
    "mistral_wide",
    "mixtral_window",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
)
CORE += ("gpt_oss", "llama4")
"""A case of every family."""
RANKED = [
    (case, layout) for case in FAMILIES for layout in LAYOUTS if CASES[case].moe.enabled or "ep" not in layout
]
CORE_RANKED = [
    ("llama", "tp"),
    ("llama", "fsdp"),
    ("deepseek_v3", "tp"),
    ("gpt_oss", "tp_ep"),
    ("llama4", "ep"),
]
CACHED = list(itertools.product(CASES, [(24, 24), (24, 9), (1, 2)]))
CORE_CACHED = [
    *((case, (24, 9)) for case in CORE),
    *itertools.product(["llama", "deepseek_v3"], [(24, 24), (1, 2)]),
]


def prompts(vocab_size: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    return [Prompt("", each) for each in ids]


def expected(theirs: Any, prompt: Prompt, new: int = NEW) -> list[int]:
    tokens = torch.tensor([prompt.ids])
    made = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return made[0, len(prompt.ids) :].tolist()


def greedy(theirs: Any, prompt: Prompt, made: list[int]) -> list[int]:
    """The likeliest token after the prompt, and after each token of ``made``, in one pass without a cache.

    It equals ``made`` only if that is the greedy text: its first token that differs follows an equal prefix.
    """
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt.ids + made[:-1]]), use_cache=False).logits
    return logits[0, len(prompt.ids) - 1 :].argmax(-1).tolist()


def job_of(folder: Path, *overrides: str) -> GenerateJob:
    job = compose_job(
        [f"checkpoint={folder}", "tokenizer=bytes", "cluster.device=cpu", *overrides],
        config_name="generate",
        schema=GenerateJob,
    )
    job = with_value(job, "generate.max_new_tokens", NEW)
    return with_value(job, "training.seq_len", max(LENGTHS) + NEW)


def on_rank(job: GenerateJob, folder: str, given: list[Prompt]) -> list[list[int]]:
    function = "harness.tools.inference.decode:generate"
    outcome = with_model(job, torch.device("cpu"), function, find_source(folder), given, False)
    return [text.tokens for text in outcome.texts]


@pytest.mark.parametrize("case", rest_is_thorough(CASES, *CORE))
def test_one_process(case: str, tmp_path: Path) -> None:
    model, given = random_model(CASES[case]), prompts(CASES[case].vocab_size)
    theirs = to_transformers(model, tmp_path / "hf")
    job = job_of(tmp_path / "hf", "generate.batch_size=3")
    with process_group(job, torch.device("cpu")):
        made = on_rank(job, str(tmp_path / "hf"), given)
    for prompt, tokens in zip(given, made, strict=True):
        assert len(tokens) == NEW
        assert tokens == greedy(theirs, prompt, tokens), f"a prompt of {len(prompt.ids)} tokens"
    assert made[0][:FEW] == expected(theirs, given[0], FEW)


@pytest.mark.parametrize("row", rest_is_thorough(RANKED, *CORE_RANKED), ids="-".join)
def test_ranks(row: tuple[str, str], tmp_path: Path, pool: RankPool) -> None:
    case, layout = row
    model, given = random_model(CASES[case]), prompts(CASES[case].vocab_size)
    theirs = to_transformers(model, tmp_path / "hf")
    job = job_of(tmp_path / "hf", *LAYOUTS[layout])
    for rank, made in enumerate(pool.run(job.world_size, on_rank, job, str(tmp_path / "hf"), given)):
        for prompt, tokens in zip(given, made, strict=True):
            assert len(tokens) == NEW
            assert tokens == greedy(theirs, prompt, tokens), (
                f"rank {rank}, a prompt of {len(prompt.ids)} tokens"
            )


@pytest.mark.parametrize("row", rest_is_thorough(CACHED, *CORE_CACHED), ids=lambda row: f"{row[0]}-{row[1]}")
def test_cached_logits(row: tuple[str, tuple[int, int]]) -> None:
    """Logits of every new token equal those of a pass over the complete sequences."""
    case, lengths = row
    length, device = 40, torch.device("cpu")
    plain = random_model(CASES[case], length)
    cached = copy.deepcopy(plain)
    cached.use_cache(length)
    tokens = torch.randint(CASES[case].vocab_size, (2, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = plain(tokens)
        now = list(lengths)
        padded = tokens[:, : max(now)].clone()
        for row, end in enumerate(now):
            padded[row, end:] = 0
        got = cached(padded, cached=CachedPass(now, is_first=True, device=device))
        while max(now) < length:
            for row, end in enumerate(now):
                worst = (got[row, 0] - wanted[row, end - 1]).abs().max() / wanted.abs().max()
                assert worst < 1e-5, f"row {row}, position {end - 1}: {worst:.1e}"
            new = torch.stack([tokens[row, end] for row, end in enumerate(now)]).unsqueeze(1)
            now = [end + 1 for end in now]
            got = cached(new, cached=CachedPass(now, is_first=False, device=device))
