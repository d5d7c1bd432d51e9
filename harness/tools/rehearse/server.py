"""Starts the process of a rehearsed rank (no torch here)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.config.job import Job
from harness.tools.rehearse.build import GPU_LIBRARY, library
from harness.tools.rehearse.config import RehearseConfig
from harness.tools.rehearse.figures import RankFigures, RehearsalFailure
from harness.tools.rehearse.rank import CONTROLLER
from harness.util import PACKAGE
from harness.util.errors import UserError

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


def rehearse_rank(job: Job, rank: int, config: RehearseConfig) -> RankFigures:
    """Rehearse one rank of a job in a process of its own; at first use the library is built."""
    variables = environment(library())
    request = {"job": job.to_json(), "rank": rank, "steps": config.steps, "skew": config.skew}
    with tempfile.TemporaryDirectory(prefix="harness rehearse-") as folder:
        result, log = (Path(folder) / name for name in ("result", "log"))
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.tools.rehearse.rank", result],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )
            ended = f"took longer than rehearse.timeout_seconds={config.timeout_seconds}"
            try:
                process.communicate(json.dumps(request).encode(), config.timeout_seconds)
                ended = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode == 0:
            return RankFigures.from_plain(json.loads(result.read_text()))
        said = log.read_text(errors="replace").strip().splitlines()[-LINES_SHOWN:]
    pp_rank = rank // (job.world_size // job.parallelism.pp)
    figures = RankFigures(rank, pp_rank, str(job.cluster.accelerator))
    message = f"{ended}: {' / '.join(said)}"
    figures.failure = RehearsalFailure("process", message, "unknown", None)
    return figures


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
