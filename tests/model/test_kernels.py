"""Backends of attention, each against softmax(q k^T) v written out, document by document."""

import pytest
import torch
from cases import rows

from harness.config.model import AttentionSpan
from harness.model import kernels
from harness.model.kernels import AttentionSpec, FlexKernel, Positions, SdpaKernel, VarlenKernel
from harness.util.errors import ConfigError

# E: width of values
B, T, H, K, D, E = 2, 12, 6, 2, 8, 6
DOCUMENTS = torch.tensor(
    [[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]]
)
SCALE = 0.3
REACHES = {
    "causal": AttentionSpec(AttentionSpan(), SCALE),
    "window": AttentionSpec(AttentionSpan(window=4), SCALE),
    "chunk": AttentionSpec(AttentionSpan(chunk=5), SCALE),
    "sinks": AttentionSpec(AttentionSpan(), SCALE, has_sinks=True),
    "window_sinks": AttentionSpec(AttentionSpan(window=3), SCALE, has_sinks=True),
}


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, E), (H,))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def written_out(q, k, v, sinks, reach, documents):
    """Position by position: the softmax over the keys it may see, and over the sink where there is one."""
    rows = []
    for b in range(B):
        for t in range(T):
            first = 0 if documents is None else int((documents[b] == documents[b, t]).nonzero()[0])
            if reach.span.window is not None:
                first = max(first, t + 1 - reach.span.window)
            if reach.span.chunk is not None:
                first = max(first, t // reach.span.chunk * reach.span.chunk)
            for h in range(H):
                keys, values = (x[b, first : t + 1, h * K // H] for x in (k, v))
                scores = keys @ q[b, t, h] * reach.scale
                if reach.has_sinks:
                    scores = torch.cat((scores, sinks[h : h + 1]))
                rows.append(scores.softmax(0)[: len(keys)] @ values)
    return torch.stack(rows).view(B, T, H, E)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", [SdpaKernel, FlexKernel], ids=["sdpa", "flex"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("name", REACHES)
def test_output(name, documents, kernel):
    reach, (q, k, v, sinks) = REACHES[name], tensors()
    built = kernel(reach)
    out = built(
        q,
        k,
        v,
        built.mask(Positions(documents, B, T, q.device)),
        sinks if reach.has_sinks else None,
    )
    torch.testing.assert_close(
        out, written_out(q, k, v, sinks, reach, documents), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("name", REACHES)
def test_gradients(name, memory_efficient, monkeypatch):
    monkeypatch.setattr(kernels, "needs_memory_efficient", lambda *_: memory_efficient)
    reach, leaves = REACHES[name], [x.requires_grad_() for x in tensors()]
    wanted = leaves if reach.has_sinks else leaves[:3]
    kernel, weights = (
        SdpaKernel(reach),
        torch.randn(B, T, H, E, generator=torch.Generator().manual_seed(1)),
    )
    q, k, v, sinks = leaves
    mask = kernel.mask(Positions(None, B, T, q.device))
    out = kernel(q, k, v, mask, sinks if reach.has_sinks else None)
    found = torch.autograd.grad((out * weights).sum(), wanted)
    expected = torch.autograd.grad((written_out(*leaves, reach, None) * weights).sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_only_what_is_not_causal_needs_a_mask():
    needed = {
        name: SdpaKernel(reach).mask(Positions(None, B, T, torch.device("cpu")))
        for name, reach in REACHES.items()
    }
    assert [name for name, mask in needed.items() if mask is None] == ["causal"]
    assert (
        SdpaKernel(AttentionSpec(AttentionSpan(window=T), SCALE)).mask(
            Positions(None, B, T, torch.device("cpu"))
        )
        is None
    )


def test_varlen_knows_where_documents_begin():
    begins = {
        "causal": (DOCUMENTS, [0, 5, 6, 12, 13, 23, 24]),
        "chunk": (None, [0, 5, 10, 12, 17, 22, 24]),
    }
    for name, (documents, wanted) in begins.items():
        [(queries, keys)] = VarlenKernel(REACHES[name]).mask(
            Positions(documents, B, T, DOCUMENTS.device)
        )
        assert queries.tolist() == keys.tolist() == wanted
        assert queries.dtype == keys.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", [SdpaKernel, FlexKernel, VarlenKernel], ids=["sdpa", "flex", "varlen"]
)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("name", REACHES)
def test_output_and_gradients_on_a_gpu(name, documents, kernel):
    """In bfloat16, the only format that all of them take, at widths and lengths that kernels are made for."""
    reach = REACHES[name]
    if kernel is VarlenKernel and reach.has_sinks:
        pytest.skip("flash attention knows no sinks")
    longer = None if documents is None else documents.repeat_interleave(32, dim=1)
    q, k, v, sinks = tensors()
    plain = [x.repeat_interleave(32, dim=1).repeat(1, 1, 1, 8) / 8 for x in (q, k, v)]
    plain = [*plain, sinks] if reach.has_sinks else plain
    expected = [x.requires_grad_() for x in plain]
    reference, length = SdpaKernel(reach), 32 * T
    out = reference(
        *expected[:3], reference.mask(Positions(longer, B, length, q.device)), *expected[3:]
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    found = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in plain]
    built = kernel(reach)
    mask = built.mask(
        Positions(None if longer is None else longer.cuda(), B, length, torch.device("cuda"))
    )
    on_gpu = built(*found[:3], mask, *found[3:])
    (on_gpu * weights.cuda()).sum().backward()
    torch.testing.assert_close(on_gpu.cpu().float(), out, rtol=2e-2, atol=2e-2)
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert float((a.grad.cpu().float() - b.grad).norm() / b.grad.norm()) < 2e-2


@pytest.mark.parametrize(
    ("device", "major", "rule"),
    rows("""
        cpu   9  'runs on GPUs of compute capability 9.0, and this rank has none; would work: default'
        cuda  8  'runs on GPUs of compute capability 9.0, and this rank has none; would work: default'
        cuda  9  'flash_attn_interface: No module named ''flash_attn_interface''; would work: default, or'
    """),
)
def test_flash_attention_that_is_not_there_is_refused(monkeypatch, device, major, rule):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    with pytest.raises(ConfigError, match=rule):
        kernels.use_flash("FA3", torch.device(device))
