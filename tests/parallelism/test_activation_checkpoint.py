"""Activation checkpointing: recomputed operations and saved memory; parity is tested by the matrix."""

import pytest
import torch
from cases import rows
from jobs import tiny
from memory import Ledger
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from harness.model.decoder import Decoder
from harness.parallelism.activation_checkpoint import apply_activation_checkpoint
from harness.parallelism.fused import lay_parameters
from harness.parallelism.mesh import build_mesh
from harness.parallelism.parallelize import build_model_parts
from harness.train.setup import process_group

CPU = torch.device("cpu")
BLOCKS = "training.seq_len=64", "model.n_layers=4"
MATMULS, ATTENTION = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"


def ledger_of(*overrides):
    """Bytes alive after forward, and the ledgers of the forward and of the backward pass."""
    job = tiny(*BLOCKS, *overrides)
    with process_group(job, CPU):
        [part] = build_model_parts(job, build_mesh(job.parallelism, CPU), CPU)
        tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
        with Ledger() as forward:
            loss = part(tokens).square().mean()
            kept = forward.live
        with Ledger() as backward:
            loss.backward()
    return kept, forward, backward


@pytest.fixture(scope="module")
def plain():
    return ledger_of("activation_checkpoint=none")


@pytest.mark.parametrize(
    ("mode", "recomputed_matmuls", "recomputed_attentions", "least", "most"),
    # Backward does not need the output of w2, the fifth matmul of a block: queries, keys and values are one.
    # Of five, selective_op saves every second, and attention.
    rows("""
        full                                                          16  4  0    0.2
        selective_layer                                               8   2  0.4  0.6
        selective_layer activation_checkpoint.every_nth_layer=3       8   2  0.4  0.6
        selective_op                                                  8   0  0.2  0.4
        selective_op activation_checkpoint.save_every_nth_matmul=1    0   0  0.4  0.7
        selective_op activation_checkpoint.save_every_nth_matmul=0    16  0  0.1  0.3
    """),
)
def test_what_is_recomputed_and_what_kept(
    plain, mode, recomputed_matmuls, recomputed_attentions, least, most
):
    kept, forward, backward = ledger_of(*f"activation_checkpoint={mode}".split())
    assert forward.calls[MATMULS] == plain[1].calls[MATMULS] == 4 * 5 + 1
    assert backward.calls[MATMULS] - plain[2].calls[MATMULS] == recomputed_matmuls
    assert backward.calls[ATTENTION] - plain[2].calls[ATTENTION] == recomputed_attentions
    assert least < kept / plain[0] < most


@pytest.mark.parametrize(
    ("mode", "recomputed_matmuls"), [("none", 0), ("full", 4), ("selective_op", 2)]
)
def test_a_split_backward_pass_recomputes_once(mode, recomputed_matmuls):
    """torch calls autograd for the inputs, and then for each group of parameters."""
    job = tiny(*BLOCKS, f"activation_checkpoint={mode}")
    torch.manual_seed(0)
    part, gradients = Decoder(job.model, 64, ["layers.1"]), []
    part.materialize_buffers(CPU)
    lay_parameters(part)
    x_BTC = torch.randn(2, 64, job.model.dim, requires_grad=True)
    for _ in range(2):
        loss = part(x_BTC).square().mean()
        with Ledger() as backward:
            _, groups = stage_backward_input([loss], None, [x_BTC], iter(part.parameters()))
            stage_backward_weight(iter(part.parameters()), groups)
        gradients.append([parameter.grad for parameter in part.parameters()])
        assert backward.calls[MATMULS] == 10 + recomputed_matmuls * (len(gradients) - 1)
        part.zero_grad()
        apply_activation_checkpoint(part, job.activation_checkpoint, splits_backward=True)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_memory_budget_moves_the_partitioner():
    def kept(budget):
        """Bytes that autograd saves; a ledger does not work with the compiler."""
        job = tiny(
            *BLOCKS,
            "model.n_layers=1",
            "compile=on",
            "compile.backend=aot_eager",
            "activation_checkpoint=memory_budget",
            f"activation_checkpoint.memory_budget={budget}",
        )
        saved = {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with process_group(job, CPU):
            [part] = build_model_parts(job, build_mesh(job.parallelism, CPU), CPU)
            tokens = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = part(tokens).square().mean()
            for parameter in part.parameters():
                saved.pop(parameter.untyped_storage().data_ptr(), None)
            loss.backward()
        return sum(saved.values())

    most, half, least = kept(1.0), kept(0.5), kept(0.0)
    assert least < half < most
    assert least < 0.4 * most


def test_selective_layers_do_not_depend_on_the_pipeline():
    """The second stage recomputes the same layers as the full model."""
    job = tiny(*BLOCKS, "activation_checkpoint=selective_layer")
    part = Decoder(job.model, 64, ["layers.1", "layers.2", "layers.3"])
    apply_activation_checkpoint(part, job.activation_checkpoint)
    assert [name for name, block in part.layers.items() if "forward" in vars(block)] == ["2"]
