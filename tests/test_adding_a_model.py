"""docs/adding_a_model.md, followed to the letter in a copy of the sources."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding_a_model.md"
BLOCK = re.compile(r"^(?:`([^`\n]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources with all that the page says done to it."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in ("harness", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True)
    for folder in ("experiments", "sweeps"):
        (copy / folder).symlink_to(ROOT / folder)
    file = ""
    for named, language, content in BLOCK.findall(PAGE.read_text()):
        file = named or file
        if language == "diff":
            apply(copy / file, content)
        elif language in ("yaml", "python"):
            assert not (copy / file).exists(), f"{file} is there already"
            (copy / file).write_text(content)
    return copy


def apply(path, diff):
    """Apply one hunk of a unified diff, without its header."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] in " -")
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has no line {old!r}"
    path.write_text(text.replace(old, new))


def commands():
    shown = "".join(
        content for _, language, content in BLOCK.findall(PAGE.read_text()) if language == "console"
    )
    return [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]


def test_the_page_has_what_a_family_needs(sources):
    assert (sources / "conf/model/seed_oss_debug.yaml").exists()
    assert (sources / "harness/weights/families/seed_oss.py").exists()
    assert len(commands()) == 2


@pytest.mark.parametrize("command", commands())
def test_commands(sources, command):
    program, *arguments = shlex.split(command)
    program = [] if program == "python" else ["-m", "harness"]
    done = python(*program, *arguments, cwd=sources, PYTHONPATH=str(sources), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "SeedOssForCausalLM: logits differ" in done.stdout or "1 of 1 layouts agree" in done.stdout
    )
