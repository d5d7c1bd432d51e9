"""Multi-token prediction: against the paper's formulas, on layouts, at sequence and document boundaries."""

import dataclasses

import pytest
import torch
from cases import words
from jobs import random_batch
from plain_llama import block, frequencies, hidden, norm

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.batch import IGNORE_INDEX, Batch
from harness.model.accounting import account
from harness.model.decoder import Decoder
from harness.model.spec import parameter_shapes
from harness.parallelism.execute import shift_by_one
from harness.precision.linears import sort_linears
from harness.train.engine import Engine

CPU = torch.device("cpu")
SMALL = words("""
    model=llama3_tiny model.n_layers=2 model.rope.scaling=none model.mtp.depth=1 data=synthetic
    tokenizer=bytes training.seq_len=32 training.global_batch_size=4 cluster.device=cpu
    model.mtp.loss_weight=0.7
""")
WEIGHT = 0.7
HEADS = 8


def job_of(*overrides):
    return compose_job([*SMALL, *overrides])


def by_the_paper(w, tokens, counted):
    """Losses of the next token and of the one after it (arXiv:2412.19437, equations 21 to 25).

    Args:
        w: parameters by name.
        tokens: [B, T + 1].
        counted: [B, T], which of tokens 1 to T are predicted.
    """
    table = w["tok_embeddings.weight"]
    head = w.get("output.weight", table)
    of_pairs = frequencies(500000.0, w["layers.0.attention.wq.weight"].shape[0] // HEADS)
    h = hidden(w, tokens[:, :-1], 2, of_pairs)

    def loss(stream, ahead):
        losses = (
            -(stream @ head.T)
            .log_softmax(-1)
            .gather(-1, tokens[:, ahead:].unsqueeze(-1))
            .squeeze(-1)
        )
        return losses[counted[:, ahead - 1 :]].sum() / counted.sum()

    # Positions i of T - 1: those for which tokens i + 1 and i + 2 exist.
    first = norm(h[:, :-1], w["mtp.hidden_norm.weight"])
    second = norm(table[tokens[:, 1:-1]], w["mtp.embedding_norm.weight"])
    joined = torch.cat((second, first), -1) @ w["mtp.proj.weight"].T
    further = block(w, "mtp.block", joined, of_pairs)
    return loss(norm(h, w["norm.weight"]), 1), loss(norm(further, w["mtp.norm.weight"]), 2)


def with_other_weights(engine, generator):
    """Change the engine's weights from their initial values; return copies in float64."""
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if "norm" in name:  # initial norms are all equal, which would hide exchanged ones
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif name.startswith(("layers.", "mtp.")):
                parameter.mul_(5)
    return {name: p.detach().double().requires_grad_() for name, p in engine.named_parameters()}


def differences_from_the_paper(job_json):
    """Relative differences of both losses and of every gradient."""
    job, generator = Job.from_json(job_json), torch.Generator().manual_seed(0)
    engine = Engine(job, CPU)
    w = with_other_weights(engine, generator)
    tokens = torch.randint(256, (4, 33), generator=generator)
    counted = torch.rand(4, 32, generator=generator) > torch.tensor([[0.0], [0.2], [0.4], [0.9]])
    outcome = engine.gradients(
        Batch(tokens[:, :-1], tokens[:, 1:].masked_fill(~counted, IGNORE_INDEX))
    )
    main, further = by_the_paper(w, tokens, counted)
    (main + WEIGHT * further).backward()
    assert outcome.valid_tokens == counted.sum() and outcome.mtp_loss is not None
    found = {
        "loss": outcome.loss / main.item() - 1,
        "mtp_loss": outcome.mtp_loss / further.item() - 1,
    }
    for name, parameter in engine.named_parameters():
        gradient, expected = parameter.grad, w[name].grad
        assert gradient is not None and expected is not None, name
        found[name] = float((gradient - expected).norm() / expected.norm())
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.loss_chunks=3"],
        ["training.local_batch_size=2"],
        ["model.tied_embeddings=true"],
    ],
    ids=lambda overrides: "".join(overrides) or "plain",
)
def test_losses_and_gradients_are_the_papers(pool, overrides):
    job = job_of(*overrides)
    [differences] = pool.run(1, differences_from_the_paper, job.to_json())
    assert differences.keys() == {"loss", "mtp_loss", *parameter_shapes(job.model)}
    assert all(abs(difference) < 1e-5 for difference in differences.values()), differences


