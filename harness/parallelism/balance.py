"""Expert load statistics, and the routing biases that balance the load.

Every rank counts the tokens it routes. Once a step the counts of all layers are summed over the
world, so all ranks have the same counts, also of layers they do not hold. Then every layer's
balancing bias is updated (auxiliary-loss-free balancing, arXiv:2408.15664).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.job import Job
from harness.metrics.columns import Metric
from harness.model.part import ModelPart
from harness.model.workloads import Workload, key_of
from harness.util.annotation import annotated

LOADS = (
    Metric("moe.load_max", "ratio", "Largest load of an expert over its layer's mean.", "mixtures"),
    Metric(
        "moe.load_min", "ratio", "Smallest load of an expert over its layer's mean.", "mixtures"
    ),
    Metric(
        "moe.load_max.*",
        "ratio",
        "The same for one layer; the name ends in its number.",
        "mixtures",
    ),
    Metric(
        "moe.load_min.*",
        "ratio",
        "The same for one layer; the name ends in its number.",
        "mixtures",
    ),
    Metric(
        "moe.rank_load_max",
        "ratio",
        "Largest load of a rank of experts over the mean: the others wait for it.",
        "mixtures, `parallelism.ep`",
    ),
    Metric(
        "moe.rank_load_max.*",
        "ratio",
        "The same for one layer; the name ends in its number.",
        "mixtures, `parallelism.ep`",
    ),
    Metric("moe.unused", "count", "Experts without a token, over all layers.", "mixtures"),
    Metric(
        "moe.dropped", "count", "Choices of an expert that were not computed: always 0.", "mixtures"
    ),
)

# M: layers with experts, E: experts


def workload_of(job: Job, layer: int, step: int = 1) -> Workload:
    """The workload of ``debug.routing`` in a layer and a step."""
    assert job.debug.routing is not None
    of = job.model.moe
    key = key_of(job.training.seed, layer)
    return Workload(job.debug.routing, of.num_experts, of.top_k, key, step)


class Balance:
    """Load counts and balancing biases of all MoE layers; a collective object, one per rank.

    It also sets the routers' scale of the auxiliary loss, so that the loss is a mean over the
    global batch, and gives them the workload of ``debug.routing``.

    Attributes:
        load_ME: tokens routed to each expert in the last step, over the world, int64; None before
            the first.
    """

    def __init__(self, job: Job, parts: Sequence[ModelPart], device: torch.device) -> None:
        self.job = job
        self.parts = parts
        self.device = device
        self.rows = {layer: row for row, layer in enumerate(job.model.expert_layers)}
        # Ranks that split every expert route the same tokens: each token is counted that many
        # times, and the gradient of an auxiliary loss is summed over these ranks.
        self.copies = job.parallelism.tp if job.parallelism.splits_experts else 1
        self.set_rows(job.global_batch_size)
        self.load_ME: Tensor | None = None
        self.step: Tensor | None = None
        if job.debug.routing is not None:
            self.step = torch.ones((), dtype=torch.int64, device=device)
            for part in parts:
                for layer, moe in part.mixtures.items():
                    plain = workload_of(job, layer)
                    key = torch.tensor(plain.key, device=device)
                    moe.router.workload = replace(plain, key=key, step=self.step)

    def set_step(self, step: int) -> None:
        """Set the step whose experts ``debug.routing`` gives to tokens."""
        if self.step is not None:
            self.step.fill_(step)

    def set_rows(self, rows: float | Tensor) -> None:
        """Set the number of sequences of the next global batch, without those that are all padding."""
        for part in self.parts:
            for moe in part.mixtures.values():
                moe.router.aux_scale = 1 / (rows * self.copies)

    @torch.no_grad()
    def update_biases(self, norm: Tensor | float) -> None:
        """Sum the step's counts over the world; move the biases if the gradient norm is finite."""
        if not self.rows:
            return
        load_ME = torch.zeros(
            len(self.rows), self.job.model.moe.num_experts, dtype=torch.int64, device=self.device
        )
        for part in self.parts:
            for layer, load_E in part.take_loads().items():
                load_ME[self.rows[layer]] = load_E
        if self.job.world_size > 1:
            with annotated("ep.all_reduce"):
                dist.all_reduce(load_ME)
        self.load_ME = load_ME // self.copies
        # A factor, so that the host does not wait for the device.
        is_finite = torch.as_tensor(norm).isfinite()
        for part in self.parts:
            for layer, moe in part.mixtures.items():
                if moe.balance_bias is not None:
                    load_E = self.load_ME[self.rows[layer]]
                    # Positive where the load is below the mean. Integers are compared, so that
                    # rounding is the same on all layouts.
                    direction_E = torch.sign(load_E.sum() - load_E * load_E.numel()).float()
                    update_E = self.job.model.moe.balance_coeff * direction_E
                    moe.balance_bias += is_finite * (update_E - update_E.mean())

    def take_needed(self) -> Tensor:
        """Of each layer, ``MoE.capacity_needed`` of this rank's passes since the last call, int64 [M].

        Without ``parallelism.ep_capacity`` the result is empty.
        """
        if not self.job.parallelism.fixes_messages:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        needed: dict[int, Tensor] = {}
        for part in self.parts:
            needed |= part.take_needed()
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        return torch.stack([needed.get(layer, none) for layer in self.rows])

    def metrics(self, load_ME: Tensor, tokens: int) -> dict[str, float]:
        """Return ``LOADS`` of a step of so many tokens, from its ``load_ME`` in host memory."""
        moe = self.job.model.moe
        load_ME = load_ME.double()
        mean = tokens * moe.top_k / moe.num_experts
        most = (load_ME.amax(1) / mean).tolist()
        least = (load_ME.amin(1) / mean).tolist()
        metrics = {
            "moe.load_max": max(most),
            "moe.load_min": min(least),
            "moe.unused": float((load_ME == 0).sum()),
            "moe.dropped": float(tokens * moe.top_k * len(self.rows) - load_ME.sum()),
        }
        for layer, row in self.rows.items():
            metrics |= {f"moe.load_max.{layer}": most[row], f"moe.load_min.{layer}": least[row]}
        ranks = self.job.parallelism.ep
        if ranks > 1:
            # Each rank has as many experts, in order.
            load_MR = load_ME.unflatten(1, (ranks, -1)).sum(2)
            fullest = (load_MR.amax(1) / load_MR.mean(1)).tolist()
            metrics["moe.rank_load_max"] = max(fullest)
            for layer, row in self.rows.items():
                metrics[f"moe.rank_load_max.{layer}"] = fullest[row]
        return metrics
