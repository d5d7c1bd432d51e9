"""Run the harness's commands against a test's scheduler, in the test's own folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
from cases import words

TINY = tuple(
    words("""
    model=llama3_tiny data=synthetic tokenizer=bytes data.mask_fraction=0.3 training.seq_len=64
    training.global_batch_size=8 training.steps=6 metrics.console=plain
""")
)
# All nodes are this machine, whose name may not resolve to an address that gloo can use.
ENVIRONMENT = "GLOO_SOCKET_IFNAME:lo,OMP_NUM_THREADS:'1',MASTER_ADDR:'127.0.0.1'"
ON_SLURM = (
    *words("cluster=slurm_cpu cluster.time=30 cluster.cpus_per_rank=1 cluster.mem=4000M"),
    f"cluster.env={{{ENVIRONMENT}}}",
)


def misbehaving(how):
    """Return the environment of ranks that misbehave as patch/sitecustomize.py says."""
    patch = f"PYTHONPATH:'{Path(__file__).parent / 'patch'}',TEST_PATCH:{how}"
    return f"cluster.env={{{ENVIRONMENT},{patch},WANDB_MODE:disabled}}"


# So slow that the test has time to act on the job.
SLOW = misbehaving("slow")
COMMAND_SECONDS = 600


class Commands:
    """Run commands as a user does.

    Args:
        slurm: the scheduler.
        home: folder of the run folders.
        checkout: working folder; if it has the code, the code is imported from there.
    """

    def __init__(self, slurm, home, checkout=None):
        self.slurm, self.home, self.checkout = slurm, home, checkout

    def start(self, verb, *arguments, **environment):
        """Start ``python -m harness.<verb>``."""
        return subprocess.Popen(
            [sys.executable, "-m", "harness", verb, *arguments],
            env={**os.environ, **self.slurm.environment, "HF_HUB_OFFLINE": "1", **environment},
            cwd=self.checkout or self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, verb, *arguments, code=0, **environment):
        """Run a command to its end; return its output, stderr first."""
        process = self.start(verb, *arguments, **environment)
        out, err = process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == code, (
            f"exit code {process.returncode}, wanted {code}\n{err}\n{out}"
        )
        return err + out

    def train(self, *overrides, code=0, **environment):
        """Train a tiny model."""
        return self.run(
            "train", *TINY, f"runs_dir={self.home}", *overrides, code=code, **environment
        )

    def job(self, name, *overrides, patch=""):
        """Submit a job; return its run folder."""
        own = (*ON_SLURM[:-1], misbehaving(patch)) if patch else ON_SLURM
        self.train(f"name={name}", *own, *overrides)
        return self.only_run(name)

    def only_run(self, name):
        """The run folder of the only job of a name."""
        found = [path.parent for path in (self.home / name).glob("[0-9a-f]*/job.json")]
        assert len(found) == 1, found
        return found[0]


def read(path):
    """A JSON file; empty if it is not there yet."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def losses(run):
    """Return the losses of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def logs_of(run):
    """All output of a run, for the message of a failing test."""
    files = [*run.glob("slurm/*.out"), *run.glob("logs/*"), *run.glob("attempts/*/logs/*")]
    return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def until(condition, what, seconds=COMMAND_SECONDS):
    return processes.until(condition, seconds, what)


def job_of(run):
    """The SLURM job id of a run."""
    return str(until(lambda: read(run / "slurm" / "job.json").get("job_id"), "a job id"))


def restarts_of(run):
    return int(read(run / "slurm" / "job.json").get("restarts", 0))


def facts_of(slurm, run):
    """What scontrol shows of the job."""
    said = slurm.run("scontrol", "show", "job", "--oneliner", job_of(run)).split()
    return dict(part.split("=", 1) for part in said if "=" in part)


def nodes_in(slurm, listed):
    """Names of a list of nodes."""
    return [
        each
        for each in slurm.run("scontrol", "show", "hostnames", listed).split()
        if each != "(null)"
    ]


def step_of(run):
    try:
        return losses(run)[-1][0]
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def until_done(run, seconds=COMMAND_SECONDS):
    def is_done():
        # A failed attempt is not the end: its batch process may go on without the nodes it lost.
        state = read(run / "status.json").get("state")
        has_ended = not read(run / "slurm" / "job.json").get("begun")
        return state == "completed" or (state == "failed" and has_ended)

    until(is_done, f"{run} to end", seconds)
    assert read(run / "status.json")["state"] == "completed", logs_of(run)
