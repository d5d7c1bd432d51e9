"""Rows of metrics and their columns, and the progress of a run that they show. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from harness.metrics.columns import Metric
from harness.metrics.memory import MEMORY
from harness.metrics.mfu import UTILIZATION
from harness.metrics.window import INTERVAL, RATE, SUMMARY
from harness.run.result import GOES_ON, RUN
from harness.train.objective import OBJECTIVES

if TYPE_CHECKING:
    from harness.train.observer import Observer
    from harness.train.step import Step
    from harness.train.trainer import Trainer

Row = dict[str, Any]
_STEP = Metric("step", "count", "Optimizer step, from 1.")
_TIME = Metric("time", "s", "Unix time at which the row was written.")
_SOURCES = (
    Metric(
        "tokens.*",
        "tokens",
        "Tokens of a source since step 1; padding counts, and so do batches left out.",
        "`data=mixture`",
    ),
    Metric(
        "epochs.*", "count", "Epochs of a source since step 1; not of streams.", "`data=mixture`"
    ),
)
_ROW = (
    _STEP,
    Metric(
        "loss",
        "nats/token",
        "Mean cross entropy over all valid tokens of the global batch.",
        line="loss {:.4f}",
    ),
    Metric(
        "loss_max",
        "nats/token",
        "Largest mean loss of one rank's share of the batch.",
        line="max {:.4f}",
    ),
    Metric(
        "mtp_loss",
        "nats/token",
        "Loss of multi-token prediction, without its weight.",
        "`model.mtp`",
        line="mtp_loss {:.4f}",
    ),
    Metric(
        "grad_norm", "2-norm", "Norm of all gradients before clipping.", line="grad_norm {:.3f}"
    ),
    Metric("lr", "1", "Learning rate of this step.", line="lr {:.2e}"),
    Metric("tokens", "tokens", "Tokens processed since step 1, masked ones included, padding not."),
    Metric("valid_tokens", "tokens", "Tokens of this step whose label is not masked."),
    Metric(
        "loss.*",
        "nats/token",
        "Loss of a source; null if the step has none of it.",
        "`data=mixture`",
    ),
    Metric(
        "valid_tokens.*", "tokens", "Tokens of a source in this step, not masked.", "`data=mixture`"
    ),
    *_SOURCES,
    Metric("skipped_steps", "count", "Updates skipped so far: a number not finite, or a spike."),
    Metric(
        "spike.*",
        "1",
        "Robust z-scores of the loss and the gradient norm of a spike; a row of its own with `step`.",
        "`debug.spikes=log` or `skip`",
        line="spike.{rest} {:.1f}",
    ),
    Metric("schedule.batch_size", "sequences", "Sequences of this step.", "`schedule.batch_size`"),
    Metric("schedule.seq_len", "tokens", "Tokens per sequence of this step.", "`schedule.seq_len`"),
    _TIME,
)
_RANK = (
    _STEP,
    Metric("rank", "number", "The rank."),
    Metric("stage", "number", "Its pipeline stage."),
    Metric("host", "text", "Name of its node."),
    Metric("device", "text", "Name of its device."),
    Metric(
        "loss", "nats/token", "Mean loss of the tokens that it counts; null if another rank does."
    ),
    Metric("step_seconds", "s", "Mean time of its steps since the last row, warm-up included."),
    Metric("data_share", "0 to 1", "Share of its time spent waiting for data, without warm-up."),
    _TIME,
)
_RESULT = (
    Metric("step", "count", "Last step completed.", in_summary=True),
    Metric("start_step", "count", "Step that this attempt started from; 0 for a new run."),
    Metric("resumed_from", "path", "Checkpoint that was loaded; null for a new run."),
    Metric("saved", "bool", "Whether the last step is checkpointed."),
    Metric("checkpoint.step", "count", "Step of the newest checkpoint of this attempt."),
    Metric("checkpoint.saves", "count", "Checkpoints written by this attempt."),
    Metric("checkpoint.failed", "count", "Saves that failed."),
    Metric("checkpoint.seconds", "s", "Time that training waited for checkpoints."),
    Metric("tokens", "tokens", "Tokens processed since step 1, without padding.", in_summary=True),
    Metric("loss", "nats/token", "Loss of the last step.", in_summary=True),
    Metric(
        "validation_loss",
        "nats/token",
        "Loss of the last validation on the held-out documents of `data`; null without one.",
        in_summary=True,
    ),
    Metric(
        "best_validation_loss",
        "nats/token",
        "Lowest `validation_loss` so far, over all attempts; null without one.",
    ),
    Metric("best_validation_step", "count", "Step of that validation."),
    Metric(
        "validation_loss.*",
        "nats/token",
        "The same for a source or a set, of this attempt.",
        "`data=mixture` or `validation.sets`",
    ),
    Metric(
        "evaluation.*", "number", "Metrics of the last evaluation of this attempt.", "evaluation"
    ),
    *_SOURCES,
    Metric("skipped_steps", "count", "Updates skipped: a number not finite, or a spike."),
    Metric("spikes", "count", "Spikes found (`debug.spikes`)."),
    Metric("left_out_batches", "count", "Batches that `debug.spikes=rewind` leaves out."),
    Metric(
        "train_seconds",
        "s",
        "Time of the steps that count, of all attempts: not of steps that were lost and done again.",
    ),
    Metric(
        "first_step_seconds",
        "s",
        "Time from the start of the command to the end of the first step.",
    ),
    Metric(
        "recovery_seconds",
        "s",
        "Time from the last loss of a node to the end of the first step after it.",
        GOES_ON,
    ),
    Metric(
        "recovery.*",
        "s",
        "Its parts: until the ranks had `ended`, the next attempt was `decided`, its `ranks` were "
        "there, had `loaded` the checkpoint, and had done the `first_step`.",
        GOES_ON,
    ),
    Metric("compile_seconds", "s", "Time spent in torch.compile."),
    Metric("recompiles", "count", "Graphs compiled again after the first step."),
    Metric("parameters", "count", "Parameters of the model."),
    Metric(
        "flops_per_token_full",
        "FLOP",
        "Model FLOPs per token of the window, attention counted in full.",
    ),
    Metric("flops_per_token_causal", "FLOP", "The same with the attention that masks leave."),
    Metric(
        "peak_flops", "FLOP/s", "Peak of the device that MFU is computed against; null if unknown."
    ),
    Metric("peak_origin", "text", "Source of that peak, or why there is none."),
    Metric("device", "text", "Name of the device."),
    *SUMMARY,
    *UTILIZATION,
    *MEMORY,
)


@dataclass
class Kept:
    """What a run has so far, over all attempts: checkpoints keep it."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    best_validation_step: int | None = None
    skipped_steps: int = 0
    spikes: int = 0
    train_seconds: float = 0.0
    """Of all steps that count: those that a checkpoint has, and those after it of this attempt."""


