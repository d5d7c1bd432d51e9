"""Rotary position embedding.

Pairs are (i, i + D/2), the layout of Hugging Face's Llama checkpoints, whose weights can be used
unchanged. Meta's original files interleave pairs (2i, 2i + 1), so their wq and wk are permuted when
they are read. Families whose checkpoints are all interleaved set ``rope.interleaved``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.config.model import RopeConfig

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA
    triton = None

# B: batch, T: sequence, H: heads, D: rotated width


def rope_table(
    config: RopeConfig, width: int, seq_len: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Cosines and sines of each position's rotation.

    Returns:
        float32 tensor [2, seq_len, width / 2]: cosines, then sines, times the temperature of YaRN.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        frequencies = _stretch_llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _stretch_yarn(frequencies, config, width)
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    table = torch.stack((angles.cos(), angles.sin()))
    return table if config.rotation_scale == 1 else table * config.rotation_scale


def _stretch_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones not, with a ramp between.

    Source: apply_scaling in meta-llama/llama-models, models/llama3/model.py.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position / wavelengths
    low = config.low_freq_factor
    high = config.high_freq_factor
    # With equal factors (Llama 4) the ramp is a step.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high > low else (turns >= low).float()
    return frequencies * (kept + (1 - kept) / config.factor)


def _stretch_yarn(frequencies: Tensor, config: RopeConfig, width: int) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a ramp from unchanged to stretched pairs.

    The ramp lies between the pairs that turn ``beta_fast`` and ``beta_slow`` times within the original
    context.
    """

    def pair_with(turns: float) -> float:
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(config.theta))

    first = pair_with(config.beta_fast)
    last = pair_with(config.beta_slow)
    if config.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    if first == last:
        last += 0.001  # a step, as in the reference code of DeepSeek and transformers
    pairs = torch.arange(width // 2, dtype=torch.float32, device=frequencies.device)
    stretched = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.factor * stretched


def signed_table(table_2TD: Tensor) -> Tensor:
    """Widen [2, T, D / 2] to [2, T, D] for ``rotate``: cosines of both halves, and sines with their signs."""
    cos, sin = table_2TD
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(
    q_BTHD: Tensor, k_BTHD: Tensor, table_2TD: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, in float32, and return them in their own dtypes.

    If heads are wider than the table, only their first values are rotated.

    Interleaved pairs are returned as (i, i + D/2): scores do not depend on the order, which all
    heads share.

    Args:
        q_BTHD, k_BTHD: queries, and keys of any number of heads.
        table_2TD: rows of ``signed_table``; [2, B, T, D] if positions differ between sequences.
        interleaved: pairs are (2i, 2i + 1), not (i, i + D/2).
    """
    width = table_2TD.shape[-1]
    if width < q_BTHD.shape[-1]:
        q_first, k_first = rotate(
            q_BTHD[..., :width], k_BTHD[..., :width], table_2TD, interleaved=interleaved
        )
        return (
            torch.cat((q_first, q_BTHD[..., width:]), dim=-1),
            torch.cat((k_first, k_BTHD[..., width:]), dim=-1),
        )
    if torch.compiler.is_compiling():  # the compiler fuses these operations itself
        q, k = (_rotated(x.float(), table_2TD, 1, interleaved).type_as(x) for x in (q_BTHD, k_BTHD))
    else:
        q, k = _Rotation.apply(q_BTHD, k_BTHD, table_2TD, interleaved)
    return q, k


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is a rotation back.

    On GPUs a kernel computes each of them. Its last bit of float32 may differ from torch's.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BTHD: Tensor, k_BTHD: Tensor, table_2TD: Tensor, interleaved: bool
    ) -> Any:
        ctx.save_for_backward(table_2TD)
        ctx.interleaved = interleaved
        return _both(q_BTHD, k_BTHD, table_2TD, 1, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_BTHD: Tensor, k_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        return *_both(q_BTHD, k_BTHD, ctx.saved_tensors[0], -1, ctx.interleaved), None, None


def _both(
    q: Tensor, k: Tensor, table_2TD: Tensor, direction: int, interleaved: bool
) -> tuple[Tensor, ...]:
    if q.is_cuda:
        return turn(q, k, table_2TD, direction, interleaved)
    return tuple(_rotated(x, table_2TD, direction, interleaved) for x in (q, k))


def _rotated(x_BTHD: Tensor, table_2TD: Tensor, direction: int, interleaved: bool) -> Tensor:
    """Rotate a tensor forward (1) or back (-1). If interleaved, only the tensor before the rotation is."""
    if interleaved and direction == 1:
        x_BTHD = x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    cos, sin = table_2TD.unsqueeze(-2)
    others = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    out_BTHD = torch.addcmul(x_BTHD * cos, others, sin, value=direction).type_as(x_BTHD)
    if interleaved and direction == -1:
        out_BTHD = out_BTHD.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return out_BTHD


def turn(
    q: Tensor, k: Tensor, table: Tensor, direction: int, interleaved: bool
) -> tuple[Tensor, ...]:
    """Rotate queries and keys in one kernel, forward (1) or back (-1)."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    B, T, H, D = q.shape
    K = k.shape[2]
    half = D // 2
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    by_batch = 0 if table.ndim == 3 else table.stride(1)
    strides = *q.stride()[:3], *k.stride()[:3], by_batch, table.stride(-2)
    padded = map(triton.next_power_of_2, (half, H, K))
    _turn[B * T,](
        q,
        k,
        *out,
        table,
        table[1],
        T,
        H,
        K,
        *strides,
        half,
        *padded,
        direction,
        interleaved,
    )
    return out


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn(  # type: ignore[no-untyped-def]
        q, k, q_out, k_out, all_cos, all_sin, T, H, K, q_b, q_t, q_h, k_b, k_t, k_h, by_batch, by_position,
        HALF: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
        DIRECTION: tl.constexpr, INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        b = token // T
        t = token % T
        pair = tl.arange(0, PAIRS)[None, :]
        row = b * by_batch + t * by_position + pair
        cos = tl.load(all_cos + row, pair < HALF)
        sin = tl.load(all_sin + HALF + row, pair < HALF) * DIRECTION
        q = q + b * q_b + t * q_t
        q_out = q_out + token * H * HALF * 2
        k = k + b * k_b + t * k_t
        k_out = k_out + token * K * HALF * 2
        _turn_heads(q, q_out, H, q_h, cos, sin, pair, HALF, Q_HEADS, DIRECTION, INTERLEAVED)
        _turn_heads(k, k_out, K, k_h, cos, sin, pair, HALF, K_HEADS, DIRECTION, INTERLEAVED)

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_heads(  # type: ignore[no-untyped-def]
        x, out, heads, by_head, cos, sin, pair,
        HALF: tl.constexpr, HEADS: tl.constexpr, DIRECTION: tl.constexpr, INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        head = tl.arange(0, HEADS)[:, None]
        exists = (head < heads) & (pair < HALF)
        # In the rotated tensor the two values of a pair are half a head apart. In the other tensor
        # they are side by side if interleaved.
        other, step = (pair * 2, 1) if INTERLEAVED else (pair, HALF)
        x += head * by_head + (other if DIRECTION == 1 else pair)
        out += head * HALF * 2 + (pair if DIRECTION == 1 else other)
        a = tl.load(x, exists).to(tl.float32)
        b = tl.load(x + (step if DIRECTION == 1 else HALF), exists).to(tl.float32)
        tl.store(out, tl.fma(b, -sin, a * cos).to(out.dtype.element_ty), exists)
        out += HALF if DIRECTION == 1 else step
        tl.store(out, tl.fma(a, sin, b * cos).to(out.dtype.element_ty), exists)
