"""What the README says is what happens: its commands compose, its example of a mistake is word for word."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bench import BenchJob
from harness.compose import compose_job
from harness.convert import ConvertJob
from harness.download import DownloadJob
from harness.errors import ConfigError
from harness.job import Job
from harness.parity import ParityJob
from harness.plan.config import PlanJob
from harness.rehearse.config import RehearseJob
from harness.report.__main__ import _parser as _report_parser
from harness.sweep.__main__ import _parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Every command line in a fenced block, continuation lines joined, comments and prompts taken off."""
    found = []
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip()
            if re.match(r"(make|python|torchrun)\b", command):
                found.append(command)
    return found


@pytest.mark.parametrize("command", [c for c in commands() if "harness." in c])
def test_harness_commands_compose(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    module = words.index("-m") + 1
    overrides = [word for word in words[module + 1 :] if not word.startswith("-")]
    verb = words[module].removeprefix("harness.")
    if verb == "sweep":
        arguments = _parser().parse_args(words[module + 1 :])
        assert str(arguments.folder).startswith("runs/")
        return
    if verb == "report":
        folder = _report_parser().parse_args(words[module + 1 :]).folder
        assert str(folder).startswith("runs/") or (ROOT / folder).is_dir()
        return
    schemas = {"bench": BenchJob, "parity": ParityJob, "convert": ConvertJob, "download": DownloadJob}
    schemas |= {"plan": PlanJob, "rehearse": RehearseJob}
    schema, name = schemas.get(verb, Job), verb
    if words[0] == "torchrun":
        for variable, value in (("RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("WORLD_SIZE", words[words.index("--nproc-per-node") + 1])
    if f"$ {command}\nerror: " in README:
        shown = README.split(f"$ {command}\nerror: ")[1].splitlines()[0]
        with pytest.raises(ConfigError) as refused:
            compose_job(overrides, config_name=name, schema=schema)
        assert str(refused.value) == shown
    else:
        compose_job(overrides, config_name=name, schema=schema)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert {"train", "test"} <= named <= targets


def test_listed_options_exist_and_all_are_listed() -> None:
    table = README.split("| group | options |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        groups, options = (re.findall(r"`([\w.]+)`", cell) for cell in row.strip("|").split("|", 1))
        if groups == ["experiment", "sweep"]:
            continue
        shipped = {p.stem for group in groups for p in (ROOT / "conf" / group).glob("*.yaml")}
        assert set(options) == shipped, groups


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_the_refused_command_for_real() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.train", "model=llama3_8b", "parallelism.tp=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.strip() in README
