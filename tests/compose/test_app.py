"""Verbs: flags, results as text and as ``--json``, errors after a result."""

import subprocess
import sys
from pathlib import Path

import pytest
from declared import VERBS
from plugins import FLUX

from harness.compose.arguments import Argument
from harness.compose.verb import VERBS as TABLE
from harness.compose.verb import Result, Verb
from harness.util.errors import EXIT_MACHINE, MachineError


def work(folder, *, fails):
    """Print, start a process that prints, and return a result."""
    sys.stdout.write(f"working in {folder}\n")
    sys.stdout.flush()
    subprocess.run(["echo", "child"], check=True)
    error = MachineError("the disk is full") if fails else None
    return Result({"folder": folder}, f"result of {folder}\n", error=error)


ARGUMENTS = (Argument("folder", help="a folder"), Argument("--fails", help="fail"))
HELP = "Verbs: flags, results as text and as `--json`, errors after a result."
VERB = Verb("work", work, help=HELP, arguments=ARGUMENTS, has_json=True)
JSON = '{\n  "folder": "here"\n}\n'


def run(monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", ["work", *arguments])
    with pytest.raises(SystemExit) as ended:
        VERB.main()
    return (ended.value.code, *capfd.readouterr())


def test_every_verb_is_in_the_table():
    folders = (Path(__file__).parents[2] / "harness", FLUX / "harness_flux")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    declaring = [path for path in files if "\nVERB = Verb(" in path.read_text()]
    assert len(declaring) == len(list(TABLE)) >= 15
    assert all(TABLE[name].name == name for name in TABLE)
    assert {name: TABLE[name] for name in VERBS} == VERBS


@pytest.mark.parametrize(
    ("flags", "code", "out", "err"),
    [
        ("", 0, "working in here\nchild\nresult of here\n", ""),
        ("--json", 0, JSON, "working in here\nchild\n"),
        (
            "--fails",
            EXIT_MACHINE,
            "working in here\nchild\nresult of here\n",
            "error: the disk is full\n",
        ),
        ("--fails --json", EXIT_MACHINE, JSON, "working in here\nchild\nerror: the disk is full\n"),
    ],
)
def test_a_result(monkeypatch, capfd, flags, code, out, err):
    """With --json, it is all of standard output."""
    assert run(monkeypatch, capfd, "here", *flags.split()) == (code, out, err)


def test_help_and_version(monkeypatch, capfd):
    code, out, _ = run(monkeypatch, capfd, "--help")
    assert code == 0 and f"\n{HELP}\n" in out
    assert all(flag in out for flag in ("--fails", "--json", "--version", "folder"))
    code, out, _ = run(monkeypatch, capfd, "--version")
    assert code == 0 and "\nharness " in out


def test_flags_and_overrides_in_any_order():
    line = VERBS["plan"].parse(
        ["a=1", "--cfg", "job", "~b", "-p=model", "+c=-1", "d=--x", "--json"]
    )
    assert (line.cfg, line.package, line.json) == ("job", "model", True)
    assert line.overrides == ["a=1", "~b", "+c=-1", "d=--x"]
