"""QK-clip (Kimi K2, arXiv:2507.20534, section 2.1): heads of attention with large logits shrink."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.config.model import ModelConfig
from harness.model.architecture import architecture_of
from harness.optimizer.base import local, parts_of
from harness.parallelism.materialize import local_ranges
from harness.precision.swap import plain

# L: layers of attention, H: query heads of the full model


def powers_of_rows(model: ModelConfig) -> dict[str, list[float]]:
    """Return how a head's factor gamma scales the rows of that head, by the linear's name: as gamma ** power.

    Every choice scales all logits of the head by gamma, and those of no other head:

    * Multi-head attention: the rows of its query and of its key, each by the root.
    * Grouped queries: a key is that of several query heads, whose factors differ. So the rows of the query
      alone are scaled, by all of gamma.
    * Multi-head latents: the parts without rotation, each by the root. The rotated key is that of all heads,
      so the rotated part of the query has all of gamma. Rows of values stay.
    """
    of = model.attention
    if of.is_latent:
        query = "wq" if of.q_lora_rank is None else "wq_b"
        content = [0.5] * of.qk_nope_head_dim
        return {
            query: content + [1.0] * of.qk_rope_head_dim,
            "wkv_b": content + [0.0] * of.v_head_dim,
        }
    if model.n_kv_heads < model.n_heads:
        return {"wq": [1.0] * model.head_width}
    half = [0.5] * model.head_width
    return {"wq": half, "wk": half}


@dataclass(frozen=True)
class _Rows:
    """The rows of a linear's weight or bias that this rank holds.

    Attributes:
        head_R: the head of each row, in the full model.
        power_R: the power of that head's factor.
    """

    parameter: Tensor
    layer: int
    head_R: Tensor
    power_R: Tensor


class QKClip:
    """Scales queries and keys of heads whose largest logit exceeds ``tau``, after an update of the weights.

    On the batch of the logits, with the weights that they are of, the largest logit of such a head
    becomes ``tau``. Each rank scales the rows that it holds, in place. What the optimizer remembers
    stays.

    Attributes:
        largest_LH: the largest logit of every head in the step's batch; None: nothing is clipped.

    Args:
        named_parameters: those of this rank, under their names in the full model.
    """

    def __init__(
        self, tau: float, model: ModelConfig, named_parameters: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.tau = tau
        self.largest_LH: Tensor | None = None
        parameters = dict(named_parameters)
        powers = powers_of_rows(model)
        self._rows = []
        for layer in range(model.num_blocks):
            prefix = architecture_of(model).block_prefix(model, layer)
            for linear, power_of_row in powers.items():
                for kind in ("weight", "bias"):
                    parameter = parameters.get(f"{prefix}attention.{linear}.{kind}")
                    if parameter is not None:
                        self._rows.append(_held_rows(parameter, layer, power_of_row))

    @torch.no_grad()
    def clip(self, dropped: Tensor | None = None) -> None:
        """Scale the rows of this rank; the host does not wait.

        Args:
            dropped: 1 on the device if it has dropped the update, and the clip has to be dropped too.
        """
        if self.largest_LH is None:
            return
        is_clipped_LH = self.largest_LH > self.tau
        if dropped is not None:
            is_clipped_LH = is_clipped_LH & (dropped == 0)
        factor_LH = (self.tau / self.largest_LH).where(is_clipped_LH, 1)
        if self._rows:
            # To host memory with offloaded parameters.
            factor_LH = factor_LH.to(self._rows[0].head_R.device)
        for rows in self._rows:
            factor_R = factor_LH[rows.layer][rows.head_R] ** rows.power_R
            # Transposed, so that rows are the last dimension; a bias has no other.
            local(plain(rows.parameter.detach())).t().mul_(factor_R)

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Clip; a hook that runs after each step of an optimizer."""
        self.clip(getattr(parts_of(optimizer)[0], "found_inf", None))


def _held_rows(parameter: Tensor, layer: int, power_of_row: list[float]) -> _Rows:
    rows = local_ranges(parameter)[0]
    row_R = torch.arange(rows.start, rows.stop, device=local(parameter).device)
    width = len(power_of_row)
    power_R = torch.tensor(power_of_row, device=row_R.device)[row_R % width]
    return _Rows(parameter, layer, row_R // width, power_R)
