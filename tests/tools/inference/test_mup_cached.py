"""muP's multipliers in generation: cached passes compute the logits of complete sequences."""

from __future__ import annotations

import copy

import pytest
import torch
from families_table import PLAIN, changed, random_model, set_fields

from harness.model.cache import CachedPass

CASES = {
    "grouped queries": set_fields(
        PLAIN, n_kv_heads=2, tied_embeddings=True, mup__base_dim=32, mup__base_widths={"head_dim": 4}
    ),
    "latents and experts": changed(
        "deepseek_v3_debug", mup__base_dim=16, mup__base_widths={"attention.qk_nope_head_dim": 4}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cached_logits(case: str) -> None:
    length, begin, device = 12, 7, torch.device("cpu")
    plain = random_model(CASES[case], length)
    assert plain.config.score_multiplier != 1 and plain.config.output_multiplier != 1
    cached = copy.deepcopy(plain)
    cached.use_cache(length)
    tokens = torch.randint(plain.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = plain(tokens)
        got = [cached(tokens[:, :begin], cached=CachedPass([begin] * 2, is_first=True, device=device))]
        for end in range(begin + 1, length + 1):
            new = tokens[:, end - 1 : end]
            got.append(cached(new, cached=CachedPass([end] * 2, is_first=False, device=device)))
    torch.testing.assert_close(torch.cat(got, 1), wanted[:, begin - 1 :], rtol=1e-4, atol=1e-4)
