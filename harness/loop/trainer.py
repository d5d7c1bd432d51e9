"""The training loop: data, gradients, update, metrics, validation, checkpoints, stop."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.load import Starter
from harness.checkpoint.save import SaveFailed, Saver
from harness.checkpoint.together import Together
from harness.data.loader import Batch
from harness.data.prefetch import Prefetcher
from harness.data.tokenizer import build_tokenizer
from harness.errors import NonFiniteError, UserError
from harness.job import Job
from harness.loop.batches import loader_of
from harness.loop.engine import Engine, StepOutcome
from harness.loop.evidence import save_evidence
from harness.loop.finite import FiniteWatch, unwrap_non_finite
from harness.loop.flight_recorder import StepWatch
from harness.loop.progress import Progress, device_name, device_peak
from harness.loop.setup import shorten_timeouts
from harness.loop.signals import StopRequest, ignore_stop_signals
from harness.metrics.annotation import annotated
from harness.metrics.memory import peak_memory_gib
from harness.metrics.mfu import describe_inputs, utilization
from harness.metrics.profiler import Profiler
from harness.metrics.recorder import Recorder
from harness.metrics.window import StepTimer, Window
from harness.model.accounting import account
from harness.parallelism.compile import CompileWatch
from harness.precision.linears import sort_linears, warning_of_eager
from harness.run_folder import RunFolder


@dataclass(frozen=True)
class _Step:
    """A step that the host has launched; the device may not have finished it."""

    number: int
    batch: Batch
    outcome: StepOutcome
    lr: float


# How many steps later the host may read the values of a step. On a CPU there is no device to wait for.
LATE_STEPS = {"cpu": 0, "cuda": 1}


class Trainer:
    """Train one job; every rank has a trainer.

    Args:
        job: the resolved job.
        folder: the run folder.
        engine: model and optimizer.
        recorder: writes the metrics; on rank 0 only.
        started: time.time() at which the process or its controller started.
    """

    def __init__(
        self, job: Job, folder: RunFolder, engine: Engine, recorder: Recorder | None, started: float
    ) -> None:
        self.job, self.folder, self.engine, self.recorder = job, folder, engine, recorder
        self.started = started
        self.progress = Progress()
        self.resumed_from: str | None = None
        self.window = Window(job.metrics.warmup_steps)
        self.late_steps = LATE_STEPS[engine.device.type]
        self.compiler = CompileWatch()
        device = engine.device
        self.timer = StepTimer(synchronize=torch.cuda.synchronize if device.type == "cuda" else None)
        self.accounting = account(job.model, job.training.seq_len)
        self.peak = device_peak(job, device)
        tokenizer = build_tokenizer(job.tokenizer)
        loader, ahead = loader_of(job, tokenizer, engine.rows), job.data.prefetch
        self.loader = Prefetcher(loader, ahead, device) if ahead else loader
        self.validation_loader = (
            loader_of(job, tokenizer, engine.rows, "validation") if job.validation.interval else None
        )
        self.together = Together(job.checkpoint.timeout_seconds)
        self.saver = Saver(job, folder.path, engine, self.loader, self.together, self._message)
        rank = dist.get_rank() if dist.is_initialized() else 0
        watching = job.world_size > 1 and job.debug.flight_recorder > 0
        self.watch = StepWatch(folder.path, rank, enabled=watching)
        self.finite = FiniteWatch(engine.parts) if job.debug.nan else None
        self.profiler = Profiler(job.profiling, folder.path, rank, device, self._message)
        self._skipped_in_a_row = 0

    def train(self) -> str:
        """Train to the last step, or to a stop that all ranks agree on.

        Returns:
            ``completed`` or ``interrupted``.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite and the policy says stop.
            UserError: the run cannot start from the given checkpoint or weights.
            SaveFailed: checkpoints cannot be written.
        """
        # The loop's handlers stay until everything is closed: closing takes time.
        with ExitStack() as handlers:
            try:
                return self._train(handlers)
            except torch.OutOfMemoryError:
                self.profiler.out_of_memory(self.progress.step + 1)
                raise
            finally:
                if "RANK" in os.environ:
                    # A launcher sends them when a rank has failed; they would hide the error.
                    ignore_stop_signals()
                self.watch.close()
                self.profiler.close()
                self.loader.close()
                self.saver.folder.release()

    def _train(self, handlers: ExitStack) -> str:
        self._message(describe_inputs(self.accounting, self.peak))
        precision = self.job.precision
        if precision.linear != "none":
            self._message(sort_linears(self.job.model, precision).describe(precision.linear))
        warning = warning_of_eager(precision, compiled=self.job.compile.blocks)
        if warning is not None and self.engine.device.type == "cuda":
            self._message(f"WARNING {warning}")
        self._start()
        if self.job.checkpoint.create_seed_checkpoint:
            if self.resumed_from is not None and self.progress.step > 0:
                raise UserError(
                    "checkpoint.create_seed_checkpoint=true: the run is already at step "
                    f"{self.progress.step}; would work: checkpoint.resume=false, or another name"
                )
            self._save(final=True)
            return "completed"
        collecting = self.job.training.gc_interval > 0
        if collecting:
            # Every step waits for the slowest rank, so all ranks collect at the same step.
            gc.disable()
            gc.collect()
        try:
            return self._loop(handlers.enter_context(StopRequest()), collecting)
        except NonFiniteError:
            # All ranks raise this error, so the checkpoint in flight can still be finished.
            try:
                self.saver.close()
            except SaveFailed as failure:
                self._message(f"WARNING {failure}")
            raise
        finally:
            if collecting:
                gc.enable()

    @property
    def is_saved(self) -> bool:
        """Whether the latest step is checkpointed."""
        return self.job.checkpoint.writes and self.saver.account.step == self.progress.step

    @property
    def is_resumable(self) -> bool:
        """Whether the same command resumes from the latest step."""
        return self.is_saved and self.job.checkpoint.resume

    def _start(self) -> None:
        """Load the checkpoint or weights that the run starts from."""
        if self.job.checkpoint.enable:
            self.saver.prepare()
            starter = Starter(self.job, self.folder.path, self.engine, self.loader, self.together)
            resumed = starter.start()
            for message in resumed.messages:
                self._message(message)
            self.resumed_from = resumed.path
            self.progress.resume(resumed.state)
        if self.recorder is not None:
            step = self.progress.step
            self.recorder.begin(step, has_curve=self.saver.folder.path_of(step) == self.resumed_from)

    def result(self) -> dict[str, Any]:
        """Return the trainer's fields of result.json: progress, speed and memory."""
        progress, window = self.progress, self.window.summary()
        rate = window["tokens_per_second"]
        per_rank = None if rate is None else rate / self.job.world_size
        return {
            "step": progress.step,
            "start_step": progress.start_step,
            "resumed_from": self.resumed_from,
            "saved": self.is_saved,
            "checkpoint": dataclasses.asdict(self.saver.account),
            "tokens": progress.tokens,
            "loss": progress.loss,
            "validation_loss": progress.validation_loss,
            "skipped_steps": progress.skipped_steps,
            "damaged_documents": self.loader.damaged_documents,
            "first_step_seconds": progress.first_step_seconds,
            "compile_seconds": self.compiler.seconds,
            "recompiles": self.compiler.recompiles,
            "parameters": self.accounting.parameters,
            "flops_per_token_full": self.accounting.flops_per_token_full,
            "flops_per_token_causal": self.accounting.flops_per_token_causal,
            "peak_flops": self.peak.flops,
            "peak_origin": self.peak.origin,
            "device": device_name(self.engine.device),
            "window": window,
            "tokens_per_second_per_rank": per_rank,
            **utilization(per_rank, self.accounting, self.peak),
            "memory_gib": self.progress.memory_gib,
        }

    def shown_summary(self) -> dict[str, Any]:
        """Return the fields of the result that the console shows at the end."""
        row = self.result()
        rates = ("tokens_per_second_per_rank", "mfu", "memory_gib")
        names = ("step", "tokens", "loss", "validation_loss", *rates)
        shown = {name: row[name] for name in names if row[name] is not None}
        rate = row["window"]["tokens_per_second"]
        return {**shown, "tokens_per_second": rate} if rate is not None else shown

    def _loop(self, request: StopRequest, collecting: bool) -> str:
        training, unread = self.job.training, deque[_Step]()
        self.profiler.start(self.progress.step)
        self.timer.restart()
        for number in range(self.progress.step + 1, training.steps + 1):
            self.profiler.begin_step(number)
            if collecting and number % training.gc_interval == 0:
                gc.collect(1)
            with annotated("data"), self.timer.section("data"):
                batch = self.loader.next()
            if self.job.optimizer.in_backward:
                self._wait_for_staging()
            self._watch(number)
            with unwrap_non_finite(number):
                outcome = self.engine.gradients(batch, stop_requested=self._wants_to_stop(request))
            step = _Step(number, batch, outcome, self.engine.lr)
            self._wait_for_staging()
            self.engine.update(outcome.norm)
            unread.append(step)
            stopping = outcome.stop_requested and number < training.steps
            # Values that are not needed yet are read one step later. Then the host does not wait for the
            # device to finish its queue, and is never more than one step ahead of it.
            while len(unread) > self.late_steps or (unread and (stopping or self._needs_outcome(number))):
                self._read_outcome(unread.popleft())
            self.watch.end()
            self._record_time(number)
            if self._is_logged(number):
                self._log(step)
            self._validate_if_due(number)
            self._save_if_due(number, stopping)
            self._end_profiled(number)
            if stopping:
                saved = ""
                if self.is_saved:
                    resumable = self.is_resumable
                    command = "the same command" if resumable else "it without checkpoint.resume=false"
                    saved = f" and saved: {command} resumes from there"
                self._message(f"stopped after step {number} of {training.steps}{saved}")
                return "interrupted"
        return "completed"

    def _watch(self, step: int) -> None:
        """Tell the watchdogs which step starts."""
        if self.finite is not None:
            self.finite.step = step
        cluster, first = self.job.cluster, self.progress.first_step_seconds is None
        self.watch.begin(step, cluster.start_timeout_seconds if first else cluster.step_timeout_seconds)

    def _wants_to_stop(self, request: StopRequest) -> bool:
        return request.signal is not None or self.saver.gives_up

    def _is_logged(self, step: int) -> bool:
        ends = (self.progress.start_step + 1, self.job.training.steps)
        return step in ends or step % self.job.metrics.log_interval == 0

    def _is_validated(self, step: int) -> bool:
        """Every ``interval`` steps and after the last one."""
        interval = self.job.validation.interval
        return interval > 0 and (step % interval == 0 or step == self.job.training.steps)

    def _needs_outcome(self, step: int) -> bool:
        """Whether a save, log or validation after this step needs its loss, or to know that it is finite."""
        saved = self.job.checkpoint.is_due(step, self.job.training.steps)
        return saved or self._is_logged(step) or self._is_validated(step)

    def _end_profiled(self, step: int) -> None:
        if not self.profiler.ends_trace(step):
            self.profiler.end_step(step)
            return
        with self.timer.section("profiling"):
            self.profiler.end_step(step)
            # Wait here for the ranks that write; otherwise the wait would count as time of the next step.
            self.engine.world_max([0.0])

    def _wait_for_staging(self) -> None:
        """Wait until the checkpoint in flight has copied the tensors that the next update changes."""
        if self.saver.is_staging:
            with self.timer.section("checkpoint"):
                self.saver.wait_for_staging()

    def _save_if_due(self, step: int, stopping: bool) -> None:
        """Save at the job's interval, at the end, and before a stop."""
        config, last = self.job.checkpoint, self.job.training.steps
        self.saver.poll()
        if config.is_due(step, last) or (stopping and config.writes):
            with self.timer.section("checkpoint"):
                self._save(final=stopping or step == last)

    def _save(self, *, final: bool) -> None:
        self.saver.save(self.progress.step, self.progress.saved(), final=final)
        if final:
            self.saver.close()

    def _read_outcome(self, step: _Step) -> None:
        """Read the loss and norm of a step, handle values that are not finite, and update the progress."""
        if step.outcome.is_finite:
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
            self._handle_non_finite(step)
        self.progress.step, self.progress.loss = step.number, step.outcome.loss
        self.progress.tokens += self.job.global_batch_size * self.job.training.seq_len

    def _record_time(self, step: int) -> None:
        lap, tokens = self.timer.lap(), self.job.global_batch_size * self.job.training.seq_len
        profiled = self.profiler.is_profiled(step)
        self.window.add(lap.seconds, tokens, lap.data_seconds, profiled=profiled)
        if self.progress.first_step_seconds is None:
            self.progress.first_step_seconds = time.time() - self.started
            shorten_timeouts(self.job)
            if self.job.compile.enable:
                graphs, seconds = self.compiler.graphs, self.compiler.seconds
                self._message(f"compiled {graphs} graphs in {seconds:.1f} s, in the first step")
        elif new := self.compiler.unexpected:
            self.compiler.recompiles += new
            self._message(f"WARNING step {step} compiled {new} graphs again: TORCH_LOGS=recompiles says why")
        self.compiler.settle()

    def _log(self, step: _Step) -> None:
        """Write one row of metrics; two of them are maxima over all ranks."""
        outcome = step.outcome
        local = float("-inf") if outcome.local_loss is None else outcome.local_loss
        loss_max, memory = self.engine.world_max([local, peak_memory_gib(self.engine.device.type)])
        self.progress.memory_gib = memory
        interval = self.window.interval()
        rate = interval["tokens_per_second"]
        per_rank = None if rate is None else rate / self.job.world_size
        row = {
            "step": step.number,
            "loss": outcome.loss,
            "loss_max": loss_max,
            "grad_norm": outcome.grad_norm,
            "lr": step.lr,
            "tokens": self.progress.tokens,
            "valid_tokens": outcome.valid_tokens,
            **({} if outcome.mtp_loss is None else {"mtp_loss": outcome.mtp_loss}),
            **interval,
            "tokens_per_second_per_rank": per_rank,
            **utilization(per_rank, self.accounting, self.peak),
            "memory_gib": memory,
            "skipped_steps": self.progress.skipped_steps,
            **self.engine.balance.figures(),
            "time": time.time(),
        }
        if self.recorder is not None:
            self.recorder.log(row)

    def _validate_if_due(self, step: int) -> None:
        if self.validation_loader is None or not self._is_validated(step):
            return
        with self.timer.section("validation"):
            self.validation_loader.reset()
            losses, tokens = 0.0, 0
            for _ in range(self.job.validation.steps):
                loss, valid = self.engine.evaluate(self.validation_loader.next())
                losses, tokens = losses + loss, tokens + valid
            self.progress.validation_loss = losses / max(1, tokens)
            self.compiler.settle()  # compiling a graph without gradients is expected
        if self.recorder is not None:
            self.recorder.log_validation({"step": step, "validation_loss": self.progress.validation_loss})

    def _handle_non_finite(self, step: _Step) -> None:
        """Save the evidence, then stop or skip; every rank has the same sums and does the same.

        The update was not applied (see ``Engine.update``).
        """
        evidence, outcome = self.folder.path / "evidence", step.outcome
        rank = dist.get_rank() if dist.is_initialized() else 0
        names = [name for name, _ in self.engine.named_parameters()]
        saved = save_evidence(evidence, rank, step.number, outcome, step.batch, names)
        text = f"step {step.number}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; {saved}"
        if self.job.debug.non_finite == "stop":
            raise NonFiniteError(text)
        if self._skipped_in_a_row > self.job.debug.max_skipped_steps:
            raise NonFiniteError(f"{text}; {self._skipped_in_a_row} updates in a row skipped")
        self.progress.skipped_steps += 1
        self._message(f"skipped the update of {text}")

    def _message(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.message(text)
