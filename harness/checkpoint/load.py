"""Loading a checkpoint or initial values, on all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from harness.checkpoint.catalog import Checkpoint, DamagedCheckpoint, open_checkpoint, reading
from harness.checkpoint.optimizer_state import (
    allocate_optimizer_state,
    clear_optimizer_state,
    set_numbers,
    tensors_to_load,
)
from harness.checkpoint.resume import FALLBACKS, find_start, no_usable_error, written_by
from harness.checkpoint.state import (
    OPTIMIZER,
    RNG,
    CheckpointedRun,
    RankGroup,
    model_state,
    rng_key,
    rng_state,
    set_rng_state,
)
from harness.checkpoint.storage import Reader
from harness.config.parallelism import degrees_in_words
from harness.model.spec import tensor_shapes
from harness.util.errors import MachineError, UserError


@dataclass(frozen=True)
class Resumed:
    """Result of loading, with lines to show to the user."""

    path: str | None = None
    """The checkpoint; None if parameters were initialized by name."""
    state: dict[str, Any] = field(default_factory=dict)
    """Its counters; empty if the run starts at step 0."""
    messages: tuple[str, ...] = ()


class CheckpointLoader(CheckpointedRun):
    """Finds and loads the checkpoint that a run starts from: parameters, optimizer, data position."""

    def start(self) -> Resumed:
        """Load the newest undamaged checkpoint, or else checkpoint.initial_load_path."""
        self._random = rng_state(self.engine.device)
        start = self.ranks.on_rank_zero(lambda: find_start(self.job, self.run_dir))
        messages = list(start.warnings)
        if start.candidates:
            return self._load_first(start.candidates, messages)
        initial = Resumed()
        if start.initial is not None:
            initial = Resumed(start.initial.path, self._load_initial(start.initial))
            messages.append(f"initial values from {initial.path}")
        self._move_later_aside(-1)
        return replace(initial, messages=tuple(messages))

    def go_back(self, first: str | None) -> Resumed:
        """Load the newest undamaged checkpoint of the run, or else ``first``, which it started from."""

        def find() -> list[Checkpoint]:
            full = [each for each in self.folder.complete(FALLBACKS)[0] if each.holds == "full"]
            if full or first is None or self.config.exclude_from_loading:
                return full
            try:
                return [open_checkpoint(first)]
            except DamagedCheckpoint as error:
                raise no_usable_error(self.folder.path, [f"{first}: {error}"]) from None

        found = self.ranks.on_rank_zero(find)
        # That of another layout has no random states.
        set_rng_state(self._random, self.engine.device)
        return self._load_first(found, []) if found else Resumed()

    def _load_first(self, candidates: list[Checkpoint], messages: list[str]) -> Resumed:
        """Load the first of the checkpoints that is not damaged."""
        damaged = []
        for checkpoint in candidates:
            try:
                state = self._load(checkpoint)
            except DamagedCheckpoint as error:
                damaged.append(f"{checkpoint.path} cannot be used: {error}")
                continue
            if damaged:
                messages.append(f"WARNING {'; '.join(damaged)}; using {checkpoint.path}")
            self._move_later_aside(checkpoint.step)
            messages.append(f"resumed from {checkpoint.path}, saved by {_ranks(checkpoint)}")
            return Resumed(checkpoint.path, state, tuple(messages))
        raise no_usable_error(self.folder.path, damaged)

    def _move_later_aside(self, step: int) -> None:
        """Move checkpoints after ``step`` to ``superseded/``: the run's own must be the newest."""

        def move() -> None:
            try:
                self.folder.supersede_after(step)
            except OSError as error:
                raise UserError(
                    f"{self.folder.path}: checkpoints after step {step} cannot be moved aside: {error}"
                ) from error

        if self.config.writes:
            self.ranks.on_rank_zero(move)

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load everything that is not excluded; return the counters."""
        state = checkpoint.state
        if checkpoint.holds != "full":
            return state["train_state"]  # the run has completed
        excluded = self.config.exclude_from_loading
        if written_by(self.job, checkpoint, self.run_dir):
            excluded = []  # this command excluded them when it started, and has saved its own since
        with opened(checkpoint, self.ranks) as reader:
            wanted = model_state(self.engine)
            # A checkpoint from before the first update has no optimizer state.
            saved = {
                name: facts.properties.dtype for name, facts in _tensors(reader, OPTIMIZER).items()
            }
            if "optimizer" in excluded or not saved:
                clear_optimizer_state(self.engine)
                saved = {}
            else:
                allocate_optimizer_state(self.engine)
                wanted |= tensors_to_load(self.engine, saved)
            key = rng_key(self.engine.mesh)
            facts = _tensors(reader, RNG).get(key)
            random = torch.empty(facts.size if facts else (0,), dtype=torch.uint8)
            if "rng" not in excluded and random.numel():
                wanted[key] = random
            dcp.load(dict(wanted), storage_reader=reader, process_group=self.ranks.group)
        if saved:
            set_numbers(self.engine, wanted)
        if key in wanted:
            set_rng_state(random, self.engine.device)
        if "lr_scheduler" not in excluded:
            self.engine.set_schedule(state["lr_scheduler"]["last_epoch"])
        counters = {} if "train_state" in excluded else state["train_state"]
        position = state["data_loader"]
        if "data_loader" in excluded:
            position = {**self.loader.state_dict(), "batch": 0}
        # Sizes of batches follow the run's step, also where the data begins again.
        self.loader.load_state_dict({**position, "step": counters.get("step", 0)})
        return counters

    def _load_initial(self, checkpoint: Checkpoint) -> dict[str, Any]:
        path = checkpoint.path
        try:
            if self.config.initial_load_in_hf:
                self.ranks.on_rank_zero(lambda: self.weights.check(path, self.job.model))
                self.weights.load(path, self.job.model, model_state(self.engine), self.ranks)
                return {}
            self.ranks.on_rank_zero(lambda: self._require_parameters(checkpoint))
            if not self.config.initial_load_model_only:
                return self._load(checkpoint)
            with opened(checkpoint, self.ranks) as reader:
                dcp.load(
                    dict(model_state(self.engine)),
                    storage_reader=reader,
                    process_group=self.ranks.group,
                )
            return {}
        except DamagedCheckpoint as error:
            raise UserError(f"checkpoint.initial_load_path={path}: {error}") from error

    def _require_parameters(self, checkpoint: Checkpoint) -> None:
        """Check names and shapes on rank 0; DCP's own check prints many lines per tensor."""
        found = _tensors(Reader(checkpoint.path, checkpoint.manifest), "")
        for name, shape in tensor_shapes(self.job.model).items():
            if name not in found or found[name].size != shape:
                has = f"has shape {list(found[name].size)}" if name in found else "is missing"
                raise UserError(
                    f"checkpoint.initial_load_path={checkpoint.path}: {name} {has}, and the model's has "
                    f"shape {list(shape)}; would work: the model that it was saved with"
                )


