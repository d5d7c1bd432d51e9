"""Command lines that are drawn: none ends in a traceback or without end, and a mistake is one line."""

import os
import subprocess
import sys

import pytest
from cases import rows
from fuzz import judged
from fuzz_lines import Line, line
from fuzz_server import ROOT, Ended, serving

from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER


def test_a_draw_of_lines():
    drawn = [line(f"0.{number}") for number in range(60)]
    assert (
        drawn
        == [line(f"0.{number}") for number in range(60)]
        != [line(f"1.{n}") for n in range(60)]
    )
    with serving() as run:
        ended = [(each, run(each)) for each in drawn]
    assert [(wrong, each, end.err) for each, end in ended if (wrong := judged(each, end))] == []
    assert {end.code for _, end in ended} >= {EXIT_OK, EXIT_USER}


@pytest.mark.parametrize(
    ("code", "err", "left", "wrong"),
    rows(r"""
        2    "note: a\nerror: a=b: no\n\x20\x20b\n"  []         ""
        0    "Traceback (most recent call last):\n"  []         traceback
        1    "error: a\n"                            []         exit code 1
        -24  ""                                      []         "hangs: 20 s of CPU"
        2    "usage: x\nerror: a\n"                  []         2 lines for one mistake
        2    ""                                      []         0 errors in 0 lines
        2    "error: a\x1b[31m\n"                    []         control characters
        0    "error: a\n"                            []         reports an error and ends with 0
        2    "error: a\n"                            [outputs]  leaves outputs
    """),
)
def test_what_is_wrong_with_an_end(code, err, left, wrong):
    """-24 is SIGXCPU."""
    assert judged(Line("0", "train", []), Ended(code, "", err, 20.0, left)) == (wrong or "")


def shell(command, folder, **environment):
    """Run a line of shell in which $PLAN is the plan of a small job."""
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
        ("$PLAN --json | true", EXIT_OK, ""),
        (
            "$PLAN > /dev/full",
            EXIT_MACHINE,
            "standard output cannot be written: No space left on device",
        ),
        (
            "$PLAN $'name=\\xff'",
            EXIT_USER,
            "name=\\udcff: must be one line of printable text, and holds U+DCFF",
        ),
    ],
)
def test_streams_and_arguments_that_cannot_be_used(command, code, err, tmp_path):
    done = shell(command, tmp_path)
    assert (done.returncode, done.stderr) == (code, f"error: {err}\n" if err else "")


def test_a_locale_that_is_not_utf_8(tmp_path):
    command = "$PLAN name=grün --cfg job --package name"
    done = shell(command, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "grün\n", "")
