"""A mixture of experts: the router chooses, rows are sorted by expert, experts compute grouped products.

No tokens are dropped. Under expert parallelism ``MoE.exchange`` sends rows to their experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.config.model import ModelConfig
from harness.model.combine import combine
from harness.model.feed_forward import FeedForward, gated
from harness.model.grouped import (
    ends_for_linear,
    grouped_linear,
    local_shard,
    padded_positions,
)
from harness.model.workloads import IN_TURN, Workload

# N: tokens, C: residual width, E: experts, K: experts of a token, R: rows (tokens times K), F:
# hidden width, B: batch, T: sequence


class Routing(NamedTuple):
    """Experts of each token."""

    weights_NK: Tensor
    """Score of each chosen expert, float32; 0 of padding."""
    experts_NK: Tensor
    """The chosen experts, int64; of padding the number of experts, which is no expert's."""


class Router(nn.Linear):
    """Scores tokens in float32 and chooses their experts.

    Attributes:
        multiplier: factor of the products, muP's; a bias has none.
        aux_scale: factor that makes the sum of auxiliary losses over all passes and ranks a mean
            over the global batch's sequences that have tokens.
        sequence_parts: number of ranks that the tokens of a sequence are split over.
        over_sequence: function that sums counts over those ranks; None: there is only one.
        positions_T: positions of the sequence that this rank routes, in order; None: all.
        workload: what chooses experts in place of the scores; None: scores do.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.dim, config.moe.num_experts, bias=config.moe.router_bias)
        self.config = config.moe
        self.multiplier = config.mup_multiplier
        self.aux_scale: float | Tensor = 1.0
        self.sequence_parts = 1
        self.over_sequence: Callable[[Tensor], Tensor] | None = None
        self.positions_T: Tensor | None = None
        self.workload: Workload | None = None
        if self.config.force_balance:
            self.workload = Workload(IN_TURN, self.config.num_experts, self.config.top_k)

    def forward(  # type: ignore[override]
        self, x_BTC: Tensor, balance_bias_E: Tensor | None, places_BT: Tensor | None = None
    ) -> Routing:
        """Route every token.

        Args:
            x_BTC: normed residual stream.
            balance_bias_E: added to the scores for the choice only, not to the weights
                (arXiv:2408.15664).
            places_BT: positions in the sequence, negative for padding; None: those of
                ``positions_T``, and all are tokens.
        """
        tokens_BT = None if places_BT is None else places_BT >= 0
        scores_NE, choice_NE = self.score(x_BTC, balance_bias_E, tokens_BT)
        if self.workload is None:
            experts_NK = choice_NE.topk(self.config.top_k, dim=-1, sorted=False).indices
        elif places_BT is not None:
            experts_NK = self.workload.choose(places_BT.flatten())
        else:
            positions_T = self.positions_T
            if positions_T is None:
                positions_T = torch.arange(x_BTC.shape[1], device=x_BTC.device)
            experts_NK = self.workload.choose(positions_T).repeat(len(x_BTC), 1)
        if tokens_BT is not None:
            experts_NK = experts_NK.masked_fill(~tokens_BT.reshape(-1, 1), self.config.num_experts)
        return Routing(self.weigh(scores_NE, experts_NK, x_BTC.shape[1], tokens_BT), experts_NK)

    def score(
        self, x_BTC: Tensor, balance_bias_E: Tensor | None, tokens_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores of every token for every expert, and what is compared for the choice: float32 [N, E]."""
        of = self.config
        logits_NE = self.logits(x_BTC)
        if of.z_loss_coeff:
            logits_NE = self._with_z_loss(logits_NE, x_BTC.shape[1], tokens_BT)
        scores_NE = logits_NE.softmax(-1) if of.score == "softmax" else logits_NE.sigmoid()
        choice_NE = scores_NE.detach()
        if balance_bias_E is not None:
            choice_NE = choice_NE + balance_bias_E
        if of.num_groups > 1:
            choice_NE = choice_NE.masked_fill(~self._allowed(choice_NE), float("-inf"))
        return scores_NE, choice_NE

    def weigh(
        self, scores_NE: Tensor, experts_NK: Tensor, length: int, tokens_BT: Tensor | None = None
    ) -> Tensor:
        """Weights of the chosen experts, float32 [N, K]; backward adds the auxiliary loss's gradient."""
        of = self.config
        if of.aux_loss_coeff:
            scores_NE = self._with_aux_loss(scores_NE, experts_NK, length, tokens_BT)
        if tokens_BT is not None:
            scores_NE = F.pad(scores_NE, (0, 1))  # for the number that padding has
        weights_NK = scores_NE.gather(1, experts_NK)
        if of.normalize_scores:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * of.score_scale

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Score every token for every expert, float32 [N, E]."""
        bias = None if self.bias is None else local_shard(self, "bias").float()
        weight_EC = local_shard(self, "weight").float()
        weight_EC = weight_EC if self.multiplier == 1 else weight_EC * self.multiplier
        return F.linear(x_BTC.flatten(0, 1).float(), weight_EC, bias)

    def _allowed(self, choice_NE: Tensor) -> Tensor:
        """Mask of the experts in each token's best groups (DeepSeek-V2, arXiv:2405.04434, 2.2.2)."""
        of = self.config
        grouped = choice_NE.unflatten(-1, (of.num_groups, -1))
        best = (
            grouped.amax(-1) if of.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        )
        groups = best.topk(of.top_groups, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, groups, True)
        return allowed.unsqueeze(-1).expand_as(grouped).flatten(-2)

    def _with_aux_loss(
        self, scores_NE: Tensor, experts_NK: Tensor, length: int, tokens_BT: Tensor | None
    ) -> Tensor:
        """Add the gradient of the sequence-wise auxiliary loss to that of the scores.

        The loss of a sequence is the sum over experts of f * P: f is the expert's fraction of the
        choices times E (without a gradient), P its mean normalized score (arXiv:2412.19437,
        equations 17-20).
        """
        of = self.config
        share_NE = (
            scores_NE if of.score == "softmax" else scores_NE / scores_NE.sum(-1, keepdim=True)
        )
        load_BE = count_by_expert(experts_NK.unflatten(0, (-1, length)), of.num_experts)
        if self.over_sequence is not None:
            load_BE = self.over_sequence(load_BE)
        tokens: int | Tensor = length * self.sequence_parts
        if tokens_BT is not None:
            share_NE = share_NE * tokens_BT.reshape(-1, 1)
            tokens = (load_BE.sum(1, keepdim=True) / of.top_k).clamp_min(1)
        f_BE = load_BE * (of.num_experts / (of.top_k * tokens))
        weight_BE = of.aux_loss_coeff * self.aux_scale / tokens * f_BE
        aux_loss = (share_NE.unflatten(0, (-1, length)) * weight_BE.unsqueeze(1)).sum()
        return _WithLoss.apply(scores_NE, aux_loss)  # type: ignore[no-any-return]

    def _with_z_loss(self, logits_NE: Tensor, length: int, tokens_BT: Tensor | None) -> Tensor:
        """Add the gradient of the z-loss to that of the logits: a mean over tokens, then over sequences."""
        square_BT = logits_NE.logsumexp(-1).square().unflatten(0, (-1, length))
        tokens_B: int | Tensor = length * self.sequence_parts
        if tokens_BT is not None:
            square_BT = square_BT * tokens_BT
            tokens_B = tokens_BT.sum(1)
            if self.over_sequence is not None:
                tokens_B = self.over_sequence(tokens_B)
            tokens_B = tokens_B.clamp_min(1)
        z_loss = (square_BT.sum(1) * (self.config.z_loss_coeff * self.aux_scale / tokens_B)).sum()
        return _WithLoss.apply(logits_NE, z_loss)  # type: ignore[no-any-return]


