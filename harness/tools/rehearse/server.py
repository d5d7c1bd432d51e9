"""Starts the process that forks rehearsed ranks (no torch here)."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harness.config.job import Job
from harness.tools.rehearse.build import GPU_LIBRARY, library
from harness.tools.rehearse.config import RehearseConfig
from harness.tools.rehearse.figures import RankFigures, RehearsalFailure
from harness.tools.rehearse.rank import CONTROLLER
from harness.util import PACKAGE
from harness.util.errors import MachineError, UserError

LINES_SHOWN = 3
# The GPUs that NVIDIA's driver lists.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def require_no_gpu(config: RehearseConfig) -> None:
    """Raise UserError on a machine with a GPU, unless ``rehearse.real_gpu`` is set."""
    if _DRIVER.is_dir() and any(_DRIVER.iterdir()) and not config.real_gpu:
        raise UserError(
            "this machine has a GPU, where a real run tells more than a rehearsal; "
            "would work: harness train, or rehearse.real_gpu=true"
        )


class Rehearsals:
    """Context manager that rehearses ranks, one after another."""

    def __enter__(self) -> Rehearsals:
        folder = library()
        self._scratch = tempfile.TemporaryDirectory(prefix="harness rehearse-")
        self._log = open(Path(self._scratch.name) / "server.log", "w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.tools.rehearse.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(folder),
            start_new_session=True,
        )
        self._said = b""
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        self._scratch.cleanup()

    def run(self, job: Job, rank: int, config: RehearseConfig) -> RankFigures:
        """Rehearse one rank of a job."""
        result, log = (Path(self._scratch.name) / name for name in ("result", "rank.log"))
        result.unlink(missing_ok=True)
        log.write_text("")
        request = {
            "job": job.to_json(),
            "rank": rank,
            "steps": config.steps,
            "skew": config.skew,
            "result": str(result),
            "log": str(log),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())
        self._process.stdin.flush()
        deadline = time.monotonic() + config.timeout_seconds
        process = int(self._answer(deadline) or 0)
        code = self._answer(deadline)
        if code is None:
            os.kill(process, signal.SIGKILL)
            self._answer(time.monotonic() + config.timeout_seconds)
            return _ended(
                job,
                rank,
                f"took longer than rehearse.timeout_seconds={config.timeout_seconds}",
                log,
            )
        if code != "0":
            ended = f"signal {-int(code)}" if int(code) < 0 else f"exit code {code}"
            return _ended(job, rank, f"ended with {ended}", log)
        figures: RankFigures = pickle.loads(result.read_bytes())
        return figures

    def _answer(self, deadline: float) -> str | None:
        """Return the server's next line; None after the deadline."""
        assert self._process.stdout is not None
        while b"\n" not in self._said:
            # Not the stream's readline: select cannot see what it has read ahead.
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                return None
            read = os.read(self._process.stdout.fileno(), 4096)
            if not read:
                words = _end_of_log(Path(self._log.name))
                raise MachineError(f"the rehearsal's process ended: {words}")
            self._said += read
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that loads the stand-in library."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        CONTROLLER: str(os.getpid()),
        "LD_PRELOAD": str(folder / GPU_LIBRARY),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
        ),
        "TRITON_LIBCUDA_PATH": str(folder),
        # Own caches: timings of kernels measured here must not be used on a GPU.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_MODULE_LOADING": "LAZY",
    }


def _ended(job: Job, rank: int, ended: str, log: Path) -> RankFigures:
    pp_rank = rank // (job.world_size // job.parallelism.pp)
    figures = RankFigures(rank, pp_rank, str(job.cluster.accelerator))
    figures.failure = RehearsalFailure("process", f"{ended}: {_end_of_log(log)}", "unknown", None)
    return figures


def _end_of_log(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-LINES_SHOWN:])
