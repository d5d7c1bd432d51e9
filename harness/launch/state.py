"""The state of a run: one function of the files in its folder and of SLURM's queue; and rows of lost runs."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.failures import VICTIMS
from harness.config.fields import from_dict
from harness.launch.faults import last_lines
from harness.launch.queue import ENDED, Jobs, Queued, SlurmError, is_live, jobs, last_states
from harness.metrics.slow_ranks import SlowRank, slow_ranks
from harness.run.folder import RunFolder
from harness.run.result import write_json_atomically
from harness.train.finish import finish_run
from harness.util.encoding import read_object
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, MachineError, UserError
from harness.util.words import plural

FILE = "slurm/job.json"
# States in which a process runs the job, or SLURM will start or continue one.
BUSY = ("pending", "running", "suspended")
# States of a job that must not be started again: SLURM has it in its queue, or a process runs it.
HELD = (*BUSY, "blocked")
FACTS = (
    "tokens_per_second",
    "tokens_per_second_per_rank",
    "mfu",
    "memory_gib",
    "loss",
    "train_seconds",
    "wall_seconds",
)
# A shared file system may show a job's last writes up to this long after the job has left the
# queue.
LAST_WRITES_SECONDS = 15.0
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")


@dataclass(frozen=True)
class SlurmJobRecord:
    """``slurm/job.json``; written before submission, and again once SLURM has returned the job's id.

    Attributes:
        name: the job's name, unique among the user's jobs.
        index: index of the array task; None for a job that is not an array.
        job_id: the id as ``squeue`` prints it; None until SLURM has answered.
        restarts: how often SLURM has restarted the job.
        begun: whether an attempt has begun and has not said how it ended.
        logs: folder of the job script's log; None in files of earlier versions.
    """

    name: str
    index: int | None = None
    job_id: str | None = None
    restarts: int = 0
    cancelled: bool = False
    logs: str | None = None
    begun: bool = False

    def write(self, run_dir: Path) -> None:
        """Write the record into a run folder."""
        path = run_dir / FILE
        path.parent.mkdir(exist_ok=True)
        write_json_atomically(path, asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> SlurmJobRecord | None:
        """Return the record of a run folder; None if the run was never submitted."""
        path = run_dir / FILE
        try:
            plain = read_object(path)
        except FileNotFoundError:
            return None
        if "name" not in plain:
            raise UserError(f"{path}: damaged: name is missing")
        try:
            record: SlurmJobRecord = from_dict(cls, plain)
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None
        return record

    @property
    def key(self) -> tuple[str, str]:
        """Id and name, which identify the job once SLURM has returned its id."""
        return self.job_id or "", self.name

    def find(self, listed: Jobs) -> Queued | None:
        """Return the job in the queue; None if it has ended, or its controller died before submitting it."""
        return listed.find(self.job_id, self.name, self.index)

    @property
    def log(self) -> Path | None:
        """Path of the job script's output, if known."""
        return Path(self.logs) / f"{self.job_id}_0_log.out" if self.logs and self.job_id else None

    def lost_in_words(self, *, is_killed: bool = False) -> str:
        """A message that the job ended without a result, or its process was killed, with its log's path."""
        named = f"SLURM job {self.job_id}" if self.job_id else f"the SLURM job {self.name}"
        how = f"{named} ended without a result"
        if is_killed:
            how = f"the batch process of {named} was killed"
        if self.log is None:
            return how
        if not self.log.is_file():
            return f"{how} and without {self.log}: its node may not be able to write this folder"
        return f"{how}, see {self.log}"


class JobLost(MachineError):
    """A SLURM job that ended without a result; ``state`` is SLURM's, None if SLURM has forgotten the job."""

    def __init__(self, record: SlurmJobRecord, state: str | None) -> None:
        # SLURM keeps no record of a waiting task of an array that is cancelled.
        default = "machine" if record.begun else "unknown"
        self.kind = "cancelled" if record.cancelled else ENDED.get(state or "") or default
        known = f"SLURM says {state}" if state else "SLURM does not know it any more"
        log = "" if record.log is None else last_lines(record.log)
        super().__init__(f"{record.lost_in_words(is_killed=self.kind == 'machine')}; {known}{log}")


