"""How attention is computed once queries, keys and values are there: one module per backend.

A backend maps queries [B, T, H, D], keys [B, T, K, D] and values [B, T, K, E] to [B, T, H, E]; K divides H,
and each key head serves H / K query heads. Every position sees itself and those before it that its ``Span``
reaches, where documents are told apart only those of its own. The model does not know how a sequence is
shared between ranks: parallelism puts modules of its own in the place of these.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from harness.model.attention_config import Span

# B: batch, T: sequence, H: query heads, K: key and value heads, D: head width, E: head width of values


@dataclass(frozen=True)
class Reach:
    """What a layer's attention needs of a backend besides queries, keys and values.

    Attributes:
        span: which positions are attended to.
        scale: what scores are multiplied by.
        has_sinks: whether every head has a score that takes attention to nowhere.
    """

    span: Span
    scale: float
    has_sinks: bool = False

    def is_causal(self, length: int) -> bool:
        """Whether all positions up to its own are reached, in a sequence of so many."""
        return self.span.most_reach(length) == length


ALIGNED = 8
"""Kernels of GPUs want widths that are multiples of so many 16-bit numbers."""


class Kernel(nn.Module, ABC):
    """One backend. ``mask`` is asked once per pass for layers of equal reach, ``forward`` once per block."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self.reach = reach

    @abstractmethod
    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> Any | None:
        """What ``forward`` needs to know besides that attention is causal; None: nothing.

        Args:
            documents_BT: for every position the number of its document, equal numbers are neighbours; None:
                the sequence is one.
            batch: number of sequences.
            length: of each.
            device: where the mask is needed.
        """

    @abstractmethod
    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: Any | None, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Attends; ``mask`` is what the method of that name gave."""


class SdpaKernel(Kernel):
    """torch's scaled_dot_product_attention, which takes the fastest kernel of the device.

    Flash kernels know the causal mask only, so everything else is a dense mask, T x T bytes a sequence.
    """

    def mask(
        self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device
    ) -> Tensor | None:
        if documents_BT is None and self.reach.is_causal(length) and not self.reach.has_sinks:
            return None
        position = torch.arange(length, device=device)
        sees = _sees(self.reach.span, position.unsqueeze(1), position).unsqueeze(0)
        if documents_BT is not None:
            sees = sees & (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1))
        # All see the sink, which is the last key.
        return F.pad(sees, (0, int(self.reach.has_sinks)), value=True).unsqueeze(1)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        width, grouped = v_BTKE.shape[-1], q_BTHD.shape[2] != k_BTKD.shape[2]
        if sinks_H is not None:
            q_BTHD, k_BTKD, v_BTKE = self._with_sink(q_BTHD, k_BTKD, v_BTKE, sinks_H)
        if q_BTHD.device.type == "cpu":
            # Its flash kernel wants one width for all; the other keeps the whole square of scores.
            v_BTKE = F.pad(v_BTKE, (0, q_BTHD.shape[-1] - v_BTKE.shape[-1]))
        out_BHTE = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.reach.scale,
            enable_gqa=grouped,
        )
        return out_BHTE.transpose(1, 2)[..., :width]

    def _with_sink(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, sinks_H: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more key, whose value is nothing and whose score with each head is that head's sink.

        The score comes from one more feature: the sink in the queries, 1 in that key and 0 in all others. So
        the kernel knows nothing of it, and the sink's gradient is that of a query.
        """
        B, _, K, D = k_BTKD.shape
        score_BTHD = (sinks_H / self.reach.scale).to(q_BTHD.dtype)[:, None].expand(*q_BTHD.shape[:3], 1)
        q_BTHD = F.pad(torch.cat((q_BTHD, score_BTHD), dim=-1), (0, ALIGNED - 1))
        sink_B1KD = F.pad(k_BTKD.new_ones(1), (D, ALIGNED - 1)).expand(B, 1, K, -1)
        k_BTKD = torch.cat((F.pad(k_BTKD, (0, ALIGNED)), sink_B1KD), dim=1)
        return q_BTHD, k_BTKD, F.pad(v_BTKE, (0, 0, 0, 0, 0, 1))


