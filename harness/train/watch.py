"""What a pass computes inside of blocks: the residual stream, choices of routers, scores of attention.

Every rank counts what it computes: its rows, positions, heads and layers. Ranks may compute the same,
such as the stream without sequence parallel, but then all elements of a layer are counted equally
often. So means and maxima over the world are exact on any layout.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.job import Job
from harness.data.batch import PADDING
from harness.model.kernels import Kernel, Positions, largest_logits
from harness.model.moe import Router
from harness.model.part import ModelPart
from harness.parallelism.compile import uncompiled
from harness.parallelism.context import in_order, places_of, queries_of
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
        # Those of the running pass.
        self._positions: Positions
        self._real_B: Tensor | None = None
        self.sums = torch.zeros(5, 1 + layers, dtype=torch.float64, device=device)
        self.largest = torch.zeros(1 + layers, device=device)
        self.max_logits = torch.full((layers, model.n_heads), float("-inf"), device=device)

    @contextmanager
    def watching(self, part: ModelPart) -> Iterator[None]:
        """Context manager in which passes of a model part are counted; nothing of it runs compiled."""
        with ExitStack() as watched:
            watched.enter_context(uncompiled(part))
            watched.enter_context(part.register_forward_pre_hook(self._begin, with_kwargs=True))
            for layer, block in part.blocks.items():
                place = 1 + layer
                watched.enter_context(block.register_forward_hook(partial(self._leave, place)))
                if layer == 0:
                    watched.enter_context(block.register_forward_pre_hook(self._enter))
                if block.moe is not None:
                    router = block.moe.router
                    hook = router.register_forward_pre_hook(partial(self._route, place))
                    watched.enter_context(hook)
                if block.attention is None:
                    continue
                kernel = block.attention.inner
                hook = kernel.register_forward_pre_hook(partial(self._attend, layer))
                watched.enter_context(hook)
                kernel.mask = partial(self._mask, kernel.mask)
                watched.callback(delattr, kernel, "mask")
            yield

    def _begin(self, _part: nn.Module, _inputs: Any, keywords: dict[str, Any]) -> None:
        self._real_B = keywords.get("real_B")

    def _enter(self, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._see(0, inputs[0])

    def _leave(self, place: int, _block: nn.Module, _inputs: Any, output: tuple[Any, ...]) -> None:
        self._see(place, output[0])

    def _see(self, place: int, x_BTC: Tensor) -> None:
        elements: Tensor | int = x_BTC.numel()
        if self._real_B is not None:
            elements = self._real_B.sum() * x_BTC[0].numel()
            x_BTC = x_BTC * self._real_B.view(-1, 1, 1)
        x_BTC = x_BTC.float()
        square_BTC = x_BTC.square()
        self.sums[0, place] += square_BTC.sum(dtype=torch.float64)
        self.sums[1, place] += square_BTC.square().sum(dtype=torch.float64)
        self.sums[2, place] += elements
        self.largest[place] = torch.maximum(self.largest[place], x_BTC.abs().amax())

    def _route(self, place: int, router: Router, inputs: tuple[Any, ...]) -> None:
        x_BTC, _, places_BT = inputs
        logits_NE = router.logits(x_BTC).double()
        is_softmax = router.config.score == "softmax"
        scores_NE = logits_NE.softmax(-1) if is_softmax else logits_NE.sigmoid()
        shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        entropy_N = torch.special.entr(shares_NE).sum(-1)
        counted_N = torch.ones_like(entropy_N)
        if places_BT is not None:
            counted_N = (places_BT >= 0).flatten().double()
        self.sums[3, place] += (entropy_N * counted_N).sum()
        self.sums[4, place] += counted_N.sum()

    def _mask(self, mask: Callable[[Positions], Any], positions: Positions) -> Any | None:
        self._positions = positions
        if positions.documents_BT is None and self._real_B is not None:
            # Empty rows are documents of padding.
            documents_B = torch.where(self._real_B, 0, PADDING)
            documents_BT = documents_B.unsqueeze(1).expand(-1, positions.length)
            self._positions = positions._replace(documents_BT=documents_BT)
        return mask(positions)

    def _attend(self, layer: int, kernel: Kernel, inputs: tuple[Any, ...]) -> None:
        q_BTHD, k_BTKD, *_ = inputs
        k_BSKD = self._of_all_ranks(k_BTKD)
        parts = queries_of(self._layout, self._positions, self._mesh.rank("cp"))
        for q, own in zip(q_BTHD.chunk(len(parts), dim=1), parts, strict=True):
            found_H = largest_logits(kernel.spec, q, k_BSKD, own)
            # Tensor-parallel ranks have the heads in order.
            first = self._mesh.rank("tp") * len(found_H)
            own_H = self.max_logits[layer, first : first + len(found_H)]
            torch.maximum(own_H, found_H, out=own_H)

    def _of_all_ranks(self, k_BTKD: Tensor) -> Tensor:
        """Keys of the full sequence."""
        ranks = self._layout.cp
        if ranks == 1:
            return k_BTKD
        k_BTKD = k_BTKD.contiguous()
        by_rank = [torch.empty_like(k_BTKD) for _ in range(ranks)]
        # torch 2.11 has it too.
        dist.all_gather(by_rank, k_BTKD, self._mesh.group("cp"))
        places = places_of(self._layout, self._positions.documents_BT)
        return in_order(torch.stack(by_rank), self._layout, places)
