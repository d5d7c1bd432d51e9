"""muP on layouts: multipliers, learning rates and score scales are those of one process."""

from __future__ import annotations

import pytest
from layouts import layout, require_parity
from tiers import rest_is_thorough

from harness.launch.pool import RankPool
from harness.tools.parity import parity

# Heads of another width have another score scale, which ring attention applies in its own way.
MUP = ("model.mup.base_dim=16", "model.mup.base_widths={head_dim:4}")
DENSE = [
    "cp",
    "cp_ulysses",
    "tp_plain_chunked_loss",
    "fsdp_tp_chunked_loss",
    "fsdp_tp_pp",
    "pp_zbv_chunked_loss",
    "hsdp",
]


@pytest.mark.parametrize("name", rest_is_thorough(DENSE, "cp", "tp_plain_chunked_loss"))
def test_layouts_agree(pool: RankPool, name: str) -> None:
    require_parity(pool, name, layout(name, *MUP))


@pytest.mark.parametrize("name", rest_is_thorough(["fsdp_tp_ep", "fsdp_ep_pp", "tp_experts"], "fsdp_tp_ep"))
@pytest.mark.parametrize(
    "optimizer", rest_is_thorough(["optimizer=adamw", "optimizer=muon"], "optimizer=adamw")
)
def test_layouts_of_experts_agree(pool: RankPool, name: str, optimizer: str) -> None:
    require_parity(pool, name, layout(name, "model=deepseek_v3_debug", "model.mup.base_dim=16", optimizer))


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "float8_rowwise precision.emulate=true"])
def test_low_precision_agrees(pool: RankPool, precision: str) -> None:
    job = layout("fsdp_tp", *MUP, *f"precision={precision}".split())
    tolerances = parity.TOLERANCES["float8" if "float8" in precision else "bfloat16"]
    require_parity(pool, "fsdp_tp", job, tolerances=tolerances)
