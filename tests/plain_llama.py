"""A Llama from its paper and Meta's code, with no code of the harness: what models are compared with."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
"""Tensors by our names."""


def frequencies(theta, width):
    """Radians per position of each pair of a head [width / 2]."""
    return theta ** (-torch.arange(0, width, 2) / width)


def norm(x, weight, eps=1e-5):
    """Divide by the root of the mean square of the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x, turn, *, interleaved):
    """Rotate pairs: neighbours, as Meta does, or value i of the first half with value i of the second."""
    if interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)
    turned = torch.complex(*x.chunk(2, -1)) * turn
    return torch.cat((turned.real, turned.imag), -1)


def block(
    w,
    name,
    x,
    of_pairs,
    *,
    scale=None,
    interleaved=False,
):
    """The block of this name, of any numbers of heads.

    Args:
        w: all weights.
        name: such as layers.0.
        x: [B, T, C].
        of_pairs: ``frequencies``.
        scale: factor of the scores; by default one over the root of a head's width.
        interleaved: which values are pairs, see ``rotated``.
    """
    width = 2 * len(of_pairs)
    h = norm(x, w[f"{name}.attention_norm.weight"])
    q, k, v = (
        (h @ w[f"{name}.attention.{each}.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
        for each in ("wq", "wk", "wv")
    )
    angles = torch.arange(x.shape[1]).outer(of_pairs)
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (rotated(each, turn, interleaved=interleaved) for each in (q, k))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.mT * (width**-0.5 if scale is None else scale)
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    x = x + out.transpose(1, 2).flatten(2) @ w[f"{name}.attention.wo.weight"].T
    h = norm(x, w[f"{name}.ffn_norm.weight"])
    w1, w2, w3 = (w[f"{name}.feed_forward.w{number}.weight"] for number in (1, 2, 3))
    return x + (F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T


def hidden(w, tokens, layers, of_pairs, **options):
    """The stream after all blocks [B, T, C]; options are those of ``block``."""
    x = w["tok_embeddings.weight"][tokens]
    for layer in range(layers):
        x = block(w, f"layers.{layer}", x, of_pairs, **options)
    return x


def logits(w, tokens, layers, of_pairs, **options):
    """Logits [B, T, V], by the table if there is no output projection; options are those of ``block``."""
    stream = norm(hidden(w, tokens, layers, of_pairs, **options), w["norm.weight"])
    return stream @ w.get("output.weight", w["tok_embeddings.weight"]).T
