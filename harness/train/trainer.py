"""The training loop: data, gradients, update, metrics, observers, checkpoints, stop."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import torch

from harness.checkpoint.load import CheckpointLoader
from harness.checkpoint.save import SaveFailed, Saver
from harness.checkpoint.state import RankGroup
from harness.config.job import Job
from harness.data.loader import leave_out
from harness.data.prefetch import Prefetcher
from harness.data.tokenizer import build_tokenizer
from harness.metrics.mfu import Efficiency, describe_inputs
from harness.metrics.recorder import Recorder
from harness.metrics.spikes import Spike, SpikePolicy
from harness.metrics.window import StepTimer, Window
from harness.model.architecture import method_in_words
from harness.parallelism.async_tp import describe_fused, fused
from harness.parallelism.compile import CompileWatch
from harness.precision.linears import sort_linears, warning_of_eager
from harness.run.folder import RunFolder
from harness.train.commands import SaveCommands
from harness.train.engine import Engine
from harness.train.non_finite import NonFinitePolicy, unwrap_non_finite
from harness.train.objective import loader_of
from harness.train.observer import Need, Observer, Run
from harness.train.observers import observers_of
from harness.train.process import (
    StopRequest,
    garbage_collection,
    ignore_stop_signals,
    stop_signals_call,
)
from harness.train.rows import Progress, Row, metrics_of_rows, result_row, source_progress, step_row
from harness.train.setup import device_name, device_peak, set_timeouts
from harness.train.step import LATE_STEPS, HostCopy, Noted, Step
from harness.util.annotation import annotated
from harness.util.errors import CapacityError, NonFiniteError, UserError
from harness.weights import huggingface


class Trainer:
    """Train one job; every rank has a trainer.

    Args:
        started: time.monotonic() of this machine at which the process or its controller started.
        observers: what watches the loop, in order; None: the observers of the job.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        engine: Engine,
        recorder: Recorder | None,
        started: float,
        observers: Sequence[Callable[[Run], Observer]] | None = None,
    ) -> None:
        self.job = job
        self.engine = engine
        self.recorder = recorder
        self.started = started
        self.layout = folder.layout
        self.moments: dict[str, float] = {"ranks": time.time()}
        self.progress = Progress()
        self.window = Window(job.metrics.warmup_steps)
        self.resumed_from: str | None = None
        self.unread = deque[Step]()
        self.compiler = CompileWatch()
        engine.expecting = self.compiler.expecting
        synchronize = torch.cuda.synchronize if engine.device.type == "cuda" else None
        self.timer = StepTimer(synchronize, annotated=annotated)
        self.device_name = device_name(engine.device)
        peak = device_peak(job, engine.device)
        self.efficiency = Efficiency(job.model, job.training.seq_len, peak, job.world_size)
        tokenizer = build_tokenizer(job.tokenizer)
        loader = loader_of(job, tokenizer, engine.rows)
        ahead = job.data.prefetch
        prefetches = ahead and not loader.runs_in_loop
        self.loader = Prefetcher(loader, ahead, engine.device) if prefetches else loader
        ranks = RankGroup(job.checkpoint.timeout_seconds)
        self.commands = SaveCommands(job.checkpoint, folder.path, self._message)
        self.saver = Saver(
            job,
            folder.path,
            engine,
            self.loader,
            ranks,
            huggingface,
            self._message,
            self.commands.start,
        )
        self.checkpoints = CheckpointLoader(
            job, folder.path, engine, self.loader, ranks, huggingface
        )
        self.non_finite = NonFinitePolicy(job.debug, folder.path, engine)
        self.spikes = SpikePolicy(job.debug)
        self._note_of_data = loader.note
        self.run = Run(job, folder.path, engine, tokenizer, ranks, self.progress, self._message)
        self.observers = [
            make(self.run) for make in (observers_of(job) if observers is None else observers)
        ]

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
        with ExitStack() as handlers, ExitStack() as open_until_the_end:
            open_until_the_end.callback(self.saver.folder.release)
            open_until_the_end.callback(self.loader.close)
            open_until_the_end.callback(self.engine.close)
            for observer in self.observers:
                open_until_the_end.push(lambda _kind, error, _, own=observer: own.close(error))
            if "RANK" in os.environ:
                # A launcher sends them when a rank has failed; they would hide the error.
                open_until_the_end.callback(ignore_stop_signals)
            return self._train(handlers)

    def _train(self, handlers: ExitStack) -> str:
        self._describe()
        self._start()
        if self.job.checkpoint.create_seed_checkpoint:
            if self.resumed_from is not None and self.progress.step > 0:
                raise UserError(
                    "checkpoint.create_seed_checkpoint=true: the run is already at step "
                    f"{self.progress.step}; would work: checkpoint.resume=false, or another name"
                )
            self._save(final=True)
            return "completed"
        request = handlers.enter_context(StopRequest())
        with garbage_collection(self.job.training.gc_interval) as collect:
            try:
                return self._loop(request, collect)
            except (NonFiniteError, CapacityError):
                # All ranks raise this error, so the checkpoint in flight can still be finished.
                try:
                    self.saver.close()
                except SaveFailed as failure:
                    self._message(f"WARNING {failure}")
                raise

    def _loop(self, request: StopRequest, collect: Callable[[int], None]) -> str:
        config = self.job.checkpoint
        self._start_observers()
        number = self.progress.step
        while number < self.job.steps:
            number += 1
            collect(number)
            try:
                step, aside = self._launch(number, request)
            except Exception:
                # Of more ranks, a row needs the others, which may not have failed.
                if self.job.world_size == 1:
                    self._finish(drain=True)
                raise
            stopping = step.outcome.stop_requested and number < self.job.steps
            self.unread.append(step)
            # The first sum is that of is_overdue (_launch).
            saves = config.is_due(number, self.job.steps) or step.outcome.beside[0] > 0
            drain = stopping or saves or bool(aside) or self._needs_outcome(number)
            spike = self._finish(drain=drain)
            self.progress.running = None
            self._note_compiled(number)
            if spike is not None:
                self._go_back(spike)
                number = self.progress.step
                continue
            for observer, sums in aside:
                with self.timer.section(observer.section):
                    columns = observer.end_step(number, sums)
                    self.compiler.mark_expected()  # compiling a graph without gradients is expected
                if columns:
                    self._write({"step": number, **columns})
            self.saver.poll()
            if saves or (stopping and config.writes):
                with self.timer.section("checkpoint"):
                    self._save(final=stopping or number == self.job.steps)
            if stopping:
                saved = ""
                if self.is_saved:
                    command = "the same command"
                    if not self.is_resumable:
                        command = "it without checkpoint.resume=false"
                    saved = f" and saved: {command} resumes from there"
                self._message(f"stopped after step {number} of {self.job.steps}{saved}")
                return "interrupted"
        return "completed"

    def _launch(
        self, number: int, request: StopRequest
    ) -> tuple[Step, list[tuple[Observer, Sequence[float]]]]:
        """Launch the passes and the update of the next batch.

        Returns:
            The step, and the observers that end it aside, with their sums.
        """
        with self.timer.section("data"):
            batch = self.loader.next()
        if self.run.compiles and self.run.sizes.changes_length(number):
            set_timeouts(self.run.limit_seconds(number))
        self.progress.running = number
        begun = [each.begin_step(number) for each in self.observers]
        with unwrap_non_finite(number):
            stop_requested = request.signal is not None or self.saver.asks_to_stop
            beside = [float(self.saver.is_overdue), *chain.from_iterable(begun)]
            outcome = self.engine.gradients(batch, stop_requested=stop_requested, beside=beside)
        limits = self.spikes.limits(number) if self.spikes.action == "skip" else None
        if limits is not None:
            outcome.drop_above(limits)
        lr = self.engine.lr
        if self.saver.is_staging:
            with self.timer.section("checkpoint"):
                self.saver.wait_for_staging()
        with self.compiler.expecting():  # what observers compile
            for each in self.observers:
                each.before_update(number, outcome)
        self.engine.update(outcome.norm)
        if number == self.progress.start_step + 1:
            self.saver.check_optimizer()
        columns = dict[str, Any]()
        aside = list[tuple[Observer, Sequence[float]]]()
        of_observers = iter(outcome.beside[1:])
        for observer, values in zip(self.observers, begun, strict=True):
            sums = list(islice(of_observers, len(values)))
            if Need.ASIDE in observer.needs(number):
                aside.append((observer, sums))
            else:
                columns |= observer.end_step(number, sums)
        noted = self._note(columns) if self.run.is_logged(number) else None
        return Step(number, batch, outcome, lr, noted), aside

    def _note(self, columns: Row) -> Noted:
        """Note values for the step's row before the next step changes them."""
        load_ME = self.engine.balance.load_ME
        names = chain.from_iterable(each.maxima for each in self.observers)
        maxima = {name: columns.pop(name) for name in names if name in columns}
        loads = None if load_ME is None else HostCopy(load_ME)
        return Noted(columns, maxima, source_progress(self), loads)

    def _describe(self) -> None:
        if method := method_in_words(self.job):
            self._message(method)
        if self._note_of_data:
            self._message(self._note_of_data)
        if self.engine.device.type != "cpu":
            self._message(describe_inputs(self.efficiency.accounting, self.efficiency.peak))
        precision = self.job.precision
        if precision.linear != "none":
            self._message(sort_linears(self.job.model, precision).describe(precision.linear))
        warning = warning_of_eager(precision, compiled=self.job.compile.blocks)
        if warning is not None and self.engine.device.type == "cuda":
            self._message(f"WARNING {warning}")

    @property
    def is_saved(self) -> bool:
        """Whether the latest step is checkpointed."""
        return self.job.checkpoint.writes and self.saver.account.step == self.progress.step

    @property
    def is_resumable(self) -> bool:
        """Whether the same command resumes from the latest step."""
        return self.is_saved and self.job.checkpoint.resume

    def _start(self) -> None:
        if self.job.checkpoint.enable:
            self.saver.prepare()
            resumed = self.checkpoints.start()
            for message in resumed.messages:
                self._message(message)
            self.resumed_from = resumed.path
            self.progress.resume(resumed.state)
            self.progress.start_step = self.progress.step
            self.spikes.load_state_dict(resumed.state)
            self.moments["loaded"] = time.time()
        if self.recorder is not None:
            hidden = {"loss_max"} if self.job.world_size == 1 else set()
            if self.efficiency.peak.flops is not None or self.engine.device.type == "cpu":
                hidden.add("tflops_per_device")
            shown = [each for each in metrics_of_rows(self.observers) if each.name not in hidden]
            self.recorder.begin(self.progress.step, shown)

    def _go_back(self, spike: Spike) -> None:
        """Go back to the newest checkpoint, and leave out the batch of a spike, on all ranks."""
        ahead = self.loader.state_dict()
        self.saver.finish()
        resumed = self.checkpoints.go_back(self.resumed_from if self.progress.start_step else None)
        self.spikes.count_rewind(resumed.state.get("step"), spike)
        self.progress.resume({**resumed.state, "spikes": self.progress.spikes})
        self.saver.account.step = self.progress.step
        self.spikes.load_state_dict(resumed.state)
        batches = leave_out(self.loader, ahead, spike.step, self.job)
        what = f"back to step {self.progress.step}, without batches {batches}"
        for message in (*resumed.messages, what):
            self._message(message)
        if self.recorder is not None:
            self.recorder.go_back(self.progress.step)
        self._start_observers()

    def _start_observers(self) -> None:
        for each in self.observers:
            each.start()
        self.timer.restart()

    def end_commands(self, *, finished: bool) -> None:
        """Wait for the commands of ``checkpoint.on_save``; end them if the run has not ``finished``."""
        if not finished:
            self.commands.end()
        elif self.commands.unfinished:
            steps = ", ".join(map(str, self.commands.unfinished))
            self._message(f"waiting for checkpoint.on_save of step {steps}")
        with stop_signals_call(self.commands.end):
            self.commands.finish()

    def result(self) -> Row:
        """Return the trainer's fields of result.json (``result_row``)."""
        return result_row(self)

    def _needs_outcome(self, step: int) -> bool:
        """Whether it is the last one, or its time is measured alone.

        Else its values are read, and its row is written, when the next step is launched.
        """
        sizes = self.run.sizes
        return (
            step in (self.progress.start_step + 1, self.job.steps)
            or sizes.changes_length(step)
            or sizes.changes_length(step + 1)
            or self._is_slowed(step) != self._is_slowed(step + 1)
        )

    def _is_slowed(self, step: int) -> bool:
        return any(Need.SLOWS in each.needs(step) for each in self.observers)

    def _save(self, *, final: bool) -> None:
        state = {**self.progress.saved(), **self.spikes.state_dict()}
        self.saver.save(self.progress.step, state, final=final)
        if final:
            self.saver.close()

    def _finish(self, *, drain: bool) -> Spike | None:
        """Read the values of steps and write their rows; return a spike from which the run must go back."""
        late = 0 if drain else LATE_STEPS[self.engine.device.type]
        while len(self.unread) > late:
            step = self.unread.popleft()
            skipped = self.non_finite.check(step)
            outcome = step.outcome
            spike = self.spikes.check(step.number, outcome.loss, outcome.grad_norm)
            if spike is not None:
                self.progress.spikes += 1
                if self.spikes.action != "log":
                    self._message(f"{spike}; {self.non_finite.save_evidence(step)}")
                if self.spikes.action == "rewind":
                    self.unread.clear()
                    return spike
                if self.spikes.action == "skip":
                    skipped = f"skipped the update of step {step.number}"
            if skipped is not None:
                self.progress.skipped_steps += 1
                self._message(skipped)
            self.progress.step = step.number
            self.progress.loss = outcome.loss
            self.progress.tokens += outcome.tokens
            self._record_time(step)
            if step.noted is not None:
                self._log(step, step.noted)
            if spike is not None:
                self._write(spike.row)
        return None

    def _record_time(self, step: Step) -> None:
        """Record the time since the step before was read: that of the device, if the host is ahead."""
        lap = self.timer.lap()
        self.progress.train_seconds += lap.seconds
        self.window.add(
            lap.seconds,
            step.outcome.tokens,
            lap.spent["data"],
            profiled=self._is_slowed(step.number),
            warms_up=self.run.sizes.changes_length(step.number),
            seq_len=self.run.sizes.at(step.number).seq_len,
        )
        if self.progress.first_step_seconds is None:
            self.progress.first_step_seconds = time.monotonic() - self.started
            self.moments["first_step"] = time.time()

    def _note_compiled(self, step: int) -> None:
        sizes = self.run.sizes
        new = self.compiler.unexpected
        if step == self.progress.start_step + 1:
            set_timeouts(self.job.cluster.step_timeout_seconds)
            if self.run.compiles:
                what = f"{self.compiler.graphs} graphs in {self.compiler.seconds:.1f} s"
                self._message(f"compiled {what}, in the first step")
            if self.job.parallelism.async_tp:
                self._message(describe_fused(fused))
        elif self.run.compiles and sizes.changes_length(step):
            set_timeouts(self.job.cluster.step_timeout_seconds)
            what = f"sequences of {sizes.at(step).seq_len} tokens, in step {step}"
            self._message(f"graphs compiled for {what}: {new}")
        elif new:
            self.compiler.recompiles += new
            self._message(
                f"WARNING step {step} compiled {new} graphs again: TORCH_LOGS=recompiles says why"
            )
        self.compiler.mark_expected()

    def _log(self, step: Step, noted: Noted) -> None:
        """Write one row of metrics; loss_max and the observers' maxima are over all ranks."""
        loss = step.outcome.local_loss
        maxima = noted.maxima
        own_max = -math.inf if loss is None else loss
        loss_max, *most = self.engine.world_max([own_max, *maxima.values()])
        self.progress.maxima = dict(zip(maxima, most, strict=True))
        row = step_row(step, self, loss_max)
        # Its times are this rank's own.
        times = {name: row[name] for name in ("step_seconds", "data_share")}
        own = {"loss": loss, **times, **maxima}
        for each in self.observers:
            each.log(row, own)
        self._write(row)

    def _write(self, row: Row) -> None:
        if self.recorder is not None:
            self.recorder.log(row)

    def _message(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.message(text)
