"""Gathered keys in float64: losses and gradients of split sequences are those of one process to 1e-12.

No job computes in float64. Here what casts to float32 keeps doubles as they are. The rotation's table stays
float32: its numbers are the same on all ranks.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from cases import texts
from jobs import tiny
from torch import Tensor

from harness.config.precision import PrecisionConfig
from harness.parallelism import clip
from harness.tools.parity.first_wrong import full_gradients, start
from harness.tools.parity.parity import single_process

STEPS = 3
MOST = 1e-12
DOUBLES = PrecisionConfig("float64", "float64", "float64")
CHAT = (
    "data=chat data.paths=[experiments/chat/conversations.jsonl] data.chat_template=plain "
    "tokenizer=python_2k model.vocab_size=2048"
)
narrow = Tensor.float


def kept(tensor):
    return tensor if tensor.dtype == torch.float64 else narrow(tensor)


def squares_of(tensors):
    return torch.stack([tensor.square().sum() for tensor in tensors])


def trained(job_json):
    """Loss, gradient norm and gradients of some steps."""
    found = []
    with patch.object(Tensor, "float", kept), patch.object(clip, "squares_of", squares_of):
        engine, loader = start(job_json)
        for _ in range(STEPS):
            outcome = engine.gradients(loader.next())
            found.append((outcome.loss, outcome.grad_norm, full_gradients(engine)))
            engine.update(outcome.norm)
    return found


@pytest.mark.parametrize(
    ("cp", "typed"),
    # Windows and sinks, also on more ranks than key heads; chunks; latent attention; norms of all heads,
    # another rotation of local layers and soft caps, with tensor parallel; documents.
    texts(f"""
        2  model=gpt_oss_debug
        3  model=gpt_oss_debug model.moe.num_experts=6
        8  model=gpt_oss_debug model.n_kv_heads=2
        3  model=mistral_debug parallelism.cp_load_balance=false
        2  model=llama4_debug
        4  model=deepseek_v3_debug
        2  model=olmo3_debug parallelism.tp=2
        2  model=gemma3_debug parallelism.tp=2 model.attention.score_cap=5 model.logits_cap=2
        4  {CHAT}
        3  {CHAT} model=qwen3_next_debug model.moe.num_experts=6
        2  {CHAT} model=kimi_linear_debug parallelism.tp=2
    """),
)
def test_gathered_keys_are_exact(pool, cp, typed):
    job = tiny(
        *typed.split(),
        f"parallelism.cp={cp}",
        "parallelism.cp_method=gather",
        "training.seq_len=96",
        "model.max_seq_len=96",
    )
    traces = []
    for each in (single_process(job), job):
        optimizer = replace(each.optimizer, state_dtype="float64")
        in_float64 = replace(each, precision=DOUBLES, optimizer=optimizer)
        traces.append(pool.run(each.world_size, trained, in_float64.to_json()))
    [whole], ranks = traces
    for rank in ranks:
        for (loss, norm, gradients), (own_loss, own_norm, own) in zip(whole, rank, strict=True):
            assert own_loss == pytest.approx(loss, rel=MOST, abs=0)
            assert own_norm == pytest.approx(norm, rel=MOST, abs=0)
            for name, gradient in gradients.items():
                assert own[name].dtype == torch.float64
                assert (own[name] - gradient).norm() <= MOST * gradient.norm(), name
