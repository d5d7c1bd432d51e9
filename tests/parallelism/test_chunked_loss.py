"""Chunked loss: value and gradients against torch's loss, and memory."""

import pytest
import torch
import torch.nn.functional as F
from memory import Ledger
from waits import waits

from harness.data.batch import IGNORE_INDEX
from harness.model.kernels import capped
from harness.parallelism.loss import ChunkedLoss, TokenLoss, _add_product

ROWS, WIDTH, VOCABULARY = 48, 32, 1031


def made_up(dtype=torch.float32, rows=ROWS, vocabulary=VOCABULARY):
    """Activations [2, rows / 2, C], weight [V, C] and labels, a third of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    x_BTC = torch.randn(2, rows // 2, WIDTH, generator=generator)
    weight_VC = torch.randn(vocabulary, WIDTH, generator=generator) / WIDTH**0.5
    labels_BT = torch.randint(0, vocabulary, (2, rows // 2), generator=generator)
    labels_BT[torch.rand(2, rows // 2, generator=generator) < 1 / 3] = IGNORE_INDEX
    return x_BTC.to(dtype).requires_grad_(), weight_VC.to(dtype).requires_grad_(), labels_BT


def plain(x_BTC, weight_VC, labels_BT):
    loss = TokenLoss(len(weight_VC), None)
    loss.denominator = 17.0
    return loss(F.linear(x_BTC, weight_VC), labels_BT)


def chunked(x_BTC, weight_VC, labels_BT, chunks, compiled=None):
    loss = TokenLoss(len(weight_VC), None, compiled)
    loss.denominator = 17.0
    return ChunkedLoss(loss, chunks)(x_BTC, weight_VC, labels_BT)


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("chunks", [1, 5, 48, 1000])
@pytest.mark.parametrize("compiled", [None, "aot_eager"])
def test_equals_torch(chunks, compiled, valid):
    """Also without a single label."""
    x_BTC, weight_VC, labels_BT = made_up()
    if not valid:
        labels_BT.fill_(IGNORE_INDEX)
    expected = plain(x_BTC, weight_VC, labels_BT)
    expected_gradients = torch.autograd.grad(3 * expected, [x_BTC, weight_VC])
    found = chunked(x_BTC, weight_VC, labels_BT, chunks, compiled)
    gradients = torch.autograd.grad(3 * found, [x_BTC, weight_VC])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(
            chunked(x_BTC, weight_VC, labels_BT, chunks), expected, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("compiled", [None, "aot_eager"])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_gradient_of_the_z_loss(chunks, compiled, cap):
    """Against float64: the value is the cross entropy's, the gradient has that of log(Z) squared too."""
    x_BTC, weight_VC, labels_BT = made_up()
    exact_inputs = [t.detach().double().requires_grad_() for t in (x_BTC, weight_VC)]
    logits_NV = F.linear(*exact_inputs).flatten(0, 1)
    logits_NV = logits_NV if cap is None else capped(logits_NV, cap)
    labels_N = labels_BT.flatten()
    valid_N = labels_N != IGNORE_INDEX
    cross = F.cross_entropy(logits_NV, labels_N, reduction="sum", ignore_index=IGNORE_INDEX)
    z_loss = 0.3 * (logits_NV.logsumexp(-1).square() * valid_N).sum()
    expected = torch.autograd.grad((cross + z_loss) / 17, exact_inputs)
    loss = TokenLoss(VOCABULARY, None, compiled)
    loss.denominator = 17.0
    found = ChunkedLoss(loss, chunks, z_loss=0.3, cap=cap)(x_BTC, weight_VC, labels_BT)
    assert found.item() == pytest.approx(float(cross) / 17, rel=1e-6)
    gradients = torch.autograd.grad(found, [x_BTC, weight_VC])
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_it_is_as_accurate_as_the_plain_loss():
    """Both are compared with float64; torch's own chunked loss has an error of 1 to 3.5 % here."""
    x_BTC, weight_VC, labels_BT = made_up(torch.bfloat16, rows=512)
    exact_inputs = [t.detach().double().requires_grad_() for t in (x_BTC, weight_VC)]
    logits = F.linear(*exact_inputs).flatten(0, 1)
    exact = (
        F.cross_entropy(logits, labels_BT.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        / 17
    )
    exact_gradients = torch.autograd.grad(exact, exact_inputs)
    errors = []
    for loss in (plain(x_BTC, weight_VC, labels_BT), chunked(x_BTC, weight_VC, labels_BT, 8)):
        gradients = torch.autograd.grad(loss, [x_BTC, weight_VC])
        assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
        pairs = zip(gradients, exact_gradients, strict=True)
        errors.append([float((g.double() - e).norm() / e.norm()) for g, e in pairs])
    for plain_error, chunked_error in zip(*errors, strict=True):
        assert chunked_error < max(1.2 * plain_error, 5e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_chunks_are_not_rounded_to_bfloat16(device):
    x_BTC, _, _ = made_up(torch.bfloat16, rows=512)
    x_NC = x_BTC.detach().flatten(0, 1).to(device)
    found = torch.zeros(WIDTH, WIDTH, device=device)
    for piece in x_NC.chunk(8):
        _add_product(found, piece.T, piece)
    torch.testing.assert_close(
        found.double(), x_NC.double().T @ x_NC.double(), rtol=1e-5, atol=1e-4
    )


def test_a_weight_of_the_loss_is_not_rounded_to_bfloat16():
    """0.3 would be 0.3008, which scales every gradient by the same factor."""
    x_BTC, weight_VC, labels_BT = made_up(torch.bfloat16, rows=512)
    sums = []
    for weight in (1.0, 0.3):
        loss = weight * chunked(x_BTC, weight_VC, labels_BT, 8)
        sums.append(
            [g.double().norm() / weight for g in torch.autograd.grad(loss, [x_BTC, weight_VC])]
        )
    for plain_norm, weighted_norm in zip(*sums, strict=True):
        assert float(weighted_norm / plain_norm) == pytest.approx(1, abs=2e-4)


def test_memory_at_a_large_vocabulary_is_a_quarter_at_most():
    peaks = []
    for call in (plain, lambda *inputs: chunked(*inputs, 16)):
        inputs = made_up(rows=256, vocabulary=128_256)
        with Ledger() as ledger:
            call(*inputs).backward()
        peaks.append(ledger.peak)
    assert peaks[0] > 2 * 256 * 128_256 * 4, "the plain loss holds logits and their gradient"
    assert peaks[1] < peaks[0] / 4


def test_the_host_does_not_wait_for_it():
    """Although the denominator changes with every step."""
    loss = TokenLoss(VOCABULARY, None)
    loss.denominator = 17.0
    x_BTC, weight_VC, labels_BT = (tensor.detach().to("meta") for tensor in made_up())
    with waits() as found:
        ChunkedLoss(loss, 4)(
            x_BTC.requires_grad_(), weight_VC.requires_grad_(), labels_BT
        ).backward()
    assert x_BTC.grad is not None
    assert found == []
