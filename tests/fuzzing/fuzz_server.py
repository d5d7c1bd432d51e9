"""A process that has imported the harness once, and runs each command line in a fork of itself.

It reads requests as lines of JSON and answers each with a line of JSON. A line that is legal ends where torch
would be imported, or units would be written: what comes then is another test's.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from declared import VERBS
from safetensors.numpy import save_file

from harness.util.errors import EXIT_OK

ROOT = Path(__file__).resolve().parents[2]
HF = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 258, "hidden_size": 16, '
    '"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "rms_norm_eps": 1e-5}'
)
JSON = {"empty.json": "", "list.json": "[1]", "deep.json": "[" * 100_000, "broken.yaml": "a: ["}
CPU_SECONDS = 20
# A command that sleeps for so long waits for something that does not come.
IDLE_SECONDS = 30.0
LIMITS = {
    resource.RLIMIT_CPU: (CPU_SECONDS, CPU_SECONDS + 1),
    resource.RLIMIT_AS: (4 << 30, 4 << 30),
    resource.RLIMIT_FSIZE: (64 << 20, 64 << 20),
}
STARTED = "would start"


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code; of a signal, the negative number.
        out: its standard output.
        err: its standard error.
        cpu_seconds: the CPU time it took.
        left: what is in the folder that was not there before.
    """

    code: int
    out: str
    err: str
    cpu_seconds: float
    left: list[str]


def make_folder(folder, run):
    """Make the files that ``fuzz_values.PATHS`` and ``WEIGHTS`` name, with a copy of a run."""
    shutil.copytree(run, folder / "run")
    (folder / "hf").mkdir()
    save_file(
        {"lm_head.weight": np.ones((258, 16), np.float32)}, folder / "hf" / "model.safetensors"
    )
    for name, text in {**JSON, "hf/config.json": HF, "file": "text\n"}.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "unreadable").touch(mode=0)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "binary").write_bytes(bytes(range(256)))
    os.mkfifo(folder / "fifo")


@contextmanager
def serving():
    """Train a run and start the process; yields a function that runs a line in a folder of its own."""
    from jobs import train  # not for the process, which ends where torch would be imported

    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "fuzzing")))
    environment = {**kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory() as runs,
        subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process,
    ):
        typed = ("training.steps=2", "checkpoint.interval=1")
        trained = train(Path(runs), *typed).folder.path

        def run(line):
            assert process.stdin is not None and process.stdout is not None
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "here"
                folder.mkdir()
                make_folder(folder, trained)
                before = set(os.listdir(folder))
                request = [line.verb, line.written(Path(name)), line.environment, name]
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                code, cpu_seconds = json.loads(process.stdout.readline())
                out, err = (
                    (Path(name) / each).read_text(errors="replace") for each in ("out", "err")
                )
                return Ended(code, out, err, cpu_seconds, sorted(set(os.listdir(folder)) - before))

        yield run


def _serve():
    """Answer requests until there are no more."""
    from harness.compose.composer import compose_job
    from harness.data.shards import ShardWriter
    from harness.run.folder import _code

    compose_job(["model=llama3_tiny"])
    _code()
    os.environ["PATH"] = "/nowhere"  # no SLURM
    ShardWriter.begin = _started
    for request in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(*json.loads(request))
        print(json.dumps(_wait(child)), flush=True)  # noqa: T201


def _started(*_):
    with contextlib.suppress(Exception):  # a stream may be closed
        sys.stdout.flush()
        os.write(1, STARTED.encode())
    os._exit(EXIT_OK)


class _ComputingEndsIt:
    """Finds no module, and ends a command that imports one of those that compute."""

    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, *_):
        if name in self.modules:
            _started()


def _wait(child):
    """Exit code and CPU seconds of a child; one that waits for ever is killed.

    Time on the clock says little, because other processes may have the cores.
    """
    busy = time.monotonic()
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] not in "SD":
            busy = time.monotonic()
        if time.monotonic() > busy + IDLE_SECONDS:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)


def _run(verb, arguments, environment, outside):
    """Be the command, in a fork; does not return."""
    os.setpgid(0, 0)
    # The encoder of pictures is built before the first unit.
    computes = {"harness.launch.pool"} | (set() if verb == "encode" else {"torch"})
    sys.meta_path.insert(0, _ComputingEndsIt(computes))
    for which, limit in LIMITS.items():
        resource.setrlimit(which, limit)
    os.chdir(f"{outside}/here")
    os.environ.update(environment)
    _redirect(outside)
    sys.argv = ["harness", *arguments]
    code = 1
    try:
        VERBS[verb].main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _redirect(outside):
    """Send the standard streams to files."""
    for number, path in enumerate((os.devnull, f"{outside}/out", f"{outside}/err")):
        os.close(number)
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.__stdout__ = sys.stdout


if __name__ == "__main__":
    _serve()
