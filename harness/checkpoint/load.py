"""Loading: what a run starts from, taken up by all ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from harness.checkpoint import exchange
from harness.checkpoint.catalog import Checkpoint, CheckpointFolder, DamagedCheckpoint, reading
from harness.checkpoint.formats import is_finite, non_finite_warning
from harness.checkpoint.resume import find_start, folder_of, no_usable, wrote
from harness.checkpoint.state import (
    OPTIMIZER,
    RNG,
    allocate_optimizer_state,
    model_state,
    optimizer_state,
    rng_key,
    set_rng_state,
)
from harness.checkpoint.storage import Reader
from harness.checkpoint.together import Together
from harness.data.loader import Loader
from harness.errors import MachineError, UserError
from harness.job import Job
from harness.loop.engine import Engine
from harness.model.spec import tensor_shapes


@dataclass(frozen=True)
class Resumed:
    """What a run starts from.

    Attributes:
        path: the checkpoint; None for a run from initial values drawn by name.
        state: the counters it was saved with; empty where they are not taken over.
        messages: what the user should read.
    """

    path: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


class Starter:
    """Finds what a run starts from and loads it.

    Args:
        job: the resolved job.
        run_dir: its run folder.
        engine: what is loaded into.
        loader: whose position is set.
        together: the ranks.
    """

    def __init__(self, job: Job, run_dir: Path, engine: Engine, loader: Loader, together: Together) -> None:
        self.job, self.config, self.run_dir = job, job.checkpoint, run_dir
        self.engine, self.loader, self.together = engine, loader, together
        self.folder = CheckpointFolder(folder_of(job, run_dir))

    def start(self) -> Resumed:
        """Loads the newest checkpoint that is whole, or else the initial values the job names.

        Raises:
            UserError: there is something to start from and it cannot be used.
        """
        start = self.together.on_rank_zero(lambda: find_start(self.job, self.run_dir))
        messages, damaged = list(start.warnings), []
        for checkpoint in start.candidates:
            try:
                state = self._load(checkpoint)
            except DamagedCheckpoint as error:
                damaged.append(f"{checkpoint.path} cannot be used: {error}")
                continue
            if damaged:
                messages.append(f"WARNING {'; '.join(damaged)}; using {checkpoint.path}")
            self._clear_way(checkpoint.step)
            messages.append(f"resumed from {checkpoint.path}, saved by {_ranks(checkpoint)}")
            return Resumed(checkpoint.path, state, tuple(messages))
        if damaged:
            raise no_usable(self.folder.path, damaged)
        if start.initial is None:
            self._clear_way(-1)
            return Resumed(messages=tuple(messages))
        state = self._load_initial(start.initial)
        self._clear_way(-1)
        messages.append(f"initial values from {start.initial.path}")
        messages += self._warnings_of_values()
        return Resumed(start.initial.path, state, tuple(messages))

    def _clear_way(self, step: int) -> None:
        """Moves aside what lies behind the step the run goes on from: what it writes must be the newest.

        Raises:
            UserError: it cannot be moved.
        """
        if self.config.writes:
            self.together.on_rank_zero(lambda: self._supersede_after(step))

    def _supersede_after(self, step: int) -> None:
        try:
            self.folder.supersede_after(step)
        except OSError as error:
            raise UserError(
                f"{self.folder.path}: checkpoints after step {step} cannot be moved aside: {error}"
            ) from error

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Loads everything that is not excluded; returns the counters.

        Raises:
            DamagedCheckpoint: on all ranks, when any has found damage.
        """
        state = checkpoint.state
        if checkpoint.holds != "full":
            return state["train_state"]  # of a run that is over
        excluded = set(self.config.exclude_from_loading)
        if wrote(self.job, checkpoint):
            excluded = set()  # after this same command had excluded them
        with self._reading(checkpoint) as reader:
            sizes = self.together.on_rank_zero(lambda: _sizes(reader, OPTIMIZER, RNG))
            wanted = model_state(self.engine)
            # There are none before the first update.
            if "optimizer" not in excluded and any(name.startswith(OPTIMIZER) for name in sizes):
                allocate_optimizer_state(self.engine)
                wanted |= optimizer_state(self.engine)
            else:
                self.engine.optimizer.state.clear()  # of a candidate that turned out to be damaged
            key = rng_key(self.engine.mesh)
            random = torch.empty(sizes.get(key, (0,)), dtype=torch.uint8)
            if "rng" not in excluded and random.numel():
                wanted[key] = random
            dcp.load(dict(wanted), storage_reader=reader, process_group=self.together.group)
        if key in wanted:
            set_rng_state(random, self.engine.device)
        if "lr_scheduler" not in excluded:
            self.engine.set_schedule(state["lr_scheduler"]["last_epoch"])
        if "data_loader" not in excluded:
            self.loader.load_state_dict(state["data_loader"])
        return {} if "train_state" in excluded else state["train_state"]

    @contextmanager
    def _reading(self, checkpoint: Checkpoint) -> Iterator[Reader]:
        """A reader of a checkpoint that nobody removes meanwhile, and whose damage is told as such."""
        try:
            with contextlib.ExitStack() as held:
                self.together.on_rank_zero(lambda: held.enter_context(reading(checkpoint.path)))
                yield Reader(checkpoint.path, checkpoint.manifest)
        except CheckpointException as error:
            rank, cause = next((rank, cause) for rank, (cause, _) in error.failures.items())
            if isinstance(cause, DamagedCheckpoint | FileNotFoundError):
                raise DamagedCheckpoint(f"{cause} (found by rank {rank})") from error
            if isinstance(cause, OSError):
                # It may be whole: going on from an older one is not for us to decide.
                raise MachineError(f"{checkpoint.path}: rank {rank} cannot read it: {cause}") from error
            raise

    def _load_initial(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Loads initial_load_path.

        Raises:
            UserError: it is damaged, or its tensors are not the model's.
        """
        path, group = checkpoint.path, self.together.group
        try:
            if self.config.initial_load_in_hf:
                self.together.on_rank_zero(lambda: exchange.check(path, self.job.model))
                exchange.load(path, self.job.model, model_state(self.engine), self.together)
                return {}
            self.together.on_rank_zero(lambda: self._require_parameters(checkpoint))
            if not self.config.initial_load_model_only:
                return self._load(checkpoint)
            with self._reading(checkpoint) as reader:
                dcp.load(dict(model_state(self.engine)), storage_reader=reader, process_group=group)
            return {}
        except DamagedCheckpoint as error:
            raise UserError(f"checkpoint.initial_load_path={path}: {error}") from error

    def _warnings_of_values(self) -> list[str]:
        """A warning of weights that are not finite on any rank, if there are."""
        held = {
            name: each.to_local() if isinstance(each, DTensor) else each
            for name, each in model_state(self.engine).items()
        }
        found = self.together.gather([name for name, each in held.items() if not is_finite(each)])
        names, on_any = tensor_shapes(self.job.model), set().union(*found)
        wrong = [name for name in names if name in on_any]
        warning = non_finite_warning(wrong, len(names), "loaded")
        return [warning] if warning else []

    def _require_parameters(self, checkpoint: Checkpoint) -> None:
        """Checks names and shapes before DCP does, which has many lines to say of each; on rank 0."""
        found = _sizes(Reader(checkpoint.path, checkpoint.manifest), "")
        for name, shape in tensor_shapes(self.job.model).items():
            if found.get(name) != shape:
                has = f"has shape {list(found[name])}" if name in found else "is missing"
                raise UserError(
                    f"checkpoint.initial_load_path={checkpoint.path}: {name} {has}, and the model's has "
                    f"shape {list(shape)}; would work: the model that it was saved with"
                )


def _sizes(reader: Reader, *prefixes: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a checkpoint whose names begin in certain ways."""
    return {
        name: tuple(facts.size)
        for name, facts in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefixes) and hasattr(facts, "size")
    }


def _ranks(checkpoint: Checkpoint) -> str:
    """Who wrote a checkpoint: how many ranks, in which layout."""
    layout = (checkpoint.job or {}).get("parallelism", {})
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    degrees = {axis: layout[axis] for axis in axes if isinstance(layout.get(axis), int)}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one rank"
