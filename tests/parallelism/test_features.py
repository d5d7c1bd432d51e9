"""What a layout could change, on the layouts that split it, against one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from layouts import layout, require_parity

from harness.optimizer import assignment
from harness.tools.parity import parity

DEEPSEEK, QWEN = "model=deepseek_v3_debug", "model=qwen3_moe_debug"
# Heads of another width have another score scale, which ring attention applies in its own way.
MUP = ("model.mup.base_dim=16", "model.mup.base_widths={head_dim:4}")
# A learning rate at which updates matter, from the first step on.
MUON = ("optimizer=muon", "schedule.warmup_steps=1", "optimizer.lr=0.01")
# DeepSeek V3 has every MoE feature except biases; the others run on layouts that split what is special about
# them: heads with sinks and norms, windows, experts with biases.
TABLE: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "deepseek_v3": (
        (DEEPSEEK,),
        ["ep_accumulate", "tp_experts_plain", "fsdp_cp_ep", "fsdp_ep_compiled_recompute_op"],
    ),
    "deepseek_v2": (("model=deepseek_v2_debug",), ["fsdp_tp_ep"]),
    "qwen3": ((QWEN,), ["cp_ep"]),
    "gpt_oss": (("model=gpt_oss_debug",), ["tp_experts", "fsdp_tp_ep_experts"]),
    "llama4": (("model=llama4_debug",), ["fsdp_tp_ep"]),
    # A rank's part of 60 positions is not a multiple of the 8 experts.
    "forced_balance": ((QWEN, "model.moe.force_balance=true", "training.seq_len=60"), ["cp"]),
    "mup": (MUP, ["cp", "tp_plain_chunked_loss"]),
    "mup_experts": ((DEEPSEEK, "model.mup.base_dim=16"), ["fsdp_tp_ep"]),
    "mup_muon": ((DEEPSEEK, "model.mup.base_dim=16", "optimizer=muon"), ["fsdp_ep_pp"]),
    "mtp": ((DEEPSEEK, "model.mtp.depth=1"), ["cp_ulysses"]),
    "mtp_tied": ((DEEPSEEK, "model.mtp.depth=1", "model.tied_embeddings=true"), ["fsdp_tp"]),
    # Shards by rows and columns, strided shards, uneven ones, replicas, host memory, and stages.
    "muon": (MUON, ["fsdp_uneven", "hsdp_tp", "fsdp_offload", "fsdp_tp_pp"]),
    "muon_experts": ((*MUON, QWEN), ["fsdp_tp_ep_experts", "ep_hsdp"]),
}
ROWS = [(feature, name) for feature, (_, names) in TABLE.items() for name in names]


def in_many_rounds(job_json: str, steps: int, resume_in: str | None = None) -> parity.Trace:
    """Train with rounds of one matrix each, so that the exchanges of Muon overlap."""
    with mock.patch.object(assignment, "ROUND_VALUES", 1):
        return parity.trace(job_json, steps, resume_in)


OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"steps": 3},
    "muon_experts": {"steps": 3, "run": in_many_rounds},
}


@pytest.mark.parametrize("case", ROWS, ids="-".join)
def test_layout_agrees_with_one_process(pool, case):
    feature, name = case
    require_parity(pool, name, layout(name, *TABLE[feature][0]), **OPTIONS.get(feature, {}))
