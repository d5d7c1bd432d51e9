"""Gated DeltaNet (arXiv:2412.06464): a mixer whose heads have a state instead of keys and values.

With ``model.delta.decay=channel`` it is Kimi Delta Attention (arXiv:2510.26692).

A position decays the state of a head, replaces the value that is stored under its key by a mixture
with its own, and reads the state with its query. So the cost of a position does not depend on how
many are before it, and the state is all that later positions need of earlier ones.
"""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import DeltaConfig, ModelConfig
from harness.data.batch import PADDING
from harness.model.accounting import DELTA_CHUNK, DELTA_ROWS
from harness.model.grouped import local_shard
from harness.model.kernels import Positions
from harness.model.norm import Norm
from harness.util.errors import ConfigError

# B: batch, T: sequence, C: features, W: width of a convolution, K: key heads, G: value heads of a key
# head, H: value heads (K x G), D: width of keys, E: width of values, N: chunks, L: length of a chunk,
# R: channels with a decay of their own, D or 1

NORM_EPS = 1e-6


class DeltaRule(nn.Module):
    """The operation of the mixer: convolutions, then the gated delta rule, from an empty state."""

    def __init__(self, spec: DeltaConfig) -> None:
        super().__init__()
        self.spec = spec
        self.rule = delta_rule

    def mask(self, positions: Positions) -> Any | None:
        """What ``forward`` has to know of documents: their numbers, [B, W - 1 + T]; None: they are one.

        The first W - 1 are those of the positions before the first.
        """
        if positions.documents_BT is None:
            return None
        return F.pad(positions.documents_BT, (self.spec.kernel - 1, 0), value=PADDING)

    def forward(
        self,
        streams: tuple[Tensor, ...],
        kernels: tuple[Tensor, ...],
        decay_BTHR: Tensor,
        beta_BTH: Tensor,
        mask: Any | None,
    ) -> Tensor:
        """Compute the operation.

        Args:
            streams: queries, keys and values before the convolutions, [B, T, C] each.
            kernels: their convolutions, [C, W] each.
            decay_BTHR: logarithm of the factor of the state, or of each row of it, never positive.
            beta_BTH: share of the value under its key that a position replaces.
            mask: result of ``self.mask``.

        Returns:
            [B, T, H, E], in the dtype of the streams.
        """
        out_BTHE, _ = self.scan(streams, kernels, decay_BTHR, beta_BTH, mask)
        return out_BTHE.type_as(streams[0])

    def scan(
        self,
        streams: tuple[Tensor, ...],
        kernels: tuple[Tensor, ...],
        decay_BTHR: Tensor,
        beta_BTH: Tensor,
        documents_BT: Tensor | None,
        before: tuple[Tensor | None, ...] = (None, None, None),
        state_BHDE: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The operation after earlier positions: outputs and the last state, in float32.

        Args:
            before: the last W - 1 inputs of each convolution before the first; None: zeros.
            state_BHDE: the state before the first position, None: zeros. It may be wider than values
                (``delta_rule``).
        """
        widths = self.spec.key_head_dim, self.spec.key_head_dim, self.spec.value_head_dim
        q, k, v = (
            convolved(x, kernel, earlier, documents_BT).unflatten(-1, (-1, width))
            for x, kernel, earlier, width in zip(streams, kernels, before, widths, strict=True)
        )
        if documents_BT is not None:
            documents_BT = documents_BT[:, self.spec.kernel - 2 :]
        return self.rule(q, k, v, decay_BTHR, beta_BTH, state_BHDE, documents_BT)


def convolved(
    x_BTC: Tensor, kernel_CW: Tensor, before_BTC: Tensor | None, documents_BT: Tensor | None
) -> Tensor:
    """SiLU of a causal convolution of each feature, within documents; arguments as in ``DeltaRule``."""
    width = kernel_CW.shape[1]
    length = x_BTC.shape[1]
    if before_BTC is None:
        inputs_BTC = F.pad(x_BTC, (0, 0, width - 1, 0))
    else:
        inputs_BTC = torch.cat((before_BTC, x_BTC), dim=1)
    # Products and their sum are computed in float32.
    kernel_CW = _precise(kernel_CW)
    out_BTC = inputs_BTC[:, width - 1 :] * kernel_CW[:, -1]
    for tap in range(width - 1):
        term_BTC = inputs_BTC[:, tap : tap + length] * kernel_CW[:, tap]
        if documents_BT is not None:
            is_other_BT = documents_BT[:, tap : tap + length] != documents_BT[:, width - 1 :]
            term_BTC = term_BTC.masked_fill(is_other_BT.unsqueeze(-1), 0)
        out_BTC = out_BTC + term_BTC
    return F.silu(out_BTC).type_as(x_BTC)


def delta_rule(
    q_BTKD: Tensor,
    k_BTKD: Tensor,
    v_BTHE: Tensor,
    decay_BTHR: Tensor,
    beta_BTH: Tensor,
    state_BHDE: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, chunk by chunk, in float32 (arXiv:2412.06464, section 3.3).

    Args:
        state_BHDE: the state before the first position; None: zeros. If it is wider than values, these
            are continued with zeros: what such columns become depends on the state alone.
        documents_BT: document numbers of the position before the first, and of all positions: a state
            does not reach into another document.

    Returns:
        Outputs [B, T, H, E], as wide as the state, and the state after the last position.
    """
    B, T, K, D = k_BTKD.shape
    length = min(DELTA_CHUNK, T)
    padding = -T % length

    def chunked(x_BTHE: Tensor, heads: int) -> Tensor:
        """In float32, by key head, value head of it, and chunk: [B, K, heads, N, L, E]."""
        x = F.pad(_precise(x_BTHE), (0, 0, 0, 0, 0, padding))
        x = x.view(B, -1, length, K, heads, x.shape[-1]).permute(0, 3, 4, 1, 2, 5)
        return x.contiguous()  # else every product saves a copy

    groups = v_BTHE.shape[2] // K
    q = _normalized(chunked(q_BTKD, 1)) * D**-0.5
    k = _normalized(chunked(k_BTKD, 1))
    v = chunked(v_BTHE, groups)
    beta = chunked(beta_BTH.unsqueeze(-1), groups)
    decay = chunked(decay_BTHR, groups).cumsum(-2)
    # Factors of the state: between two positions of a chunk, from its begin to a position, from a
    # position to its end, and over all of it.
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    to_position = decay.exp()
    to_end = (decay[..., -1:, :] - decay).exp()
    over_all = to_position[..., -1:, :].mT
    if documents_BT is not None:
        last_B1 = documents_BT[:, -1:]
        documents_BT = torch.cat((documents_BT, last_B1.expand(-1, padding)), dim=1)
        document = documents_BT[:, 1:].view(B, 1, 1, -1, length, 1)
        earlier = documents_BT[:, :-1:length].view(B, 1, 1, -1, 1, 1)
        last = document[..., -1:, :]
        hidden = hidden | (document != document.mT)
        to_position = to_position.masked_fill(document != earlier, 0)
        to_end = to_end.masked_fill(document != last, 0)
        over_all = over_all.masked_fill(last != earlier, 0)
    if decay.shape[-1] > 1:
        of_keys = decayed_products(k, k, decay).masked_fill(hidden, 0)
        seen = decayed_products(q, k, decay).masked_fill(hidden, 0)
    else:
        between = (decay - decay.mT).masked_fill(hidden, float("-inf")).exp()
        of_keys = (k @ k.mT) * between
        seen = (q @ k.mT) * between
    # Positions of a chunk correct each other: the values that they write are the solution of a
    # triangular system, whose right side has those that they were given less what the state has.
    system = of_keys * beta
    given = torch.linalg.solve_triangular(system, v * beta, upper=False, unitriangular=True)
    taken = torch.linalg.solve_triangular(
        system, k * (beta * to_position), upper=False, unitriangular=True
    )
    reading = q * to_position
    writing = (k * to_end).mT
    if state_BHDE is None:
        state = v.new_zeros(B, K, groups, D, v.shape[-1])
    else:
        state = state_BHDE.unflatten(1, (K, groups))
        given = F.pad(given, (0, state.shape[-1] - v.shape[-1]))
    written, states = delta_scan(given, taken, writing, over_all, state, torch.zeros_like(over_all))
    out = reading @ states[:, :, :, :-1] + seen @ written
    out_BTKGE = out.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)
    return out_BTKGE.flatten(2, 3)[:, :T], states[:, :, :, -1].flatten(1, 2)


