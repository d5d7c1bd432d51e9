"""An attention kernel: attention written out, with the full square of scores in memory."""

from typing import Any

import torch
from torch import Tensor

from harness.model.kernels import AttentionSpec, Kernel, Positions, SdpaKernel
from harness.util.errors import ConfigError


class PlainKernel(Kernel):
    """softmax(scale q k^T + mask) v, in float32."""

    def __init__(self, reach: AttentionSpec) -> None:
        super().__init__(reach)
        if reach.has_sinks:
            raise ConfigError(
                "training.attention", "plain", "does not support sinks", ["sdpa", "flex"]
            )

    def mask(self, positions: Positions) -> Tensor:
        visible = SdpaKernel(self.spec).mask(positions)
        if visible is None:
            size = 1, 1, positions.length - positions.first, positions.length
            every = torch.ones(size, dtype=torch.bool, device=positions.device)
            visible = every.tril(positions.first)
        return visible

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        assert mask is not None
        groups = q_BTHD.shape[2] // k_BTKD.shape[2]
        keys, values = (each.repeat_interleave(groups, dim=2).float() for each in (k_BTKD, v_BTKE))
        scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD.float(), keys) * self.spec.scale
        weights_BHTS = scores_BHTS.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhts,bshe->bthe", weights_BHTS, values).to(v_BTKE.dtype)
