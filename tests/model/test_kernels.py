"""Backends of attention, each against softmax(q k^T) v written out, document by document."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.model.kernels import FlexKernel, Kernel, SdpaKernel, VarlenKernel

B, T, H, K, D = 2, 12, 6, 2, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]])


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, heads, D, generator=generator) for heads in (H, K, K)]


def written_out(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Position by position: the softmax over the keys it may see."""
    rows = []
    for b in range(B):
        for t in range(T):
            first = 0 if documents is None else int((documents[b] == documents[b, t]).nonzero()[0])
            for h in range(H):
                keys, values = (x[b, first : t + 1, h * K // H] for x in (k, v))
                rows.append((keys @ q[b, t, h] / math.sqrt(D)).softmax(0) @ values)
    return torch.stack(rows).view(B, T, H, D)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", [SdpaKernel(), FlexKernel()], ids=["sdpa", "flex"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_output(kernel: Kernel, documents: Tensor | None) -> None:
    q, k, v = tensors()
    mask = None if documents is None else kernel.mask(documents)
    torch.testing.assert_close(kernel(q, k, v, mask), written_out(q, k, v, documents), rtol=1e-5, atol=1e-6)


def test_varlen_knows_where_documents_begin() -> None:
    starts = VarlenKernel().mask(DOCUMENTS)
    assert starts.tolist() == [0, 5, 6, 12, 13, 23, 24]
    assert starts.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", [SdpaKernel(), FlexKernel(), VarlenKernel()], ids=["sdpa", "flex", "varlen"]
)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_output_and_gradients_on_a_gpu(kernel: Kernel, documents: Tensor | None) -> None:
    """In bfloat16, the only format that all of them take, at widths and lengths that kernels are made for."""
    longer = None if documents is None else documents.repeat_interleave(32, dim=1)
    plain = [x.repeat_interleave(32, dim=1).repeat(1, 1, 1, 8) / 8 for x in tensors()]
    expected = [x.requires_grad_() for x in plain]
    reference = SdpaKernel()
    out = reference(*expected, None if longer is None else reference.mask(longer))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    found = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in plain]
    on_gpu = kernel(*found, None if longer is None else kernel.mask(longer.cuda()))
    (on_gpu * weights.cuda()).sum().backward()
    torch.testing.assert_close(on_gpu.cpu().float(), out, rtol=2e-2, atol=2e-2)
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert float((a.grad.cpu().float() - b.grad).norm() / b.grad.norm()) < 2e-2
