"""SLURM jobs: derive resources from the layout, write one sbatch script with submitit, and submit it.

The script runs ``harness.launch.batch``: one process on the first node, which starts the ranks by
``srun``, one task each. Everything that the script reads is written before it is submitted, so it
can be submitted again by hand: ``sbatch RUN_DIR/slurm/job.sh``.
"""

import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.component import COPIES
from harness.config.job import Job
from harness.launch.queue import NoSlurm, partition_minutes, require_slurm, submit_script
from harness.launch.state import SlurmJobRecord
from harness.util import PACKAGE
from harness.util.errors import DISK_FULL, ConfigError, MachineError, UserError
from harness.util.files import write_atomically
from harness.util.words import plural


@dataclass(frozen=True)
class Shape:
    """The resources that a job requests; jobs of equal shape form one array.

    Attributes:
        options: sbatch options, sorted.
        exports: shell lines that set the job's environment.
        setup: the user's shell lines before the job.
        snapshot: whether the job runs a copy of the code.
    """

    nodes: int
    ranks_per_node: int
    options: tuple[tuple[str, Any], ...]
    exports: tuple[str, ...]
    setup: tuple[str, ...]
    snapshot: bool

    def describe(self) -> str:
        """Return the shape as text, e.g. ``2 nodes x 8 ranks``."""
        return f"{plural(self.nodes, 'node')} x {plural(self.ranks_per_node, 'rank')}"


def shape_of(job: Job) -> Shape:
    """Return the resources of a resolved job."""
    config = job.cluster
    nodes, ranks_per_node = config.nodes_for(job.world_size)
    nodes += config.spare_nodes
    options: dict[str, Any] = {
        "nodes": nodes,
        # srun starts the tasks, but sbatch must reserve their CPUs.
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": config.cpus_per_rank,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "exclude": config.exclude,
        "mem": config.mem,
        "time": config.minutes,
        "exclusive": config.exclusive or None,
        "signal": f"USR2@{config.signal_seconds}",
        "no-kill": config.on_node_loss == "continue" or None,
    }
    if config.device == "cuda":
        gpus = f"{config.gpu_type}:{ranks_per_node}" if config.gpu_type else str(ranks_per_node)
        if config.gres:
            options["gres"] = f"gpu:{gpus}"
        else:
            options["gpus-per-node"] = gpus
    exports = {} if config.ib_hca is None else {"NCCL_IB_HCA": config.ib_hca}
    if config.socket_ifname is not None:
        # Without the equals sign NCCL treats a name as a prefix; gloo does not.
        exports["NCCL_SOCKET_IFNAME"] = f"={config.socket_ifname}"
        exports["GLOO_SOCKET_IFNAME"] = config.socket_ifname
    # cluster.env overrides the variables that are derived from other fields.
    exports |= config.env
    options["requeue" if config.max_requeues else "no-requeue"] = True
    options.update(config.sbatch)
    return Shape(
        nodes,
        ranks_per_node,
        tuple(sorted((name, value) for name, value in options.items() if value is not None)),
        tuple(f"export {name}={shlex.quote(str(value))}" for name, value in exports.items()),
        tuple(config.setup),
        config.snapshot,
    )


def device_hours(job: Job) -> float | None:
    """Return the maximum device-hours of a job until its time limit: of its ranks, or nodes if exclusive.

    None if the time limit is the partition's and there is no SLURM here to read it from.
    """
    config = job.cluster
    nodes, ranks_per_node = config.nodes_for(job.world_size)
    nodes += config.spare_nodes
    if config.exclusive and config.ranks_per_node is not None:
        ranks_per_node = config.ranks_per_node
    minutes = config.minutes
    if minutes is None and shutil.which("scontrol") is not None:
        with suppress(NoSlurm):
            minutes = partition_minutes(config.partition or os.environ.get("SBATCH_PARTITION"))
    return None if minutes is None else nodes * ranks_per_node * minutes / 60