@torch.library.custom_op("harness::decayed_products", mutates_args=())
def decayed_products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Products of x at a position of a chunk with keys up to it, that decay by channel: [..., L, L].

    The sum over channels d of x_id k_jd exp(G_id - G_jd), zero for j > i, where G are the summed decays of a
    chunk, [..., L, D] as x and k. exp(-G) alone would overflow. So rows are computed in blocks of DELTA_ROWS.
    With keys before a block both factors are relative to the block's first row, and neither exceeds 1. Within
    a block every pair of positions has a factor of its own. It is an operator because autograd would keep
    these: DELTA_ROWS x D values per position.
    """
    length = decay.shape[-2]
    out = x.new_zeros(*x.shape[:-1], length)
    for begin in range(0, length, DELTA_ROWS):
        x_own, k_own, own = (each[..., begin : begin + DELTA_ROWS, :] for each in (x, k, decay))
        from_first, to_first = _around(decay, begin)
        rows = out[..., begin : begin + DELTA_ROWS, :]
        rows[..., :begin] = (x_own * from_first) @ (k[..., :begin, :] * to_first).mT
        pairs = _between(own) * k_own.unsqueeze(-3)
        rows[..., begin : begin + DELTA_ROWS] = (pairs @ x_own.unsqueeze(-1)).squeeze(-1)
    return out


@decayed_products.register_fake
def _(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-2])


@torch.library.custom_op("harness::decayed_products_backward", mutates_args=())
def decayed_products_backward(
    grad: Tensor, x: Tensor, k: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and k."""
    grad_x = torch.empty_like(x)
    grad_k = torch.zeros_like(k)
    for begin in range(0, decay.shape[-2], DELTA_ROWS):
        own = slice(begin, begin + DELTA_ROWS)
        x_own = x[..., own, :]
        from_first, to_first = _around(decay, begin)
        before = grad[..., own, :begin]
        grad_x[..., own, :] = (before @ (k[..., :begin, :] * to_first)) * from_first
        grad_k[..., :begin, :] += (before.mT @ (x_own * from_first)) * to_first
        pairs = _between(decay[..., own, :]) * grad[..., own, own].unsqueeze(-1)
        grad_x[..., own, :] += (pairs * k[..., own, :].unsqueeze(-3)).sum(-2)
        grad_k[..., own, :] += (pairs * x_own.unsqueeze(-2)).sum(-3)
    return grad_x, grad_k


