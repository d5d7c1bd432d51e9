"""Start real jobs as a user does, and inspect their processes from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import words
from processes import PATIENCE, until

from harness.metrics.jsonl import read_metrics

TINY = words("""
    model=llama3_tiny model.vocab_size=258 tokenizer=bytes training.seq_len=16
    metrics.console=plain cluster.device=cpu
""")
LONG = ["training.steps=1000000", "metrics.log_interval=5"]
TWO_RANKS = ["parallelism=fsdp", "parallelism.dp_shard=2"]


class Launch:
    """One started job: ``python -m MODULE`` in its own session, as a terminal starts it.

    ``patch`` is source code that every Python process of the job runs when it starts.
    """

    def __init__(
        self,
        folder,
        *overrides,
        module=("harness.train",),
        patch="",
        environment=None,
    ):
        self.folder = folder
        defaults = [] if any(each.startswith("data=") for each in overrides) else ["data=synthetic"]
        if not any(each.startswith("training.global_batch_size=") for each in overrides):
            defaults.append("training.global_batch_size=4")
        launchers = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        inherited = {k: v for k, v in os.environ.items() if k not in launchers}
        paths = [str(Path(__file__).parents[2])]
        if patch:
            (folder / "patch").mkdir()
            (folder / "patch" / "sitecustomize.py").write_text(patch)
            paths.insert(0, str(folder / "patch"))
        self._log = tempfile.NamedTemporaryFile("w+", dir=folder, prefix="stderr-")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *module, *TINY, *defaults, *overrides],
            cwd=folder,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            # In a background job of a shell script SIGINT is ignored, which children would inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.out = ""

    def finish(self):
        """Wait for the end; return the exit code."""
        self.out, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    @property
    def err(self):
        """The job's stderr, without the note that depends on other processes."""
        lines = Path(self._log.name).read_text().splitlines(keepends=True)
        return "".join(each for each in lines if not each.startswith("NOTE other processes"))

    @property
    def run_dir(self):
        """The only run folder that the job created."""
        [found] = [p.parent for p in (self.folder / "runs").glob("*/[0-9a-f]*/job.json")]
        return found

    def read(self, name):
        """Read a JSON file of the run folder."""
        return json.loads((self.run_dir / name).read_text())

    @property
    def rows(self):
        """The rows of metrics.jsonl."""
        return read_metrics(self.run_dir / "metrics.jsonl")

    def ranks(self):
        """Return the process ids of living ranks, by rank, from their environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = dict(
                    v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v
                )
                here = os.readlink(entry / "cwd") == str(self.folder.resolve())
                command = (entry / "cmdline").read_text()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if here and "RANK" in variables and "harness" in command and state != "Z":
                found[int(variables["RANK"])] = int(entry.name)
        return found

    def wait_for_step(self, step=5):
        """Wait until the job has reached a step of training."""

        def trains():
            assert self.process.poll() is None, self.err
            try:
                return bool(self.rows) and self.rows[-1]["step"] >= step
            except (OSError, ValueError):
                return False

        until(trains)

    def kill(self):
        """Kill all processes of the job."""
        for pid in [self.process.pid, *self.ranks().values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        self._log.close()
