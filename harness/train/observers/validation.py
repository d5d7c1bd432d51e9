"""Validation: the loss on held-out samples."""

from __future__ import annotations

from harness.metrics.columns import Metric
from harness.train.mixture_loss import add_up
from harness.train.observer import Periodic, Row, Run


class Validation(Periodic):
    """Computes the loss of the first held-out batches."""

    metrics = (
        Metric(
            "validation_loss",
            "nats/token",
            "Loss on held-out samples; a row of its own with `step`.",
            "validation",
            line="validation_loss {:.4f}",
        ),
        Metric(
            "validation_loss.*",
            "nats/token",
            "The same for a source.",
            "`data=mixture`, validation",
            line="validation_loss.{rest} {:.5g}",
        ),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.job.validation.interval)
        self._loader = run.validation_loader

    def start(self) -> None:
        if self._loader.note:
            self.run.message(self._loader.note)

    def act(self, step: int) -> Row:
        engine, progress, loader = self.run.engine, self.run.progress, self._loader
        loader.reset()
        batches = (loader.next() for _ in range(self.run.job.validation.steps))
        total, *by_source = add_up([engine.evaluate(batch) for batch in batches])
        progress.validation_loss = total.mean
        progress.source_validation = {
            f"validation_loss.{name}": found.mean
            for name, found in zip(engine.sources.names, by_source, strict=True)
            if found.tokens
        }
        return {"validation_loss": progress.validation_loss, **progress.source_validation}

    def close(self, error: BaseException | None) -> None:
        self._loader.close()
