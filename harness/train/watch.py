"""What a pass computes inside of blocks: the residual stream, choices of routers, scores of attention.

Every rank counts what it computes: its rows, positions, heads and layers. Ranks may compute the same,
such as the stream without sequence parallel, but then all elements of a layer are counted equally
often. So means and maxima over the world are exact on any layout.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.data.batch import PADDING
from harness.model.kernels import Kernel, largest_logits, sees
from harness.model.moe import Router
from harness.model.part import ModelPart
from harness.parallelism.compile import uncompiled
from harness.parallelism.context import local_positions
from harness.parallelism.mesh import Mesh

# B: batch, T: queries of this rank, S: keys of the full sequence, H: query heads, K: key heads, D: head
# width, C: residual width, N: tokens, E: experts, P: places, L: layers


class Watch:
    """Sums and maxima of the passes that run inside of ``watching``, of this rank.

    A place is the embedding's output, number 0, or the output of block ``place - 1``.

    Attributes:
        sums: of each place the squares and fourth powers of the stream, its elements, the entropies of a
            router, and its tokens; float64 [5, P].
        largest: largest absolute value of the stream, float32 [P].
        max_logits: largest score of each query head of the full model, float32 [L, H].
    """

    def __init__(self, job: Job, mesh: Mesh, device: torch.device) -> None:
        model = job.model
        layers = model.num_blocks
        self._layout = job.parallelism
        self._mesh = mesh
        self.sums = torch.zeros(5, 1 + layers, dtype=torch.float64, device=device)
        self.largest = torch.zeros(1 + layers, device=device)
        self.max_logits = torch.full((layers, model.n_heads), float("-inf"), device=device)

    @contextmanager
    def watching(self, part: ModelPart) -> Iterator[None]:
        """Context manager in which passes of a model part are counted; nothing of it runs compiled."""
        with ExitStack() as watched:
            watched.enter_context(uncompiled(part))
            for layer, block in part.blocks.items():
                hooks = [block.register_forward_hook(partial(self._leave, 1 + layer))]
                if layer == 0:
                    hooks.append(block.register_forward_pre_hook(self._enter))
                if block.moe is not None:
                    route = partial(self._route, 1 + layer)
                    hooks.append(block.moe.router.register_forward_pre_hook(route))
                for hook in hooks:
                    watched.callback(hook.remove)
                inner = block.attention.inner
                block.attention.inner = WatchedKernel(
                    inner, self._mesh, self._layout, self.max_logits[layer]
                )
                watched.callback(setattr, block.attention, "inner", inner)
            yield

    def _enter(self, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._see(0, inputs[0])

    def _leave(self, place: int, _block: nn.Module, _inputs: Any, output: tuple[Any, ...]) -> None:
        self._see(place, output[0])

    def _see(self, place: int, x_BTC: Tensor) -> None:
        x_BTC = x_BTC.float()
        square_BTC = x_BTC.square()
        self.sums[0, place] += square_BTC.sum(dtype=torch.float64)
        self.sums[1, place] += square_BTC.square().sum(dtype=torch.float64)
        self.sums[2, place] += x_BTC.numel()
        self.largest[place] = torch.maximum(self.largest[place], x_BTC.abs().amax())

    def _route(self, place: int, router: Router, inputs: tuple[Any, ...]) -> None:
        x_BTC, _, tokens_BT = inputs
        logits_NE = router.logits(x_BTC).double()
        is_softmax = router.config.score == "softmax"
        scores_NE = logits_NE.softmax(-1) if is_softmax else logits_NE.sigmoid()
        shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        entropy_N = torch.special.entr(shares_NE).sum(-1)
        counted_N = torch.ones_like(entropy_N)
        if tokens_BT is not None:
            counted_N = tokens_BT.flatten().double()
        self.sums[3, place] += (entropy_N * counted_N).sum()
        self.sums[4, place] += counted_N.sum()


class WatchedKernel(Kernel):
    """A kernel, and the largest scores of its queries.

    Args:
        max_logits: the layer's row, [H] of the full model.
    """

    def __init__(
        self, inner: Kernel, mesh: Mesh, layout: ParallelismConfig, max_logits: Tensor
    ) -> None:
        super().__init__(inner.spec)
        self.inner = inner
        self.mesh = mesh
        self.layout = layout
        self.max_logits = max_logits

    def mask(
        self,
        documents_BT: Tensor | None,
        batch: int,
        length: int,
        device: torch.device,
        first: int = 0,
    ) -> tuple[Any, Tensor | None, list[Tensor]]:
        # Made on the device, so that the host does not wait for a copy.
        with device:
            positions = [
                local_positions(self.layout, length, rank) for rank in range(self.layout.cp)
            ]
        return self.inner.mask(documents_BT, batch, length, device), documents_BT, positions

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        inner_mask, documents_BS, positions = mask  # as ``mask`` returns them
        position_T = positions[self.mesh.rank("cp")]
        position_S = torch.cat(positions)

        def visible(some: slice) -> Tensor:
            own_T = position_T[some]
            seen = sees(self.spec.span, own_T.unsqueeze(1), position_S).unsqueeze(0)
            if documents_BS is None:
                return seen
            document_BT = documents_BS[:, own_T].unsqueeze(2)
            same = document_BT == documents_BS[:, position_S].unsqueeze(1)
            return seen & same & (document_BT != PADDING)

        found_H = largest_logits(self.spec, q_BTHD, self._gathered(k_BTKD), visible)
        # Tensor-parallel ranks have the heads in order.
        first = self.mesh.rank("tp") * len(found_H)
        own_H = self.max_logits[first : first + len(found_H)]
        torch.maximum(own_H, found_H, out=own_H)
        return self.inner(q_BTHD, k_BTKD, v_BTKE, inner_mask, sinks_H)  # type: ignore[no-any-return]

    def _gathered(self, k_BTKD: Tensor) -> Tensor:
        """Keys of all ranks that split the sequence, in their order."""
        if self.layout.cp == 1:
            return k_BTKD
        batch = len(k_BTKD)
        by_rank = k_BTKD.new_empty(self.layout.cp * batch, *k_BTKD.shape[1:])
        dist.all_gather_single(by_rank, k_BTKD.contiguous(), self.mesh.group("cp"))
        return by_rank.unflatten(0, (-1, batch)).transpose(0, 1).flatten(1, 2)
