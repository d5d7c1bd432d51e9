"""Bytes of logits and of what the loss makes of them."""

from __future__ import annotations

from harness.job import Job
from harness.plan.memory_activations import ActivationBytes
from harness.plan.parameters import BYTES

FLOAT32 = 4


class LogitBytes:
    """Logits of one microbatch on a rank, from the output projection to their gradient.

    The plain loss (``parallelism/loss.py``) has them in param_dtype and float32, and keeps the logarithm of
    their softmax. Backward has three tensors of float32 at once: that one, the gradient by it, and the one
    by the logits. torch's loss of a split vocabulary (torch/distributed/tensor/parallel/loss.py) is made of
    single operations, with four at once. Compiled by inductor the loss keeps the logits themselves, and
    writes their gradient only. In chunks (``parallelism/chunked_loss.py``) only a chunk stands, and what is
    kept are gradients: of the stream, and of the projection in float32.
    """

    def __init__(self, job: Job, activations: ActivationBytes) -> None:
        layout, model = job.parallelism, job.model
        streams = 1 + model.mtp.depth
        split = layout.tp > 1 and layout.loss_parallel
        vocabulary = -(-model.vocab_size // layout.tp) if split else model.vocab_size
        self.compute = BYTES[job.precision.param_dtype]
        self.numbers = float(activations.tokens * vocabulary)
        self.streams, self.pipelined = streams, layout.pp > 1
        # Without the parallel loss, every rank's columns are gathered.
        self.columns = self.numbers / layout.tp if layout.tp > 1 and not split else 0.0
        if job.training.loss_chunks > 1:
            stream = streams * activations.tokens * model.dim
            self._chunked(self.numbers / job.training.loss_chunks, float(vocabulary * model.dim), stream)
        elif job.compile.loss and job.compile.backend == "inductor" and not split:
            self._plain(kept=self.compute, forward=2 * self.compute, backward=2 * self.compute)
        else:
            copy = FLOAT32 if self.compute < FLOAT32 else 0
            others = 3 if split else 2
            forward = self.compute + copy + FLOAT32 * (others - 1)
            held = self.compute if self.pipelined else 0
            self._plain(FLOAT32 + held, forward, FLOAT32 * (others + 1) + held)

    def _plain(self, kept: int, forward: int, backward: int) -> None:
        """Takes bytes of a number; losses of several streams come one after another, backward too."""
        more = (self.streams - 1) * self.numbers
        self.kept = self.streams * kept * self.numbers
        """Between forward and backward."""
        self.forward = forward * self.numbers + more * (self.compute + kept) + self.compute * self.columns
        """At the fullest moment of the loss."""
        self.backward = backward * self.numbers + more * max(kept, self.compute)
        """At the fullest moment of its backward."""
        self.gradient = self.streams * self.compute * self.numbers + self.compute * self.columns
        """While the output projection is differentiated."""

    def _chunked(self, chunk: float, weight: float, stream: float) -> None:
        copy = FLOAT32 if self.compute < FLOAT32 else 0
        product = self.compute * weight if copy else 0
        self.kept = self.streams * FLOAT32 * weight + self.compute * stream
        # The gradient of the chunk before stands until the next one's is there.
        self.forward = self.kept + self.compute * chunk + max((self.compute + copy) * chunk, product)
        # The kept gradients are multiplied by the loss's own, out of place.
        self.backward = self.kept + FLOAT32 * weight + (FLOAT32 + self.compute) * stream / self.streams
        self.gradient = 0.0
