"""How attention is computed once queries, keys and values are there: one module per backend.

A backend maps queries [B, T, H, D] and keys and values [B, T, K, D] to [B, T, H, D]; K divides H, and each
key head serves H / K query heads. Every position sees itself and those before it, where documents are told
apart only those of its own. The model does not know how a sequence is shared between ranks: parallelism puts
modules of its own in the place of these.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# B: batch, T: sequence, H: query heads, K: key and value heads, D: head width


class Kernel(nn.Module, ABC):
    """One backend. ``mask`` is asked once per pass, ``forward`` once per block."""

    @abstractmethod
    def mask(self, documents_BT: Tensor) -> Any:
        """What ``forward`` needs to know of the documents.

        Args:
            documents_BT: for every position the number of its document; equal numbers are neighbours.
        """

    @abstractmethod
    def forward(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask: Any | None) -> Tensor:
        """Attends; without a mask the whole sequence is one document."""


class SdpaKernel(Kernel):
    """torch's scaled_dot_product_attention, which takes the fastest kernel of the device.

    Flash kernels know the causal mask only, so documents are a dense mask, T x T bytes a sequence.
    """

    def mask(self, documents_BT: Tensor) -> Tensor:
        same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
        return same_BTT.tril().unsqueeze(1)

    def forward(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask: Tensor | None) -> Tensor:
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
        )
        return out_BHTD.transpose(1, 2)


class FlexKernel(Kernel):
    """FlexAttention (arXiv:2412.05496): blocks of the mask that are empty are not computed.

    torch has no backward pass of it on a CPU.
    """

    def mask(self, documents_BT: Tensor) -> BlockMask:
        def own_past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents_BT[b, q] == documents_BT[b, k])

        (B, T), device = documents_BT.shape, documents_BT.device
        return _on(device, create_block_mask)(own_past, B, None, T, T, device=device)

    def forward(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask: BlockMask | None) -> Tensor:
        if mask is None:
            mask = _causal(q_BTHD.shape[1], q_BTHD.device)
        out_BHTD = _on(q_BTHD.device, flex_attention)(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKD.transpose(1, 2),
            block_mask=mask,
            enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
        )
        return out_BHTD.transpose(1, 2)


class VarlenKernel(Kernel):
    """Flash attention over documents laid end to end; CUDA and 16-bit formats only."""

    def mask(self, documents_BT: Tensor) -> Tensor:
        """Where documents begin in the batch laid end to end, and its end, int32."""
        begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        # The device has to say how many there are: the one wait in a pass.
        begins = begins_BT.flatten().nonzero().flatten()
        return F.pad(begins, (0, 1), value=documents_BT.numel()).int()

    def forward(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask: Tensor | None) -> Tensor:
        # Not at the top: it needs flash attention, which not every build of torch has.
        from torch.nn.attention.varlen import varlen_attn

        B, T, _, _ = q_BTHD.shape
        if mask is None:
            mask = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q_BTHD.device)
        # Older versions share key heads without being told, and refuse the word.
        gqa: dict[str, Any] = (
            {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        )
        out = varlen_attn(
            q_BTHD.flatten(0, 1),
            k_BTKD.flatten(0, 1),
            v_BTKD.flatten(0, 1),
            mask,
            mask,
            # No document is longer than the sequence; the longest one would have to be asked for.
            T,
            T,
            window_size=(-1, 0),
            **gqa,
        )
        assert isinstance(out, Tensor)
        return out.unflatten(0, (B, T))


KERNELS: dict[str, type[Kernel]] = {"sdpa": SdpaKernel, "flex": FlexKernel, "varlen": VarlenKernel}
"""By the names of training.attention."""


@lru_cache(maxsize=8)
def _causal(length: int, device: torch.device) -> BlockMask:
    def past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    return _on(device, create_block_mask)(past, None, None, length, length, device=device)


def _on(device: torch.device, function: Any) -> Any:
    """The function, compiled on a GPU: as it stands it makes the whole square of every head."""
    return _compiled(function) if device.type == "cuda" else function


@lru_cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
