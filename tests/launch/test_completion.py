"""Completion in shells: the function of bash, run by bash itself, and scripts that other shells read."""

import shutil
import subprocess

import pytest
from cases import rows

from harness.compose.verb import VERBS
from harness.launch.completion import VERB

# What readline does: an equals sign is a word of its own.
COMPLETE = """
source "$1"
COMP_LINE="harness $2"
COMP_POINT=${#COMP_LINE}
read -ra COMP_WORDS <<< "${COMP_LINE//=/ = }"
[[ $COMP_LINE != *[\\ =] ]] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_harness 2>&1
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with the script of each shell, where one folder of HARNESS_CONF has a model."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "llama3_mine.yaml").write_text("defaults: [llama3_tiny]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_CONF", str(folder / "conf"))
        for shell in ("bash", "zsh", "fish"):
            with (folder / shell).open("w") as file:
                patch.setattr("sys.stdout", file)
                assert VERB.run_line([shell]) == 0
    return folder


@pytest.mark.parametrize(
    ("typed", "words"),
    rows("""
        t                    train tokenize
        train mod            model. model=
        train model=llama3_  llama3_405b llama3_70b llama3_8b llama3_debug llama3_mine llama3_tiny
        train -m model=from  from_config
        train training.seq   training.seq_len=
        train schedule.t     schedule.total_steps=
        train --conf         --config-name --config-dir
        plan sea             search=
        train sea            ''
        completion z         zsh
        runs --j             --json
        runs model=          ''
        download rep         repo=
        download model=      ''
        'nothing '           ''
    """),
)
def test_bash_completes(scripts, typed, words):
    command = ["bash", "--norc", "-c", COMPLETE, "bash", scripts / "bash", typed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{words}\n", "")


def test_bash_completes_verbs(scripts):
    command = ["bash", "--norc", "-c", COMPLETE, "bash", scripts / "bash", ""]
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == [*VERBS]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_read_their_script(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "words"),
    rows("""
        train model=llama3_t  [model=llama3_tiny]
        report con            [conf/]
        con                   [converge, convert]
    """),
)
def test_fish_completes(scripts, typed, words):
    if shutil.which("fish") is None:
        pytest.skip("there is no fish here")
    command = ["fish", "--no-config", "-c", f"source fish; complete -C 'harness {typed}'"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == words


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_files_are_completed_where_no_word_fits(scripts, shell):
    assert "-o default -F _harness" in (scripts / shell).read_text()
