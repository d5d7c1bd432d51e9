"""The decoder: embedding, blocks, final norm, output projection; or one pipeline stage of it."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig, RopeConfig
from harness.data.batch import PADDING
from harness.model.architecture import block_of
from harness.model.attention import build_attention
from harness.model.cache import CachedDelta, CachedKernel, CachedPass
from harness.model.delta import GatedDeltaNet
from harness.model.feed_forward import FeedForward
from harness.model.kernels import Positions, capped
from harness.model.moe import MoE
from harness.model.norm import build_norm
from harness.model.part import ModelPart
from harness.model.rope import rope_table, signed_table

# B: batch, T: sequence (of this rank, when it is split), C: residual width, V: vocabulary


class Head(nn.Linear):
    """The output projection.

    Attributes:
        loss: maps the residual stream [B, T, C], the weight [V, C] and labels [B, T] to the loss;
            None: the head returns logits.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BTC: Tensor, *labels_BT: Tensor) -> Tensor:
        """Logits [B, T, V], or the scalar loss if there are labels.

        With L labels, x is L streams concatenated [L * B, T, C], and the result has their losses
        [L].
        """
        if not labels_BT:
            return super().forward(x_BTC)
        assert self.loss is not None, "labels need a head with a loss"
        streams = x_BTC.chunk(len(labels_BT))
        losses = [
            self.loss(x, self.weight, labels) for x, labels in zip(streams, labels_BT, strict=True)
        ]
        return losses[0] if len(losses) == 1 else torch.stack(losses)


