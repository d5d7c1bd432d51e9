"""Saving: now or in the background, all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from harness.checkpoint import exchange
from harness.checkpoint.catalog import (
    CheckpointFolder,
    DamagedCheckpoint,
    make_room,
    remove,
    remove_unfinished,
)
from harness.checkpoint.resume import folder_of
from harness.checkpoint.state import model_state, optimizer_state, rng_key, rng_state
from harness.checkpoint.storage import Writer
from harness.checkpoint.together import Together
from harness.data.loader import Loader, merge_states
from harness.errors import MachineError, UserError
from harness.job import Job
from harness.locks import Held
from harness.loop.engine import Engine


class SaveFailed(MachineError):
    """A checkpoint could not be written; earlier ones are as they were."""


@dataclass
class Account:
    """What saving has come to in this process.

    Attributes:
        step: step of the newest checkpoint written; None before the first.
        saves: checkpoints written.
        failed: saves that failed.
        seconds: time that training stood still for it.
    """

    step: int | None = None
    saves: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class _InFlight:
    """A checkpoint that is being written in the background."""

    step: int
    written: Future[Any]
    reported: bool = False


class _Stager(DefaultStager):
    """torch's stager, whose own future can be waited for: the one ``async_save`` gives hides a failure."""

    copied: Future[Any] | None = None

    def stage(self, state_dict: Any, **options: Any) -> Any:
        """Begins to copy."""
        staged: Any = super().stage(state_dict, **options)
        self.copied = staged
        return staged


