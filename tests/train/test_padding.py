"""Padding is no token: losses, gradients, loads, biases and counts are those of a batch without it."""

import json
import random
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import yaml
from jobs import batches_of, full, tiny, train
from layouts import layout, reference, require_parity

from harness.data.batch import IGNORE_INDEX, PADDING, Batch
from harness.tools.parity.first_wrong import TOKENS
from harness.tools.parity.parity import single_process
from harness.train.engine import Engine
from harness.train.setup import process_group, set_up_process

CPU = torch.device("cpu")
LENGTHS = [20, 14]
"""Tokens of two conversations in a row."""
# GPT-OSS has biases of experts, and Llama 4 gives them scaled inputs.
MODELS = yaml.safe_load("""
mixtral: model=mixtral_debug
deepseek_v3: model=deepseek_v3_debug model.moe.aux_loss_coeff=0.1
qwen3_moe: model=qwen3_moe_debug model.moe.aux_loss_coeff=0.1 model.moe.z_loss_coeff=1 training.z_loss=1
gpt_oss: model=gpt_oss_debug
llama4: model=llama4_debug
compiled: model=deepseek_v3_debug compile=on compile.backend=aot_eager
""")


def batch_of(rows, length):
    """Two conversations in the first of some rows."""
    tokens = torch.randint(0, 256, (sum(LENGTHS) + 1,), generator=torch.Generator().manual_seed(0))
    columns = [torch.full((rows, length), value) for value in (7, IGNORE_INDEX, PADDING)]
    contents = tokens[:-1], tokens[1:], torch.repeat_interleave(torch.tensor(LENGTHS))
    for column, content in zip(columns, contents, strict=True):
        column[0, : len(content)] = content
    return Batch(*columns)


def stepped(rows, length, *overrides):
    """The loss and tokens of a step, and its gradients, loads and biases."""
    job = tiny(f"training.seq_len={length}", f"training.global_batch_size={rows}", *overrides)
    with process_group(job, CPU):
        engine = Engine(job, CPU)
        outcome = engine.gradients(batch_of(rows, length))
        tensors = {
            name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None
        }
        engine.update(outcome.norm)
        assert engine.balance.load_ME is not None
        tensors["loads"] = engine.balance.load_ME
        for layer, moe in engine.parts[0].mixtures.items():
            if moe.balance_bias is not None:
                tensors[f"layers.{layer}.moe.balance_bias"] = moe.balance_bias.clone()
    return outcome.loss, outcome.tokens, tensors


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_its_conversations_without_padding(name):
    loss, tokens, expected = stepped(1, sum(LENGTHS), *MODELS[name].split())
    padded_loss, padded_tokens, found = stepped(2, sum(LENGTHS) + 30, *MODELS[name].split())
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    assert padded_tokens == tokens == sum(LENGTHS)
    assert found.keys() == expected.keys() and "layers.3.moe.router.weight" in found
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-4, atol=1e-6, msg=tensor)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    file = tmp_path_factory.mktemp("padding") / "c.jsonl"
    generator, lines = random.Random(0), []
    for _ in range(40):
        question, answer = (
            "".join(generator.choices("abcdef ", k=generator.randint(1, 22))) for _ in range(2)
        )
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines))
    return file


def chat(file):
    data = ["data=chat", f"data.paths=[{file}]", "data.chat_template=plain", "model.vocab_size=258"]
    return [*data, f"data.cache_dir={file.parent}", "data.validation_fraction=0"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ep",
            "tp_ep",
            "fsdp_tp_ep_experts",
            "cp_ep",
            "fsdp_ep_pp",
            "fsdp_ep_compiled_recompute_op",
        ),
        *("ep_capacity", "fsdp_tp_ep_capacity", "ep_rows"),
    ],
)
def test_layouts_agree_on_conversations(pool, conversations, name):
    """Ranks have different numbers of tokens, of rows and of parts of a sequence."""
    model = ["model=deepseek_v3_debug", "model.moe.aux_loss_coeff=1"]
    job = layout(name, *chat(conversations), *model)
    require_parity(pool, name, job, resume=False)
    assert len({values[TOKENS] for values in reference(pool, job)}) > 1


def test_rows_and_throughput_count_no_padding(tmp_path, conversations):
    sizes = ("training.seq_len=64", "training.global_batch_size=4", "training.steps=5")
    done = train(tmp_path, "model=mixtral_debug", *sizes, *chat(conversations))
    loader = batches_of(done.job, range(4))
    batches = [loader.next() for _ in range(5)]
    counts = [int((batch.documents_BT != PADDING).sum()) for batch in batches]
    assert max(counts) < 4 * 64
    assert [row["tokens"] for row in done.rows] == list(accumulate(counts))
    assert {row["moe.dropped"] for row in done.rows} == {0}
    assert done.folder.row["window.window_tokens"] == sum(counts[3:])


def in_float64(job):
    """The loss, gradient norm and gradients of a step; what asks for float32 gets float64."""
    set_up_process(job)
    torch.set_default_dtype(torch.float64)
    wider = patch.object(torch.Tensor, "float", torch.Tensor.double)
    try:
        with wider, patch.object(torch, "float32", torch.float64):
            engine = Engine(job, CPU)
            outcome = engine.gradients(batches_of(job, engine.rows).next())
            gradients = {name: full(p.grad) for name, p in engine.named_parameters()}
            return outcome.loss, outcome.grad_norm, gradients
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=ep parallelism.dp_replicate=3",
        "parallelism=fsdp_ep_pp training.local_batch_size=3",
    ],
)
def test_empty_rows_change_nothing(pool, layout):
    losses = ("model.moe.aux_loss_coeff=1", "model.moe.z_loss_coeff=1", "training.z_loss=1")
    common = ("model=deepseek_v3_debug", *losses, "training.global_batch_size=7")
    job = tiny("training.seq_len=32", *common, *layout.split())
    [(*expected, gradients)] = pool.run(1, in_float64, single_process(job))
    for *found, own in pool.run(job.world_size, in_float64, job):
        assert found == pytest.approx(expected, rel=1e-12)
        for name, gradient in own.items():
            assert gradient.dtype == torch.float64
            assert (gradient - gradients[name]).norm() <= 1e-12 * gradients[name].norm(), name


def test_rows_and_throughput_count_no_empty_rows(tmp_path, capsys):
    sizes = ("training.seq_len=64", "training.global_batch_size=7", "training.local_batch_size=2")
    sizes = (*sizes, "training.steps=2", "metrics.console=plain")
    done = train(tmp_path, "model=mixtral_debug", *sizes)
    says = "7 sequences on 1 data-parallel rank x 8 rows: 12.5% of the rows are empty\n"
    assert says in capsys.readouterr().out
    assert [row["tokens"] for row in done.rows] == [7 * 64, 2 * 7 * 64]
    assert {row["moe.dropped"] for row in done.rows} == {0}
