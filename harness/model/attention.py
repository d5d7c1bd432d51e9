"""Attention: grouped queries, or multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.model.cache import CachedKernel, Slots
from harness.model.fused import multiply
from harness.model.grouped import local_shard
from harness.model.kernels import AttentionSpec, Kernel, SdpaKernel
from harness.model.norm import build_norm
from harness.model.rope import rotate

# B: batch, T: sequence, C: residual width, H: heads of this rank, D: head width, E: head width of
# values


def build_attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """Build the attention of one block."""
    return (
        LatentAttention(config, layer) if config.attention.is_latent else Attention(config, layer)
    )


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); under tensor parallel each rank holds some of the heads.

    ``inner`` is the attention operation; parallelism can replace it.
    """

    fused: Tensor | None = None
    """The weights of queries, keys and values, if they are adjacent in memory."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        of = config.attention
        self.head_dim = config.head_width
        bias = of.qkv_bias
        width = config.head_width
        self.wq = nn.Linear(config.dim, config.n_heads * width, bias=bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * width, bias=bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * width, bias=bias)
        self.wg = (
            nn.Linear(config.dim, config.n_heads * width, bias=bias) if of.output_gate else None
        )
        self.wo = nn.Linear(config.n_heads * width, config.dim, bias=of.output_bias)
        self.q_norm = self.k_norm = None
        self.norms_all_heads = of.qk_norm == "all_heads"
        if of.qk_norm in ("learned", "all_heads"):
            q_heads, k_heads = (
                (config.n_heads, config.n_kv_heads) if self.norms_all_heads else (1, 1)
            )
            self.q_norm = build_norm(config, q_heads * width)
            self.k_norm = build_norm(config, k_heads * width)
        self.sinks = nn.Parameter(torch.empty(config.n_heads)) if of.sinks else None
        self.is_rotated = of.is_rotated(layer)
        self.interleaved = config.rope.interleaved
        self.normed_eps = config.norm_eps if of.qk_norm == "l2" and self.is_rotated else None
        self.temperature = 0.0 if self.is_rotated else of.nope_temperature
        self.temperature_floor = of.nope_temperature_floor
        self.inner: Kernel = SdpaKernel(
            AttentionSpec(of.span(layer), config.score_scale, of.sinks, of.score_cap)
        )

    def forward(
        self,
        x_BTC: Tensor,
        rope_2TD: Tensor,
        mask: Any | None = None,
        positions_T: Tensor | None = None,
    ) -> Tensor:
        """Attends from every position to itself and those before it.

        Args:
            x_BTC: normed residual stream.
            rope_2TD: cosines and sines of the positions.
            mask: result of ``inner.mask``.
            positions_T: the positions, for layers whose temperature depends on them; [B, T] if they
                differ between sequences.

        Returns:
            The update that is added to the residual stream, [B, T, C].
        """
        B, T, _ = x_BTC.shape
        # -1 and not n_heads: a tensor-parallel rank sees only its own heads.
        linears = [self.wq, self.wk, self.wv]
        if self.wg is not None:
            linears.append(self.wg)
        q_BTHD, k_BTHD, v_BTHD, *gate = (
            each.view(B, T, -1, self.head_dim) for each in multiply(self, x_BTC, *linears)
        )
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_all_heads:
                q_BTHD = self.q_norm(q_BTHD.flatten(2)).view_as(q_BTHD)
                k_BTHD = self.k_norm(k_BTHD.flatten(2)).view_as(k_BTHD)
            else:
                q_BTHD = self.q_norm(q_BTHD)
                k_BTHD = self.k_norm(k_BTHD)
        elif self.is_rotated:
            # Backward needs the values alone: as a view they would keep all of a fused product.
            v_BTHD = v_BTHD.contiguous()
        if self.is_rotated:
            q_BTHD, k_BTHD = rotate(q_BTHD, k_BTHD, rope_2TD, interleaved=self.interleaved)
        if self.normed_eps is not None:
            q_BTHD, k_BTHD = (
                F.rms_norm(x, x.shape[-1:], eps=self.normed_eps) for x in (q_BTHD, k_BTHD)
            )
        if self.temperature:
            assert positions_T is not None, "the temperature depends on positions"
            q_BTHD = q_BTHD * self._temperatures(positions_T)[..., None, None].type_as(q_BTHD)
        sinks_H = None if self.sinks is None else local_shard(self, "sinks")
        out_BTHD = self.inner(q_BTHD, k_BTHD, v_BTHD, mask, sinks_H)
        if gate:
            out_BTHD = out_BTHD * gate[0].sigmoid()
        return self.wo(out_BTHD.reshape(B, T, -1))

    def _temperatures(self, positions_T: Tensor) -> Tensor:
        """Scale of the queries in layers without rotation (arXiv:2501.19399, as in Llama 4), as positions."""
        steps = torch.floor((positions_T.float() + 1) / self.temperature_floor)
        return 1 + self.temperature * torch.log1p(steps)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values are projected from a low-rank latent, and one rotated key is shared by all
    heads. Under tensor parallelism every rank computes the full latents and some of the heads.
    """

    fused: Tensor | None = None
    """The weights of all linears of the input, if they are adjacent in memory."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        of = config.attention
        heads = config.n_heads
        self.nope = of.qk_nope_head_dim
        self.rotated = of.qk_rope_head_dim
        self.value = of.v_head_dim
        self.interleaved = config.rope.interleaved
        self.is_rotated = of.is_rotated(layer)
        width = config.head_width
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if of.q_lora_rank is None:
            self.wq = nn.Linear(config.dim, heads * width, bias=False)
        else:
            self.wq_a = nn.Linear(config.dim, of.q_lora_rank, bias=False)
            self.q_norm = build_norm(config, of.q_lora_rank, LATENT_EPS)
            self.wq_b = nn.Linear(of.q_lora_rank, heads * width, bias=False)
        self.wkv_a = nn.Linear(config.dim, of.kv_lora_rank + self.rotated, bias=False)
        self.kv_norm = build_norm(config, of.kv_lora_rank, LATENT_EPS)
        self.wkv_b = nn.Linear(of.kv_lora_rank, heads * (self.nope + self.value), bias=False)
        self.wo = nn.Linear(heads * self.value, config.dim, bias=False)
        scale = config.score_scale * config.rope.score_scale
        self.inner: Kernel = SdpaKernel(AttentionSpec(of.span(layer), scale, cap=of.score_cap))

    def forward(
        self,
        x_BTC: Tensor,
        rope_2TD: Tensor,
        mask: Any | None = None,
        positions_T: Tensor | None = None,
    ) -> Tensor:
        """Attend; arguments and result as in ``Attention``."""
        B, T, _ = x_BTC.shape
        q, latents = self._project(x_BTC)
        q_BTHD = q.view(B, T, -1, self.nope + self.rotated)
        latent_BTL, k_rotated = latents.split(
            [latents.shape[-1] - self.rotated, self.rotated], dim=-1
        )
        latent_BTL = self.kv_norm(latent_BTL)
        q_nope, q_rotated = q_BTHD.split([self.nope, self.rotated], dim=-1)
        k_rotated = k_rotated.unsqueeze(2)
        if self.is_rotated:
            q_rotated, k_rotated = rotate(
                q_rotated, k_rotated, rope_2TD, interleaved=self.interleaved
            )
        inner: Callable[..., Tensor] = self.inner
        if isinstance(mask, Slots):
            assert isinstance(self.inner, CachedKernel)
            keys = self.inner.store_keys(torch.cat((latent_BTL.unsqueeze(2), k_rotated), -1), mask)
            if not mask.is_first:
                return self.wo(
                    self._attend_latents(q_nope, q_rotated, keys, mask).reshape(B, T, -1)
                )
            inner = partial(SdpaKernel.forward, self.inner)
            mask = mask.visible
        kv = self.wkv_b(latent_BTL).view(B, T, -1, self.nope + self.value)
        k_nope, v_BTHE = kv.split([self.nope, self.value], dim=-1)
        q_BTHD = torch.cat((q_nope, q_rotated), dim=-1)
        k_BTHD = torch.cat((k_nope, k_rotated.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        return self.wo(inner(q_BTHD, k_BTHD, v_BTHE, mask).reshape(B, T, -1))

    def _attend_latents(
        self, q_nope: Tensor, q_rotated: Tensor, keys_B1SL: Tensor, mask: Slots
    ) -> Tensor:
        """Attend from one token to stored latents, which serve as the key and value of all heads.

        The projection of latents to keys is applied to the query instead, and the projection to
        values to the result (arXiv:2405.04434, section 2.1.2).
        """
        assert isinstance(self.inner, CachedKernel)
        weight_HDL = local_shard(self.wkv_b, "weight").unflatten(0, (-1, self.nope + self.value))
        to_key_HDL, to_value_HEL = weight_HDL.split([self.nope, self.value], dim=1)
        q_BTHL = torch.einsum("bthd,hdl->bthl", q_nope, to_key_HDL)
        latents_B1SL = keys_B1SL[..., : q_BTHL.shape[-1]]
        out_BTHL = self.inner.attend(
            torch.cat((q_BTHL, q_rotated), dim=-1), keys_B1SL, latents_B1SL, mask
        )
        return torch.einsum("bthl,hel->bthe", out_BTHL, to_value_HEL)

    def _project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and the latents of keys and values with the rotated key."""
        if self.wq is not None:
            q, latents = multiply(self, x_BTC, self.wq, self.wkv_a)
            # A norm keeps them for backward: as a view they would keep the queries too.
            return q, latents.contiguous()
        assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None
        q_latents, latents = multiply(self, x_BTC, self.wq_a, self.wkv_a)
        return self.wq_b(self.q_norm(q_latents)), latents


LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, independent of model.norm_eps (DeepseekV2RMSNorm's default)."""
