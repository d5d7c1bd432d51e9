"""Bytes of logits and of the loss."""

from __future__ import annotations

from harness.config.job import Job
from harness.tools.plan.costs import costs_of
from harness.tools.plan.memory_activations import ActivationBytes
from harness.tools.plan.parameters import BYTES

FLOAT32 = 4


class LogitBytes:
    """Logits of one microbatch on a rank, from the output projection to their gradient.

    The plain loss (``parallelism/loss.py``) has them in param_dtype and float32, and saves the log-softmax.
    Its backward has three float32 tensors at once: the log-softmax, its gradient, and the gradient of the
    logits. torch's loss with a sharded vocabulary (torch/distributed/tensor/parallel/loss.py) is made of
    single operations, with four tensors at once. Compiled by inductor, the loss saves the logits themselves
    and writes only their gradient; with a sharded vocabulary it saves the log-softmax. In chunks
    (``parallelism/loss.py``) only one chunk exists at a time, and gradients are saved: of the stream,
    and of the projection in float32.

    CUDA's allocator cannot use the memory of the plain loss's logits in backward: they are freed after they
    are copied to float32, and all tensors that follow are twice as large.
    """

    def __init__(self, job: Job, activations: ActivationBytes) -> None:
        layout, model = job.parallelism, job.model
        streams = 1 + model.mtp.depth
        split = layout.tp > 1 and layout.loss_parallel
        outputs = costs_of(model).outputs(model)
        vocabulary = -(-outputs // layout.tp) if split else outputs
        self.compute = BYTES[job.precision.param_dtype]
        self.numbers = float(activations.tokens * vocabulary)
        self.streams, self.pipelined = streams, layout.pp > 1
        self.unusable = 0.0
        """Bytes that are free in backward of the loss, but too small for its tensors."""
        # Without the parallel loss, the ranks' columns are gathered.
        self.columns = self.numbers / layout.tp if layout.tp > 1 and not split else 0.0
        held = self.compute if self.pipelined else 0  # a schedule keeps the last stage's output
        if job.training.loss_chunks > 1:
            stream = streams * activations.tokens * model.dim
            self._chunked(self.numbers / job.training.loss_chunks, float(vocabulary * model.dim), stream)
        elif job.compile.loss and job.compile.backend == "inductor" and split:
            # Collectives between maximum, sum and difference keep the loss from being one kernel.
            forward = self.compute + 2 * FLOAT32
            self._plain(FLOAT32 + held, forward, FLOAT32 + self.compute + held)
        elif job.compile.loss and job.compile.backend == "inductor":
            self._plain(kept=self.compute, forward=2 * self.compute, backward=2 * self.compute)
        else:
            copy = FLOAT32 if self.compute < FLOAT32 else 0
            others = 3 if split else 2
            forward = self.compute + copy + FLOAT32 * (others - 1)
            self._plain(FLOAT32 + held, forward, FLOAT32 * (others + 1) + held)
            if copy and not held and not activations.cpu:
                self.unusable = self.numbers * self.compute

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
        self.kept = self.streams * FLOAT32 * weight + self.compute * stream
        # The gradient of a chunk is freed after the next one's is allocated.
        self.forward = self.kept + self.compute * chunk + (self.compute + copy) * chunk
        # The saved gradients are multiplied by the gradient of the loss, out of place.
        self.backward = self.kept + FLOAT32 * weight + (FLOAT32 + self.compute) * stream / self.streams
        self.gradient = 0.0