def state_of(
    folder: RunFolder, record: SlurmJobRecord | None, listed: Jobs | None, silent: str
) -> tuple[str, str, str | None]:
    """Return a run's state, its reason, and the class of a failure that no file names.

    Args:
        record: of its SLURM job; None if it was not submitted.
        listed: SLURM's jobs; None if they are not known, for the reason ``silent``.
    """
    status = folder.state
    if status == "completed":
        return status, "", None
    found = None if record is None or listed is None else record.find(listed)
    # SLURM ends an attempt that has not said how it ended, and may put its job back into the queue.
    has_begun = record is not None and record.begun and listed is not None
    kind, cause = _failure(folder) if status == "failed" else (None, "")
    if kind and not has_begun and (found is None or found.state == "COMPLETING"):
        return "failed", cause, kind
    if record is not None and found is not None:
        again = f", started {record.restarts + 1} times" if record.restarts else ""
        after = f", after {kind}: {cause}" if kind else ""
        if found.state in ("SUSPENDED", "STOPPED"):
            how = f"job {found.id}: scontrol resume {found.id} continues it{again}"
            return "suspended", how, None
        if found.never_starts:
            works = "cancel it (harness sweep cancel), then a request that SLURM can meet"
            why = f"job {found.id} can never start: {found.reason}; would work: {works}"
            return "blocked", why, "user"
        if found.is_waiting:
            requeued = f", requeued by SLURM{after}" if after else ""
            return "pending", f"job {found.id} waits: {found.reason}{again}{requeued}", None
        return "running", f"job {found.id}{again}{after}", None
    if status == "interrupted" and not has_begun:
        if record is not None and record.cancelled:
            return "cancelled", "", None
        why = folder.stop_reason or "before its end; the same command continues it"
        return "stopped", why, None
    if status in (None, "planned"):
        return "planned", "", None
    if record is None:
        if folder.may_be_running:
            return "running", "", None
        return "lost", "the process that ran it is gone", "unknown"
    if listed is None:
        return "pending" if status in ("submitted", "requeued") else "running", silent, None
    if status == "submitted" and record.job_id is None:
        return "planned", "never submitted: the command ended before it called sbatch", None
    return "lost", record.lost_in_words(), "unknown"


@dataclass(frozen=True)
class RunState:
    """The current state of a run.

    Attributes:
        state: ``planned`` (never started), ``pending`` (waits in SLURM's queue), ``blocked`` (is in
            the queue and can never start), ``running``, ``suspended`` (by SLURM), ``completed``,
            ``stopped`` (interrupted, can resume), ``cancelled`` (its SLURM job was), ``failed``, or
            ``lost`` (ended without a result).
        step: the last finished step, of ``steps``.
        facts: values of the metrics FACTS; None where unknown.
        kind: class of the failure.
        reason: the message of a failure, or why a pending job waits.
        job_record: the record of its SLURM job, if it was submitted.
        job_id: id of its SLURM job, while that waits or runs.
        slow: ranks that the last attempt found slow.
    """

    run_dir: Path
    state: str
    step: int = 0
    steps: int = 0
    facts: dict[str, float | None] | None = None
    kind: str | None = None
    reason: str = ""
    job_record: SlurmJobRecord | None = None
    job_id: str | None = None
    slow: tuple[SlowRank, ...] = ()

    @property
    def about(self) -> str:
        """The class of a failure, if any, and the reason; then the slow ranks."""
        reason = f"{self.kind}: {self.reason}" if self.kind else self.reason
        return "; ".join([*([reason] if reason else []), *(f"slow: {each}" for each in self.slow)])

    @property
    def is_held(self) -> bool:
        """Whether SLURM has a job of the run, which must not be submitted again."""
        return self.state in HELD and self.job_record is not None

    @property
    def is_damaged(self) -> bool:
        """Whether a damaged file hides the state; ``reason`` names the file."""
        return self.state == "lost" and self.kind == "user"


def read_states(run_dirs: Sequence[Path]) -> list[RunState]:
    """Return the states of all runs, with one query of SLURM if any run needs it."""
    listed = queued_jobs(run_dirs)
    return [read_state(run_dir, listed) for run_dir in run_dirs]


def queued_jobs(run_dirs: Sequence[Path]) -> Jobs | None:
    """Return SLURM's jobs if any run was submitted and is not complete; None if there is no SLURM here."""
    if not any(
        (path / FILE).is_file() and RunFolder(path).state != "completed" for path in run_dirs
    ):
        return Jobs([])
    return jobs() if shutil.which("squeue") is not None else None


def read_or_warn(
    run_dirs: Sequence[Path], read: Callable[[Sequence[Path]], list[RunState]] = read_states
) -> tuple[list[RunState], int]:
    """Return what ``read`` does and the exit code; if SLURM does not answer, the states in the folders."""
    try:
        return read(run_dirs), EXIT_OK
    except SlurmError as error:
        sys.stderr.write(f"WARNING {error}; shown is what the run folders know\n")
        return [
            read_state(each, None, "SLURM does not answer") for each in run_dirs
        ], error.exit_code


