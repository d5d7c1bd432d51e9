"""FSDP on one rank, which casts and reduces in place."""

import pytest
import torch
from jobs import batches_of, full, tiny
from torch.func import functional_call

from harness.model.decoder import Decoder
from harness.parallelism.materialize import materialize
from harness.train.engine import Engine

TABLE, HEAD = "tok_embeddings.weight", "output.weight"
KEEPS_FLOAT32 = torch.__version__ >= "2.15"
"""Whether gradients of norms stay as a CPU computes them, and both of a tied table are summed in float32;
before, autograd rounded them to param_dtype."""


def gradients(job):
    """The second step's gradients: the engine's, and autograd's through casts of every weight."""
    cpu = torch.device("cpu")
    engine, model = Engine(job, cpu), Decoder(job.model, job.training.seq_len)
    materialize(model, job.training.seed, cpu, cpu)
    for each in engine.parts[0].modules():
        each.fused = None  # bit for bit: one product adds up gradients of its input otherwise
    loader = batches_of(job, engine.rows)
    engine.update(engine.gradients(loader.next()).norm)
    batch = loader.next()
    engine.optimizer.zero_grad()
    weights = {name: full(each).requires_grad_() for name, each in engine.named_parameters()}
    engine.gradients(batch)
    for inputs_BT, labels_BT in zip(
        *(each.split(job.local_batch_size) for each in (batch.inputs_BT, batch.labels_BT)),
        strict=True,
    ):
        cast = {name: each.detach().bfloat16().requires_grad_() for name, each in weights.items()}
        for each in cast.values() if KEEPS_FLOAT32 else ():
            each.grad_dtype = None
        if apart := job.model.tied_embeddings and KEEPS_FLOAT32:
            cast[HEAD] = cast[TABLE].detach().requires_grad_()
        engine.loss(
            functional_call(model, cast, inputs_BT, tie_weights=not apart), labels_BT
        ).backward()
        for name, each in weights.items():
            each.grad = cast[name].grad.float() + (0 if each.grad is None else each.grad)
        if apart:
            weights[TABLE].grad += cast[HEAD].grad
    found = {name: full(each.grad) for name, each in engine.named_parameters()}
    return found, {name: each.grad for name, each in weights.items()}


@pytest.mark.parametrize(
    "options",
    [
        "training.local_batch_size=4",
        "training.local_batch_size=1",
        "activation_checkpoint=full",
        "model.tied_embeddings=true",
    ],
)
def test_gradients_are_those_of_casts_bit_for_bit(pool, options):
    job = tiny(
        "precision=bf16",
        "training.max_norm=0",
        "training.seq_len=32",
        "training.global_batch_size=4",
        options,
    )
    [(found, expected)] = pool.run(1, gradients, job)
    assert job.fsdp_ranks == 1 and found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32 and gradient.equal(expected[name]), name
