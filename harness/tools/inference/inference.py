"""A job that uses trained weights and trains nothing: its checkpoint, its ranks. Imports no torch."""

import dataclasses
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.compose.override import last_text, parse
from harness.compose.overrides import FROM_CONFIG
from harness.compose.resolve import resolve
from harness.compose.verb import prepare_process
from harness.config.data import TokenizerConfig
from harness.config.failures import describe_failure
from harness.config.fields import label, with_value
from harness.config.job import Job
from harness.config.registry import load_attribute
from harness.data.tokenizer import build_tokenizer
from harness.train.process import (
    importing_torch,
    keep_freed_memory,
    launched_ranks,
    openmp_environment,
)
from harness.util.errors import (
    ConfigError,
    DataError,
    HarnessError,
    MachineError,
    UserError,
    as_typed,
    one_line,
)
from harness.weights.detect import WeightFolder, choose_tokenizer, chosen_source
from harness.weights.tokenizer import gives_same_ids

FIXED: dict[str, tuple[Any, str]] = {
    "precision.linear": ("none", "float8 products need many rows; a pass has few"),
    "compile.cuda_graphs": (False, "captures a step of training"),
    "parallelism.ep_capacity": (None, "refuses a step of training"),
    "model.moe.force_balance": (False, "is for measurements of training"),
    "debug.routing": (None, "is for measurements of training"),
    "cluster.kind": ("local", "starts no SLURM job; use torchrun inside of an allocation"),
}
"""Fields that must have one value, with the reason."""
ONE_POSITION = "generation computes one position at a time"
FIXED_TO_GENERATE: dict[str, tuple[Any, str]] = {
    "parallelism.pp": (1, f"{ONE_POSITION}, so all stages but one would wait"),
    "parallelism.cp": (1, f"{ONE_POSITION}, which cannot be split"),
    "training.attention": ("sdpa", "the cache has a kernel of its own"),
}
"""The same, for jobs with a cache."""


