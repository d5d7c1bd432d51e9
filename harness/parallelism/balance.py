"""How evenly experts are used, and the biases that make it more even.

Every rank counts what it routes; once a step the counts of all layers are summed over the world, so that all
ranks, those without the layer too, know the same, and every layer's balancing bias moves (auxiliary-loss-free
balancing, arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harness.job import Job
from harness.model.decoder import Decoder

# M: layers with experts, E: experts


class Balance:
    """Counts and biases of all mixtures of a model; every rank makes one and calls it together.

    It also tells routers what makes their auxiliary losses a mean over the global batch.

    Args:
        job: the resolved job.
        parts: this rank's parts of the model.
        device: where counts are summed.

    Attributes:
        load_ME: tokens that went to each expert in the last step, over the world, int64; None before it.
    """

    def __init__(self, job: Job, parts: Sequence[Decoder], device: torch.device) -> None:
        self.job, self.parts, self.device = job, parts, device
        self.rows = {layer: row for row, layer in enumerate(job.model.expert_layers)}
        # Ranks that split every expert route the same tokens; so many times they are counted, and the
        # gradient of an auxiliary loss is summed over these ranks.
        self.copies = job.parallelism.tp if job.parallelism.splits_experts else 1
        for part in parts:
            for moe in part.mixtures.values():
                moe.router.aux_scale = 1 / (job.global_batch_size * self.copies)
        self.load_ME: Tensor | None = None

    @torch.no_grad()
    def settle(self) -> None:
        """Ends a step: sums its counts and moves the biases by them."""
        if not self.rows:
            return
        load_ME = torch.zeros(
            len(self.rows), self.job.model.moe.num_experts, dtype=torch.int64, device=self.device
        )
        for part in self.parts:
            for layer, load_E in part.take_loads().items():
                load_ME[self.rows[layer]] = load_E
        if self.job.world_size > 1:
            dist.all_reduce(load_ME)
        self.load_ME = load_ME // self.copies
        for part in self.parts:
            for layer, moe in part.mixtures.items():
                if moe.balance_bias is not None:
                    moe.balance_bias += self._move(self.load_ME[self.rows[layer]])

    def _move(self, load_E: Tensor) -> Tensor:
        """By how much the biases of a layer move: up where the load is below the mean, on average not."""
        # Whole numbers are compared, so that no layout rounds otherwise.
        direction_E = torch.sign(load_E.sum() - load_E * load_E.numel()).float()
        move_E = self.job.model.moe.balance_coeff * direction_E
        return move_E - move_E.mean()

    def figures(self) -> dict[str, float]:
        """What a row of metrics says of the last step; waits for the device.

        ``moe.load_max`` and ``moe.load_min`` are the largest and smallest load of an expert over the mean of
        its layer, ``moe.unused`` the number of experts without a token, ``moe.dropped`` the number of choices
        that no expert has computed; figures of single layers have the layer's number behind.
        """
        if self.load_ME is None:
            return {}
        of, tokens = self.job.model.moe, self.job.global_batch_size * self.job.training.seq_len
        load_ME = self.load_ME.cpu().double()
        mean = tokens * of.top_k / of.num_experts
        most, least = (load_ME.amax(1) / mean).tolist(), (load_ME.amin(1) / mean).tolist()
        figures = {
            "moe.load_max": max(most),
            "moe.load_min": min(least),
            "moe.unused": float((load_ME == 0).sum()),
            "moe.dropped": float(tokens * of.top_k * len(self.rows) - load_ME.sum()),
        }
        for layer, row in self.rows.items():
            figures |= {f"moe.load_max.{layer}": most[row], f"moe.load_min.{layer}": least[row]}
        return figures
