"""Mistakes on the command line: each gives one line with field, value, rule and what would work."""

import os
import re
import resource
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from declared import VERBS
from processes import python

from harness.compose.composer import compose_job
from harness.compose.paths import using_folders
from harness.util.errors import EXIT_USER, UserError

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mistake:
    """Overrides, the last of which is wrong, or a command line.

    Attributes:
        typed: the overrides, separated by spaces.
        start: start of the message.
        works: overrides that work in place of the last one; the message must contain their values.
    """

    typed: str
    start: str
    works: tuple[str, ...] = ()


def read_mistakes(text):
    """Read ``mistakes.txt``, whose head describes it."""
    found = []
    for line in re.sub(r"<(\d+) (\w+)>", lambda long: int(long[1]) * long[2], text).splitlines():
        rule = re.fullmatch(r"(.*?) +(:|=>) (.*)", line)
        if not line or line.startswith("#"):
            continue
        if line.startswith("    works: "):
            works = line.removeprefix("    works: ").split(" | ")
            found[-1] = replace(found[-1], works=(*found[-1].works, *works))
        elif rule:
            typed = rule[1] or found.pop().typed
            start = rule[3] if rule[2] == "=>" else f"{typed.split(' ')[-1]}: {rule[3]}"
            found.append(Mistake(typed, start))
        else:
            found.append(Mistake(line, ""))
    return found


MISTAKES = read_mistakes((ROOT / "tests" / "mistakes.txt").read_text())
LINES = [each for each in MISTAKES if each.typed.startswith("harness ")]
JOBS = [each for each in MISTAKES if each not in LINES]

pytestmark = pytest.mark.usefixtures("alone")


def message(overrides):
    with pytest.raises(UserError) as caught:
        compose_job(overrides)
    assert caught.value.exit_code == EXIT_USER
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contains_value(error, value):
    """Whether a message contains this value, not only as a part of another one."""
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w.]\w)", error) is not None


@pytest.mark.parametrize("mistake", JOBS, ids=lambda mistake: mistake.typed[:100])
def test_each_mistake_is_one_line(mistake):
    *right, wrong = mistake.typed.split(" ")
    error = message([*right, wrong])
    assert error.startswith(mistake.start)
    for instead in mistake.works:
        compose_job([*right, *instead.split(" ")])
        new = [
            override.split("=")
            for override in instead.split(" ")
            if override not in mistake.typed.split()
        ]
        assert any(
            contains_value(error, value) or f"{field} set" in error for field, value in new
        ), instead


