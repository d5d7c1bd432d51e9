"""Command lines, drawn and known: none ends in a traceback or without end, and a mistake is one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import judged, shown
from fuzz_lines import Line, lines
from fuzz_server import ROOT, Ended, Server

from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


def wrong_of(server: Server, seed: int, count: int) -> list[str]:
    """What ends badly of so many lines of a seed."""
    ended = ((line, server.run(line)) for line in lines(seed, count))
    return [shown(line, end, wrong) for line, end in ended if (wrong := judged(line, end))]


def test_a_draw_of_lines(server: Server) -> None:
    assert wrong_of(server, seed=0, count=60) == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [101, 102])
def test_many_lines(server: Server, seed: int) -> None:
    assert wrong_of(server, seed, count=300) == []


def test_a_seed_draws_the_same_lines_again() -> None:
    assert list(lines(3, 20)) == list(lines(3, 20)) != list(lines(4, 20))


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        (Ended(0, "shown", "", 1.0, []), ""),
        (Ended(2, "", "error: a=b: no\n", 1.0, []), ""),
        (Ended(1, "", "Traceback (most recent call last):\n", 1.0, []), "traceback"),
        (Ended(0, "", "Traceback (most recent call last):\n", 1.0, []), "traceback"),
        (Ended(1, "", "error: a\n", 1.0, []), "exit code 1"),
        (Ended(-signal.SIGXCPU, "", "", 20.0, []), "hangs: 20 s of CPU"),
        (Ended(-signal.SIGKILL, "", "", 0.0, []), "hangs: 0 s of CPU"),
        (Ended(2, "", "usage: x\nerror: a\n", 1.0, []), "2 lines for one mistake"),
        (Ended(2, "", "error: a\nerror: b\n", 1.0, []), "2 errors in 2 lines"),
        (Ended(2, "", "", 1.0, []), "0 errors in 0 lines"),
        (Ended(2, "", "error: a\x1b[31m\n", 1.0, []), "control characters"),
        (Ended(0, "", "error: a\n", 1.0, []), "reports an error and ends with 0"),
        (Ended(2, "", "error: a\n", 1.0, ["outputs"]), "leaves outputs"),
    ],
)
def test_what_is_wrong_with_an_end(ended: Ended, wrong: str) -> None:
    assert judged(Line("0", "train", []), ended) == wrong


KNOWN = [
    ("train", ["runs_dir=/etc/passwd/x"], "runs_dir=/etc/passwd/x: /etc/passwd is not a folder"),
    ("train", ["cluster=slurm_cpu", "runs_dir=file/x"], "runs_dir=file/x: file is not a folder"),
    (
        "train",
        [f"name={'x' * 300}"],
        f"name={'x' * 200}... (300 characters): a folder's name has ",
    ),
    ("train", [f"name={'ü' * 128}"], "name="),
    ("train", [f"optimizer.eps={'9' * 300}"], "optimizer.eps=1e+300: must be a finite number of float32"),
    ("train", [f"training.steps={'9' * 300}"], "training.steps="),
    ("train", ["hydra=3"], "hydra=3: has no effect, "),
    ("train", ["hydra.output_subdir=x"], "hydra.output_subdir=x: has no effect, "),
    (
        "train",
        ["hydra/job_logging=default"],
        "hydra/job_logging=default: has no effect, ",
    ),
    ("train", ["hydra.mode=MULTIRUN", "training.steps=1,2"], "hydra.mode=MULTIRUN: has no effect, "),
    ("train", ["--package"], "--package: takes a value; would work: --package NAME"),
    (
        "train",
        ["--cfg", "job", "--package", "nope"],
        "--package=nope: no such part; would work: name, ",
    ),
    ("train", ["--package", "model"], "--package: needs --cfg; would work: --cfg job --package"),
    ("train", ["--cfg", "jobs"], "--cfg=jobs: would work: job, hydra, all"),
    ("train", ["-m", "--cfg"], "--cfg: takes a value; would work: --cfg job"),
    ("train", ["-m", "--cfg", "job"], "--cfg: works for one job only; would work: the command without -m"),
    ("train", ["--info"], "--info: is not supported; would work: --cfg all"),
    (
        "train",
        ["--config-dir", "nope"],
        "--config-dir=nope: no such folder; would work: ",
    ),
    ("train", ["-cn", "nope"], "--config-name=nope: no such file in "),
    ("train", ["-cn", ""], "--config-name=: no such file in "),
    ("report", [".", "--out", "s3://bucket/x"], "--out=s3://bucket/x: is not a local path; would work: "),
    ("train", ["-sc", "install=bash"], "-sc: is not supported; would work: --help"),
    ("train", ["name=${nope}"], "name: Interpolation key 'nope' not found"),
    ("train", ["--cfg", "job", "--resolve", "name=${nope}"], "name: Interpolation key 'nope' not found"),
    ("plan", ["calibration=folder"], "calibration=folder: is not a file"),
    ("plan", ["calibration=/dev/zero"], "calibration=/dev/zero: is not a file"),
    ("plan", ["calibration=fifo"], "calibration=fifo: is not a file"),
    ("plan", ["calibration=list.json"], "calibration=list.json: it holds "),
    ("plan", ["--jsn"], "--jsn: no such flag; did you mean --json?"),
    ("parity", ["-m", "training.steps=1,2"], "-m: this verb takes one job; would work: "),
    (
        "plan",
        [
            *("search=true", "cluster.accelerator=H100 SXM", "sweep_file=found.yaml"),
            *("parallelism.pp_layers_per_stage=99", "parallelism.tp=1000003", "parallelism.dp_shard=999983"),
        ],
        "none of the 1 ways to run 999985999949 ranks is legal",
    ),
    (
        "plan",
        ["search=true", "cluster.accelerator=H100 SXM", "parallelism=single", "cluster.ranks=8"],
        "no layout has 8 ranks with the fields on the command line (parallelism.cp, ",
    ),
    (
        "plan",
        [
            "search=true",
            "cluster.accelerator=H100 SXM",
            "cluster.ranks=720720",
            "sweep_file=found.yaml",
        ],
        "cluster.ranks=720720: a search of more than 20,000 layouts takes too long",
    ),
    ("parity", ["parity.layouts=[[a]]"], "parity.layouts=[[a]]: must be a list of texts, like [a,b]"),
    (
        "bench",
        ["bench.variants={a: 'hydra.mode=MULTIRUN'}"],
        "bench.variants.a: hydra.mode=MULTIRUN: has no effect, ",
    ),
    ("sweep", ["nope"], "nope: no such choice; would work: status, resume, collect, cancel"),
    (
        "sweep",
        ["status"],
        "the following arguments are required: folder; would work: ",
    ),
    ("sweep", ["status", "x" * 300], "x"),
    ("report", ["--otu", "x"], "--otu: no such flag; did you mean --out?"),
    ("report", ["x" * 300], "x"),
]


@pytest.mark.parametrize(
    ("verb", "arguments", "says"),
    KNOWN,
    ids=lambda each: " ".join(each)[:60] if isinstance(each, list) else "",
)
def test_known_mistakes(server: Server, verb: str, arguments: list[str], says: str) -> None:
    line = Line("known", verb, arguments)
    ended = server.run(line)
    assert judged(line, ended) == "", ended.err
    assert ended.code == EXIT_USER
    assert ended.err.startswith(f"error: {says}")
    assert ended.cpu_seconds < 10


YAML = [
    ("training:\n steps: 3\n   x: 4\n", "experiment/mine.yaml:3:5: "),
    (
        "training:\n\tsteps: 3\n",
        "experiment/mine.yaml:2:1: found character '\\t' that cannot start",
    ),
    ("name: a\nname: b\n", "experiment/mine.yaml:2:1: found duplicate key name"),
    ("name: \xff\n", "experiment/mine.yaml: is not YAML in UTF-8"),
    ("name: a\x07\n", "experiment/mine.yaml: is not YAML in UTF-8"),
    ("name: [a\n", "experiment/mine.yaml:"),
]


@pytest.mark.parametrize(("text", "says"), YAML)
def test_mistakes_in_yaml(server: Server, text: str, says: str) -> None:
    line = Line("known", "train", ["experiment=mine"], files={"experiment/mine.yaml": text})
    ended = server.run(line)
    assert judged(line, ended) == "", ended.err
    assert ended.code == EXIT_USER
    assert says in ended.err


def test_settings_of_hydra_in_a_file_are_refused_as_on_the_command_line(server: Server) -> None:
    text = "# @package _global_\nhydra:\n  output_subdir: x\n  mode: MULTIRUN\ntraining:\n  steps: 0\n"
    line = Line("known", "train", ["experiment=mine"], files={"experiment/mine.yaml": text})
    ended = server.run(line)
    assert ended.err.startswith("error: hydra.output_subdir=x (in a file of the job): has no effect, ")
    assert (ended.err.count("\n"), ended.left) == (1, [])


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of shell in which $PLAN is the plan of a small job."""
    plan = f"{sys.executable} -m harness plan model=llama3_tiny"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("$PLAN", plan)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
    )


@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("$PLAN >&-", EXIT_OK, ""),
        ("$PLAN --jsn 2>&-", EXIT_USER, ""),
        ("$PLAN --json | true", EXIT_OK, ""),
        (
            "$PLAN > /dev/full",
            EXIT_MACHINE,
            "error: standard output cannot be written: No space left on device\n",
        ),
        (
            "mkdir gone; cd gone; rmdir ../gone; $PLAN",
            EXIT_USER,
            "error: the current folder has been removed; would work: cd to one that exists\n",
        ),
        (
            "$PLAN $'name=\\xff'",
            EXIT_USER,
            "error: name=\\xff: is not UTF-8; would work: a terminal and a locale in UTF-8\n",
        ),
    ],
)
def test_streams_and_folders_that_cannot_be_used(command: str, code: int, err: str, tmp_path: Path) -> None:
    done = shell(command, tmp_path)
    assert (done.returncode, done.stderr) == (code, err)


def test_a_locale_that_is_not_utf_8(tmp_path: Path) -> None:
    command = "$PLAN name=grün --cfg job --package name"
    done = shell(command, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "grün\n", "")
