"""Attention backends, one module each.

A backend maps queries [B, T, H, D], keys [B, T, K, D] and values [B, T, K, E] to [B, T, H, E]; K
divides H, and each key head serves H / K query heads. Every position attends to itself and to
earlier positions within its ``AttentionSpan``, and only to its own document when documents are
masked. The model does not know how a sequence is split over ranks: parallelism replaces these
modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from harness.config.model import AttentionSpan
from harness.data.batch import PADDING
from harness.util.errors import ConfigError

# B: batch, T: sequence, H: query heads, K: key and value heads, D: head width, E: head width of
# values


@dataclass(frozen=True)
class AttentionSpec:
    """The parameters of a layer's attention.

    Attributes:
        span: the positions that are attended to.
        scale: factor of the scores.
        has_sinks: whether every head has an attention sink.
        cap: soft cap of the scores, as in ``capped``; None: there is none.
        causal: whether positions attend to earlier ones only; else ``SdpaKernel`` without a mask.
    """

    span: AttentionSpan
    scale: float
    has_sinks: bool = False
    cap: float | None = None
    causal: bool = True

    def is_causal(self, length: int) -> bool:
        """Whether no window or chunk limits causal attention over ``length`` positions."""
        return self.span.most_reach(length) == length


def capped(x: Tensor, cap: float) -> Tensor:
    """Bound values smoothly by +-cap."""
    return cap * torch.tanh(x / cap)


class Positions(NamedTuple):
    """The keys of a pass and its queries, by default the last of them; a mask says who sees whom."""

    documents_BT: Tensor | None
    """The document number of each key, equal numbers contiguous; None: a sequence is one document."""
    batch: int
    length: int
    """Number of keys of a sequence."""
    device: torch.device
    first: int = 0
    """Position of the first query, if they are the last."""
    own_BT: Tensor | None = None
    """Positions of the queries, if they are not the last: ``pieces`` of equal length."""
    pieces: int = 1
    """Number of runs of consecutive positions in ``own_BT``."""

    def of_queries(self, begin: int, end: int) -> "Positions":
        """Of some queries only, by their numbers, with the keys that they may see."""
        if self.own_BT is not None:
            return self._replace(own_BT=self.own_BT[:, begin:end])
        length = self.first + end
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, :length]
        return self._replace(documents_BT=documents_BT, length=length, first=self.first + begin)

    @property
    def queries_BT(self) -> Tensor:
        """Positions of the queries of every sequence."""
        if self.own_BT is not None:
            return self.own_BT
        return torch.arange(self.first, self.length, device=self.device).expand(self.batch, -1)

    def seen(self, span: AttentionSpan) -> Tensor:
        """Which keys each query sees within ``span``, bool [B or 1, queries, keys]."""
        own_BT = self.queries_BT
        if self.documents_BT is None:
            own_BT = own_BT[:1]
        seen = sees(span, own_BT.unsqueeze(2), torch.arange(self.length, device=self.device))
        if self.documents_BT is not None:
            documents_BT = self.documents_BT.gather(1, own_BT)
            seen = seen & (documents_BT.unsqueeze(2) == self.documents_BT.unsqueeze(1))
        return seen


ALIGNED = 8
"""GPU kernels need widths that are multiples of this many 16-bit values."""


class Kernel(nn.Module, ABC):
    """One backend. Layers of equal ``reach`` share one call of ``mask`` per pass."""

    def __init__(self, reach: AttentionSpec) -> None:
        super().__init__()
        self.spec = reach

    @abstractmethod
    def mask(self, positions: Positions) -> Any | None:
        """Make the mask for ``forward``; None: causal, without further limits."""

    @abstractmethod
    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; ``mask`` is the result of ``self.mask``."""


