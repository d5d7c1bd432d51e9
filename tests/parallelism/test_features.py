"""What a layout could change, on the layouts that split it, against one process."""

from unittest import mock

import pytest
import yaml
from layouts import layout, require_parity

from harness.optimizer import assignment
from harness.tools.parity import parity

# DeepSeek V3 has every MoE feature except biases; the others run on layouts that split what is special
# about them: heads with sinks and norms, windows, experts with biases. With muP, heads of another width
# have another score scale, which ring attention applies in its own way. With Muon, updates matter from
# step 1 on; its layouts have shards by rows and columns, strided ones, uneven ones, replicas, host
# memory, and stages. A rank's part of 60 positions is not a multiple of the 8 experts.
TABLE = yaml.safe_load("""
deepseek_v3: [V3, [ep_accumulate, tp_experts_plain, fsdp_cp_ep, fsdp_ep_compiled_recompute_op]]
capacity: [V3, [ep_capacity_accumulate, fsdp_tp_ep_capacity, fsdp_ep_pp_zbv_capacity]]
capacity_recomputed: [V3, [fsdp_ep_capacity_recompute_op]]
capacity_compiled: [V3, [fsdp_ep_capacity_compiled_recompute_op, fsdp_tp_ep_capacity_compiled_recompute_full]]
capacity_in_context: [QWEN, [fsdp_cp_ep_capacity]]
deepseek_v2: [model=deepseek_v2_debug, [fsdp_tp_ep]]
qwen3: [QWEN, [cp_ep]]
gpt_oss: [model=gpt_oss_debug, [tp_experts, fsdp_tp_ep_experts, fsdp_tp_ep_experts_capacity]]
llama4: [model=llama4_debug, [fsdp_tp_ep, ep4_capacity]]
olmo3:
    ["model=olmo3_debug model.embedding_multiplier=3 model.residual_multiplier=0.5 model.logits_scaling=2
    model.logits_cap=5", [pp_zbv_chunked_loss, fsdp_tp_compiled_recompute_op]]
qwen3_next: [NEXT, [tp_experts_plain, fsdp_tp_ep, pp_zbv, tp_cp]]
qwen3_next_dense:
    ["NEXT model.moe.num_experts=0 model.moe.aux_loss_coeff=0 optimizer=muon model.n_layers=2
    model.layer_kinds=[delta,full]", [cp_gather_compiled_recompute_op]]
kimi_linear: [model=kimi_linear_debug, [tp_experts_plain, pp_zbv, tp_cp, fsdp_ep_compiled_recompute_op]]
forced_balance: [QWEN model.moe.force_balance=true training.seq_len=60, [cp]]
zipf: [V3 debug.routing=zipf training.seq_len=60, [fsdp_cp_ep, fsdp_ep_pp_zbv]]
one_hot: [QWEN debug.routing=one_hot, [fsdp_tp_ep_capacity]]
drifting: [QWEN debug.routing=drifting, [ep_accumulate, fsdp_tp_ep4]]
mup: ["model.mup.base_dim=16 model.mup.base_widths={head_dim:4}", [cp, tp_plain_chunked_loss]]
mup_experts: [V3 model.mup.base_dim=16, [fsdp_tp_ep]]
mup_muon: [V3 model.mup.base_dim=16 optimizer=muon, [fsdp_ep_pp]]
mtp: [V3 model.mtp.depth=1, [cp_ulysses]]
mtp_tied: [V3 model.mtp.depth=1 model.tied_embeddings=true, [fsdp_tp]]
muon: [MUON, [fsdp_uneven, hsdp_tp, fsdp_offload, fsdp_tp_pp]]
muon_experts: [MUON QWEN, [fsdp_tp_ep_experts, ep_hsdp]]
""")
WORDS = {
    "V3": "model=deepseek_v3_debug",
    "QWEN": "model=qwen3_moe_debug",
    "NEXT": "model=qwen3_next_debug",
    "MUON": "optimizer=muon schedule.warmup_steps=1 optimizer.lr=0.01",
}
# Half a minute each, most of it the compiler's, for what other compiled rows have too.
LONG = [
    ("deepseek_v3", "fsdp_ep_compiled_recompute_op"),
    ("capacity_compiled", "fsdp_ep_capacity_compiled_recompute_op"),
    ("olmo3", "fsdp_tp_compiled_recompute_op"),
]
ROWS = [
    pytest.param(
        feature,
        typed,
        name,
        marks=[pytest.mark.thorough] * ((feature, name) in LONG),
        id=f"{feature}-{name}",
    )
    for feature, (typed, names) in TABLE.items()
    for name in names
]


def in_many_rounds(job_json, steps, resume_in=None):
    """Train with rounds of one matrix each, so that the exchanges of Muon overlap."""
    with mock.patch.object(assignment, "ROUND_VALUES", 1):
        return parity.trace(job_json, steps, resume_in)


OPTIONS = {
    "muon": {"steps": 3},
    "muon_experts": {"steps": 3, "run": in_many_rounds},
}
# These change what a step computes, and save nothing of their own.
STATELESS = [
    *("capacity", "capacity_recomputed", "capacity_in_context", "forced_balance"),
    *("zipf", "one_hot", "drifting", "mup", "mup_experts", "mtp_tied"),
]


@pytest.mark.parametrize(("feature", "typed", "name"), ROWS)
def test_layout_agrees_with_one_process(pool, feature, typed, name):
    words = " ".join(WORDS.get(word, word) for word in typed.split())
    # As in test_parity.py, compiled rows do not resume.
    resume = feature not in STATELESS and "compiled" not in name
    options = {"resume": resume, **OPTIONS.get(feature, {})}
    require_parity(pool, name, layout(name, *words.split()), **options)