class MTP(nn.Module):
    """Multi-token prediction of DeepSeek V3 (arXiv:2412.19437, section 2.2).

    It has no table of its own: the decoder embeds the tokens and computes the logits. The order of
    the concatenated halves is that of the released weights, layer 61: ``eh_proj`` multiplies the
    embedding's half (``enorm``), then the stream's (``hnorm``); ``norm`` is ``shared_head.norm``.
    The stream is that before the decoder's final norm. Neither the paper nor the files specify
    this, and implementations differ (ggml-org/llama.cpp#24025 and vllm-project/vllm#47448).

    Args:
        block: its block, number n_layers.
    """

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = build_norm(config, config.dim)
        self.hidden_norm = build_norm(config, config.dim)
        self.proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = block
        self.norm = build_norm(config, config.dim)

    def forward(
        self,
        x_BTC: Tensor,
        later_BTC: Tensor,
        rope_2TD: Tensor,
        mask: Any | None,
        positions_T: Tensor,
        places_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map the stream before the decoder's final norm to the output projection's input.

        Args:
            x_BTC: the stream after the last block.
            later_BTC: embeddings of the tokens one position later.
            rope_2TD: the rotation table; it is not shifted, as rotation depends on distances only.

        Returns:
            The normed stream [B, T, C], and the number of tokens per expert, None without experts.
        """
        both = torch.cat((self.embedding_norm(later_BTC), self.hidden_norm(x_BTC)), dim=-1)
        out_BTC, load_E = self.block(self.proj(both), rope_2TD, mask, positions_T, places_BT)
        return self.norm(out_BTC), load_E


class Block(nn.Module):
    """Decoder block, with norms before attention and feed-forward, after them, or both."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        before = config.norm_position != "after"
        after = config.norm_position != "before"
        is_delta = config.is_delta(layer)
        self.attention_norm = build_norm(config, config.dim) if before else None
        self.attention = None if is_delta else build_attention(config, layer)
        self.delta = GatedDeltaNet(config) if is_delta else None
        self.attention_post_norm = build_norm(config, config.dim) if after else None
        self.ffn_norm = build_norm(config, config.dim) if before else None
        mixed = config.has_experts(layer)
        self.moe = MoE(config) if mixed else None
        self.feed_forward = (
            None if mixed else FeedForward(config.dim, config.ffn_hidden_dim, config.activation)
        )
        self.ffn_post_norm = build_norm(config, config.dim) if after else None

    @property
    def mixer(self) -> Any:
        """The module that mixes positions: attention or another, with an operation ``inner``."""
        return self.attention if self.delta is None else self.delta

    def forward(
        self,
        x_BTC: Tensor,
        rope_2TD: Tensor,
        mask: Any | None = None,
        positions_T: Tensor | None = None,
        places_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map the residual stream [B, T, C] to the next block's input; ``places_BT`` as in ``MoE``.

        Returns:
            The stream, and the number of tokens per expert, None without experts.
        """
        return self.feed(self.attend(x_BTC, rope_2TD, mask, positions_T), places_BT)

    def attend(
        self, x_BTC: Tensor, rope_2TD: Tensor, mask: Any | None, positions_T: Tensor | None
    ) -> Tensor:
        """The first half of a block: its mixer with the residual sum."""
        in_BTC = x_BTC if self.attention_norm is None else self.attention_norm(x_BTC)
        out_BTC = self.mixer(in_BTC, rope_2TD, mask, positions_T)
        return self._sum(x_BTC, out_BTC, self.attention_post_norm)

    def feed(self, x_BTC: Tensor, places_BT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The second half: the feed-forward or the experts, with their residual sum."""
        in_BTC = x_BTC if self.ffn_norm is None else self.ffn_norm(x_BTC)
        if self.moe is None:
            assert self.feed_forward is not None
            return self._sum(x_BTC, self.feed_forward(in_BTC), self.ffn_post_norm), None
        out_BTC, load_E = self.moe(in_BTC, places_BT)
        return self._sum(x_BTC, out_BTC, self.ffn_post_norm), load_E

    def _sum(self, x_BTC: Tensor, update_BTC: Tensor, norm: nn.Module | None) -> Tensor:
        """Add an update to the residual stream."""
        if norm is not None:
            update_BTC = norm(update_BTC)
        if self.residual_multiplier != 1:
            update_BTC = update_BTC * self.residual_multiplier
        return x_BTC + update_BTC


class Decoder(ModelPart):
    """A decoder, or a part of one."""

    def __init__(
        self, config: ModelConfig, seq_len: int, modules: Collection[str] | None = None
    ) -> None:
        """Build the named modules on the current default device (use ``torch.device("meta")``).

        Args:
            seq_len: length of the sequences, and of the rotation table.
            modules: names among tok_embeddings, layers.<i>, norm, output; None means all.
        """
        super().__init__()
        has = (lambda name: True) if modules is None else set(modules).__contains__
        self.config = config
        self.seq_len = seq_len
        self._share: Tensor | None = None
        self.loads: dict[int, Tensor] = {}
        self.needed: dict[int, Tensor] = {}
        self.tok_embeddings = (
            nn.Embedding(config.vocab_size, config.dim) if has("tok_embeddings") else None
        )
        block = block_of(config)
        self.layers = nn.ModuleDict(
            {str(i): block.build(config, i) for i in range(config.n_layers) if has(f"layers.{i}")}
        )
        self.norm = build_norm(config, config.dim) if has("norm") else None
        self.output = Head(config.dim, config.vocab_size, bias=False) if has("output") else None
        # It uses both tables, so a pipeline stage cannot have it.
        whole = self.tok_embeddings is not None and self.output is not None
        self.mtp = (
            MTP(config, block.build(config, config.n_layers))
            if config.mtp.depth and whole
            else None
        )
        self.tie_embeddings()
        self.positions: Tensor
        self.rope: Tensor
        self.local_rope: Tensor | None
        self.register_buffer("positions", None, persistent=False)
        self.register_buffer("rope", None, persistent=False)
        self.register_buffer("local_rope", None, persistent=False)
        self._materialize_positions(torch.get_default_device())

    def set_length(self, length: int, positions_T: Tensor | None) -> None:
        self.seq_len = length
        self._share = positions_T
        self._materialize_positions(self.rope.device)

    def use_cache(self, capacity: int) -> None:
        """Make attention store up to ``capacity`` positions, for passes with ``cached``.

        Latent attention stores latents and rotated keys, not heads; Gated DeltaNet one state.
        """
        for module in self.kernels:
            module.inner = CachedKernel(module.inner.spec, capacity)
        for module in self.scans:
            module.inner = CachedDelta(module.inner.spec)

    @property
    def entries(self) -> list[nn.Module]:
        return [] if self.tok_embeddings is None else [self.tok_embeddings]

    @property
    def blocks(self) -> dict[int, Block]:
        """This part's blocks, by number in the full model; multi-token prediction's is the last."""
        blocks = super().blocks
        return blocks if self.mtp is None else blocks | {self.config.n_layers: self.mtp.block}

    @property
    def mixtures(self) -> dict[int, MoE]:
        return {layer: block.moe for layer, block in self.blocks.items() if block.moe is not None}

    def take_loads(self) -> dict[int, Tensor]:
        taken = self.loads
        self.loads = {}
        return taken

    def take_needed(self) -> dict[int, Tensor]:
        taken = self.needed
        self.needed = {}
        return taken

    def tie_embeddings(self) -> None:
        """Make the output projection the embedding table, if ``tied_embeddings``.

        Otherwise two tables would silently remain.
        """
        if (
            self.config.tied_embeddings
            and self.tok_embeddings is not None
            and self.output is not None
        ):
            self.output.weight = self.tok_embeddings.weight

    def materialize_buffers(self, device: torch.device) -> None:
        self._materialize_positions(device)
        for moe in self.mixtures.values():
            moe.materialize_buffers(device)

    def _materialize_positions(self, device: torch.device) -> None:
        positions = torch.arange(self.seq_len, device=device)
        if self._share is not None:
            positions = self._share.to(device)
        self.positions = positions
        self.rope = self._rope_table(self.config.rope, device)
        if self.config.rope.local_theta is not None:
            self.local_rope = self._rope_table(self.config.rope.of_local_layers, device)

    def _rope_table(self, rope: RopeConfig, device: torch.device) -> Tensor:
        table = signed_table(rope_table(rope, self.config.rotated_width, self.seq_len, device))
        return table if self._share is None else table[:, self.positions]

    @property
    def ropes(self) -> list[Tensor]:
        """The rotation tables: that of most layers, and if there is another one, that of local layers."""
        return [self.rope] if self.local_rope is None else [self.rope, self.local_rope]

    def _rope_of(self, layer: int) -> int:
        """Index of a block's table among ``ropes``."""
        return int(self.local_rope is not None and not self.config.span(layer).is_whole)

    def forward(
        self,
        x: Tensor,
        labels_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        later_BT: Tensor | None = None,
        later_labels_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cached: CachedPass | None = None,
        real_B: Tensor | None = None,
    ) -> Tensor:
        """Run this part's modules.

        Args:
            x: token ids [B, T] for a part with the embedding, else the residual stream [B, T, C].
                Token ids of the full model may be shorter than ``seq_len``, for passes without
                gradients.
            labels_BT: labels, for a part whose output projection computes the loss.
            documents_BT: the document number of each position, if documents do not attend to each
                other; negative for padding, which experts leave out. Positions do not restart:
                rotation depends on the distance of two tokens only.
            later_BT: tokens one position later, for multi-token prediction; None: run without it.
            later_labels_BT: labels of ``later_BT``, if there are labels.
            positions_BT: positions of x in the sequences, if they are not those of ``set_length``.
            cached: after ``use_cache``: the new tokens of a generation; x has them, [B, T] or [B,
                1].
            real_B: false for empty rows, which experts leave out; None: all rows are real.

        Returns:
            Logits [B, T, V] from a part with the output projection, or the loss if there are
            labels; else the residual stream [B, T, C]. With multi-token prediction, its logits are
            appended [2B, T, V], or both losses are returned [2].
        """
        later_BTC = None
        length = self.seq_len
        if self.tok_embeddings is not None and self._share is None and positions_BT is None:
            length = x.shape[1]
        if later_BT is not None:
            # Each table is used once per pass: FSDP gathers it and reduces its gradient at every
            # use.
            assert self.tok_embeddings is not None and self.mtp is not None, (
                "later_BT needs model.mtp"
            )
            x, later_BTC = self._embed(torch.cat((x, later_BT))).chunk(2)
        elif self.tok_embeddings is not None:
            x = self._embed(x)
        blocks = self.blocks
        places_BT = self._places(documents_BT, real_B, positions_BT)
        inner: list[Any] = [block.mixer.inner for block in blocks.values()]
        kernels = {each.spec: each for each in inner}
        if cached is None:
            masks = {
                spec: kernel.mask(Positions(documents_BT, len(x), length, x.device))
                for spec, kernel in kernels.items()
            }
        else:
            positions_BT = cached.positions
            masks = {
                spec: cached.slots_of(kernel) if isinstance(kernel, CachedKernel) else cached
                for spec, kernel in kernels.items()
            }
        if positions_BT is None:
            # A full model may have shorter sequences; a rank's share has its own length.
            positions = self.positions[:length]
            ropes = [table[:, :length] for table in self.ropes]
        else:
            positions = positions_BT
            ropes = [table[:, positions] for table in self.ropes]
        for layer in map(int, self.layers):
            mask = masks[blocks[layer].mixer.inner.spec]
            rope = ropes[self._rope_of(layer)]
            x, load_E = blocks[layer](x, rope, mask, positions, places_BT)
            self._count(layer, load_E)
        x = x if cached is None else cached.last_of(x)
        stream = x
        x = self.norm(x) if self.norm is not None else x
        if later_BTC is not None:
            assert self.mtp is not None
            layer = self.config.n_layers
            shared = masks[blocks[layer].mixer.inner.spec], positions, places_BT
            rope = ropes[self._rope_of(layer)]
            further_BTC, load_E = self.mtp(stream, later_BTC, rope, *shared)
            self._count(layer, load_E)
            x = torch.cat((x, further_BTC))
        if self.output is None:
            return x
        if self.config.output_multiplier != 1:
            x = x * self.config.output_multiplier
        # A float8 output projection takes no labels.
        labels = [each for each in (labels_BT, later_labels_BT) if each is not None]
        cap = self.config.logits_cap
        if labels or cap is None:
            return self.output(x, *labels)
        return capped(self.output(x), cap)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        assert self.tok_embeddings is not None
        x_BTC: Tensor = self.tok_embeddings(tokens_BT)
        multiplier = self.config.embedding_multiplier
        return x_BTC if multiplier == 1 else x_BTC * multiplier

    def _places(
        self, documents_BT: Tensor | None, real_B: Tensor | None, positions_BT: Tensor | None
    ) -> Tensor | None:
        """Positions that this rank's routers route, negative without a token; None: all have one."""
        routers = [moe.router for moe in self.mixtures.values()]
        if (documents_BT is None and real_B is None) or not routers:
            return None
        positions_T = routers[0].positions_T
        if documents_BT is None:
            assert real_B is not None
            routed_T = self.positions if positions_T is None else positions_T
            return torch.where(real_B.unsqueeze(1), routed_T, PADDING)
        position_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        places_BT = torch.where(documents_BT >= 0, position_T, PADDING)
        if positions_BT is not None:
            places_BT = places_BT.gather(1, positions_BT)
            if positions_T is not None:
                # Routers have numbers of consecutive positions. Taken modulo the rank's share, they
                # are numbers among its own positions, whatever these are.
                positions_T = positions_T % positions_BT.shape[1]
        return places_BT if positions_T is None else places_BT.index_select(1, positions_T)

    def _count(self, layer: int, load_E: Tensor | None) -> None:
        """Add to a block's loads. Outside of the block, so that recomputation does not count twice."""
        if load_E is None:
            return
        experts = self.config.moe.num_experts
        if len(load_E) > experts:
            needed = load_E[experts]
            earlier = self.needed.get(layer)
            self.needed[layer] = needed if earlier is None else torch.maximum(earlier, needed)
        if not torch.is_grad_enabled():
            return
        load_E = load_E[:experts]
        before = self.loads.get(layer)
        self.loads[layer] = load_E if before is None else before + load_E
