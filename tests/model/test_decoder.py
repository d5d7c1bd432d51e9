"""Parts of a decoder, and its causal mask."""

from __future__ import annotations

import torch
from families_table import LLAMAS, random_model

from harness.model.decoder import Decoder


def test_a_part_continues_where_the_other_ends() -> None:
    """Two halves of a model, each built alone, compute what the complete model computes."""
    config = LLAMAS["llama_grouped_query"]
    complete = random_model(config, 16)
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    halves = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
    x = tokens
    for modules in halves:
        part = Decoder(config, 16, modules)
        part.load_state_dict(
            {name: value for name, value in complete.state_dict().items() if name in part.state_dict()}
        )
        x = part(x)
    torch.testing.assert_close(x, complete(tokens), rtol=0, atol=0)


def test_no_position_sees_a_later_one() -> None:
    config = LLAMAS["llama_grouped_query"]
    model = random_model(config, 16)
    tokens = torch.randint(96, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 96
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0
