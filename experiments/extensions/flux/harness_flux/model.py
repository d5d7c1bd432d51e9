"""The modules of Flux (github.com/black-forest-labs/flux, src/flux/model.py)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import AttentionSpan, ModelConfig
from harness.model.kernels import AttentionSpec, SdpaKernel
from harness.model.part import ModelPart
from harness.model.rope import rotate, signed_table
from harness_flux.config import PATCH, flux_of

# B: batch, T: sequence (of this rank, when it is split), L: its text tokens, I: its image tokens,
# C: residual width, H: heads, D: head width, P: values of an image token

TIME_FACTOR = 1000.0
LONGEST_PERIOD = 10000.0


class Modulation(nn.Linear):
    """Shifts, scales and gates [B, 1, C] of the residual stream, from one row per sample [B, C]."""

    def forward(self, vec_BC: Tensor) -> Tensor:
        return super().forward(F.silu(vec_BC)).unsqueeze(1)


class StreamAttention(nn.Module):
    """The projections of attention for one stream; the block computes attention itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_heads * config.head_width
        self.head_width = config.head_width
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, width) for _ in range(3))
        self.wo = nn.Linear(width, config.dim)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_width, eps=config.norm_eps) for _ in range(2)
        )

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys (both normed) and values [B, T, H, D]."""
        q, k, v = (
            linear(x_BTC).unflatten(-1, (-1, self.head_width))
            for linear in (self.wq, self.wk, self.wv)
        )
        return self.q_norm(q), self.k_norm(k), v


class FluxFeedForward(nn.Module):
    """Two linears around GELU."""

    def __init__(self, config: ModelConfig, *, output_bias: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_hidden_dim)
        self.w2 = nn.Linear(config.ffn_hidden_dim, config.dim, bias=output_bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x_BTC), approximate="tanh"))
        return out


class FluxBlock(nn.Module):
    """A block of either kind; ``inner`` is the kernel of its attention."""

    moe = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = SdpaKernel(
            AttentionSpec(AttentionSpan(), config.head_width**-0.5, causal=False)
        )
        self.norm_eps = config.norm_eps

    def attend(self, qkv: Sequence[Tensor], rope_2TD: Tensor) -> Tensor:
        """Rotate queries and keys, attend to all positions, and return [B, T, H * D]."""
        q_BTHD, k_BTHD, v_BTHD = qkv
        q_BTHD, k_BTHD = rotate(q_BTHD, k_BTHD, rope_2TD, interleaved=True)
        return self.inner(q_BTHD, k_BTHD, v_BTHD, None).flatten(2)  # type: ignore[no-any-return]


class DoubleBlock(FluxBlock):
    """Caption and picture have weights of their own, and attend to each other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        dim = config.dim
        self.img_mod = Modulation(dim, 6 * dim)
        self.txt_mod = Modulation(dim, 6 * dim)
        self.img_attn = StreamAttention(config)
        self.txt_attn = StreamAttention(config)
        self.img_mlp = FluxFeedForward(config)
        self.txt_mlp = FluxFeedForward(config)

    def forward(self, x_BTC: Tensor, vec_BC: Tensor, rope_2TD: Tensor, text: int) -> Tensor:
        """Map the residual stream [B, T, C], first ``text`` tokens of the caption, to the next block's."""
        txt_BLC = x_BTC[:, :text]
        img_BIC = x_BTC[:, text:]
        img_shifts = self.img_mod(vec_BC).chunk(6, -1)
        txt_shifts = self.txt_mod(vec_BC).chunk(6, -1)
        txt_qkv = self.txt_attn(modulate(txt_BLC, txt_shifts[:2], self.norm_eps))
        img_qkv = self.img_attn(modulate(img_BIC, img_shifts[:2], self.norm_eps))
        joined = [torch.cat(pair, dim=1) for pair in zip(txt_qkv, img_qkv, strict=True)]
        out_BTC = self.attend(joined, rope_2TD)
        # The streams are gathered, if tensor parallel splits them.
        length = txt_qkv[0].shape[1]
        txt_BLC = txt_BLC + txt_shifts[2] * self.txt_attn.wo(out_BTC[:, :length])
        img_BIC = img_BIC + img_shifts[2] * self.img_attn.wo(out_BTC[:, length:])
        txt_BLC = txt_BLC + txt_shifts[5] * self.txt_mlp(
            modulate(txt_BLC, txt_shifts[3:5], self.norm_eps)
        )
        img_BIC = img_BIC + img_shifts[5] * self.img_mlp(
            modulate(img_BIC, img_shifts[3:5], self.norm_eps)
        )
        return torch.cat((txt_BLC, img_BIC), dim=1)


