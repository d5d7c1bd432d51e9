"""Statistics of activations, exact on every layout, by one more pass over a step's batch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.data.batch import AnyBatch
from harness.model.architecture import architecture_of
from harness.model.decoder import Decoder
from harness.train.watch import Watch
from harness.util.annotation import SUMS, annotated

if TYPE_CHECKING:
    from harness.train.engine import Engine

STATISTICS = ("rms", "largest", "kurtosis", "router_entropy", "max_logit")
"""Of the residual stream at a place its root mean square, largest absolute value, and kurtosis
E[x^4] / E[x^2]^2, 3 for a normal distribution; of a router the mean entropy of its tokens' distributions
over experts, nats; of attention the largest score before softmax. NaN: the place has none."""


class Activations(NamedTuple):
    """What a ``Probe`` has seen, on the device and the same on all ranks."""

    statistics: Tensor
    """float64 [one of STATISTICS, one of ``Probe.names``]."""
    max_logits: Tensor
    """Largest score of each query head, scaled, over pairs of positions that see each other, without padding:
    float32 [layer, head of the full model], multi-token prediction's layer last."""


class Probe:
    """Looks at the activations of a batch, with the present weights; changes nothing.

    It runs the forward pass again, without gradients and without the compiler, so that hooks inside of
    blocks are called. All ranks call it together; the host does not wait for the result.
    """

    def __init__(self, engine: Engine) -> None:
        model = engine.job.model
        assert all(isinstance(part, Decoder) for part in engine.parts), "only decoders have places"
        self._engine = engine
        prefixes = [
            architecture_of(model).block_prefix(model, layer) for layer in range(model.num_blocks)
        ]
        self.names = ["tok_embeddings", *(prefix.removesuffix(".") for prefix in prefixes)]

    def __call__(self, batch: AnyBatch) -> Activations:
        """Look at this rank's rows of a global batch, such as ``StepOutcome.batch``."""
        engine = self._engine
        watch = Watch(engine.job, engine.mesh, engine.device)
        with ExitStack() as watched:
            for part in engine.parts:
                watched.enter_context(watch.watching(part))
            engine.forward(batch, further=True)
        # The step itself is refused if rows had no room.
        engine.balance.take_needed()
        with annotated(SUMS):
            if engine.job.world_size > 1:
                dist.all_reduce(watch.sums)
                for maxima in (watch.largest, watch.max_logits):
                    dist.all_reduce(maxima, dist.ReduceOp.MAX)
        squares, fourth_powers, elements, entropies, tokens = watch.sums
        mean = squares / elements
        of_layers = watch.max_logits.amax(1).double()
        # Layers without attention have none.
        of_layers = of_layers.masked_fill(of_layers.isneginf(), torch.nan)
        statistics = (
            mean.sqrt(),
            watch.largest.double(),
            fourth_powers / elements / mean.square(),
            entropies / tokens,
            torch.cat((of_layers.new_full((1,), torch.nan), of_layers)),
        )
        return Activations(torch.stack(statistics), watch.max_logits)