def test_labels_at_the_ends_of_sequences_and_documents():
    inputs, labels = torch.arange(10, 18).unsqueeze(0), torch.arange(11, 19).unsqueeze(0)
    later = shift_by_one(Batch(inputs, labels))
    ignored = IGNORE_INDEX
    assert later.inputs_BT[0, :-1].tolist() == [11, 12, 13, 14, 15, 16, 17]
    assert later.labels_BT.tolist() == [[12, 13, 14, 15, 16, 17, 18, ignored]]
    # Documents 10 to 12 and 13 to 17: no label of the second at a position of the first, and not its first.
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    cut = labels.clone()
    cut[0, 2] = ignored
    later = shift_by_one(Batch(inputs, cut, documents))
    assert later.labels_BT.tolist() == [[12, ignored, ignored, 15, 16, 17, 18, ignored]]
    # If the first token of a document is predicted, it is also the shifted label one position earlier.
    later = shift_by_one(Batch(inputs, labels, documents))
    assert later.labels_BT.tolist() == [[12, 13, ignored, 15, 16, 17, 18, ignored]]
    assert labels.tolist() == [[11, 12, 13, 14, 15, 16, 17, 18]]


def step_of(job_json, spoiled=False):
    """Both losses of a step, the validation loss of its batch, and what host and device find finite.

    If it is spoiled, multi-token prediction is NaN, and nothing else.
    """
    engine = Engine(Job.from_json(job_json), CPU)
    batch = random_batch(4, 32)
    if spoiled:
        dict(engine.named_parameters())["mtp.norm.weight"].data[0] = float("nan")
    found = engine.gradients(batch)
    ((total, valid),) = engine.evaluate(batch)
    return found.loss, found.mtp_loss, total / valid, found.is_finite, bool(found.norm.isfinite())


def test_validation_sees_the_next_token_only(pool):
    [(loss, further, validation, *_)] = pool.run(1, step_of, job_of().to_json())
    assert validation == pytest.approx(loss, rel=1e-5)
    assert further is not None and further != pytest.approx(loss, rel=1e-3)
    [without] = pool.run(1, step_of, job_of("model.mtp.depth=0").to_json())
    assert without == (loss, None, validation, True, True)


def test_a_nan_loss_is_detected_by_host_and_device(pool):
    [(*_, is_finite, norm_is_finite)] = pool.run(1, step_of, job_of().to_json(), True)
    assert not is_finite and not norm_is_finite


def with_depth(model, depth):
    return dataclasses.replace(model, mtp=dataclasses.replace(model.mtp, depth=depth))


def test_parameters_and_flops_are_counted():
    model = compose_job(["model=deepseek_v3_671b"]).model
    off, on = (account(with_depth(model, depth), 4096) for depth in (0, 1))
    # Layer 61 of the released checkpoint, without its copies of embedding and head, has 11.5B parameters.
    added = on.parameters - off.parameters
    with torch.device("meta"):
        built = Decoder(with_depth(model, 1), 16)
    assert built.mtp is not None
    assert sum(p.numel() for p in built.mtp.parameters()) == added
    assert added == pytest.approx(11.5e9, rel=0.01)
    assert list(parameter_shapes(with_depth(model, 1))) == [
        name for name, _ in built.named_parameters()
    ]
    multiplied = on.active_parameters - off.active_parameters + model.vocab_size * model.dim
    attention = 6 * model.n_heads * (model.head_width + model.value_width) * 4096
    assert on.flops_per_token_full - off.flops_per_token_full == 6 * multiplied + attention


def test_linears_of_the_block_multiply_in_float8():
    job = compose_job(
        words("""
            model=deepseek_v3_671b model.mtp.depth=1 precision=float8_tensorwise
            precision.emulate=true
        """),
    )
    linears = sort_linears(job.model, job.precision)
    assert "mtp.block.attention.wo" in linears.converted
    assert linears.kept["mtp.proj"] == "joins two streams"