class Submission:
    """Jobs of one shape, submitted together: several form a job array.

    Args:
        run_dirs: their run folders, begun with the state ``submitted`` when ``submit`` is called.
        home: the folder of the run or the sweep, for SLURM's logs and the copy of the code.
        name: SLURM's job name; it identifies the job if this process dies before it has stored the
            job id.
        at_once: maximum number of jobs that run at once; None means ``cluster.max_running``.
        after: ids of jobs that must end first, successfully or not.
        module: run by the script, with the run folder, or ``--list`` and the file of an array's run
            folders.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        run_dirs: Sequence[Path],
        home: Path,
        name: str,
        *,
        at_once: int | None = None,
        after: Sequence[str] = (),
        module: str = "harness.launch.batch",
    ) -> None:
        shapes = {shape_of(job) for job in jobs}
        assert len(shapes) == 1, "jobs of one array have one shape"
        self.is_array = len(jobs) > 1
        self.jobs = jobs
        self.run_dirs = [path.absolute() for path in run_dirs]
        self.home = home.absolute()
        self.name = name
        self.shape = shapes.pop()
        self.at_once = min(job.cluster.max_running for job in jobs) if at_once is None else at_once
        self.after = after
        self.module = module
        # Not one folder per job: SLURM opens the log before submitit could create the folder.
        self.folder = self.home / "slurm"
        # Whether sbatch was started: then the job may be in the queue even if this process fails.
        self.is_sent = False
        # A sweep's folder holds several scripts.
        self._stem = "job" if self.run_dirs == [self.home] else Path(name).name

    def script(self, *, planned: bool = False) -> str:
        """Return the sbatch script; if ``planned``, for a run folder that does not exist yet.

        Then SLURM's log goes into the working folder: SLURM opens it before it starts the script,
        and if it cannot, the job fails silently.
        """
        from submitit.slurm.slurm import _make_sbatch_string

        log = "%A_%a_0_log.out" if self.is_array else "%j_0_log.out"  # submitit's names
        folder = str(self.folder).replace("%", "%%")
        options = dict(self.shape.options)
        options["output"] = f"slurm-{log}" if planned else f"{folder}/{log}"
        if self.after:
            own = [options["dependency"]] if "dependency" in options else []
            options["dependency"] = ",".join([*own, f"afterany:{':'.join(self.after)}"])
        # submitit's defaults are a time limit of five minutes, and a wckey, which clusters without
        # accounting by wckey refuse.
        nothing: Any = None
        text: str = _make_sbatch_string(
            command=f"exec {self._command()}",
            folder=self.folder,
            job_name=self.name,
            setup=self._setup(),
            use_srun=False,
            stderr_to_stdout=True,
            map_count=len(self.jobs) if self.is_array else None,
            array_parallelism=self.at_once,
            time=nothing,
            wckey=nothing,
            additional_parameters=options,
        )
        return text

    @property
    def script_path(self) -> Path:
        """Path where ``submit`` writes the script."""
        return self.folder / f"{self._stem}.sh"

    @property
    def _list_path(self) -> Path:
        return self.folder / f"{self._stem}.runs"

    def _command(self) -> str:
        command = [sys.executable, "-u", "-m", self.module]
        if self.is_array:
            command += ["--list", str(self._list_path)]
        else:
            command.append(str(self.run_dirs[0]))
        if self.shape.snapshot:
            command += ["--code", str(snapshot_path(self.home, self.jobs))]
        return shlex.join(command)

    def submit(self) -> list[str]:
        """Submit the jobs; return their ids, in the order of the jobs."""
        require_slurm()
        check_shell(self.shape.setup)
        if self.shape.snapshot:
            take_snapshot(self.home, self.jobs)
        self.folder.mkdir(parents=True, exist_ok=True)
        job_records = [
            SlurmJobRecord(self.name, i if self.is_array else None, logs=str(self.folder))
            for i in range(len(self.jobs))
        ]
        for run_dir, job_record in zip(self.run_dirs, job_records, strict=True):
            job_record.write(run_dir)
        # Write everything that the job reads before submitting it: this process may die at any
        # moment.
        if self.is_array:
            write_atomically(
                self._list_path, "".join(f"{path}\n" for path in self.run_dirs).encode()
            )
        write_atomically(self.script_path, self.script().encode())
        self.is_sent = True
        with _environment_for_submitting(self.shape):
            number = submit_script(self.script_path)
        ids = [
            f"{number}_{job_record.index}" if self.is_array else number
            for job_record in job_records
        ]
        for run_dir, job_record, ident in zip(self.run_dirs, job_records, ids, strict=True):
            # The job may have started meanwhile and written a newer record.
            if (SlurmJobRecord.read(run_dir) or job_record).job_id is None:
                replace(job_record, job_id=ident).write(run_dir)
        return ids

    def _setup(self) -> list[str]:
        needed = self._list_path if self.is_array else self.run_dirs[0] / "job.json"
        missing = f"error: {needed} is missing: submit the job with the harness, and without cluster.dry_run"
        lines = [
            # These signals would end bash before it execs the job's process, which handles them.
            "trap : TERM USR2",
            f"[ -f {shlex.quote(str(needed))} ] || {{ echo {shlex.quote(missing)} >&2; exit 2; }}",
            # The GPUs of the shell that submitted; SLURM sets those of each rank.
            "unset CUDA_VISIBLE_DEVICES",
            *self.shape.exports,
        ]
        code = ""
        if self.shape.snapshot:
            path = shlex.quote(str(snapshot_path(self.home, self.jobs)))
            # Without PYTHONSAFEPATH `python -m` would import from the working folder first.
            code = f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1"
        if self.shape.setup:
            lines += [*_BEFORE_SETUP.format(code=code or ":", command=self._command()).splitlines()]
            lines += [*self.shape.setup, *_AFTER_SETUP.splitlines()]
        return [*lines, code] if code else lines


# A line that fails ends the job, and the harness records the line. The DEBUG trap runs before each
# line, but not for lines of functions and sourced files; the EXIT trap itself counts as line 1. A
# cancelled job has no failed line.
_BEFORE_SETUP = """\
setup_failed() {{
  trap - EXIT DEBUG
  [ "$1" = 143 ] && exit 143
  {code}
  exec {command} --setup-failed "$1" --line="$(sed -n "$2p" "$0")"
}}
trap 'setup_failed $? $setup_line' EXIT
trap '[ "$LINENO" = 1 ] || setup_line=$LINENO' DEBUG
set -e
# cluster.setup"""
_AFTER_SETUP = """\
# end of cluster.setup
set +e
trap - EXIT DEBUG"""


