"""Bytes of logits and of the loss."""

from __future__ import annotations

from harness.job import Job
from harness.plan.memory_activations import ActivationBytes
from harness.plan.parameters import BYTES

FLOAT32 = 4


class LogitBytes:
    """Logits of one microbatch on a rank, from the output projection to their gradient.

    The plain loss (``parallelism/loss.py``) has them in param_dtype and float32, and saves the log-softmax.
    Its backward has three float32 tensors at once: the log-softmax, its gradient, and the gradient of the
    logits. torch's loss with a sharded vocabulary (torch/distributed/tensor/parallel/loss.py) is made of
    single operations, with four tensors at once. Compiled by inductor, the loss saves the logits themselves
    and writes only their gradient. In chunks (``parallelism/chunked_loss.py``) only one chunk exists at a
    time, and gradients are saved: of the stream, and of the projection in float32.
    """

    def __init__(self, job: Job, activations: ActivationBytes) -> None:
        layout, model = job.parallelism, job.model
        streams = 1 + model.mtp.depth
        split = layout.tp > 1 and layout.loss_parallel
        vocabulary = -(-model.vocab_size // layout.tp) if split else model.vocab_size
        self.compute = BYTES[job.precision.param_dtype]
        self.numbers = float(activations.tokens * vocabulary)
        self.streams, self.pipelined = streams, layout.pp > 1
        # Without the parallel loss, the ranks' columns are gathered.
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
        """Set totals from bytes per logit; several streams run one after another, also in backward."""
        more = (self.streams - 1) * self.numbers
        self.kept = self.streams * kept * self.numbers
        """Saved from forward to backward."""
        self.forward = forward * self.numbers + more * (self.compute + kept) + self.compute * self.columns
        """Peak of the loss."""
        self.backward = backward * self.numbers + more * max(kept, self.compute)
        """Peak of its backward."""
        self.gradient = self.streams * self.compute * self.numbers + self.compute * self.columns
        """During backward of the output projection."""

    def _chunked(self, chunk: float, weight: float, stream: float) -> None:
        copy = FLOAT32 if self.compute < FLOAT32 else 0
        product = self.compute * weight if copy else 0
        self.kept = self.streams * FLOAT32 * weight + self.compute * stream
        # The gradient of a chunk is freed after the next one's is allocated.
        self.forward = self.kept + self.compute * chunk + max((self.compute + copy) * chunk, product)
        # The saved gradients are multiplied by the gradient of the loss, out of place.
        self.backward = self.kept + FLOAT32 * weight + (FLOAT32 + self.compute) * stream / self.streams
        self.gradient = 0.0