class SdpaKernel(Kernel):
    """torch's scaled_dot_product_attention, which chooses the device's fastest kernel.

    Flash kernels support the causal mask only; all others are dense, T x T bytes per sequence.
    """

    def mask(self, positions: Positions) -> Tensor | None:
        whole = positions.documents_BT is None
        if whole and self.spec.is_causal(positions.length) and not self.spec.has_sinks:
            return None
        # All positions attend to the sink, the last key.
        sinks = int(self.spec.has_sinks)
        return F.pad(positions.seen(self.spec.span), (0, sinks), value=True).unsqueeze(1)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if self.spec.cap is not None:
            return self._capped(q_BTHD, k_BTKD, v_BTKE, mask, self.spec.cap)
        width = v_BTKE.shape[-1]
        grouped = q_BTHD.shape[2] != k_BTKD.shape[2]
        if sinks_H is not None:
            q_BTHD, k_BTKD, v_BTKE = self._with_sink(q_BTHD, k_BTKD, v_BTKE, sinks_H)
        if q_BTHD.device.type == "cpu":
            # The CPU's flash kernel needs equal widths; the other kernel saves the full square of
            # scores.
            v_BTKE = widened(v_BTKE, q_BTHD.shape[-1])
        causal = mask is None and self.spec.causal
        if causal and q_BTHD.shape[1] < k_BTKD.shape[1]:
            # The last query sees all keys: torch's causal mask begins with the first query and key.
            if q_BTHD.device.type == "cuda" and q_BTHD.dtype != torch.float32:
                return self._flash_of_last(q_BTHD, k_BTKD, v_BTKE)
            mask = self._mask_of_last(q_BTHD, k_BTKD)
            causal = False
        memory_efficient = needs_memory_efficient(q_BTHD, k_BTKD, mask)
        if memory_efficient and grouped:
            # It has no grouped queries; torch would compute all scores, T x T for every head.
            k_BTKD, v_BTKE = (
                x.repeat_interleave(q_BTHD.shape[2] // x.shape[2], 2) for x in (k_BTKD, v_BTKE)
            )
            grouped = False
        with sdpa_kernel(MEMORY_EFFICIENT) if memory_efficient else nullcontext():
            out_BHTE = F.scaled_dot_product_attention(
                q_BTHD.transpose(1, 2),
                k_BTKD.transpose(1, 2),
                v_BTKE.transpose(1, 2),
                attn_mask=mask,
                is_causal=causal,
                scale=self.spec.scale,
                enable_gqa=grouped,
            )
        return out_BHTE.transpose(1, 2)[..., :width]

    def _capped(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: Tensor | None, cap: float
    ) -> Tensor:
        """Attention with a soft cap, which torch's kernels do not have: all scores are in memory."""
        q_BKGTD = q_BTHD.unflatten(2, (k_BTKD.shape[2], -1)).permute(0, 2, 3, 1, 4)
        k_BK1DS = k_BTKD.permute(0, 2, 3, 1).unsqueeze(2)
        scores_BKGTS = capped((q_BKGTD @ k_BK1DS).float() * self.spec.scale, cap)
        if mask is None:
            mask = self._mask_of_last(q_BTHD, k_BTKD)
        shares_BKGTS = scores_BKGTS.masked_fill(~mask.unsqueeze(-3), float("-inf")).softmax(-1)
        v_BK1SE = v_BTKE.transpose(1, 2).unsqueeze(2)
        out_BKGTE = shares_BKGTS.type_as(v_BTKE) @ v_BK1SE
        return out_BKGTE.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _flash_of_last(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor) -> Tensor:
        """Causal attention of the last queries, by the flash kernel, which aligns them with the last keys."""
        width = v_BTKE.shape[-1]
        aligned = -(-q_BTHD.shape[-1] // ALIGNED) * ALIGNED
        q, k, v = (widened(x, aligned).transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKE))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out_BHTE = flash(q, k, v, 0.0, True, scale=self.spec.scale)[0]
        return out_BHTE.transpose(1, 2)[..., :width]

    def _mask_of_last(self, q_BTHD: Tensor, k_BTKD: Tensor) -> Tensor:
        """Which keys the last queries see, bool [queries, keys]."""
        T = q_BTHD.shape[1]
        S = k_BTKD.shape[1]
        every = torch.ones(T, S, dtype=torch.bool, device=q_BTHD.device)
        return every.tril(S - T)

    def _with_sink(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, sinks_H: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append a key with value zero, whose score in each head is that head's sink.

        The score comes from an extra feature: the sink in the queries, 1 in that key and 0 in all
        others. So any kernel supports it, and the sink's gradient is that of a query.
        """
        B, _, K, D = k_BTKD.shape
        score_BTHD = (
            (sinks_H / self.spec.scale).to(q_BTHD.dtype)[:, None].expand(*q_BTHD.shape[:3], 1)
        )
        q_BTHD = F.pad(torch.cat((q_BTHD, score_BTHD), dim=-1), (0, ALIGNED - 1))
        sink_B1KD = F.pad(k_BTKD.new_ones(1), (D, ALIGNED - 1)).expand(B, 1, K, -1)
        k_BTKD = torch.cat((F.pad(k_BTKD, (0, ALIGNED)), sink_B1KD), dim=1)
        return q_BTHD, k_BTKD, F.pad(v_BTKE, (0, 0, 0, 0, 0, 1))


def widened(x: Tensor, width: int) -> Tensor:
    """Heads with zeros up to a width, for kernels that need aligned widths, or values as wide as keys."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x  # pad copies even if none is missing


MEMORY_EFFICIENT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Math is for what no other kernel supports."""


def needs_memory_efficient(q_BTHD: Tensor, k_BTKD: Tensor, mask: Tensor | None) -> bool:
    """Whether the memory-efficient kernel has to compute attention on a GPU.

    Flash and cuDNN have no float32. With a mask, cuDNN's gradient of queries can be NaN if half of
    its last tile of 128 keys is empty (github.com/pytorch/pytorch/issues/196678).
    """
    half_empty = mask is not None and 64 in (q_BTHD.shape[1] % 128, k_BTKD.shape[1] % 128)
    return q_BTHD.device.type == "cuda" and (q_BTHD.dtype == torch.float32 or half_empty)


class FlexKernel(Kernel):
    """FlexAttention (arXiv:2412.05496), which skips empty blocks of the mask.

    torch has no backward pass for it on CPUs.
    """

    def mask(self, positions: Positions) -> BlockMask:
        documents_BT, batch, length, device, first = positions[:5]
        if documents_BT is None:
            return _block_mask(self.spec.span, length, device, first)
        span = self.spec.span
        own_BT = positions.queries_BT

        def own_past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            position = own_BT[b, q]
            return sees(span, position, k) & (documents_BT[b, position] == documents_BT[b, k])

        sizes = batch, None, own_BT.shape[1], length
        return _on(device, create_block_mask)(own_past, *sizes, device=device)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: BlockMask | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        out_BHTE, aux = _on(q_BTHD.device, flex_attention)(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            score_mod=None if self.spec.cap is None else _capping(self.spec.cap),
            block_mask=mask,
            scale=self.spec.scale,
            enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
            return_aux=AuxRequest(lse=True),
        )
        if sinks_H is not None:
            # A softmax with the sink's score in its sum is the softmax without it, times this.
            left_BHT = torch.sigmoid(aux.lse - sinks_H[:, None])
            out_BHTE = out_BHTE * left_BHT.unsqueeze(-1).to(out_BHTE.dtype)
        return out_BHTE.transpose(1, 2)


@lru_cache
def _capping(cap: float) -> Callable[..., Tensor]:
    """The change of scores that FlexAttention makes for a soft cap."""

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return capped(score, cap)

    return change


class VarlenKernel(Kernel):
    """Flash attention over concatenated documents; CUDA and 16-bit formats only, no sinks and no cap."""

    def mask(self, positions: Positions) -> list[tuple[Tensor, Tensor]] | None:
        """For each piece, starts of documents in its flattened queries and in the keys, int32.

        The numbers of queries and keys are last. Chunks count as documents, and so do keys after a
        piece. A document without queries in a piece has none there.
        """
        documents_BT, batch, length, device = positions[:4]
        chunk = self.spec.span.chunk
        if documents_BT is None and (chunk is None or chunk >= length):
            return None
        if documents_BT is None:
            documents_BT = torch.zeros(batch, length, dtype=torch.int64, device=device)
        begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        if chunk is not None:
            begins_BT[:, ::chunk] = True
        # nonzero() waits for the device to know the number: the only wait in a pass.
        begins = begins_BT.flatten().nonzero().flatten()
        starts = F.pad(begins, (0, 1), value=documents_BT.numel())
        masks = []
        for own_BT in positions.queries_BT.chunk(positions.pieces, dim=1):
            queries = own_BT.shape[1]
            keys = starts
            if positions.own_BT is not None:
                # Flash attention aligns the last query of a document with its last key.
                ends = own_BT[:, -1] + 1 + torch.arange(batch, device=device) * length
                keys = torch.cat((starts, ends)).sort().values
            rows = keys // length
            first = F.pad(own_BT[:, 0], (0, 1))[rows]
            within = (keys % length - first).clamp(0, queries)
            masks.append(((rows * queries + within).int(), keys.int()))
        return masks

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: list[tuple[Tensor, Tensor]] | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        # Imported here because it needs flash attention, which not every build of torch has.
        from torch.nn.attention.varlen import varlen_attn

        assert sinks_H is None, "flash attention has no sinks: such jobs are refused"
        B, T, _, _ = q_BTHD.shape
        S = k_BTKD.shape[1]
        if mask is None:
            numbers = torch.arange(B + 1, dtype=torch.int32, device=q_BTHD.device)
            mask = [(numbers * T, numbers * S)]
        width = v_BTKE.shape[-1]
        v_BTKE = widened(v_BTKE, q_BTHD.shape[-1])
        k_BTKD, v_BTKE = (x.flatten(0, 1) for x in (k_BTKD, v_BTKE))
        if len(mask) > 1:
            # Gradients have the strides of keys and values, and one for each piece exists.
            k_BTKD, v_BTKE = (x.contiguous() for x in (k_BTKD, v_BTKE))
        found = [
            varlen_attn(
                q.flatten(0, 1),
                k_BTKD,
                v_BTKE,
                *offsets,
                # Upper bounds of documents' lengths; the exact maximum would need to wait for the
                # device.
                q.shape[1],
                S,
                scale=self.spec.scale,
                window_size=(-1 if self.spec.span.window is None else self.spec.span.window - 1, 0),
                enable_gqa=True,
            ).unflatten(0, (B, -1))  # type: ignore[union-attr]
            for q, offsets in zip(q_BTHD.chunk(len(mask), dim=1), mask, strict=True)
        ]
        out = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return out[..., :width]


def use_flash(name: str, device: torch.device) -> None:
    """Have torch run FlashAttention-3 or 4 where it would run its own, and in place of cuDNN's attention."""
    package, majors = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}[
        name
    ]
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    if major not in majors:
        rule = f"runs on GPUs of compute capability {' and '.join(f'{each}.0' for each in majors)}"
        raise ConfigError("training.flash", name, f"{rule}, and this rank has none", ["default"])
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "training.flash", name, f"{package}: {error}", f"default, or install {package}"
        ) from None
    torch.backends.cuda.enable_cudnn_sdp(False)  # which sdpa prefers