def check_shell(lines: Sequence[str]) -> None:
    """Raise ConfigError for lines of ``cluster.setup`` that bash cannot parse."""
    bash = shutil.which("bash")
    if not lines or bash is None:
        return
    done = subprocess.run(
        [bash, "-n"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode != 0:
        message = done.stderr.strip().splitlines()[0].partition(": ")[2]
        raise ConfigError("cluster.setup", list(lines), f"bash cannot read it: {message}")


# The user's defaults for sbatch, used for options that the job does not set.
_DEFAULTS = {
    f"SBATCH_{name.upper()}": name
    for name in ("account", "partition", "qos", "constraint", "reservation")
}


@contextmanager
def _environment_for_submitting(shape: Shape) -> Iterator[None]:
    """Hide a surrounding allocation, and variables that would override the script's options."""
    from submitit.helpers import clean_env

    options = dict(shape.options)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or _DEFAULTS.get(name, "") not in ("", *options)
    }
    with clean_env():
        os.environ.update(kept)
        yield


# Modules, configurations of an installed package, and tokenizers. Other files are not copied.
_COPIED = (".py", ".yaml", ".model")


def snapshot_path(home: Path, jobs: Sequence[Job] = ()) -> Path:
    """Return the folder for a copy of the current code, ``home/code/<digest>``, to be put on PYTHONPATH.

    The copy includes the files of components that the jobs name.
    """
    digest = hashlib.sha256()
    for path, content in [*_code(PACKAGE).items(), *_components(jobs).items()]:
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return home.absolute() / "code" / digest.hexdigest()[:12]


def _components(jobs: Sequence[Job]) -> dict[Path, bytes]:
    """The files of components that the jobs name, by paths in a copy of the code."""
    found = {}
    for job in jobs:
        for component in job.components:
            found[Path(COPIES, f"{component.digest}.py")] = component.read()
    return found


def take_snapshot(home: Path, jobs: Sequence[Job] = ()) -> Path:
    """Copy the code to ``snapshot_path(home, jobs)`` unless it is there; return the folder."""
    target = snapshot_path(home, jobs)
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Nobody else can enter the temporary folder while files have not yet their permissions.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
                copy = Path(temporary) / "copy" / PACKAGE.name
                folders: set[Path] = set()
                for path, content in _code(PACKAGE).items():
                    (copy / path).parent.mkdir(parents=True, exist_ok=True)
                    (copy / path).write_bytes(content)
                    shutil.copymode(PACKAGE / path, copy / path)
                    folders |= set(path.parents)
                for path, content in _components(jobs).items():
                    copied = copy.parent / path
                    copied.parent.mkdir(exist_ok=True)
                    copied.write_bytes(content)
                    copied.chmod(0o600)
                for folder in folders:
                    mode = stat.S_IMODE((PACKAGE / folder).stat().st_mode)
                    (copy / folder).chmod(mode | stat.S_IRWXU)
                os.rename(copy.parent, target)
    except OSError as error:
        if target.is_dir():
            return target  # another process was quicker
        if error.errno in DISK_FULL:
            raise MachineError(
                f"{target}: the code cannot be copied: disk full or quota exceeded"
            ) from None
        raise UserError(f"{target}: the code cannot be copied: {error}") from None
    return target


def _fail(error: OSError) -> None:
    raise error


@functools.cache
def _code(package: Path) -> dict[Path, bytes]:
    """Read the code once, so that a copy matches its digest, by paths in the package.

    Refuse symbolic links, which may point anywhere.
    """
    found = {}
    works = "would work: a place outside of the package, or cluster.snapshot=false"
    try:
        for folder, folders, files in os.walk(package, onerror=_fail):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            copied = [name for name in files if name.endswith(_COPIED) and not name.startswith(".")]
            for path in (Path(folder) / name for name in (*folders, *copied)):
                if path.is_symlink():
                    rule = "snapshots of the code do not follow symbolic links"
                    raise UserError(f"{path}: {rule}; {works}")
                if path.is_file():
                    found[path.relative_to(package)] = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{package}: the code cannot be read for a snapshot: {error}; {works}"
        ) from None
    return dict(sorted(found.items()))
