"""Compares the layouts of transformers' own models with one process, for small random models.

    python experiments/measure/transformers_layouts.py                    # all
    python experiments/measure/transformers_layouts.py llama gpt_oss      # these types of config.json

Prints a row of a Markdown table for each type: how many of the layouts in conf/parity.yaml agree, the
largest relative difference of a gradient in those, and what the others say. Needs accelerate. A type
takes about half a minute on two cores.
"""

import sys
import tempfile

import torch
import transformers
import yaml

from harness.compose.paths import conf_dir
from harness.launch.pool import RankFailed, RankPool
from harness.tools.parity.foreign import Batch, Layout, compare, trace
from harness.tools.parity.parity import TOLERANCES

TYPES = yaml.safe_load("""
[cohere2, deepseek_v2, deepseek_v3, dots1, ernie4_5_moe, gemma2, gemma3_text, glm4, glm4_moe, gpt_oss,
granite, llama, llama4_text, minimax, mistral, mixtral, olmo2, olmo3, olmoe, phi3, qwen2, qwen2_moe, qwen3,
qwen3_moe, qwen3_next, smollm3]
""")
# Each type takes those that it has.
FIELDS = yaml.safe_load("""
{vocab_size: 256, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, max_position_embeddings: 128,
num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, sliding_window: 16, query_pre_attn_scalar: 16,
pad_token_id: 0, bos_token_id: 1, eos_token_id: 2, attention_chunk_size: 16, intermediate_size_mlp: 128,
num_experts: 8, n_routed_experts: 8, num_local_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32,
shared_expert_intermediate_size: 32, n_shared_experts: 1, n_group: 2, topk_group: 1, first_k_dense_replace: 1,
linear_key_head_dim: 16, linear_value_head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 4,
q_lora_rank: 32, kv_lora_rank: 32, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16}
""")
OTHER = {
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
    # A layer of each kind.
    "llama4_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
}
BATCH = Batch(rows=8, length=64, seed=0)


def save_small(kind: str, folder: str) -> None:
    """Save a small model with random weights."""
    torch.manual_seed(0)
    default = transformers.AutoConfig.for_model(kind)
    fields = FIELDS | OTHER.get(kind, {})
    known = {name: value for name, value in fields.items() if hasattr(default, name)}
    config = transformers.AutoConfig.for_model(kind, **known)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def row(pool: RankPool, kind: str, layouts: dict[str, Layout]) -> str:
    """Compare the layouts of a type, and describe them in cells of a table."""
    agree = []
    others = []
    with tempfile.TemporaryDirectory() as folder:
        save_small(kind, folder)
        [reference] = pool.run(1, trace, folder, {}, BATCH)
        assert isinstance(reference, dict), reference
        for name, layout in layouts.items():
            try:
                found = pool.run(layout.ranks, trace, folder, layout.sizes, BATCH)
            except RankFailed as error:
                others.append(f"{name}: {str(error).strip().splitlines()[-1][:110]}")
                continue
            if any(isinstance(each, str) for each in found):
                continue  # no plan
            verdict = compare(name, layout, reference, found, TOLERANCES["float32"])
            if verdict.passed:
                agree.append(verdict.gradient)
            else:
                others.append(f"{name}: {verdict.first_wrong}")
    cells = [kind, f"{len(agree)} of {len(agree) + len(others)}", f"{max(agree, default=0):.1e}"]
    return " | ".join([*cells, "; ".join(others)])


def main() -> None:
    transformers.logging.set_verbosity_error()
    with open(f"{conf_dir()}/parity.yaml") as file:
        matrix = yaml.safe_load(file)["parity"]["transformers_matrix"]
    layouts = {name: Layout.read(name, text) for name, text in matrix.items()}
    with RankPool(4) as pool:
        for kind in sys.argv[1:] or TYPES:
            print(f"| {row(pool, kind, layouts)} |", flush=True)


if __name__ == "__main__":
    main()