@contextmanager
def opened(checkpoint: Checkpoint, ranks: RankGroup) -> Iterator[Reader]:
    """Yield a reader; protect the checkpoint from removal, and turn DCP's errors into ours."""
    try:
        with ExitStack() as stack:
            ranks.on_rank_zero(lambda: stack.enter_context(reading(checkpoint.path)))
            reader = Reader(checkpoint.path, checkpoint.manifest)
            ranks.everywhere(reader.read_metadata)
            yield reader
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, DamagedCheckpoint | FileNotFoundError):
            raise DamagedCheckpoint(f"{cause} (found by rank {rank})") from error
        if isinstance(cause, OSError):
            # The checkpoint may be intact, so do not silently fall back to an older one.
            raise MachineError(f"{checkpoint.path}: rank {rank} cannot read it: {cause}") from error
        raise
    except OSError as error:
        raise MachineError(f"{checkpoint.path}: cannot be read: {error}") from error


def _tensors(reader: Reader, prefix: str) -> dict[str, TensorStorageMetadata]:
    """The facts of a checkpoint's tensors whose names begin with ``prefix``."""
    return {
        name: facts
        for name, facts in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(facts, TensorStorageMetadata)
    }


def _ranks(checkpoint: Checkpoint) -> str:
    """The layout that wrote a checkpoint, for messages."""
    layout = (checkpoint.job or {}).get("parallelism", {})
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    return degrees_in_words(
        {axis: layout[axis] for axis in axes if isinstance(layout.get(axis), int)}
    )
