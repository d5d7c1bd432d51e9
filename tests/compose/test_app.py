"""Verbs: flags, results as text and as ``--json``, errors after a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from declared import VERBS

from harness.compose.arguments import Argument
from harness.compose.verb import VERBS as TABLE
from harness.compose.verb import Result, Verb
from harness.util.errors import EXIT_MACHINE, EXIT_USER, MachineError, UserError


def work(folder: str, *, fails: bool) -> Result:
    """Print, start a process that prints, and return a result."""
    sys.stdout.write(f"working in {folder}\n")
    sys.stdout.flush()
    subprocess.run(["echo", "child"], check=True)
    error = MachineError("the disk is full") if fails else None
    return Result({"folder": folder}, f"result of {folder}\n", error=error)


VERB = Verb(
    "work",
    work,
    arguments=(Argument("folder", help="a folder"), Argument("--fails", help="fail")),
    has_json=True,
)


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["work", *arguments])
    with pytest.raises(SystemExit) as ended:
        VERB.main()
    return (ended.value.code, *capfd.readouterr())


def test_every_verb_is_in_the_table() -> None:
    harness = Path(__file__).parents[2] / "harness"
    declaring = [path for path in harness.rglob("*.py") if "\nVERB = Verb(" in path.read_text()]
    assert len(declaring) == len(list(TABLE)) >= 15
    assert all(TABLE[name].name == name for name in TABLE)
    assert {name: TABLE[name] for name in VERBS} == VERBS


def test_a_result_as_text(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    ended = run(monkeypatch, capfd, "here")
    assert ended == (0, "working in here\nchild\nresult of here\n", "")


def test_json_is_all_of_standard_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capfd, "here", "--json")
    assert (code, json.loads(out), err) == (0, {"folder": "here"}, "working in here\nchild\n")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_after_the_result(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capfd, "here", "--fails", *flags)
    assert code == EXIT_MACHINE and err.endswith("error: the disk is full\n")
    assert "here" in out and "error" not in out


def test_help_and_version(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capfd, "--help")
    assert code == 0 and "\nVerbs: flags, results as text and as `--json`, errors after a result.\n" in out
    assert all(flag in out for flag in ("--fails", "--json", "--version", "folder"))
    code, out, _ = run(monkeypatch, capfd, "--version")
    assert code == 0 and "\nharness " in out


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("train", "-p", "--package: takes a value; would work: --package NAME"),
        ("train", "-c", "--cfg: takes a value; would work: --cfg job"),
        (
            "train",
            "--steps 10 a=1",
            "--steps: no such flag; would work: training.steps=10 or val",
        ),
        ("train", "--training.seq-len=8", "--training.seq-len: no such flag; would work: training.seq_len=8"),
        ("plan", "--dry-run a=1", "--dry-run: no such flag; would work: cluster.dry_run=true"),
        ("train", "-hx", "-hx: no such flag; did you mean -h?"),
        ("train", "-mc", "-mc: no such flag; did you mean -m?"),
        ("train", "--multi", "--multi: no such flag; did you mean --multirun?"),
        ("train", "--json", "--json: no such flag; "),
        ("train", "--", "--: no such flag; --help lists all flags"),
        ("train", "-1", "-1: no such flag; --help lists all flags"),
        ("train", "-cp x", "-cp: is not supported; would work: --config-dir FOLDER"),
        ("train", "-m -cd x --help", "--help: works for one job only; would work: the command without -m"),
        ("train", "--resolve", "--resolve: needs --cfg; would work: --cfg job --resolve"),
        ("plan", "-m --cfg job", "--cfg: works for one job only; would work: the command without -m"),
        ("plan", "--help --cfg job", "--cfg: cannot be combined with --help; would work: one of them"),
        ("sweep", "status x --jsn", "--jsn: no such flag; did you mean --json?"),
        ("sweep", "status x y", "unrecognized arguments: y; would work: "),
        ("report", "x --out", "--out: takes a value; would work: --out OUT"),
        ("verify", "x --new", "--new: no such flag; did you mean --newest?"),
    ],
)
def test_mistakes_in_flags(name: str, typed: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        VERBS[name].parse(typed.split())
    assert str(caught.value).startswith(message) and caught.value.exit_code == EXIT_USER


def test_flags_and_overrides_in_any_order() -> None:
    line = VERBS["plan"].parse(["a=1", "--cfg", "job", "~b", "-p=model", "+c=-1", "d=--x", "--json"])
    assert (line.cfg, line.package, line.json) == ("job", "model", True)
    assert line.overrides == ["a=1", "~b", "+c=-1", "d=--x"]
