"""The command of a job's sbatch script: ``python -m harness.launch.batch RUN_DIR``.

In a job array the argument is ``--list FILE``: line i of the file is the run folder of task i. The
process runs ``slurm_attempt.py``, which it imports last. Until then it needs little of the harness,
so that it can record an import error in the run folder.
"""

import argparse
import fcntl
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

# SLURM sends these to this process. It forwards the second one: at SIGTERM srun kills the ranks.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Received:
    """Handles the signals that ask the ranks to stop, and forwards them."""

    def __init__(self) -> None:
        self.process: int | None = None
        self.has_any = False

    def install(self) -> None:
        """Install the signal handlers."""
        # Not SIG_IGN, which srun and the ranks would inherit.
        signal.signal(signal.SIGCONT, lambda *_: None)
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def forward_to(self, process: int) -> None:
        """Forward signals to a process, including one received before it started."""
        self.process = process
        if self.has_any:
            self._handle()

    def _handle(self, *_: object) -> None:
        self.has_any = True
        self.stop_ranks()

    def stop_ranks(self) -> None:
        """Ask the ranks to save and to stop, if they run."""
        if self.process is not None:
            try:
                os.kill(self.process, signal.SIGUSR2)
            except ProcessLookupError:
                self.process = None


def main() -> NoReturn:
    """Run the job; end with the run's exit code."""
    received = Received()
    received.install()
    options = parse_task("python -m harness.launch.batch")
    run_dir = Path(options.folder or folder_of_task(options.list))
    if options.setup_failed is not None:
        failed = SetupFailed(options.line, options.setup_failed)
        sys.stderr.write(f"error: {failed}\n")
        _record(run_dir, failed, "user", 2)
    try:
        found = Path(__file__).resolve().parents[2]
        if options.code is not None and found != Path(options.code).resolve():
            raise WrongCode(
                f"the job was submitted with the code in {options.code}, which is not there any more; "
                f"Python imported the harness from {found}; would work: submit the job again"
            )
        from harness.launch.slurm_attempt import run_and_leave
    except WrongCode as error:
        sys.stderr.write(f"error: {error}\n")
        _record(run_dir, error, "machine", 3)
    except Exception as error:
        traceback.print_exc()
        _record(run_dir, error, "bug", 1)
    else:
        run_and_leave(run_dir, received)


def parse_task(prog: str) -> argparse.Namespace:
    """Parse the arguments that the batch script gives to a task."""
    parser = argparse.ArgumentParser(prog=prog)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", nargs="?", help="the task's folder; for training, the run folder")
    where.add_argument("--list", help="file with a folder in each line, for a job array")
    parser.add_argument("--code", help="folder that the harness must be imported from")
    parser.add_argument(
        "--setup-failed", type=int, help="record that cluster.setup ended with this code"
    )
    parser.add_argument("--line", help="the line of cluster.setup that failed")
    return parser.parse_args()


def folder_of_task(path: str) -> str:
    """Return the folder of this array task."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    lines = Path(path).read_text().splitlines()
    if task is None or not 0 <= int(task) < len(lines):
        sys.exit(
            f"error: {path} lists the runs of an array of {len(lines)} tasks, and this is task {task}"
        )
    return lines[int(task)]


class SetupFailed(Exception):
    """A line of ``cluster.setup`` failed on the first node."""

    def __init__(self, line: str, code: int) -> None:
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        super().__init__(
            f"cluster.setup={line.strip()}: this line ended with exit code {code} on {node}; would work: a "
            f"line that succeeds, or '|| true' after it"
        )


class WrongCode(Exception):
    """The imported harness is not the one that the job was submitted with."""


def _record(run_dir: Path, error: Exception, kind: str, code: int) -> NoReturn:
    """Write the error and the run's row, and exit; the modules that usually do so may be broken."""
    state = _read(run_dir / "status.json").get("state")
    if state == "completed" or (state in ("starting", "running") and _is_held(run_dir)):
        sys.exit(
            code
        )  # the script was submitted again by hand, but the run is complete or still runs
    now = {"time": time.time(), "host": socket.gethostname()}
    shown = {
        "kind": kind,
        "type": type(error).__name__,
        "rank": None,
        "step": None,
        "message": str(error),
    }
    trace = "".join(traceback.format_exception(error))
    job = _read(run_dir / "job.json")
    earlier = _read(run_dir / "result.json") or {"name": job.get("name")}
    row = {**earlier, "id": job.get("id"), "exit_reason": "failed", "exit_code": code}
    files = {
        "errors/controller.json": {
            **now,
            **shown,
            "where": None,
            "exit_code": code,
            "traceback": trace,
        },
        "result.json": {**row, **{f"error.{key}": value for key, value in shown.items()}},
        "status.json": {**now, "state": "failed", "pid": os.getpid(), "exit_code": code},
    }
    if record := _read(run_dir / "slurm" / "job.json"):
        files["slurm/job.json"] = {**record, "begun": False}  # of an attempt that was killed
    for name, content in files.items():
        path = run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(code)


def _is_held(run_dir: Path) -> bool:
    try:
        with (run_dir / ".lock").open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system without locks
        pass
    return False


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    main()