class Saver:
    """Writes the checkpoints of one run.

    Args:
        job: the resolved job.
        run_dir: its run folder.
        engine: what is saved.
        loader: whose position is saved with it.
        together: the ranks.
        say: shows a line to the user, on rank 0.

    Raises:
        ConfigError: memory is to be pinned and there is no GPU.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        engine: Engine,
        loader: Loader,
        together: Together,
        say: Callable[[str], None],
    ) -> None:
        self.job, self.config = job, job.checkpoint
        self.engine, self.loader, self.together, self.say = engine, loader, together, say
        self.folder = CheckpointFolder(folder_of(job, run_dir))
        if engine.device.type != "cuda":
            self.config.refuse_pinned_memory(f"ranks compute on {engine.device.type}")
        self.account = Account()
        self.gives_up = False
        self._failed_in_a_row = 0
        self._flying: _InFlight | None = None
        self._stager: _Stager | None = None
        # Removing many files takes long: in the background, one checkpoint after the other.
        self._purger = ThreadPoolExecutor(1, thread_name_prefix="purge")

    def prepare(self) -> None:
        """Finds out, before anything is trained, what the first save or the last would find out hours later.

        Raises:
            UserError: the folder cannot be written, another run writes into it, or what is to lie beside
                exported weights cannot be made.
        """
        if self.config.writes:
            self.together.on_rank_zero(self._prepare)

    def _prepare(self) -> None:
        name = f"checkpoint.folder={self.config.folder}"
        try:
            self.folder.hold()
        except Held:
            raise UserError(
                f"{name}: another run writes checkpoints there; would work: another folder"
            ) from None
        except OSError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{name}: cannot be written: {reason}; would work: a folder that can, "
                "checkpoint.load_only=true, or checkpoint=disabled"
            ) from error
        if self.config.last_save_in_hf:
            exchange.rehearse(self.job)

    @property
    def is_staging(self) -> bool:
        """Whether the state may still be being copied."""
        return self._stager is not None and self._stager.copied is not None

    def wait_for_staging(self) -> None:
        """Waits until the state has been copied; the update that follows would change it meanwhile."""
        if self._stager is None or self._stager.copied is None:
            return
        started = time.perf_counter()
        # A failure here is this rank's alone, and ends the run: the others wait for its share.
        self._stager.copied.result()
        self._stager.copied = None
        self.account.seconds += time.perf_counter() - started

    def save(self, step: int, train_state: dict[str, Any], *, final: bool = False) -> None:
        """Writes the checkpoint of a step, or begins to.

        Args:
            step: the step that is done.
            train_state: the counters, JSON-able.
            final: the run ends after this one: it is written before this returns, and has to succeed.

        Raises:
            SaveFailed: on all ranks: this save, or more in a row than the job allows, could not be written.
        """
        started = time.perf_counter()
        # The last one is tried whatever became of the one before: there may be room again.
        self._settle(tolerant=final and not self.gives_up)
        if self.account.step != step:
            try:
                self._write(step, self._manifest(step, train_state), final)
            except (CheckpointException, OSError) as error:
                allowed = not final and self._failed_in_a_row < self.config.max_failed_saves
                self._book_failure(step, error, tolerant=allowed)
        self.account.seconds += time.perf_counter() - started

    def poll(self) -> None:
        """Reports a background save that has ended; every step, for the price of a look.

        ``gives_up`` then says whether this rank asks the others to stop, all of which will find the same.
        """
        flying = self._flying
        if flying is None or flying.reported or not flying.written.done():
            return
        flying.reported = True
        error = flying.written.exception()
        if error is None:
            self._tell_written(flying.step)
        else:
            self.say(f"WARNING {_failure(flying.step, error, self.together.rank)}")
            self.gives_up = self._failed_in_a_row >= self.config.max_failed_saves

    def close(self) -> None:
        """Waits for the checkpoint in flight and for removals; nothing can be saved afterwards.

        Raises:
            SaveFailed: the checkpoint in flight is one more that failed than the job allows.
        """
        started = time.perf_counter()
        self._settle()
        self._purger.shutdown(wait=True)
        self.folder.release()
        self.account.seconds += time.perf_counter() - started

    def _write(self, step: int, manifest: dict[str, Any], final: bool) -> None:
        """Writes what this step's checkpoint is to hold."""
        last = final and step == self.job.training.steps
        if last and self.config.last_save_in_hf:
            self._write_huggingface(step, {**manifest, "holds": "hf"})
        elif last and self.config.last_save_model_only:
            self._write_now(step, self._exported(), {**manifest, "holds": "model"})
        elif final or self.config.async_mode == "disabled":
            self._write_now(step, self._everything(), manifest)
        else:
            self._begin_to_write(step, manifest)

    def _write_now(self, step: int, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Writes a checkpoint while training waits."""
        started = time.perf_counter()
        self._dcp_save(self.folder.path_of(step), state, manifest)
        self._book_success(step)
        self.say(f"saved {self.folder.path_of(step)} in {time.perf_counter() - started:.1f} s")
        self._purge()

    def _begin_to_write(self, step: int, manifest: dict[str, Any]) -> None:
        """Begins to copy the state and, from the copy, to write it."""
        if self.engine.device.type == "cuda":
            # The copy runs in a stream of its own, which does not wait for the update by itself.
            torch.cuda.synchronize(self.engine.device)
        if self._stager is None:
            self._stager = _Stager(self._staging_options())
        begun: Any = dcp.async_save(
            dict(self._everything()),
            storage_writer=Writer(self.folder.path_of(step), manifest),
            process_group=self.together.group,
            async_stager=self._stager,
        )
        self._flying = _InFlight(step, begun.upload_completion)

    def _staging_options(self) -> StagingOptions:
        """The copy is made in a thread, beside the next step's passes, which change nothing of it."""
        return StagingOptions(
            use_pinned_memory=self.config.async_mode == "async_with_pinned_mem",
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=self.engine.device.type == "cuda",
        )

    def _write_huggingface(self, step: int, manifest: dict[str, Any]) -> None:
        """Writes the weights as safetensors, by way of a DCP checkpoint that ranks read their shares of."""
        between, target = f"{self.folder.path}/.export-step-{step}", self.folder.path_of(step)
        rank, size, started = self.together.rank, self.together.size, time.perf_counter()
        self.together.on_rank_zero(lambda: remove(between))
        try:
            self._dcp_save(between, self._exported(), {**manifest, "holds": "model"})
            self.together.on_rank_zero(lambda: make_room(target))
            self.together.everywhere(lambda: exchange.write_share(between, target, self.job, (rank, size)))
            self.together.on_rank_zero(lambda: exchange.finish(between, target, self.job, manifest))
        finally:
            if rank == 0:
                self._drop(between)
        self._book_success(step)
        self.say(f"saved {target} for transformers in {time.perf_counter() - started:.1f} s")
        self._purge()

    def _drop(self, path: str) -> None:
        """Removes what is not needed any more; that it is still there does no harm."""
        try:
            remove(path)
        except OSError as error:
            self.say(f"WARNING {path} could not be removed: {error}")

    def _dcp_save(self, path: str, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        dcp.save(dict(state), storage_writer=Writer(path, manifest), process_group=self.together.group)

    def _everything(self) -> dict[str, Tensor]:
        """All of this rank's state."""
        return {
            **model_state(self.engine),
            **optimizer_state(self.engine),
            rng_key(self.engine.mesh): rng_state(self.engine.device),
        }

    def _exported(self) -> dict[str, Tensor]:
        return model_state(self.engine, getattr(torch, self.config.export_dtype))

    def _manifest(self, step: int, train_state: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of itself; all ranks call it, for the data positions of all."""
        return {
            "step": step,
            "holds": "full",
            "job_id": self.job.id,
            "created": time.time(),
            "world_size": self.job.world_size,
            "options": self.config.options_of_loading(),
            "state": {
                "train_state": train_state,
                "lr_scheduler": {"last_epoch": self.engine.schedule.last_epoch},
                "data_loader": self._data_position(),
            },
            "model": dataclasses.asdict(self.job.model),
            "tokenizer": dataclasses.asdict(self.job.tokenizer),
            "job": self.job.to_dict(),
        }

    def _data_position(self) -> dict[str, Any]:
        """The loader's state, for all rows of the batch."""
        state = self.loader.state_dict()
        # Only streams have a state that differs between ranks.
        return merge_states(self.together.gather(state)) if "slots" in state else state

    def _settle(self, *, tolerant: bool = False) -> None:
        """Waits for the checkpoint in flight, so that there is at most one.

        Whether it was written is the same on all ranks: DCP tells a failure of one to all.
        """
        flying, self._flying = self._flying, None
        if flying is None:
            return
        error = flying.written.exception()
        if error is not None:
            allowed = tolerant or self._failed_in_a_row < self.config.max_failed_saves
            self._book_failure(flying.step, error, tolerant=allowed, told=flying.reported)
            return
        self._book_success(flying.step)
        if not flying.reported:
            self._tell_written(flying.step)

    def _tell_written(self, step: int) -> None:
        self.say(f"saved {self.folder.path_of(step)} in the background")
        self._purge()

    def _book_success(self, step: int) -> None:
        self.account.step, self._failed_in_a_row = step, 0
        self.account.saves += 1

    def _book_failure(self, step: int, error: BaseException, *, tolerant: bool, told: bool = False) -> None:
        """Says that a save failed, makes room again, and ends the run if that is not to be tolerated.

        Raises:
            SaveFailed: it ends.
        """
        failure = _failure(step, error, self.together.rank)
        self.account.failed += 1
        self._failed_in_a_row += 1
        if self.together.rank == 0:
            # What could not be finished takes room that the next one may need.
            with contextlib.suppress(OSError):
                remove_unfinished(self.folder.path_of(step))
        if not tolerant:
            raise failure from error
        if not told:
            self.say(f"WARNING {failure}")

    def _purge(self) -> None:
        """Removes what is not kept, in the background of rank 0."""
        if self.together.rank == 0:
            self._purger.submit(self._purge_now)

    def _purge_now(self) -> None:
        try:
            self.folder.purge(self.config.keep_latest_k)
        except Exception as error:  # in a thread, where nobody else would hear of it; and no reason to stop
            self.say(f"WARNING an old checkpoint could not be removed: {error}")


def _failure(step: int, error: BaseException, own_rank: int) -> SaveFailed:
    """A failed save in one line: what happened on which rank.

    Raises:
        BaseException: ``error`` itself, if it is a bug, or one that the other ranks do not know of.
    """
    cause, where, rank = error, "", own_rank
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        where = f" (rank {rank})"
        # torch reports what it cannot write as a RuntimeError.
        known: Any = OSError | RuntimeError | DamagedCheckpoint
    else:
        known = OSError
    if not isinstance(cause, known):
        raise error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    failure = SaveFailed(f"the checkpoint of step {step} could not be written{where}: {text}")
    if rank != own_rank:
        failure.kind = "peer"  # all ranks tell of it; the one it happened to is the one to report
    return failure