@dataclass
class Progress(Kept):
    """Step, tokens, losses and memory of a run so far; and what this attempt has beside it."""

    start_step: int = 0
    validation_of_parts: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    running: int | None = None
    """The step in which this process may wait for collectives; None between steps."""
    first_step_seconds: float | None = None
    maxima: dict[str, float | None] = field(default_factory=lambda: {"memory_gib": None})
    """Columns of observers that are maxima over all ranks, of the newest row."""

    def saved(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps: those of the run, not those of this process."""
        return {each.name: getattr(self, each.name) for each in fields(Kept)}

    def note_validation(self, loss: float | None, of_parts: dict[str, float]) -> None:
        """Take note of a validation after this step.

        Args:
            loss: of the held-out documents of ``data``, if there are any; never the best if not finite.
            of_parts: of its sources and of the sets, by column.
        """
        self.validation_loss = loss
        self.validation_of_parts = of_parts
        best = self.best_validation_loss
        if loss is not None and isfinite(loss) and (best is None or loss < best):
            self.best_validation_loss = loss
            self.best_validation_step = self.step

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue from the values of ``saved``; an empty dict starts from the beginning."""
        for name in self.saved().keys() & saved:
            setattr(self, name, saved[name])


def metrics_of_rows(observers: Iterable[Observer | type[Observer]]) -> list[Metric]:
    """The columns of metrics.jsonl, in the order of a line on the console."""
    from harness.parallelism.balance import LOADS  # imports torch

    of_observers = [metric for observer in observers for metric in observer.metrics]
    return [*_ROW, RATE, *_rates(), *UTILIZATION, *LOADS, *of_observers, *INTERVAL]


def metrics_of_ranks(observers: Iterable[Observer | type[Observer]]) -> list[Metric]:
    """The columns of the rows of ranks."""
    of_observers = [metric for observer in observers for metric in observer.metrics_of_rank]
    return [*_RANK, *MEMORY, *of_observers]


def metrics_of_result() -> list[Metric]:
    """The columns of result.json."""
    return [*RUN, *_RESULT, *_rates()]


def _rates() -> Iterator[Metric]:
    return (metric for objective in OBJECTIVES.values() for metric in objective.metrics)


def step_row(step: Step, trainer: Trainer, loss_max: float) -> Row:
    """Return the row of a training step; ``loss_max`` is the largest mean loss of a rank's rows."""
    outcome = step.outcome
    noted = step.noted
    assert noted is not None, f"step {step.number} is not logged"
    progress = trainer.progress
    interval = trainer.window.interval()
    loads = noted.loads
    schedule = trainer.job.schedule
    sizes = trainer.run.sizes.at(step.number)
    of_sources: Row = {}
    found = zip(outcome.source_losses, outcome.source_tokens, strict=True)
    for name, (loss, tokens) in zip(trainer.engine.sources.names, found, strict=True):
        of_sources |= {f"loss.{name}": loss, f"valid_tokens.{name}": tokens}
    return {
        "step": step.number,
        "loss": outcome.loss,
        "loss_max": loss_max,
        **({} if outcome.mtp_loss is None else {"mtp_loss": outcome.mtp_loss}),
        "grad_norm": outcome.grad_norm,
        "lr": step.lr,
        "tokens": progress.tokens,
        "valid_tokens": outcome.valid_tokens,
        **of_sources,
        **noted.sources,
        **interval,
        **_speed(trainer, interval["tokens_per_second"], trainer.window.interval_lengths),
        **progress.maxima,
        "skipped_steps": progress.skipped_steps,
        **({"schedule.batch_size": sizes.batch_size} if schedule.batch_size else {}),
        **({"schedule.seq_len": sizes.seq_len} if schedule.seq_len else {}),
        **({} if loads is None else trainer.engine.balance.metrics(loads.read(), outcome.tokens)),
        **noted.columns,
        "time": time.time(),
    }


def result_row(trainer: Trainer) -> Row:
    """Return the trainer's fields of result.json: progress, speed and memory."""
    progress = trainer.progress
    compiler = trainer.compiler
    window = trainer.window.summary()
    accounting = trainer.efficiency.mean(trainer.window.lengths)
    peak = trainer.efficiency.peak
    return {
        **progress.saved(),
        "start_step": progress.start_step,
        "resumed_from": trainer.resumed_from,
        "saved": trainer.is_saved,
        "left_out_batches": len(trainer.loader.state_dict().get("leave_out", [])),
        "checkpoint": asdict(trainer.saver.account),
        **progress.validation_of_parts,
        **progress.evaluation,
        **source_progress(trainer),
        "first_step_seconds": progress.first_step_seconds,
        **_recovery({**trainer.layout.get("moments", {}), **trainer.moments}),
        "compile_seconds": compiler.seconds,
        "recompiles": compiler.recompiles,
        "parameters": accounting.parameters,
        "flops_per_token_full": accounting.flops_per_token_full,
        "flops_per_token_causal": accounting.flops_per_token_causal,
        "peak_flops": peak.flops,
        "peak_origin": peak.origin,
        "device": trainer.device_name,
        "window": window,
        **_speed(trainer, window["tokens_per_second"], trainer.window.lengths),
        **progress.maxima,
    }


def _recovery(moments: Mapping[str, float]) -> Row:
    """Return the seconds between a loss and the first step after it; nothing without a loss."""
    if "lost" not in moments:
        return {}
    names = list(moments)
    parts = {name: moments[name] - moments[before] for before, name in pairwise(names)}
    return {"recovery_seconds": sum(parts.values()), "recovery": parts}


def _speed(trainer: Trainer, tokens_per_second: float | None, lengths: Mapping[int, int]) -> Row:
    """Return the columns of a throughput; ``lengths`` as in ``Efficiency.mean``."""
    samples = (
        None if tokens_per_second is None else tokens_per_second / trainer.job.training.seq_len
    )
    rates = trainer.engine.objective.rates(samples)
    return {**rates, **trainer.efficiency.row(tokens_per_second, lengths)}


def source_progress(trainer: Trainer) -> Row:
    """Return the tokens and epochs of each source of a mixture since step 1."""
    per_epoch = trainer.loader.samples_per_epoch_of
    if not per_epoch:
        return {}
    samples = trainer.loader.state_dict()["mixture"]["counts"]
    row: Row = {}
    for name, number in per_epoch.items():
        row[f"tokens.{name}"] = samples[name] * trainer.job.training.seq_len
        if number:
            row[f"epochs.{name}"] = samples[name] / number
    return row


def shown_summary(result: Row) -> Row:
    """Return the fields of ``result_row`` that the console shows at the end."""
    shown = {each.name: result[each.name] for each in _RESULT if each.in_summary}
    shown["tokens_per_second"] = result["window"]["tokens_per_second"]
    if shown["tokens_per_second_per_rank"] == shown["tokens_per_second"]:  # of one rank
        shown["tokens_per_second_per_rank"] = None
    return {name: value for name, value in shown.items() if value is not None}
