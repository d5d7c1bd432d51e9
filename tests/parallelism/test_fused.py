"""Products of several linears at once: how many there are, and whose gradient is whose."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import texts
from jobs import batches_of, full, tiny
from layouts import layout

from harness.model.decoder import Decoder
from harness.parallelism.fused import fused_sets, lay_parameters
from harness.train.engine import Engine


def both(job):
    """How many products fewer fused sets have; products of forward and gradients, fused and apart."""
    engine = Engine(job, torch.device("cpu"))
    batch = batches_of(job, engine.rows).next()
    fewer = sum(len(linears) - 1 for _, linears in fused_sets(engine.parts[0]))
    results = []
    for apart in (False, True):
        for each in engine.parts[0].modules() if apart else ():
            each.fused = None
        with mock.patch.object(F, "linear", wraps=F.linear) as linear:
            engine.gradients(batch)
        gradients = {name: full(each.grad).clone() for name, each in engine.named_parameters()}
        results.append((linear.call_count, gradients))
        engine.optimizer.zero_grad()
    return fewer * job.accumulation_steps, *results


@pytest.mark.parametrize(
    ("name", "typed"),
    texts("""
        ""            ""
        ""            precision=bf16
        ""            model.attention.qkv_bias=true
        fsdp          model.attention.qk_norm=learned
        hsdp          precision=bf16
        tp            ""
        fsdp_tp       precision=bf16
        fsdp_offload  ""
        ""            model=deepseek_v3_debug
        fsdp_tp       model=deepseek_v2_debug
    """),
)
def test_gradients_of_one_product_are_those_of_single_linears(pool, name, typed):
    job = layout(name, *typed.split()) if name else tiny(*typed.split())
    close = {"rtol": 0.05, "atol": 1e-3} if "bf16" in typed else {"rtol": 1e-4, "atol": 1e-6}
    for fewer, fused, apart in pool.run(job.world_size, both, job):
        assert apart[0] - fused[0] == fewer >= job.model.n_layers
        for key, gradient in fused[1].items():
            torch.testing.assert_close(gradient, apart[1][key], **close, msg=key)


@pytest.mark.parametrize("change", ["weight", "hook"])
def test_a_linear_with_another_weight_or_a_hook_is_respected(change):
    part = Decoder(tiny().model, 64)
    part.materialize_buffers(torch.device("cpu"))
    tokens = torch.arange(64).view(1, 64)
    apart = part(tokens)
    lay_parameters(part)
    torch.testing.assert_close(part(tokens), apart)
    linear = part.blocks[0].attention.wv
    if change == "hook":
        linear.register_forward_hook(lambda _module, _inputs, output: output * 0)
    else:
        linear.weight.data = torch.zeros_like(linear.weight)
    changed = part(tokens)
    assert not changed.allclose(apart)
    part.blocks[0].attention.fused = None
    torch.testing.assert_close(part(tokens), changed)
