"""Saving checkpoints on all ranks, synchronously or in the background."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from harness.checkpoint.catalog import (
    DamagedCheckpoint,
    remove,
    remove_unfinished,
    set_aside,
)
from harness.checkpoint.optimizer_state import optimizer_state, require_owned
from harness.checkpoint.state import (
    CheckpointedRun,
    model_state,
    rng_key,
    rng_state,
)
from harness.checkpoint.storage import Writer
from harness.data.loader import merge_states
from harness.run.folder import RunFolder
from harness.util.errors import MachineError, UserError
from harness.util.files import LockedError


class SaveFailed(MachineError):
    """A checkpoint could not be written; earlier ones are unchanged."""


@dataclass
class Account:
    """Checkpoint statistics of this process."""

    step: int | None = None  # of the newest checkpoint written
    saves: int = 0
    failed: int = 0
    seconds: float = 0.0  # that training waited for saves


@dataclass
class _BackgroundSave:
    step: int
    written: Future[Any]
    reported: bool = False


class _Stager(DefaultStager):
    """torch's stager, with access to the copy's future: the one from ``async_save`` hides a failure."""

    copied: Future[Any] | None = None

    def stage(self, state_dict: Any, **options: Any) -> Any:
        staged: Any = super().stage(state_dict, **options)
        self.copied = staged
        return staged


@dataclass
class Saver(CheckpointedRun):
    """Writes the checkpoints of one run."""

    say: Callable[[str], None]
    on_written: Callable[[str, int], None] = lambda _path, _step: None
    """Called on rank 0 with the path and the step of each checkpoint that was written."""

    def __post_init__(self) -> None:
        device = self.engine.device.type
        if device != "cuda":
            self.config.refuse_pinned_memory(f"ranks compute on {device}")
        self.account = Account()
        self.asks_to_stop = False  # set after a second failed background save in a row
        self._last_failed = False
        self._background: _BackgroundSave | None = None
        self._stager: _Stager | None = None
        self._saved_at = time.monotonic()
        # Removing many files is slow, so one background thread removes checkpoints in turn.
        self._purger = ThreadPoolExecutor(1, thread_name_prefix="purge")

    def prepare(self) -> None:
        """Check before training what would otherwise fail in the first or last save."""
        if self.config.writes:
            self.ranks.on_rank_zero(self._prepare)

    def _prepare(self) -> None:
        name = f"checkpoint.folder={self.config.folder}"
        try:
            self.folder.hold()
        except LockedError:
            rule = "another run writes checkpoints there; would work: another folder"
            raise UserError(f"{name}: {rule}") from None
        except OSError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{name}: cannot be written: {reason}; would work: a writable folder, "
                "checkpoint.load_only=true, or checkpoint=disabled"
            ) from error
        if self.config.last_save_in_hf:
            self.weights.check_export(self.job)

    @property
    def is_overdue(self) -> bool:
        """Whether rank 0 finds that ``checkpoint.interval_minutes`` have passed since the last save began."""
        minutes = self.config.interval_minutes
        if minutes is None or not self.config.writes or self.ranks.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    @property
    def is_staging(self) -> bool:
        """Whether the copy of the state may be unfinished."""
        return self._stager is not None and self._stager.copied is not None

    def check_optimizer(self) -> None:
        """Refuse an optimizer with state that checkpoints would lose; all ranks call it after an update."""
        if self.config.writes:
            self.ranks.everywhere(lambda: require_owned(self.engine))

    def wait_for_staging(self) -> None:
        """Wait until the state has been copied; call before the next update changes it."""
        if self._stager is None or self._stager.copied is None:
            return
        started = time.perf_counter()
        # A failure here is on this rank only and ends the run: the others wait for its part.
        self._stager.copied.result()
        self._stager.copied = None
        self.account.seconds += time.perf_counter() - started

    def save(self, step: int, train_state: dict[str, Any], *, final: bool = False) -> None:
        """Write the checkpoint of a step that was completed, or start to write it in the background.

        A ``final`` save, after which the run ends, is written before returning. SaveFailed is
        raised on all ranks if a final save fails, or a second one in a row.
        """
        started = time.perf_counter()
        self._saved_at = time.monotonic()
        # Try the final save even if the one before failed: there may be space again.
        self._finish_background_save(tolerant=final and not self.asks_to_stop)
        if self.account.step != step:
            try:
                manifest = self._manifest(step, train_state)
                last = final and step == self.job.steps
                if last and self.config.last_save_in_hf:
                    self._write_huggingface(step, {**manifest, "holds": "hf"})
                elif last and self.config.last_save_model_only:
                    self._write_now(step, self._exported(), {**manifest, "holds": "model"})
                elif final or self.config.async_mode == "disabled":
                    self._write_now(step, self._everything(), manifest)
                else:
                    self._start_background_save(step, manifest)
            except (CheckpointException, OSError) as error:
                self._record_failure(step, error, tolerant=not (final or self._last_failed))
        self.account.seconds += time.perf_counter() - started

    def poll(self) -> None:
        """Report a background save that has ended, and update ``asks_to_stop``; cheap enough for every step.

        All ranks see the same failure, though not necessarily in the same step.
        """
        saving = self._background
        if saving is None or saving.reported or not saving.written.done():
            return
        saving.reported = True
        error = saving.written.exception()
        if error is None:
            self._report_written(saving.step, "in the background")
        else:
            self.say(f"WARNING {_failure(saving.step, error, self.ranks.rank)}")
            self.asks_to_stop = self._last_failed

    def finish(self) -> None:
        """Wait for the background save, so that its checkpoint can be loaded."""
        self._finish_background_save(tolerant=True)

    def close(self) -> None:
        """Wait for the background save and for removals; nothing can be saved afterwards."""
        started = time.perf_counter()
        self._finish_background_save()
        self._purger.shutdown(wait=True)
        self.folder.release()
        self.account.seconds += time.perf_counter() - started

    def _write_now(self, step: int, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        started = time.perf_counter()
        self._dcp_save(self.folder.path_of(step), state, manifest)
        self._record_success(step)
        self._report_written(step, f"in {time.perf_counter() - started:.1f} s")

    def _start_background_save(self, step: int, manifest: dict[str, Any]) -> None:
        if self.engine.device.type == "cuda":
            # The copy runs in a stream of its own, which does not wait for the update.
            torch.cuda.synchronize(self.engine.device)
        if self._stager is None:
            # Copy in a thread during the next step's forward and backward, which do not change the
            # state.
            options = StagingOptions(
                use_pinned_memory=self.config.async_mode == "async_with_pinned_mem",
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=self.engine.device.type == "cuda",
            )
            self._stager = _Stager(options)
        response: Any = dcp.async_save(
            dict(self._everything()),
            storage_writer=Writer(self.folder.path_of(step), manifest),
            process_group=self.ranks.group,
            async_stager=self._stager,
        )
        self._background = _BackgroundSave(step, response.upload_completion)

    def _write_huggingface(self, step: int, manifest: dict[str, Any]) -> None:
        """Write safetensors: save a temporary DCP checkpoint, from which each rank converts a share."""
        temporary = f"{self.folder.path}/.export-step-{step}"
        target = self.folder.path_of(step)
        rank = self.ranks.rank
        size = self.ranks.size
        started = time.perf_counter()
        self.ranks.on_rank_zero(lambda: remove(temporary))
        try:
            self._dcp_save(temporary, self._exported(), {**manifest, "holds": "model"})
            self.ranks.on_rank_zero(lambda: set_aside([target]))
            self.ranks.everywhere(
                lambda: self.weights.write_share(temporary, target, self.job, (rank, size))
            )
            self.ranks.on_rank_zero(
                lambda: self.weights.finish(temporary, target, self.job, manifest)
            )
        finally:
            if rank == 0:
                try:
                    remove(temporary)
                except OSError as error:
                    self.say(f"WARNING {temporary} could not be removed: {error}")
        self._record_success(step)
        self._report_written(step, f"for transformers in {time.perf_counter() - started:.1f} s")

    def _dcp_save(self, path: str, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        dcp.save(dict(state), storage_writer=Writer(path, manifest), process_group=self.ranks.group)

    def _everything(self) -> dict[str, Tensor]:
        if self.account.saves == 0:
            self.check_optimizer()  # the first update may have been dropped
        return {
            **model_state(self.engine),
            **optimizer_state(self.engine),
            rng_key(self.engine.mesh): rng_state(self.engine.device),
        }

    def _exported(self) -> dict[str, Tensor]:
        return model_state(self.engine, getattr(torch, self.config.export_dtype))

    def _manifest(self, step: int, train_state: dict[str, Any]) -> dict[str, Any]:
        """The manifest without ``files``; called on all ranks, because it gathers their data positions."""
        position = self.loader.state_dict()
        return {
            "step": step,
            "holds": "full",
            "job_id": RunFolder(self.run_dir).id_of(self.job),
            "created": time.time(),
            "world_size": self.job.world_size,
            "options": self.config.options_of_loading(),
            "state": {
                "train_state": train_state,
                "lr_scheduler": {"last_epoch": self.engine.schedule.last_epoch},
                # Only streams have different states on different ranks.
                "data_loader": merge_states(self.ranks.gather(position))
                if "slots" in position
                else position,
            },
            "model": dataclasses.asdict(self.job.model),
            "tokenizer": dataclasses.asdict(self.job.tokenizer),
            "job": self.job.to_dict(),
        }

    def _finish_background_save(self, *, tolerant: bool = False) -> None:
        """Wait for the background save, so that there is at most one.

        All ranks see the same outcome, because DCP sends the failure of one rank to all.
        """
        saving = self._background
        self._background = None
        if saving is None:
            return
        error = saving.written.exception()
        if error is not None:
            tolerant = tolerant or not self._last_failed
            self._record_failure(saving.step, error, tolerant=tolerant, reported=saving.reported)
            return
        self._record_success(saving.step)
        if not saving.reported:
            self._report_written(saving.step, "in the background")

    def _report_written(self, step: int, how: str) -> None:
        """Say that a checkpoint was written, and begin to remove an old one."""

        def remove_old() -> None:
            try:
                self.folder.purge(self.config.keep_latest_k, self.config.keeps)
            except Exception as error:  # the thread would swallow it; no reason to stop the run
                self.say(f"WARNING an old checkpoint could not be removed: {error}")

        self.say(f"saved {self.folder.path_of(step)} {how}")
        if self.ranks.rank == 0:
            self.on_written(self.folder.path_of(step), step)
            self._purger.submit(remove_old)

    def _record_success(self, step: int) -> None:
        self.account.step = step
        self._last_failed = False
        self.account.saves += 1

    def _record_failure(
        self, step: int, error: BaseException, *, tolerant: bool, reported: bool = False
    ) -> None:
        failure = _failure(step, error, self.ranks.rank)
        self.account.failed += 1
        self._last_failed = True
        if self.ranks.rank == 0:
            # The next save may need the space.
            with contextlib.suppress(OSError):
                remove_unfinished(self.folder.path_of(step))
        if not tolerant:
            raise failure from error
        if not reported:
            self.say(f"WARNING {failure}")


def _failure(step: int, error: BaseException, own_rank: int) -> SaveFailed:
    """Describe a failed save in one line, with the rank on which it happened."""
    cause = error
    where = ""
    rank = own_rank
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        where = f" (rank {rank})"
        # torch raises a RuntimeError for some write errors.
        known: Any = OSError | RuntimeError | DamagedCheckpoint
    else:
        known = OSError
    if not isinstance(cause, known):
        raise error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    failure = SaveFailed(f"the checkpoint of step {step} could not be written{where}: {text}")
    if rank != own_rank:
        failure.kind = "peer"  # all ranks raise; the cause is reported for the failing rank
    return failure
