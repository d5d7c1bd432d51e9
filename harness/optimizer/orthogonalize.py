"""Newton-Schulz iteration of Muon (Jordan et al., kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the polynomial a x + b x^3 + c x^5 (github.com/KellerJordan/Muon, muon.py). Singular values come close
to 1, not to it: about 0.7 to 1.2 after five steps."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by (torch.optim.Muon)."""

# B: matrices, O: outputs, I: inputs, M: the smaller of these, N: the larger


def orthogonalize(x_BOI: Tensor, steps: int) -> Tensor:
    """Replace the singular values of each matrix by values near 1, in the dtype of the matrices.

    Besides the matrices it allocates a tensor of their size and two of [B, M, M].

    Args:
        x_BOI: matrices; overwritten.
        steps: iterations.
    """
    if len(x_BOI) > 1 and x_BOI.device.type == "cpu":
        # Batched products of bfloat16 are slower than single ones by orders of magnitude there.
        for x_1OI in x_BOI.split(1):
            x_1OI.copy_(orthogonalize(x_1OI, steps))
        return x_BOI
    a, b, c = COEFFICIENTS
    tall = x_BOI.shape[1] > x_BOI.shape[2]
    x, other = (each.mT if tall else each for each in (x_BOI, torch.empty_like(x_BOI)))
    # The 2-norm of the elements is at least the largest singular value.
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=EPS))
    gram, polynomial = (x.new_empty(x.shape[0], x.shape[1], x.shape[1]) for _ in range(2))
    multiply, add_product = torch.bmm, torch.baddbmm
    if len(x) == 1:
        multiply, add_product = torch.mm, torch.addmm  # type: ignore[assignment]
        x, other, gram, polynomial = (each[0] for each in (x, other, gram, polynomial))
    for _ in range(steps):
        multiply(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        add_product(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    x = x if x.ndim == 3 else x.unsqueeze(0)
    return x.mT if tall else x