def read_state(
    run_dir: Path, listed: Jobs | None, silent: str = "no SLURM here to read its state from"
) -> RunState:
    """Return the state of one run; ``listed`` and ``silent`` are those of ``state_of``."""
    folder = RunFolder(run_dir)
    try:
        record = SlurmJobRecord.read(run_dir)
    except UserError as error:
        return RunState(run_dir, "lost", kind="user", reason=str(error))
    state, reason, kind = state_of(folder, record, listed, silent)
    if state == "running" and (layout := folder.layout):
        reason = ", ".join(filter(None, [reason, layout["reason"]]))
    row = folder.row
    facts = _facts(row) if row and state != "running" else folder.last_metrics
    found = None if record is None or listed is None else record.find(listed)
    return RunState(
        run_dir,
        state,
        step=int(facts.get("step") or 0),
        steps=folder.steps,
        facts={name: facts.get(name) for name in FACTS},
        kind=kind,
        reason=reason,
        job_record=record,
        job_id=None if found is None else found.id,
        slow=tuple(slow_ranks(run_dir)),
    )


def _failure(folder: RunFolder) -> tuple[str, str]:
    """Return the class of a failure and its message: of a lost connection, the node that failed."""
    row = folder.row
    kind = row.get("error.kind", "unknown")
    rank = row.get("error.rank")
    dead = NODE_FAILURE.findall(last_lines(folder.path / "logs" / "srun.err"))
    if dead and kind in VICTIMS:
        return "node", f"{', '.join(dead)} failed"
    reason = " ".join(str(row.get("error.message", "")).split())
    if rank is not None and not reason.startswith(f"rank {rank}"):
        reason = f"rank {rank}: {reason}"
    return kind, reason


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an ended run; throughput is that of the complete measurement window."""
    rate = row.get("window.tokens_per_second")
    ranks = row.get("world_size")
    # A damaged row may have any values.
    if not isinstance(rate, int | float) or not isinstance(ranks, int) or ranks < 1:
        return {**row, "tokens_per_second": None, "tokens_per_second_per_rank": None}
    return {**row, "tokens_per_second": rate, "tokens_per_second_per_rank": rate / ranks}


def record_lost(run_dirs: Sequence[Path]) -> tuple[list[RunState], list[RunState]]:
    """Write the rows of runs that ended without one; return the states of all runs, and of those written.

    Queries SLURM once for its jobs, and once more for the final states of jobs that it does not
    list.
    """
    listed = queued_jobs(run_dirs)
    seen = {run_dir: read_state(run_dir, listed) for run_dir in run_dirs}

    def lost() -> list[RunState]:
        return [each for each in seen.values() if each.state == "lost" and not each.is_damaged]

    def submitted() -> list[tuple[str, str]]:
        return [
            each.job_record.key for each in lost() if each.job_record and each.job_record.job_id
        ]

    if left := len(submitted()):
        wait = f"in {LAST_WRITES_SECONDS:.0f} s missing rows are written"
        sys.stderr.write(f"{plural(left, 'job')} not in SLURM's queue, without a result; {wait}\n")
        sys.stderr.flush()
        time.sleep(LAST_WRITES_SECONDS)
        seen |= {each.run_dir: read_state(each.run_dir, listed) for each in lost()}
    known = {} if listed is None else listed.states
    states = {**last_states([key for key in submitted() if key not in known]), **known}
    closed = []
    for each in lost():
        state = None if each.job_record is None else states.get(each.job_record.key)
        if is_live(state):
            ident = None if each.job_record is None else each.job_record.job_id
            reason = f"another user's job {ident}, which is {state}"
            now = replace(each, state="running", kind=None, reason=reason, job_id=ident)
            seen[each.run_dir] = now
            continue
        try:
            if _close_unless_held(each, state):
                closed.append(read_state(each.run_dir, listed))
        except UserError as error:  # its job.json is damaged, so no row can be written
            seen[each.run_dir] = replace(each, kind="user", reason=str(error))
    seen |= {each.run_dir: each for each in closed}
    return [seen[run_dir] for run_dir in run_dirs], closed


def _close_unless_held(lost: RunState, state: str | None) -> bool:
    """Write the row of a run that ended without one, unless a process holds it; return whether it did.

    A cancelled job, and a run of this machine, count as interrupted, not as failed. ``state`` is
    SLURM's final one.
    """
    folder = RunFolder(lost.run_dir)
    try:
        folder.hold()
    except UserError:
        return False
    try:
        # Another process may have held the folder until now, and finished or resubmitted the run.
        now = read_state(lost.run_dir, Jobs([]))
        if now.state != "lost" or now.job_record != lost.job_record:
            return False
        job = folder.attempt_job()
        code = EXIT_INTERRUPTED
        record = lost.job_record
        if record is not None:
            ended = JobLost(record, state)
            is_cancelled = ended.kind == "cancelled"
            replace(record, begun=False, cancelled=is_cancelled).write(folder.path)
            if not is_cancelled:
                folder.errors.record(None, ended)
                code = ended.exit_code
        finish_run(job, folder, code, quiet=True)
        return True
    finally:
        folder.release()