class SingleBlock(FluxBlock):
    """Attention and feed-forward of the joined stream, in parallel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mod = Modulation(config.dim, 3 * config.dim)
        self.attn = StreamAttention(config)
        self.mlp = FluxFeedForward(config, output_bias=False)

    def forward(self, x_BTC: Tensor, vec_BC: Tensor, rope_2TD: Tensor, text: int) -> Tensor:
        """Map the residual stream to the next block's, as ``DoubleBlock.forward``."""
        shift, scale, gate = self.mod(vec_BC).chunk(3, -1)
        normed_BTC = modulate(x_BTC, (shift, scale), self.norm_eps)
        out_BTC = self.attn.wo(self.attend(self.attn(normed_BTC), rope_2TD))
        out: Tensor = x_BTC + gate * (out_BTC + self.mlp(normed_BTC))
        return out


class Embedder(nn.Module):
    """Two linears around SiLU."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, dim)
        self.w2 = nn.Linear(dim, dim)

    def forward(self, x_BP: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x_BP.to(self.w1.weight.dtype))))
        return out


class Flux(ModelPart):
    """Flux. See ``ModelPart``.

    Args:
        seq_len: tokens of a caption and a square picture.
    """

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.flux = flux = flux_of(config)
        dim = config.dim
        self.config = config
        self.seq_len = seq_len
        # The engine follows the length of batches (set_length); Flux refuses those of other
        # lengths.
        self.job_seq_len = seq_len
        self._share: Tensor | None = None
        self.img_in = nn.Linear(flux.token_width, dim)
        self.txt_in = nn.Linear(flux.context_dim, dim)
        self.time_in = Embedder(flux.time_dim, dim)
        self.vector_in = Embedder(flux.pooled_dim, dim)
        self.guidance_in = Embedder(flux.time_dim, dim) if flux.guidance else None
        self.layers = nn.ModuleDict()
        for layer in range(config.n_layers):
            block = DoubleBlock if layer < flux.double_layers else SingleBlock
            self.layers[str(layer)] = block(config)
        self.final_mod = Modulation(dim, 2 * dim)
        self.output = nn.Linear(dim, flux.token_width)
        self.rope: Tensor
        self.own_text: Tensor
        self.own_image: Tensor
        self.register_buffer("rope", self._table(torch.get_default_device()), persistent=False)

    @property
    def entries(self) -> list[nn.Module]:
        return [self.img_in, self.txt_in]

    @property
    def segments(self) -> tuple[int, ...]:
        text = self.flux.text_length
        return (text, self.seq_len - text)

    def set_length(self, length: int, positions_T: Tensor | None) -> None:
        self.seq_len = length
        self._share = positions_T
        self.materialize_buffers(self.rope.device)

    def materialize_buffers(self, device: torch.device) -> None:
        self.rope = self._table(device)
        if self._share is not None:
            text = self.flux.text_length
            own = len(self._share) * text // self.seq_len
            self.own_text = self._share[:own].to(device)
            self.own_image = (self._share[own:] - text).to(device)

    def _table(self, device: torch.device) -> Tensor:
        """The rotation table [2, T, D] of this rank's positions; those of the caption are not rotated."""
        # A position has three numbers, each of which rotates its own part of a head: 0, row and
        # column; all are 0 in a caption.
        text = self.flux.text_length
        index = torch.arange(max(0, self.seq_len - text), device=device)
        side = max(1, math.isqrt(len(index)))
        positions = torch.zeros(self.seq_len, 3, dtype=torch.float64, device=device)
        positions[text:, 1] = (index // side).double()
        positions[text:, 2] = (index % side).double()
        angles = []
        for axis, width in enumerate(self.flux.axes_dims):
            exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
            angles.append(positions[:, axis, None] * self.config.rope.theta**-exponents)
        joined = torch.cat(angles, dim=-1)
        table = signed_table(torch.stack((joined.cos(), joined.sin())).float())
        return table if self._share is None else table[:, self._share.to(device)]

    def own_tokens(self, text_BLD: Tensor, *images_BIP: Tensor) -> list[Tensor]:
        """This rank's positions of the tokens of captions and pictures."""
        if self._share is None:
            return [text_BLD, *images_BIP]
        own = [image_BIP.index_select(1, self.own_image) for image_BIP in images_BIP]
        return [text_BLD.index_select(1, self.own_text), *own]

    def forward(
        self,
        image_BIP: Tensor,
        text_BLD: Tensor,
        pooled_BP: Tensor,
        times_B: Tensor,
        guidance_B: Tensor | None = None,
    ) -> Tensor:
        """Predict noise - data.

        Args:
            image_BIP: tokens of noisy pictures (``latents.pack``), this rank's.
            text_BLD: embeddings of the captions' tokens, this rank's.
            pooled_BP: embeddings of the captions.
            times_B: share of noise, 0 to 1, float32.
            guidance_B: strength of guidance; only models with ``flux.guidance`` read it.

        Returns:
            [B, I, P], in the format of the parameters.
        """
        # What modulates all blocks: time, guidance and caption.
        width = self.flux.time_dim
        dtype = self.img_in.weight.dtype
        vec_BC: Tensor = self.time_in(sinusoids(times_B, width))
        if self.guidance_in is not None:
            assert guidance_B is not None, "model.options.guidance needs the strength of guidance"
            vec_BC = vec_BC + self.guidance_in(sinusoids(guidance_B, width))
        vec_BC = vec_BC + self.vector_in(pooled_BP)
        x_BTC = torch.cat(
            (self.txt_in(text_BLD.to(dtype)), self.img_in(image_BIP.to(dtype))), dim=1
        )
        # Tokens of the caption in the residual stream, which tensor parallel may have split.
        text = x_BTC.shape[1] * self.flux.text_length // self.seq_len
        rope = self.rope, self._joined_rope(self.rope.shape[1] // x_BTC.shape[1])
        for layer, block in self.blocks.items():
            x_BTC = block(x_BTC, vec_BC, rope[layer >= self.flux.double_layers], text)
        scale, shift = self.final_mod(vec_BC).chunk(2, -1)
        out: Tensor = self.output(modulate(x_BTC[:, text:], (shift, scale), self.config.norm_eps))
        return out

    def _joined_rope(self, pieces: int) -> Tensor:
        """The table in the order of a joined stream that ``pieces`` tensor-parallel ranks have gathered."""
        if pieces == 1:
            return self.rope
        text = self.rope.shape[1] * self.flux.text_length // self.seq_len
        caption = self.rope[:, :text].unflatten(1, (pieces, -1))
        picture = self.rope[:, text:].unflatten(1, (pieces, -1))
        return torch.cat((caption, picture), dim=2).flatten(1, 2)


def modulate(x_BTC: Tensor, modulation: Sequence[Tensor], eps: float) -> Tensor:
    """Norm the stream (LayerNorm without weights); ``modulation`` is the shift and the scale."""
    shift_B1C, scale_B1C = modulation
    return F.layer_norm(x_BTC, x_BTC.shape[-1:], eps=eps) * (1 + scale_B1C) + shift_B1C


def sinusoids(values_B: Tensor, width: int) -> Tensor:
    """Cosines and sines [B, width] of values in [0, 1], float32 (Flux's ``timestep_embedding``)."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=values_B.device) / half
    angles = TIME_FACTOR * values_B.float()[:, None] * (-math.log(LONGEST_PERIOD) * exponents).exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def pack(latents_BCHW: Tensor) -> Tensor:
    """Make tokens [B, I, P] of latents: 2 x 2 neighbours are one token."""
    return F.pixel_unshuffle(latents_BCHW, PATCH).flatten(2).mT.contiguous()


def unpack(tokens_BIP: Tensor) -> Tensor:
    """Make latents [B, C, H, W] of the tokens of square pictures."""
    side = math.isqrt(tokens_BIP.shape[1])
    return F.pixel_shuffle(tokens_BIP.mT.unflatten(2, (side, side)), PATCH)
