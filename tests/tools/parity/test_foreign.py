"""transformers' own layouts against one process."""

from unittest import mock

import pytest
import transformers

from harness.tools.parity.foreign import Batch, Layout, compare, trace
from harness.tools.parity.parity import TOLERANCES

CONFIG = transformers.Qwen3MoeConfig
BATCH = Batch(rows=8, length=32, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small mixture with norms of heads, whose gradients tensor parallel ranks add up."""
    path = str(tmp_path_factory.mktemp("foreign"))
    config = CONFIG(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def verdict_of(pool, folder, text, run=trace):
    layout = Layout.read("here", text)
    [reference] = pool.run(1, trace, folder, {}, BATCH)
    found = pool.run(layout.ranks, run, folder, layout.sizes, BATCH)
    return compare("here", layout, reference, found, TOLERANCES["float32"])


@pytest.mark.parametrize("text", ["fsdp_size=2 tp_size=2", "fsdp_size=2 ep_size=2"])
def test_layouts_agree(pool, folder, text):
    verdict = verdict_of(pool, folder, text)
    assert verdict.passed and 0 < verdict.gradient < 1e-5, verdict


def without_a_rule(*arguments):
    """Trace with a plan in which no rank adds up what the heads of others give to the norm."""
    plan = {
        name: style for name, style in CONFIG.base_model_tp_plan.items() if "q_norm" not in name
    }
    with mock.patch.object(CONFIG, "base_model_tp_plan", plan):
        return trace(*arguments)


def test_a_missing_rule_is_found(pool, folder):
    verdict = verdict_of(pool, folder, "tp_size=2", without_a_rule)
    first = "gradient of model.layers.1.self_attn.q_norm.weight, relative difference"
    assert not verdict.passed and verdict.first_wrong.startswith(first), verdict


def test_layouts_without_a_plan_are_refused(pool, folder):
    """A row of the table says what transformers says."""
    found = pool.run(2, without_experts, folder, {"fsdp_size": 2, "ep_size": 2}, BATCH)
    assert all("no `ep_plan`" in each for each in found)


def without_experts(*arguments):
    with mock.patch.object(CONFIG, "base_model_ep_plan", {}):
        return trace(*arguments)