class FlexKernel(Kernel):
    """FlexAttention (arXiv:2412.05496): blocks of the mask that are empty are not computed.

    torch has no backward pass of it on a CPU.
    """

    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> BlockMask:
        if documents_BT is None:
            return _block_mask(self.reach.span, length, device)
        span = self.reach.span

        def own_past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return _sees(span, q, k) & (documents_BT[b, q] == documents_BT[b, k])

        B = documents_BT.shape[0]
        return _on(device, create_block_mask)(own_past, B, None, length, length, device=device)

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
            block_mask=mask,
            scale=self.reach.scale,
            enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
            return_aux=AuxRequest(lse=True),
        )
        if sinks_H is not None:
            # What is left of a softmax when one more score joins its sum.
            left_BHT = torch.sigmoid(aux.lse - sinks_H[:, None])
            out_BHTE = out_BHTE * left_BHT.unsqueeze(-1).to(out_BHTE.dtype)
        return out_BHTE.transpose(1, 2)


class VarlenKernel(Kernel):
    """Flash attention over documents laid end to end; CUDA and 16-bit formats only, and no sinks."""

    def mask(
        self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device
    ) -> Tensor | None:
        """Where documents begin in the batch laid end to end, and its end, int32.

        A chunk is to attention what a document is.
        """
        chunk = self.reach.span.chunk
        if documents_BT is None and (chunk is None or chunk >= length):
            return None
        if documents_BT is None:
            documents_BT = torch.zeros(batch, length, dtype=torch.int64, device=device)
        begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        if chunk is not None:
            begins_BT[:, ::chunk] = True
        # The device has to say how many there are: the one wait in a pass.
        begins = begins_BT.flatten().nonzero().flatten()
        return F.pad(begins, (0, 1), value=documents_BT.numel()).int()

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        # Not at the top: it needs flash attention, which not every build of torch has.
        from torch.nn.attention.varlen import varlen_attn

        assert sinks_H is None, "flash attention knows no sinks: such jobs are refused"
        B, T, _, _ = q_BTHD.shape
        if mask is None:
            mask = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q_BTHD.device)
        width = v_BTKE.shape[-1]
        v_BTKE = F.pad(v_BTKE, (0, q_BTHD.shape[-1] - width))
        # Older versions share key heads without being told, and refuse the word.
        gqa: dict[str, Any] = (
            {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        )
        out = varlen_attn(
            q_BTHD.flatten(0, 1),
            k_BTKD.flatten(0, 1),
            v_BTKE.flatten(0, 1),
            mask,
            mask,
            # No document is longer than the sequence; the longest one would have to be asked for.
            T,
            T,
            scale=self.reach.scale,
            window_size=(-1 if self.reach.span.window is None else self.reach.span.window - 1, 0),
            **gqa,
        )
        assert isinstance(out, Tensor)
        return out.unflatten(0, (B, T))[..., :width]


KERNELS: dict[str, type[Kernel]] = {"sdpa": SdpaKernel, "flex": FlexKernel, "varlen": VarlenKernel}
"""By the names of training.attention."""


def _sees(span: Span, q: Tensor, k: Tensor) -> Tensor:
    """Whether positions q attend to positions k, documents aside."""
    sees = q >= k
    if span.window is not None:
        sees = sees & (q - k < span.window)
    if span.chunk is not None:
        sees = sees & (q // span.chunk == k // span.chunk)
    return sees


@lru_cache(maxsize=8)
def _block_mask(span: Span, length: int, device: torch.device) -> BlockMask:
    def past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _sees(span, q, k)

    return _on(device, create_block_mask)(past, None, None, length, length, device=device)


def _on(device: torch.device, function: Any) -> Any:
    """The function, compiled on a GPU: as it stands it makes the whole square of every head."""
    return _compiled(function) if device.type == "cuda" else function


@lru_cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
