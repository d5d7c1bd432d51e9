"""What a layout could change, on the layouts that split it, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from layouts import EXPERT_MATRIX, MATRIX, layout, require_parity
from tiers import rest_is_thorough

from harness.launch.pool import RankPool
from harness.optimizer import assignment
from harness.tools.parity import parity

DEEPSEEK, QWEN = "model=deepseek_v3_debug", "model=qwen3_moe_debug"
# Heads of another width have another score scale, which ring attention applies in its own way.
MUP = ("model.mup.base_dim=16", "model.mup.base_widths={head_dim:4}")
MUP_OF_EXPERTS = (DEEPSEEK, "model.mup.base_dim=16")
# A learning rate at which updates matter, from the first step on.
MUON = ("optimizer=muon", "schedule.warmup_steps=1", "optimizer.lr=0.01")
# Overrides; the layouts, and how many of them, from the first on, run every time. The rest is thorough.
TABLE: dict[str, tuple[tuple[str, ...], Sequence[str], int]] = {
    # DeepSeek V3 has every MoE feature except biases, and runs on all layouts. The others run on layouts that
    # split their special features: heads with sinks and norms, windows, experts with biases.
    "deepseek_v3": (
        (DEEPSEEK,),
        [
            *("ep_accumulate", "tp_experts_plain", "fsdp_tp_ep_experts", "fsdp_cp_ep", "fsdp_ep_compiled"),
            *EXPERT_MATRIX,
        ],
        5,
    ),
    "deepseek_v2": (("model=deepseek_v2_debug",), ["fsdp_tp_ep", "tp_experts"], 1),
    "qwen3": ((QWEN,), ["cp_ep", "fsdp_tp_ep"], 1),
    "gpt_oss": (
        ("model=gpt_oss_debug",),
        ["tp_experts", "fsdp_tp_ep", "cp_ep", "fsdp_tp_ep_experts"],
        1,
    ),
    "llama4": (("model=llama4_debug",), ["fsdp_tp_ep", "cp_ep", "fsdp_ep_pp"], 1),
    # A rank's part of 60 positions is not a multiple of the 8 experts.
    "forced_balance": (
        (QWEN, "model.moe.force_balance=true", "training.seq_len=60"),
        ["cp", "fsdp_tp_ep", "tp_experts"],
        1,
    ),
    "mup": (
        MUP,
        [
            *("cp", "tp_plain_chunked_loss", "cp_ulysses", "fsdp_tp_chunked_loss", "fsdp_tp_pp"),
            *("pp_zbv_chunked_loss", "hsdp"),
        ],
        2,
    ),
    "mup_experts": (MUP_OF_EXPERTS, ["fsdp_tp_ep", "fsdp_ep_pp", "tp_experts"], 1),
    "mup_muon": ((*MUP_OF_EXPERTS, "optimizer=muon"), ["fsdp_tp_ep", "fsdp_ep_pp", "tp_experts"], 0),
    "mup_bf16": ((*MUP, "precision=bf16"), ["fsdp_tp"], 0),
    "mup_float8": ((*MUP, "precision=float8_rowwise", "precision.emulate=true"), ["fsdp_tp"], 0),
    "mtp": (
        (DEEPSEEK, "model.mtp.depth=1"),
        [
            *("cp_ulysses", "fsdp", "fsdp_tp", "fsdp_ep", "cp", "tp_experts", "tp_experts_plain", "tp_ep"),
            *("hsdp", "fsdp_accumulate", "fsdp_ep_recompute_full", "fsdp_ep_compiled"),
            *("fsdp_tp_compiled_recompute_full", "fsdp_tp_chunked_loss", "fsdp_tp_recompute_op"),
            "fsdp_reshard_always",
        ],
        1,
    ),
    "mtp_tied": ((DEEPSEEK, "model.mtp.depth=1", "model.tied_embeddings=true"), ["fsdp_tp"], 1),
    # Shards by rows and columns, strided shards, uneven ones, replicas, stages, and host memory.
    "muon": (MUON, ["fsdp_uneven", "hsdp_tp", "fsdp_offload", *MATRIX], 3),
    "muon_experts": ((*MUON, QWEN), ["fsdp_tp_ep_experts", "ep_hsdp", *EXPERT_MATRIX], 2),
}
ROWS = [(feature, name) for feature, (_, names, _) in TABLE.items() for name in dict.fromkeys(names)]
CORE = [(feature, name) for feature, (_, names, number) in TABLE.items() for name in names[:number]]


def in_many_rounds(job_json: str, steps: int) -> parity.Trace:
    """Train with rounds of one matrix each, so that the exchanges of Muon overlap."""
    with mock.patch.object(assignment, "ROUND_VALUES", 1):
        return parity.trace(job_json, steps)


OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"steps": 3},
    "muon_experts": {"steps": 3, "run": in_many_rounds},
    "mup_bf16": {"tolerances": parity.TOLERANCES["bfloat16"]},
    "mup_float8": {"tolerances": parity.TOLERANCES["float8"]},
}


@pytest.mark.parametrize("case", rest_is_thorough(ROWS, *CORE), ids="-".join)
def test_layout_agrees_with_one_process(pool: RankPool, case: tuple[str, str]) -> None:
    feature, name = case
    require_parity(pool, name, layout(name, *TABLE[feature][0]), **OPTIONS.get(feature, {}))