@pytest.mark.parametrize("mistake", LINES, ids=lambda mistake: mistake.typed[:100])
def test_each_command_is_refused_in_one_line(mistake, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    _, verb, *arguments = shlex.split(mistake.typed)
    monkeypatch.setattr(sys, "argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as ended:
        VERBS[verb].main()
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {mistake.start}")
    assert (ended.value.code, captured.err.count("\n"), captured.out) == (EXIT_USER, 1, "")
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "folder", "list.json"]


# Rows of a file, separated by spaces, and the beginning of the rule that they break.
SCHEDULES = """
0F0,0F1,0B0,0B1 1F0,1B0,1F1,1B1 2F0,2B0,2F1,2B1 : has 3 rows; needs one per pipeline rank,
0F0,0B0 1F0,1X0 : cell '1X0' is not <stage><F|B|I|W><microbatch>, like 0F0
0F0,0B0 1F,1B0 : cell '1F' is not <stage>
0F0,0B0 1F0,1SEND_B0,1B0 : cell '1SEND_B0' is not <stage>
0F0,0B0 2F0,2B0 : stages [0, 2] are not 0, 1, 2, ... each on one rank
0F0,0B0 0F1,0B1 : stages [0, 0] are not 0, 1, 2, ... each on one rank
0F0,0F1,0B0,0B1 1F0,1B0 : every stage needs one F of each of the microbatches 0 to 1
0F0,0F0,0B0 1F0,1B0 : every stage needs one F of each of the microbatches 0 to 0
0F0,0F1,0B0,0B1 1F0,1F1,1B0 : every stage needs one F of each
0F0,0B0 1F0,1I0 : every stage needs one F of each
0F0,0B0,0W0 1F0,1B0 : every stage needs one F of each
0F0,0B0 1F0,1W0,1I0 : every stage needs one F of each
0F0,0B0,0B0 1F0,1B0 : every stage needs one F of each
0F0,1B0 1F0,0B0 : stages [0, 0, 1, 1] are not 0, 1, 2, ... each on one rank
0F0,0B0 1B0,1F0 : every stage needs one F of each
0F0,0B0,0F1,0B1 1F0,1F1,1B0,1B1 : the ranks wait for each other, or for themselves, for ever: 0B0 for 1B0, 1F1
0F0,2F0,2B0,0B0 1F0,3F0,3B0,1B0 : runs 4 stages, but model.n_layers=1 makes at most 3
"""


@pytest.mark.parametrize("schedule", SCHEDULES.strip().splitlines())
def test_csv_schedule_malformed(schedule, tmp_path):
    rows, rule = schedule.split(" : ")
    (tmp_path / "schedule.csv").write_text(rows.replace(" ", "\n"))
    typed = f"parallelism.pp_schedule_csv={tmp_path}/schedule.csv"
    shape = [
        "parallelism.pp=2",
        f"training.global_batch_size={1 + ('F1' in rows)}",
        "model.n_layers=1",
    ]
    assert message([*shape, typed]).startswith(f"{typed}: {rule}")


def test_csv_schedule_of_another_job(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    typed = f"parallelism.pp_schedule_csv={tmp_path}/schedule.csv"
    base = ["parallelism.pp=2", typed]
    assert message([*base, "training.global_batch_size=4"]) == (
        "training.local_batch_size=4: with parallelism.pp_microbatch_size=1 "
        f"the number of microbatches is 4, but {tmp_path}/schedule.csv runs 2 microbatches; would work: 2, "
        "or parallelism.pp_microbatch_size=2, or 2 with training.global_batch_size=2"
    )
    for works in ("4 training.local_batch_size=2", "4 parallelism.pp_microbatch_size=2", "2"):
        compose_job([*base, *f"training.global_batch_size={works}".split()])
    three = "parallelism.pp_modules_per_stage=[[tok_embeddings],[layers.0],[norm,output]]"
    error = message([*base, "training.global_batch_size=2", "model.n_layers=1", three])
    assert error == f"{typed}: runs 2 stages, but parallelism.pp_modules_per_stage makes 3"


GLOBAL = "# @package _global_\n"
FILES = (ROOT / "tests" / "mistakes_in_files.txt").read_text().splitlines()
FILES = [line for line in FILES if not line.startswith("#")]


@pytest.mark.parametrize(("row", "start"), zip(FILES[::2], FILES[1::2], strict=True))
def test_mistakes_in_files(row, start, tmp_path):
    typed, text = row.split(" | ")
    text = text.encode().decode("unicode_escape").replace("GLOBAL ", GLOBAL)
    written = tmp_path / f"{typed.replace('=', '/')}.yaml"
    written.parent.mkdir()
    written.write_bytes(f"{text}\n".encode("latin-1"))
    with using_folders([tmp_path]):
        assert message([typed]).startswith(start.strip().replace("FOLDER", str(tmp_path)))


def test_the_command_fails_fast(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "harness.train", "+parallelism.tpp=2", f"runs_dir={tmp_path}/runs")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    error = "error: parallelism.tpp=2: no such field; did you mean parallelism.tp?\n"
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_USER, "", error)
    assert not (tmp_path / "runs").exists()
    # CPU time, because other tests may use the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_composing_and_refusing_import_no_torch():
    code = (
        "import sys, harness.config.job\n"
        "from harness.compose.composer import compose_job\n"
        "compose_job(['parallelism=fsdp_tp_pp', 'training.global_batch_size=8'])\n"
        "try: compose_job(['parallelism.tp=3'])\n"
        "except Exception as error: assert 'must divide' in str(error)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