@decayed_products_backward.register_fake
def _(grad: Tensor, x: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(k)


def _around(decay: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Factors from the first of some rows to each of them, and from all positions before to the first."""
    first = decay[..., begin : begin + 1, :]
    from_first = (decay[..., begin : begin + DELTA_ROWS, :] - first).exp()
    return from_first, (first - decay[..., :begin, :]).exp()


def _between(own: Tensor) -> Tensor:
    """Factors between some rows, by channel, [..., rows, rows, D]: zero from later rows to earlier ones."""
    later = torch.ones(own.shape[-2], own.shape[-2], dtype=torch.bool, device=own.device).triu(1)
    exponents = own.unsqueeze(-2) - own.unsqueeze(-3)
    return exponents.masked_fill(later.unsqueeze(-1), float("-inf")).exp()


def _save_products(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_products(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    x, k, decay = ctx.saved_tensors
    grad_x, grad_k = decayed_products_backward(grad, x, k, decay)
    return grad_x, grad_k, x * grad_x - k * grad_k


decayed_products.register_autograd(_differentiate_products, setup_context=_save_products)


def fla_rule(
    q_BTKD: Tensor,
    k_BTKD: Tensor,
    v_BTHE: Tensor,
    decay_BTHR: Tensor,
    beta_BTH: Tensor,
    state_BHDE: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``delta_rule`` by the kernels of flash-linear-attention, for one decay per head and no documents.

    Products take values in their own dtype. Written for its version 0.6.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    assert documents_BT is None, "training.delta_rule=fla is refused with documents"
    if state_BHDE is not None:
        v_BTHE = F.pad(v_BTHE, (0, state_BHDE.shape[-1] - v_BTHE.shape[-1]))
    out_BTHE, last_BHDE = chunk_gated_delta_rule(
        q_BTKD,
        k_BTKD,
        v_BTHE,
        g=decay_BTHR.squeeze(-1),
        beta=beta_BTH,
        initial_state=state_BHDE,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return _precise(out_BTHE), last_BHDE


def require_fla() -> None:
    """Raise ConfigError where the package of ``fla_rule`` is missing."""
    if importlib.util.find_spec("fla") is None:
        works = "plain, or pip install flash-linear-attention"
        rule = "needs the package flash-linear-attention, which is not installed"
        raise ConfigError("training.delta_rule", "fla", rule, works)


@torch.library.custom_op("harness::delta_scan", mutates_args=())
def delta_scan(
    given: Tensor,
    taken: Tensor,
    writing: Tensor,
    over_all: Tensor,
    state: Tensor,
    added: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pass the state from chunk to chunk: all that is done one chunk after another.

    It is an operator so that compiled code does not grow with the sequence. Tensors have the dimensions of
    batch, key head, value head and chunk, then:

    Args:
        given: what a chunk's positions would write to an empty state, [L, E].
        taken: factor of the state that is taken off it, [L, D].
        writing: keys, decayed to the chunk's end, [D, L].
        over_all: factor of the state over the chunk, [R, 1].
        state: the state before the first chunk, without the dimension of chunks, [D, E].
        added: what else a chunk adds to the state, [D, E] or [1, 1].

    Returns:
        What positions write, [L, E]; the states before all chunks and after the last, [D, E].
    """
    written = torch.empty_like(given)
    states = [state]
    for n in range(given.shape[3]):
        written[:, :, :, n] = own = given[:, :, :, n] - taken[:, :, :, n] @ states[n]
        kept = states[n] * over_all[:, :, :, n] + added[:, :, :, n]
        states.append(kept + writing[:, :, :, n] @ own)
    return written, torch.stack(states, 3)


@delta_scan.register_fake
def _(given: Tensor, *others: Tensor) -> Any:
    state = others[3]
    shape = *state.shape[:3], given.shape[3] + 1, *state.shape[3:]
    return torch.empty_like(given), state.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[1:4], *output)


def _differentiate(ctx: Any, grad_written: Tensor, grad_states: Tensor) -> Any:
    """Gradients pass from chunk to chunk in the same way, from the last one to the first."""
    taken, writing, over_all, written, states = ctx.saved_tensors
    given = grad_written, -writing.mT, -taken.mT, over_all
    reverse = [x.flip(3) for x in (*given, grad_states)]
    scanned = delta_scan(*reverse[:4], grad_states[:, :, :, -1], reverse[4][:, :, :, 1:])
    of_written, of_states = (x.flip(3) for x in scanned)
    before = states[:, :, :, :-1]
    after = of_states[:, :, :, 1:]
    return (
        of_written,
        -of_written @ before.mT,
        after @ written.mT,
        (after * before).sum_to_size(over_all.shape),
        of_states[:, :, :, 0],
        None,
    )


delta_scan.register_autograd(_differentiate, setup_context=_save)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedDeltaNet(nn.Module):
    """The mixer of a ``delta`` layer; under tensor parallel each rank holds some of the heads.

    ``inner`` is the operation; parallelism can replace it. Gates of outputs and decays come from the input by
    ``wz`` and ``wa``; if channels decay by themselves through latents, by ``wz_a`` and ``wa_a`` first.
    """

    wq: nn.Linear
    wk: nn.Linear
    wv: nn.Linear
    wz: nn.Linear
    wb: nn.Linear
    wa: nn.Linear
    wz_a: nn.Linear
    wa_a: nn.Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        of = config.delta
        dim = config.dim
        self.by_channel = of.by_channel
        for name, (outputs, inputs) in of.linears(dim).items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))
        for name, width in of.convolutions.items():
            self.register_parameter(name, nn.Parameter(torch.empty(width, 1, of.kernel)))
        self.a_log = nn.Parameter(torch.empty(of.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(of.decays))
        self.norm = Norm(of.value_head_dim, eps=config.norm_eps)
        self.wo = nn.Linear(of.value_width, dim, bias=False)
        self.inner = DeltaRule(of)

    def forward(
        self,
        x_BTC: Tensor,
        rope_2TD: Tensor,
        mask: Any | None = None,
        positions_T: Tensor | None = None,
    ) -> Tensor:
        """Mix positions; arguments and result as in ``Attention``. Nothing is rotated."""
        streams = self.wq(x_BTC), self.wk(x_BTC), self.wv(x_BTC)
        kernels = tuple(local_shard(self, f"conv_{name}").squeeze(1) for name in "qkv")
        steps_BTC = self.wa(self.wa_a(x_BTC) if self.by_channel else x_BTC)
        steps_BTC = _precise(steps_BTC) + local_shard(self, "dt_bias")
        # Softplus: torch's own has a backward whose strides the compiler gets wrong (torch 2.13).
        steps_BTC = torch.logaddexp(steps_BTC, steps_BTC.new_zeros(()))
        rates_H1 = _precise(local_shard(self, "a_log")).exp().unsqueeze(-1)
        decay_BTHR = -rates_H1 * steps_BTC.unflatten(-1, (len(rates_H1), -1))
        out_BTHE = self.inner(streams, kernels, decay_BTHR, self.wb(x_BTC).sigmoid(), mask)
        if self.by_channel:
            gate = self.wz(self.wz_a(x_BTC)).sigmoid()
        else:
            gate = F.silu(self.wz(x_BTC))
        return self.wo((self.norm(out_BTHE) * gate.view(out_BTHE.shape)).flatten(2))