class _WithLoss(torch.autograd.Function):
    """Identity of the first argument; in backward the second, a loss, gets gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def count_by_expert(experts_BTK: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen, int64 [B, E]; the choices of padding do not count."""
    chosen = experts_BTK.flatten(1)
    counts = torch.zeros(len(chosen), num_experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add(1, chosen, torch.ones_like(chosen))[:, :num_experts]


class Experts(nn.Module):
    """Feed-forwards of equal shape with stacked weights.

    Attributes:
        output_shares: number of ranks whose outputs, and so biases, are summed.
        gate: the activation between the products.
        multiply: the grouped product, with the arguments of ``grouped_linear``.
        row_block: divisor that it requires of every group's length.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        of = config.moe
        dim = config.dim
        self.w1 = nn.Parameter(torch.empty(of.num_experts, of.hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(of.num_experts, dim, of.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(of.num_experts, of.hidden_dim, dim))
        self.has_bias = of.expert_bias
        if self.has_bias:
            self.b1 = nn.Parameter(torch.empty(of.num_experts, of.hidden_dim))
            self.b2 = nn.Parameter(torch.empty(of.num_experts, dim))
            self.b3 = nn.Parameter(torch.empty(of.num_experts, of.hidden_dim))
        self.gate = partial(gated, activation=config.activation)
        self.output_shares = 1
        self.multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_linear
        self.row_block = 1

    def forward(self, x_RC: Tensor, load_E: Tensor) -> Tensor:
        """Map rows sorted by expert to the experts' outputs [R, C].

        Args:
            x_RC: rows; the first ``load_E[0]`` are the first expert's, and so on. The rest is
                padding.
            load_E: number of rows for each of this rank's experts.
        """
        # The last expert computes padding too, which weighs 0: only the device knows its length.
        ends_E = F.pad(load_E[:-1].cumsum(0), (0, 1), value=x_RC.shape[0]).int()
        if self.row_block == 1:
            return self._feed_forward(x_RC, ends_E)
        place_R, padded_ends_E, places = padded_positions(ends_E, x_RC.shape[0], self.row_block)
        x_PC = x_RC.new_zeros(places, x_RC.shape[1]).index_copy(0, place_R, x_RC)
        return self._feed_forward(x_PC, padded_ends_E).index_select(0, place_R)

    def _feed_forward(self, x_RC: Tensor, ends_E: Tensor) -> Tensor:
        ends = ends_for_linear(x_RC, ends_E) if self.multiply is grouped_linear else ends_E
        gate = self.multiply(x_RC, local_shard(self, "w1"), ends)
        up = self.multiply(x_RC, local_shard(self, "w3"), ends)
        if not self.has_bias:
            return self.multiply(self.gate(gate, up), local_shard(self, "w2"), ends)
        rows = torch.arange(x_RC.shape[0], device=x_RC.device, dtype=torch.int32)
        expert_R = torch.searchsorted(ends_E, rows, right=True)
        gate = gate + local_shard(self, "b1")[expert_R]
        up = up + local_shard(self, "b3")[expert_R]
        out_RC = self.multiply(self.gate(gate, up), local_shard(self, "w2"), ends)
        return out_RC + (local_shard(self, "b2") / self.output_shares)[expert_R]


class _Permute(torch.autograd.Function):
    """Permute rows, or copies of them, which backward sums up.

    Indexing's own backward would add rows one after another, and on a GPU in nondeterministic
    order.
    """

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = order_R.shape[0] // x_NC.shape[0]
        return x_NC.index_select(0, order_R if ctx.copies == 1 else order_R // ctx.copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RC: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        grad_RC = grad_RC.index_select(0, inverse_R)
        if ctx.copies > 1:
            grad_RC = grad_RC.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad_RC, None, None


def permute(x_NC: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows in the given order, which ``inverse_R`` undoes; each row K times if the order has K as many."""
    return _Permute.apply(x_NC, order_R, inverse_R)  # type: ignore[no-any-return]


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse permutation."""
    places = torch.arange(order_R.shape[0], device=order_R.device)
    return torch.empty_like(order_R).scatter(0, order_R, places)


class MoE(nn.Module):
    """Routed experts, and shared experts for all tokens.

    Attributes:
        exchange: function that applies experts, given last, to rows that are on other ranks; its
            other arguments are those of the experts. None: this rank has all experts.
        capacity_needed: function of a pass's loads and number of rows: the capacity that the exchange needed,
            if it has too little; it is returned after the loads. None: the exchange takes all rows.
        reduce_output: function that sums the experts' outputs over the ranks that split each
            expert; None: experts are not split.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        of = config.moe
        self.top_k = of.top_k
        self.num_experts = of.num_experts
        self.score_before_experts = of.score_before_experts
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            FeedForward(
                config.dim, of.shared_hidden_dim, config.activation, has_gate=of.shared_gate
            )
            if of.shared_hidden_dim
            else None
        )
        self.exchange: Callable[[Tensor, Tensor, Experts], Tensor] | None = None
        self.capacity_needed: Callable[[Tensor, int], Tensor] | None = None
        self.reduce_output: Callable[[Tensor], Tensor] | None = None
        self.register_buffer(
            "balance_bias", torch.zeros(of.num_experts) if of.balance_coeff else None
        )
        self.balance_bias: Tensor | None

    def materialize_buffers(self, device: torch.device) -> None:
        """Initialize the buffers, which ``to_empty`` leaves uninitialized; always float32."""
        if self.router.positions_T is not None:
            self.router.positions_T = self.router.positions_T.to(device)
        if self.balance_bias is not None:
            self.balance_bias = torch.zeros(self.num_experts, device=device)

    def forward(self, x_BTC: Tensor, places_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map the normed residual stream to the update that is added to the stream.

        Args:
            places_BT: as in ``Router``; padding is not routed.

        Returns:
            The update [B, T, C], and the number of tokens per expert, int64 [E], or [E + 1] with
            ``capacity_needed``.
        """
        weights_NK, experts_NK = self.router(x_BTC, self.balance_bias, places_BT)
        load_E, order_R, place_R, x_RC = self.arrange(experts_NK, x_BTC.flatten(0, 1))
        if self.score_before_experts:
            weights_R1 = permute(weights_NK.view(-1, 1), order_R, place_R)
            x_RC = (x_RC * weights_R1).type_as(x_RC)
        if self.exchange is None:
            out_RC = self.experts(x_RC, load_E)
        else:
            out_RC = self.exchange(x_RC, load_E, self.experts)
        if self.score_before_experts:
            out_NC = permute(out_RC, place_R, order_R).unflatten(0, (-1, self.top_k)).sum(1)
        else:
            out_NC = combine(out_RC, weights_NK, order_R, place_R)
        out_BTC = out_NC.view(x_BTC.shape)
        if self.reduce_output is not None:
            out_BTC = self.reduce_output(out_BTC)
        if self.shared_experts is not None:
            out_BTC = out_BTC + self.shared_experts(x_BTC)
        if self.capacity_needed is not None:
            load_E = torch.cat((load_E, self.capacity_needed(load_E, len(x_RC))))
        return out_BTC, load_E

    def arrange(self, experts_NK: Tensor, x_NC: Tensor) -> tuple[Tensor, ...]:
        """Rows per expert [E], the order of rows by expert, its inverse, and a row for each choice [R, C]."""
        # A GPU sorts 8 bits at a time. Padding has one more number.
        narrow = torch.uint8 if self.num_experts < 256 else torch.int16
        order_R = experts_NK.flatten().to(narrow).sort(stable=True).indices
        place_R = inverse_of(order_R)
        load_E = count_by_expert(experts_NK.unsqueeze(0), self.num_experts).squeeze(0)
        return load_E, order_R, place_R, permute(x_NC, order_R, place_R)
