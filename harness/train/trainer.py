"""The training loop: data, gradients, update, metrics, validation, checkpoints, stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from harness.checkpoint.load import CheckpointLoader
from harness.checkpoint.rank_group import RankGroup
from harness.checkpoint.save import SaveFailed, Saver
from harness.config.job import Job
from harness.data.prefetch import Prefetcher
from harness.data.tokenizer import build_tokenizer
from harness.metrics.efficiency import Efficiency
from harness.metrics.memory import allocator, peak_memory_gib
from harness.metrics.mfu import describe_inputs
from harness.metrics.profiler import Profiler
from harness.metrics.recorder import Recorder
from harness.metrics.window import StepTimer, Window
from harness.parallelism.compile import CompileWatch
from harness.parallelism.tensor import describe_fused, fused
from harness.precision.linears import sort_linears, warning_of_eager
from harness.run.folder import RunFolder
from harness.tools.inference.evaluate.in_loop import EvaluationInLoop
from harness.train.batches import loader_of
from harness.train.engine import Engine
from harness.train.flight_recorder import StepWatch
from harness.train.mixture_loss import add_up
from harness.train.nan_watch import FiniteWatch, unwrap_non_finite
from harness.train.non_finite import NonFinitePolicy
from harness.train.phases import PhaseLog
from harness.train.process import garbage_collection
from harness.train.progress import Progress, device_name, device_peak
from harness.train.rank_metrics import RankMetrics
from harness.train.rows import Row, rank_row, result_row, source_progress, step_row
from harness.train.setup import set_timeouts
from harness.train.signals import StopRequest, ignore_stop_signals
from harness.train.step_outcome import HostCopy
from harness.train.steps import Noted, Step, StepQueue
from harness.util.annotation import annotated
from harness.util.errors import NonFiniteError, UserError
from harness.weights import on_ranks


class Trainer:
    """Train one job; every rank has a trainer.

    Args:
        job: the resolved job.
        folder: the run folder.
        engine: model and optimizer.
        recorder: writes the metrics; on rank 0 only.
        started: time.monotonic() of this machine at which the process or its controller started.
    """

    def __init__(
        self, job: Job, folder: RunFolder, engine: Engine, recorder: Recorder | None, started: float
    ) -> None:
        self.job, self.folder, self.engine, self.recorder = job, folder, engine, recorder
        self.sizes = job.sizes
        self.started = started
        self.progress = Progress()
        self.resumed_from: str | None = None
        self.window = Window(job.metrics.warmup_steps)
        self.unread = StepQueue(engine.device.type)
        self.compiler = CompileWatch()
        device = engine.device
        self.device_name = device_name(device)
        synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self.timer = StepTimer(synchronize, annotated=annotated)
        self.efficiency = Efficiency(
            job.model, job.training.seq_len, device_peak(job, device), job.world_size
        )
        tokenizer = build_tokenizer(job.tokenizer)
        loader, ahead = loader_of(job, tokenizer, engine.rows), job.data.prefetch
        self.loader = Prefetcher(loader, ahead, device) if ahead and not loader.runs_in_loop else loader
        self.validation_loader = (
            loader_of(job, tokenizer, engine.rows, "validation") if job.validation.interval else None
        )
        self.notes = [each.note for each in (loader, self.validation_loader) if each and each.note]
        self.evaluation = EvaluationInLoop(engine, tokenizer) if job.evaluation.interval else None
        self.ranks = RankGroup(job.checkpoint.timeout_seconds)
        self.sheet = (
            engine.objective.build_sheet(job, engine, self.validation_loader, self.ranks, self.folder.path)
            if self.validation_loader is not None
            else None
        )
        self.saver = Saver(job, folder.path, engine, self.loader, self.ranks, on_ranks, self._message)
        rank = dist.get_rank() if dist.is_initialized() else 0
        watching = job.world_size > 1 and job.debug.flight_recorder > 0
        self.watch = StepWatch(folder.path, rank, enabled=watching)
        self.finite = FiniteWatch(engine.parts) if job.debug.nan else None
        self.phases = (
            PhaseLog(folder.path, engine, job.metrics.warmup_steps) if job.profiling.phases else None
        )
        self.own_metrics = RankMetrics(folder.path, engine)
        self.profiler = Profiler(job.profiling, folder.path, rank, device, self._message)
        self.non_finite = NonFinitePolicy(job.debug, folder.path, engine)

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
                self.profiler.out_of_memory(self.progress.step + len(self.unread) + 1)
                raise
            finally:
                if "RANK" in os.environ:
                    # A launcher sends them when a rank has failed; they would hide the error.
                    ignore_stop_signals()
                self.watch.close()
                if self.phases is not None:
                    self.phases.close()
                self.own_metrics.close()
                self.profiler.close()
                self.loader.close()
                if self.validation_loader is not None:
                    self.validation_loader.close()
                self.saver.folder.release()

    def _train(self, handlers: ExitStack) -> str:
        self._describe()
        self._start()
        if self.job.checkpoint.create_seed_checkpoint:
            return self._save_seed()
        request = handlers.enter_context(StopRequest())
        with garbage_collection(self.job.training.gc_interval) as collect:
            try:
                return self._loop(request, collect)
            except NonFiniteError:
                # All ranks raise this error, so the checkpoint in flight can still be finished.
                try:
                    self.saver.close()
                except SaveFailed as failure:
                    self._message(f"WARNING {failure}")
                raise

    def _loop(self, request: StopRequest, collect: Callable[[int], None]) -> str:
        self.profiler.start(self.progress.step)
        if self.phases is not None:
            self.phases.start(self.progress.step)
        self.timer.restart()
        for number in range(self.progress.step + 1, self.job.steps + 1):
            self.profiler.begin_step(number)
            collect(number)
            try:
                step = self._launch(number, request)
            except Exception:
                if self.job.world_size == 1:  # else a row needs the other ranks, which may not have failed
                    self._finish(drain=True)
                raise
            stopping = step.outcome.stop_requested and number < self.job.steps
            self.unread.add(step)
            self._finish(drain=stopping or self._needs_outcome(number))
            self.watch.end()
            self._note_compiled(number)
            if self._is_validated(number):
                self._validate(number)
            if self._is_evaluated(number):
                self._evaluate(number)
            self._save_if_due(number, stopping)
            self._end_profiled(number)
            if stopping:
                self._message(self._describe_stop())
                return "interrupted"
        return "completed"

    def _launch(self, number: int, request: StopRequest) -> Step:
        """Launch the passes and the update of the next batch."""
        with self.timer.section("data"):
            batch = self.loader.next()
        if self.job.optimizer.in_backward:
            self._wait_for_staging()
        self._watch(number)
        with unwrap_non_finite(number):
            stop_requested = request.signal is not None or self.saver.asks_to_stop
            beside = [] if self.phases is None else self.phases.beside(number)
            outcome = self.engine.gradients(batch, stop_requested=stop_requested, beside=beside)
        if self.phases is not None:
            for warning in self.phases.observe(outcome.beside, number):
                self._message(warning)
        lr = self.engine.lr
        self._wait_for_staging()
        self.engine.update(outcome.norm)
        if self.phases is not None:
            self.phases.end_step(number)
        return Step(number, batch, outcome, lr, self._note() if self._is_logged(number) else None)

    def _note(self) -> Noted:
        """Note values for the step's row before the next step changes them."""
        device, load_ME = self.engine.device.type, self.engine.balance.load_ME
        return Noted(
            {"memory_gib": peak_memory_gib(device), **allocator(device)},
            source_progress(self),
            None if load_ME is None else HostCopy(load_ME),
            None if self.phases is None else len(self.phases.slow.slow),
        )

    def _describe(self) -> None:
        """Show notes about the data, the inputs of the MFU, and the formats of the linears."""
        for note in self.notes:
            self._message(note)
        self._message(describe_inputs(self.efficiency.accounting, self.efficiency.peak))
        precision = self.job.precision
        if precision.linear != "none":
            self._message(sort_linears(self.job.model, precision).describe(precision.linear))
        warning = warning_of_eager(precision, compiled=self.job.compile.blocks)
        if warning is not None and self.engine.device.type == "cuda":
            self._message(f"WARNING {warning}")

    def _describe_stop(self) -> str:
        saved = ""
        if self.is_saved:
            command = "the same command" if self.is_resumable else "it without checkpoint.resume=false"
            saved = f" and saved: {command} resumes from there"
        return f"stopped after step {self.progress.step} of {self.job.steps}{saved}"

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
            starter = CheckpointLoader(
                self.job, self.folder.path, self.engine, self.loader, self.ranks, on_ranks
            )
            resumed = starter.start()
            for message in resumed.messages:
                self._message(message)
            self.resumed_from = resumed.path
            self.progress.resume(resumed.state)
        step = self.progress.step
        self.own_metrics.begin(step)
        if self.recorder is not None:
            self.recorder.begin(step, has_curve=self.saver.folder.path_of(step) == self.resumed_from)

    def _save_seed(self) -> str:
        if self.resumed_from is not None and self.progress.step > 0:
            raise UserError(
                "checkpoint.create_seed_checkpoint=true: the run is already at step "
                f"{self.progress.step}; would work: checkpoint.resume=false, or another name"
            )
        self._save(final=True)
        return "completed"

    def result(self) -> Row:
        """Return the trainer's fields of result.json (``result_row``)."""
        return result_row(self)

    def _watch(self, step: int) -> None:
        """Tell the watchdogs which step starts."""
        if self.finite is not None:
            self.finite.step = step
        cluster, limit = self.job.cluster, self.job.cluster.step_timeout_seconds
        if self.progress.first_step_seconds is None:
            limit = cluster.start_timeout_seconds
        elif self.job.compile.enable and self._changes_length(step):
            limit = cluster.start_timeout_seconds
            set_timeouts(limit)
        self.watch.begin(step, limit)

    def _changes_length(self, step: int) -> bool:
        """Whether the sequences of a step have another length than those of the step before."""
        return step > 1 and self.sizes.at(step).seq_len != self.sizes.at(step - 1).seq_len

    def _is_logged(self, step: int) -> bool:
        ends = (self.progress.start_step + 1, self.job.steps)
        return step in ends or step % self.job.metrics.log_interval == 0

    def _is_validated(self, step: int) -> bool:
        return self._is_due(step, self.job.validation.interval)

    def _is_evaluated(self, step: int) -> bool:
        return self._is_due(step, self.job.evaluation.interval)

    def _is_due(self, step: int, interval: int) -> bool:
        """Every ``interval`` steps and after the last one."""
        return interval > 0 and (step % interval == 0 or step == self.job.steps)

    def _needs_outcome(self, step: int) -> bool:
        """Whether what comes after this step needs its loss, to know that it is finite, or its time alone.

        Else its values are read, and its row is written, when the next step is launched.
        """
        saved = self.job.checkpoint.is_due(step, self.job.steps)
        timed_alone = (
            step == self.progress.start_step + 1
            or self._changes_length(step)
            or self._changes_length(step + 1)
            or self.profiler.is_profiled(step) != self.profiler.is_profiled(step + 1)
            or self.profiler.ends_trace(step)
        )
        last = step == self.job.steps
        return last or saved or timed_alone or self._is_validated(step) or self._is_evaluated(step)

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
        config, last = self.job.checkpoint, self.job.steps
        self.saver.poll()
        if config.is_due(step, last) or (stopping and config.writes):
            with self.timer.section("checkpoint"):
                self._save(final=stopping or step == last)

    def _save(self, *, final: bool) -> None:
        self.saver.save(self.progress.step, self.progress.saved(), final=final)
        if final:
            self.saver.close()

    def _finish(self, *, drain: bool) -> None:
        """Read the launched steps that are due, and write their rows."""
        for step in self.unread.due(drain=drain):
            self._read_outcome(step)
            self._record_time(step.number)
            if step.noted is not None:
                self._log(step, step.noted)

    def _read_outcome(self, step: Step) -> None:
        """Read the loss and norm of a step, handle values that are not finite, and update the progress."""
        skipped = self.non_finite.check(step)
        if skipped is not None:
            self.progress.skipped_steps += 1
            self._message(skipped)
        self.progress.step, self.progress.loss = step.number, step.outcome.loss
        self.progress.tokens += self.sizes.at(step.number).tokens

    def _record_time(self, step: int) -> None:
        """Record the time since the step before was read: that of the device, if the host is ahead."""
        lap, phase, changes = self.timer.lap(), self.sizes.at(step), self._changes_length(step)
        if self.phases is not None:
            self.phases.take(logged=self._is_logged(step))
        self.window.add(
            lap.seconds,
            phase.tokens,
            lap.data_seconds,
            profiled=self.profiler.is_profiled(step),
            warms_up=changes,
            seq_len=phase.seq_len,
        )
        if self.progress.first_step_seconds is None:
            self.progress.first_step_seconds = time.monotonic() - self.started

    def _note_compiled(self, step: int) -> None:
        """Report what a step has compiled; after one that was expected to, timeouts are short again."""
        changes, seq_len = self._changes_length(step), self.sizes.at(step).seq_len
        if step == self.progress.start_step + 1:
            set_timeouts(self.job.cluster.step_timeout_seconds)
            if self.job.compile.enable:
                graphs, seconds = self.compiler.graphs, self.compiler.seconds
                self._message(f"compiled {graphs} graphs in {seconds:.1f} s, in the first step")
            if self.job.parallelism.async_tp:
                self._message(describe_fused(fused))
        elif changes and self.job.compile.enable:
            set_timeouts(self.job.cluster.step_timeout_seconds)
            graphs = self.compiler.unexpected
            self._message(f"compiled {graphs} graphs for sequences of {seq_len} tokens, in step {step}")
        elif new := self.compiler.unexpected:
            self.compiler.recompiles += new
            self._message(f"WARNING step {step} compiled {new} graphs again: TORCH_LOGS=recompiles says why")
        self.compiler.mark_expected()

    def _log(self, step: Step, noted: Noted) -> None:
        """Write one row of metrics; loss_max and memory are maxima over all ranks."""
        loss, memory = step.outcome.local_loss, noted.memory
        loss_max, *most = self.engine.world_max([float("-inf") if loss is None else loss, *memory.values()])
        self.progress.memory = dict(zip(memory, most, strict=True))
        row = step_row(step, self, loss_max)
        self.own_metrics.log(rank_row(row, loss, memory, {} if self.phases is None else self.phases.last))
        if self.recorder is not None:
            self.recorder.log(row)

    def _validate(self, step: int) -> None:
        assert self.validation_loader is not None
        with self.timer.section("validation"):
            self.validation_loader.reset()
            batches = (self.validation_loader.next() for _ in range(self.job.validation.steps))
            total, *by_source = add_up([self.engine.evaluate(batch) for batch in batches])
            self.progress.validation_loss = total.mean
            self.progress.source_validation = {
                f"validation_loss.{name}": found.mean
                for name, found in zip(self.engine.sources.names, by_source, strict=True)
                if found.tokens
            }
            if self.sheet is not None:
                self._message(self.sheet.write(step))
            self.compiler.mark_expected()  # compiling a graph without gradients is expected
        if self.recorder is not None:
            losses = {"validation_loss": self.progress.validation_loss, **self.progress.source_validation}
            self.recorder.log({"step": step, **losses})

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        with self.timer.section("validation"):
            self.progress.evaluation = self.evaluation.evaluate()
            self.compiler.mark_expected()
        if self.recorder is not None:
            self.recorder.log({"step": step, **self.progress.evaluation})

    def _message(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.message(text)
