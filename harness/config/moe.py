"""Config of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import numerics
from harness.util.errors import ConfigError, divisors

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts (arXiv:1701.06538): each token goes to top_k of num_experts.

    No tokens are dropped: there is no capacity limit, as in MegaBlocks (arXiv:2211.15841).
    """

    num_experts: int = numerics(0, least=0)
    """Routed experts per mixture; 0: all feed-forwards are dense."""
    top_k: int = numerics(1, least=1)
    """Experts per token."""
    hidden_dim: int = numerics(0, least=0)
    """Width of an expert's hidden layer."""
    shared_hidden_dim: int = numerics(0, least=0)
    """Hidden width of all shared experts together; 0: there are none."""
    first_dense_layers: int = numerics(0, least=0)
    """Number of blocks at the beginning with a dense feed-forward."""
    every_nth_layer: int = numerics(1, least=1)
    """Every n-th of the other blocks (n - 1, 2n - 1, ...) has experts."""
    score: str = numerics("softmax", choices=SCORES)
    """Scores of the router's logits: ``softmax`` over all experts, or ``sigmoid`` of each."""
    normalize_scores: bool = numerics(False)
    """Whether the scores of the chosen experts are divided by their sum."""
    score_scale: float = numerics(1.0, above=0)
    """Factor of the scores, after normalization."""
    score_before_experts: bool = numerics(False)
    """Whether an expert's input is multiplied by its score (Llama 4), instead of its output."""
    num_groups: int = numerics(1, least=1)
    """Number of groups of experts; a token goes to experts in top_groups of them (DeepSeek)."""
    top_groups: int = numerics(1, least=1)
    """Number of groups that a token's experts are chosen from."""
    group_score: str = numerics("max", choices=GROUP_SCORES)
    """Score of a group: that of its best expert (``max``), or the sum of its best two (``top2_sum``)."""
    router_bias: bool = numerics(False)
    """Whether the router has biases (GPT-OSS)."""
    expert_bias: bool = numerics(False)
    """Whether the experts' projections have biases (GPT-OSS)."""
    balance_coeff: float = numerics(0.0, least=0)
    """Amount by which every expert's balancing bias moves towards the mean load after each step; the bias is
    used for the choice only (arXiv:2408.15664). 0: no biases."""
    aux_loss_coeff: float = numerics(0.0, least=0)
    """Weight of the sequence-wise auxiliary loss (arXiv:2412.19437, equation 17), a mean over the sequences
    of the global batch. It changes gradients and is not part of the logged loss. 0: no auxiliary loss."""
    force_balance: bool = numerics(False)
    """Assign the positions of a sequence to experts in turn, regardless of scores: for benchmarks."""

    @property
    def enabled(self) -> bool:
        """Whether there are experts."""
        return self.num_experts > 0

    def is_at(self, layer: int) -> bool:
        """Whether a block has experts, if the model has any."""
        return layer >= self.first_dense_layers and (layer + 1) % self.every_nth_layer == 0

    def validate(self, n_layers: int) -> None:
        """Raise ConfigError for fields that do not describe a mixture."""
        if not self.enabled:
            return
        if self.hidden_dim < 1:
            raise ConfigError("model.moe.hidden_dim", self.hidden_dim, "must be at least 1")
        if not any(self.is_at(layer) for layer in range(n_layers)):
            rule = f"leaves no block of model.n_layers={n_layers} with experts"
            raise ConfigError("model.moe.first_dense_layers", self.first_dense_layers, rule, [0])
        self._validate_groups()

    def _validate_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise ConfigError(
                "model.moe.num_groups",
                self.num_groups,
                f"must divide model.moe.num_experts={self.num_experts}",
                divisors(self.num_experts),
            )
        if self.top_groups > self.num_groups:
            rule = f"must not exceed model.moe.num_groups={self.num_groups}"
            raise ConfigError("model.moe.top_groups", self.top_groups, rule, [self.num_groups])
        in_group = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * in_group:
            rule = f"must not exceed the {self.top_groups * in_group} experts that are chosen from"
            raise ConfigError("model.moe.top_k", self.top_k, rule, f"at most {self.top_groups * in_group}")
        if self.group_score == "top2_sum" and self.num_groups > 1 and in_group < 2:
            rule = "needs two experts in a group, and there is one"
            raise ConfigError("model.moe.group_score", self.group_score, rule, ["max"])