def sees(span: AttentionSpan, q: Tensor, k: Tensor) -> Tensor:
    """Whether positions q attend to positions k within ``span``, ignoring document boundaries."""
    visible = q >= k
    if span.window is not None:
        visible = visible & (q - k < span.window)
    if span.chunk is not None:
        visible = visible & (q // span.chunk == k // span.chunk)
    return visible


LOGITS_AT_ONCE = 2**26
"""Scores in memory at once in ``largest_logits``: 128 MiB in 16-bit formats."""


def largest_logits(
    spec: AttentionSpec,
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    positions: Positions,
) -> Tensor:
    """Return the largest score of each query head, as softmax gets it, float32 [H]; -inf without a pair.

    Products are rounded to the format of queries and keys. Queries of padding do not count.
    """
    B, T, H, _ = q_BTHD.shape
    rows = max(1, LOGITS_AT_ONCE // (B * H * k_BSKD.shape[1]))
    q_BTKGD = q_BTHD.unflatten(2, (k_BSKD.shape[2], -1))
    largest = []
    for start in range(0, T, rows):
        those = positions.of_queries(start, min(start + rows, T))
        logits = torch.einsum(
            "bqkgd,bskd->bkgqs", q_BTKGD[:, start : start + rows], k_BSKD[:, : those.length]
        )
        seen = those.seen(spec.span)
        if those.documents_BT is not None:
            seen = seen & (those.documents_BT != PADDING).unsqueeze(1)
        hidden = ~seen[:, None, None]
        largest.append(logits.masked_fill_(hidden, float("-inf")).amax((0, 3, 4)).flatten())
    return torch.stack(largest).amax(0).float() * spec.scale


@lru_cache(maxsize=16)
def _block_mask(
    span: AttentionSpan, length: int, device: torch.device, first: int = 0
) -> BlockMask:
    def past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(span, q + first, k)

    queries = length - first
    return _on(device, create_block_mask)(past, None, None, queries, length, device=device)


def _on(device: torch.device, function: Any) -> Any:
    """The function, compiled on a GPU: uncompiled it materializes the full square of every head."""
    return _compiled(function) if device.type == "cuda" else function


@lru_cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