@dataclass(frozen=True)
class InferenceJob(Job):
    """A job whose model and tokenizer are those of a checkpoint."""

    ema: bool = label(False)
    """Use the moving average of the weights (optimizer.ema_decay) that the checkpoint has."""
    WEIGHTS: ClassVar[str] = ""
    """The field with the path of the weights."""
    GENERATES: ClassVar[bool] = True
    """Whether the job computes one position at a time, with a cache."""

    @property
    def fsdp_ranks(self) -> int:
        """Ranks that share parameters; replicas without gradients have nothing to exchange."""
        return super().fsdp_ranks // self.parallelism.dp_replicate

    @classmethod
    def spelled_out(cls, overrides: Iterable[str]) -> list[str]:
        """Return overrides that name the field ``checkpoint=PATH`` is short for, and the weights' model."""
        spelled = []
        for each in overrides:
            if each.startswith("checkpoint="):
                spelled.append(f"{cls.WEIGHTS}={each.removeprefix('checkpoint=')}")
            else:
                spelled.append(each)
        parsed = [parse(each) for each in spelled]
        if last_text(parsed, cls.WEIGHTS) and last_text(parsed, "model") is None:
            spelled.insert(0, f"model={FROM_CONFIG}")
        return spelled

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Resolve the job, and fix the fields that inference has no use for.

        Raises:
            ConfigError: a field of ``FIXED`` has another value, or a rule is broken.
        """
        fixed = FIXED | FIXED_TO_GENERATE if self.GENERATES else FIXED
        for name, (only, reason) in fixed.items():
            value = attrgetter(name)(self)
            if value != only:
                raise ConfigError(name, value, reason, [as_typed(only)])
        # An experiment's scheduled sizes need not fit sequences of other lengths.
        changes: dict[str, Any] = {"schedule.batch_size": [], "schedule.seq_len": []}
        if self.parallelism.pp == self.parallelism.cp == 1:
            # A generated position cannot be split, and every rank chooses from all logits.
            changes |= {"parallelism.sequence_parallel": False, "parallelism.loss_parallel": False}
            if self.model.moe.enabled and self.parallelism.tp > 1:
                changes["parallelism.expert_tensor_parallel"] = True
        job = self
        for name, value in changes.items():
            job = with_value(job, name, value)
        job = resolve(job, launched_ranks=launched_ranks, gpus=gpus)
        # Nothing is updated or reduced: weights are loaded in the format of their products, and
        # held once.
        width = job.precision.param_dtype
        job = with_value(job, "precision.master_dtype", width)
        return with_value(job, "precision.reduce_dtype", width)


def use_checkpoint(
    job: Any, overrides: list[str], *, has_text: bool = True
) -> tuple[Any, WeightFolder]:
    """Return an ``InferenceJob`` with the tokenizer of its weights, and the weights.

    Its model is that of the weights already.

    Args:
        has_text: whether a tokenizer is needed.
    """
    path = attrgetter(job.WEIGHTS)(job)
    if path is None:
        raise ConfigError(
            "checkpoint", None, "must be given", "checkpoint=runs/NAME/ID, or a folder with weights"
        )
    try:
        found = chosen_source(path, job.WEIGHTS)
    except DamagedCheckpoint as error:
        raise UserError(f"{path}: {error}") from error
    if job.ema:
        found = found.averaged("ema")
    if is_first():
        sys.stderr.write("".join(f"note: {note}\n" for note in found.notes))
    if not has_text:
        return job, found
    # ``own`` is the tokenizer of the weights, ``tokenizer`` the one that overrides choose.
    file = Path(found.path) / "tokenizer.json"
    own = choose_tokenizer(job, [], found)
    if own is None and found.kind == "hf" and file.is_file():
        own = TokenizerConfig(kind="huggingface", path=str(file))
    tokenizer = choose_tokenizer(job, overrides, found) or own
    if own and tokenizer and tokenizer != own and is_first():
        _warn_of_another(tokenizer, own, found)
    if tokenizer is None:
        works = "tokenizer=NAME, an option of conf/tokenizer"
        raise UserError(f"{found.path}: has no tokenizer, and records none; would work: {works}")
    return dataclasses.replace(job, tokenizer=tokenizer), found


def _warn_of_another(chosen: TokenizerConfig, own: TokenizerConfig, found: WeightFolder) -> None:
    """Warn if a tokenizer gives other ids than the one that the weights were trained with."""
    try:
        theirs = build_tokenizer(dataclasses.replace(own, bos="", eos=""))
        is_same = gives_same_ids(build_tokenizer(chosen), theirs)
    except DataError:
        # The file is not where it was. If it is that of the chosen tokenizer, its error is shown when
        # it is read again.
        return
    if not is_same:
        own_name = own.path or own.kind
        name = chosen.path or chosen.kind
        rule = f"the tokenizer of {found.path} is {own_name}, and {name} gives other ids"
        sys.stderr.write(f"WARNING {rule}; would work: no tokenizer= at all\n")


def run_on_ranks(job: Job, function: str, *arguments: Any) -> Any:
    """Call ``function(job, device, *arguments)`` on every rank; return rank 0's result.

    Under torchrun every rank runs this: it calls the function once, and returns this rank's result.

    Args:
        job: the resolved job.
        function: ``module:name`` of a function, imported after torch's environment is set.
        arguments: picklable, like the result.
    """
    if launched_ranks() is not None or job.world_size == 1:
        os.environ.update(openmp_environment(job))
        try:
            return _in_this_process(job, function, *arguments)
        except Exception as error:
            described = describe_failure(error)
            if described["kind"] != "out_of_memory":
                raise
            raise _error_of("out_of_memory", described["message"]) from error
    from harness.config.cluster import count_gpus
    from harness.launch.pool import RankFailed, RankPool

    on_gpus = job.cluster.device != "cpu" and count_gpus() > 0
    with RankPool(job.world_size, timeout_seconds=float("inf"), on_gpus=on_gpus) as pool:
        try:
            return pool.run(job.world_size, _on_rank, job, function, *arguments)[0]
        except RankFailed as error:
            failure = error.failure
            if failure is None or failure.kind in (None, HarnessError.kind):
                raise
            raise _error_of(failure.kind, failure.message) from error


def _error_of(kind: str, message: str) -> HarnessError:
    """Return the error that reports the failure of a rank in one line."""
    if kind == "out_of_memory":
        works = "a smaller batch_size, or more ranks that share the weights"
        return MachineError(f"out of memory: {one_line(message)}; would work: {works}")
    return UserError(message) if kind == UserError.kind else MachineError(message)


def is_first() -> bool:
    """Whether this process prints and writes: under torchrun, rank 0 does."""
    return launched_ranks() is None or os.environ["RANK"] == "0"


def _on_rank(job: Job, function: str, *arguments: Any) -> Any:
    import torch

    from harness.train.process import threads_per_rank
    from harness.train.setup import pick_device, set_up_process

    prepare_process()
    device = pick_device(job)
    set_up_process(job)
    torch.set_num_threads(threads_per_rank(job))
    return load_attribute(function)(job, device, *arguments)


def _in_this_process(job: Job, function: str, *arguments: Any) -> Any:
    with importing_torch():
        from harness.train.setup import pick_device, process_group, rendezvous, set_up_process

        called = load_attribute(function)
    device = pick_device(job)
    set_up_process(job)
    if device.type == "cpu":
        keep_freed_memory()
    store = rendezvous(job) if job.world_size > 1 else None
    with process_group(job, device, store):
        return called(job, device, *arguments)
