"""Rows of metrics: of a training step, and the trainer's fields of result.json."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.train.progress import device_name

if TYPE_CHECKING:
    from harness.train.steps import Step
    from harness.train.trainer import Trainer

Row = dict[str, Any]
_SHOWN = ("step", "tokens", "loss", "validation_loss", "tokens_per_second_per_rank", "mfu", "memory_gib")


def step_row(step: Step, trainer: Trainer, loss_max: float) -> Row:
    """Return the row of a training step; ``loss_max`` is the largest mean loss of a rank's rows."""
    outcome, noted, phase = step.outcome, step.noted, trainer.run.sizes.at(step.number)
    assert noted is not None, f"step {step.number} is not logged"
    progress, interval, loads = trainer.progress, trainer.window.interval(), noted.loads
    return {
        "step": step.number,
        "loss": outcome.loss,
        "loss_max": loss_max,
        "grad_norm": outcome.grad_norm,
        "lr": step.lr,
        "tokens": progress.tokens,
        "valid_tokens": outcome.valid_tokens,
        **({} if outcome.mtp_loss is None else {"mtp_loss": outcome.mtp_loss}),
        **_source_losses(step, trainer),
        **noted.sources,
        **interval,
        **trainer.efficiency.fields(interval["tokens_per_second"], trainer.window.interval_lengths),
        **progress.maxima,
        "skipped_steps": progress.skipped_steps,
        **_scheduled_sizes(step.number, trainer),
        **({} if loads is None else trainer.engine.balance.metrics(loads.read(), phase.tokens)),
        **noted.columns,
        "time": time.time(),
    }


def rank_row(row: Row, loss: float | None, maxima: Row) -> Row:
    """Return the row of a rank's own values.

    Args:
        row: the row of the step on this rank; its times are the rank's own.
        loss: mean loss of the rank's tokens; None without any.
        maxima: its values of the columns that are maxima over all ranks.
    """
    return {"loss": loss, "step_seconds": row["step_seconds"], "data_share": row["data_share"], **maxima}


def _scheduled_sizes(step: int, trainer: Trainer) -> Row:
    """Return the sizes of a step that the job schedules."""
    schedule, phase = trainer.job.schedule, trainer.run.sizes.at(step)
    return {
        **({"schedule.batch_size": phase.batch_size} if schedule.batch_size else {}),
        **({"schedule.seq_len": phase.seq_len} if schedule.seq_len else {}),
    }


def result_row(trainer: Trainer) -> Row:
    """Return the trainer's fields of result.json: progress, speed and memory."""
    progress, compiler, window = trainer.progress, trainer.compiler, trainer.window.summary()
    accounting, peak = trainer.efficiency.mean(trainer.window.lengths), trainer.efficiency.peak
    return {
        "step": progress.step,
        "start_step": progress.start_step,
        "resumed_from": trainer.resumed_from,
        "saved": trainer.is_saved,
        "checkpoint": asdict(trainer.saver.account),
        "tokens": progress.tokens,
        "loss": progress.loss,
        "validation_loss": progress.validation_loss,
        **progress.source_validation,
        **progress.evaluation,
        **source_progress(trainer),
        "skipped_steps": progress.skipped_steps,
        "damaged_documents": trainer.loader.damaged_documents,
        "first_step_seconds": progress.first_step_seconds,
        "compile_seconds": compiler.seconds,
        "recompiles": compiler.recompiles,
        "parameters": accounting.parameters,
        "flops_per_token_full": accounting.flops_per_token_full,
        "flops_per_token_causal": accounting.flops_per_token_causal,
        "peak_flops": peak.flops,
        "peak_origin": peak.origin,
        "device": device_name(trainer.engine.device),
        "window": window,
        **trainer.efficiency.fields(window["tokens_per_second"], trainer.window.lengths),
        **progress.maxima,
    }


def _source_losses(step: Step, trainer: Trainer) -> Row:
    """Return the loss and the valid tokens of each source of a mixture in one step."""
    outcome = step.outcome
    row: Row = {}
    found = zip(outcome.source_losses, outcome.source_tokens, strict=True)
    for name, (loss, tokens) in zip(trainer.engine.sources.names, found, strict=True):
        row |= {f"loss.{name}": loss, f"valid_tokens.{name}": tokens}
    return row


def source_progress(trainer: Trainer) -> Row:
    """Return the tokens and epochs of each source of a mixture since step 1."""
    per_epoch = trainer.loader.samples_per_epoch_of
    if not per_epoch:
        return {}
    samples = trainer.loader.state_dict()["mixture"]["counts"]
    seq_len = trainer.job.training.seq_len
    tokens = {f"tokens.{name}": samples[name] * seq_len for name in per_epoch}
    epochs = {f"epochs.{name}": samples[name] / number for name, number in per_epoch.items() if number}
    return {**tokens, **epochs}


def shown_summary(result: Row) -> Row:
    """Return the fields of ``result_row`` that the console shows at the end."""
    shown = {name: result[name] for name in _SHOWN if result[name] is not None}
    rate = result["window"]["tokens_per_second"]
    return {**shown, "tokens_per_second": rate} if rate is not None else shown
