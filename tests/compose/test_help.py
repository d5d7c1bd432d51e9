"""``--help``: the screen of each verb, one group, one field, all fields, and names that are none."""

import subprocess
import sys

import pytest

from harness.compose.verb import VERBS
from harness.config.fields import leaves
from harness.config.job import Job


def shown(capsys, verb, *arguments):
    assert VERBS[verb].run_line(["--help", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", [name for name in VERBS if VERBS[name].job is not None])
def test_a_screen(capsys, verb):
    lines = shown(capsys, verb).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 110
    assert lines[0].startswith(f"usage: harness {verb} [GROUP=OPTION ...] [FIELD=VALUE ...]")
    assert any(
        line.startswith("  -cd") and " FOLDER " in line for line in lines
    )  # Python 3.13 names it once


def test_a_group_a_field_and_all(capsys):
    group = shown(capsys, "train", "precision")
    assert (
        "\n  bf16               Compute in bfloat16; parameters and reductions in float32.\n"
        in group
    )
    assert "\nprecision.linear=none\n" in group
    assert shown(capsys, "train", "training.max_norm", "training.max_norm=4") == (
        "training.max_norm=4.0\n"
        "    Clip gradients to this global 2-norm; 0 disables clipping.\n"
        "    a number; at least 0; numerics: another value computes other numbers\n"
    )
    listed = {line.partition("=")[0] for line in shown(capsys, "train", "all").splitlines()}
    assert {name for name, *_ in leaves(Job())} <= listed
    assert shown(capsys, "plan", "training.steps=3") == shown(capsys, "plan")


@pytest.mark.parametrize("arguments", ["--help", "sweep --help", "doctor --help"])
def test_help_without_docstrings(arguments):
    command = ["-m", "harness", *arguments.split()]
    plain, stripped = (
        subprocess.check_output([sys.executable, *flags, *command], text=True)
        for flags in ([], ["-OO"])
    )
    assert plain == stripped
