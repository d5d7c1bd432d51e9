"""README and docs/: commands compose, shown errors are exact, links exist, the reference is complete."""

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from declared import JOBS, VERBS
from jobs import train
from test_imports import ROOMS

from harness.compose.arguments import JOB_FLAGS
from harness.compose.composer import (
    Composer,
    chooses_points,
    compose_job,
    compose_points,
    read_space,
)
from harness.compose.hydra import folders_of_environment, search_path
from harness.config import failures
from harness.config.fields import leaves
from harness.config.job import Job
from harness.config.training import OBSERVERS
from harness.metrics.memory import ALLOCATOR
from harness.run.result import GOES_ON
from harness.tools.plan.compare import compare
from harness.tools.plan.config import PlanJob
from harness.tools.plan.verb import plan
from harness.train.rows import metrics_of_ranks, metrics_of_result, metrics_of_rows
from harness.util import __version__, errors
from harness.util.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
OUTSIDE = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "experiments/README.md", "sweeps/README.md")
# Tests of their own run the commands of these pages.
APART = ("adding_a_model.md", "extend.md")
PAGES = [
    *(ROOT / name for name in OUTSIDE),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in APART),
]
# Programs that are not the harness's; README says which packages bring them.
OTHERS = "nvidia-smi zgrep pgrep kill eval git sbatch echo pre-commit source docker"
# Pages of commands for GPUs, by section.
GPUS = {"One GPU": "0", "Eight GPUs": "0,1,2,3,4,5,6,7"}


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: Path
    line: str
    section: str
    output: list[str]
    """The lines below it, where it is shown with its output."""

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}: {self.line}"


def commands_of(page):
    """Yield the commands of fenced blocks, continuation lines joined, comments and prompts removed.

    The output of a command is below its prompt, or in a ``text`` fence that follows its ``bash`` fence.
    """
    section = ""
    text = page.read_text()
    for part in re.finditer(
        r"^## ([^\n]+)$|^ *```(bash|console)\n(.*?)^ *```$(?:\n\n```text\n(.*?)^```)?",
        text,
        re.MULTILINE | re.DOTALL,
    ):
        section = part[1] or section
        below = (part[4] or "").splitlines()
        lines = re.sub(r"\\\n\s*", "", part[3] or "").splitlines()
        for place, line in enumerate(lines):
            if part[2] == "console" and not line.startswith("$ "):
                continue
            command = re.sub(r"(^|\s+)#.*", "", line.strip().removeprefix("$ ")).strip()
            shown = itertools.takewhile(lambda each: not each.startswith("$ "), lines[place + 1 :])
            output = list(shown) if part[2] == "console" else below * (place == len(lines) - 1)
            if command:
                yield Command(page, command, section, output)


COMMANDS = [command for page in PAGES for command in commands_of(page)]
# A command that several pages have is one row.
DISTINCT = {(each.line, GPUS.get(each.section, ""), *each.output): each for each in COMMANDS}


@pytest.mark.parametrize("command", DISTINCT.values(), ids=str)
def test_commands(command, monkeypatch, tmp_path):
    words = shlex.split(command.line)
    _use_shown_files(command, monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS.get(command.section, ""))
    if words[0].startswith("HARNESS_CONF="):
        monkeypatch.setenv(*words.pop(0).split("="))
    if Path(words[0]).name in OTHERS.split():
        return
    if words[0] == "make":
        assert words[1] in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "torchrun":
        for variable, value in (
            ("RANK", "0"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
        ):
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("WORLD_SIZE", words[words.index("--nproc-per-node") + 1])
    else:
        assert re.fullmatch(r"(.*/)?(python3?|pip|harness)", words[0]), f"{words[0]}: what is this?"
    typed = verb_of(words)
    if typed == ["--help"]:
        return
    if typed:
        _check_harness(command, typed[0], typed[1:])
    elif words[1].endswith(".py"):
        script = (ROOT / words[1]).read_text()
        flags = [word for word in words[2:] if word.startswith("--")]
        assert all(f'"{flag}"' in script for flag in flags), flags
    else:
        assert words[1] in ("-c", "-m", "install"), words


def verb_of(words):
    """The verb of a command line and its arguments; nothing if it runs none."""
    if Path(words[0]).name == "harness":
        return words[1:]
    after = words[words.index("-m") + 1 :] if "-m" in words else []
    if after and after[0] == "harness.train":
        return ["train", *after[1:]]
    assert not any(word.startswith("harness.") for word in after[:1]), f"{after[0]} is no command"
    return []


def _use_shown_files(command, monkeypatch, folder):
    """For a command with such files, write the YAML that its page shows with a comment
    ``# my_conf/PATH.yaml: ...``, and an empty package."""
    if "my_conf" not in command.line:
        return
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    for text in re.findall(
        r"^```yaml\n(.*?)^```", command.page.read_text(), re.MULTILINE | re.DOTALL
    ):
        if name := re.search(r"^# (my_conf/\S+\.yaml)", text, re.MULTILINE):
            path = folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (folder / "my_package" / "conf").mkdir(parents=True)


def _check_harness(command, name, words):
    # The weights that a page names do not exist; their model is the default one.
    words = [word for word in words if not word.startswith("checkpoint=")]
    line, schema = VERBS[name].parse(words), VERBS[name].job
    if schema is None:
        for folder in getattr(line, "folders", None) or [line.folder]:
            assert str(folder).startswith("runs") or (name == "report" and (ROOT / folder).is_dir())
        return
    name = line.config_name or name
    folders = [*(line.config_dir or ()), *folders_of_environment()]
    with search_path(line.overrides, name, folders=folders) as line.overrides:
        _check_job(command, name, schema, line)


def _check_job(command, name, schema, line):
    if command.output and command.output[0].startswith("error: "):
        with pytest.raises(ConfigError) as refused:
            compose_job(line.overrides, config_name=name, schema=schema)
        assert f"error: {refused.value}" == command.output[0]
    elif line.multirun and chooses_points(Composer(name, schema), line.overrides):
        assert read_space(Composer(name, schema), line.overrides).axes
    elif line.multirun:
        points = compose_points(line.overrides, config_name=name, schema=schema)
        reasons = {point.reason for point in points if point.job is None}
        assert any(point.job is not None for point in points), reasons
        assert "sweep=" in command.line or "parallelism.tp=" in command.line or not reasons
    else:
        compose_job(line.overrides, config_name=name, schema=schema)


PLANNED = [command for command in COMMANDS if "harness plan " in command.line and command.output]
# A search for 512 GPUs takes most of a minute.
LONG = [each for each in PLANNED if {"search=true", "cluster.nodes=64"} <= set(each.line.split())]


@pytest.mark.parametrize(
    "command",
    [
        *(each for each in PLANNED if each not in LONG),
        *(pytest.param(each, marks=pytest.mark.thorough) for each in LONG),
    ],
    ids=str,
)
def test_shown_plans_are_what_the_plan_prints(command, monkeypatch, tmp_path):
    _use_shown_files(command, monkeypatch, tmp_path)
    monkeypatch.setattr("harness.tools.plan.verb.sweep_path", lambda *_: tmp_path / "sweep.yaml")
    printed = plan_of(verb_of(shlex.split(command.line))[1:]).splitlines()
    for line in command.output:
        assert line == "..." or line in printed


def plan_of(words):
    """What harness plan prints of a job, or with -m of several."""
    line = VERBS["plan"].parse(words)
    with search_path(line.overrides, "plan", folders=line.config_dir or ()) as overrides:
        if line.multirun:
            return compare(compose_points(overrides, config_name="plan", schema=PlanJob)).text
        return plan(compose_job(overrides, config_name="plan", schema=PlanJob), overrides).text


FIRST_HOUR = ROOT / "docs" / "first_hour.md"


def runs_of_the_first_hour():
    """Yield section and overrides of each run on synthetic data, every layout by itself."""
    for command in commands_of(FIRST_HOUR):
        words = verb_of(shlex.split(command.line))[1:]
        if "data=synthetic" in words:
            layouts = next(word for word in words if word.startswith("parallelism="))
            rest = [word for word in words if word not in ("-m", layouts)]
            for layout in layouts.partition("=")[2].split(","):
                yield command.section, [*rest, f"parallelism={layout}"]


@pytest.mark.parametrize("cluster", ["slurm_h100", "slurm_h200"])
def test_the_first_hour_has_what_the_plan_says(cluster, monkeypatch):
    text, found = FIRST_HOUR.read_text(), 0
    for section, words in runs_of_the_first_hour():
        on_one = section == "One GPU"
        if "metrics.warmup_steps=2" not in words or (not on_one and cluster == "slurm_h200"):
            continue  # not measured, or only planned for H100
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS[section])
        plan = plan_of(
            [*words, f"cluster={cluster}", f"cluster.ranks_per_node={1 if on_one else 8}"]
        )
        [rate] = re.findall(r"^throughput  ([\d,]+) tokens", plan, re.MULTILINE)
        [peak] = re.findall(r"rank takes ([\d.]+) of", plan)
        assert f"| {rate} |" in text, words
        assert f"| {float(peak):.1f} |" in text, words
        found += 1
    assert found == (11 if cluster == "slurm_h100" else 4)


def test_readme_shows_the_report_of_published_rows():
    tables = (ROOT / "experiments" / "llama3_h100" / "tables.md").read_text()
    table = README.split("| run | tokens/s/GPU, published |")[1].split("\n\n")[0]
    rows = [row.split(" | ", 1)[1].rstrip(" |") for row in table.splitlines()[2:]]
    *rows, _ = rows
    assert len(rows) == 5
    for row in rows:
        assert f" | {row} |" in tables, row
    of_all = tables.split("| **all** |")[1].split("\n")[0]
    for error in re.findall(r"[\d.]+%", table.splitlines()[-1]):
        assert error in of_all


def test_first_pages_show_the_version_and_errors_of_rows_that_were_not_fitted():
    held = (ROOT / "experiments" / "published" / "held_out.md").read_text()
    found = {
        row[0]: row[1:5]
        for row in re.findall(
            r"^\| ([^|]+) \| (\d+) \| (\S+) \| \S+ \| (\S+) \|", held, re.MULTILINE
        )
    }
    for name, of in (
        ("dense models on Hopper", "dense models on Hopper"),
        ("dense models on Blackwell", "dense models on Blackwell"),
        ("mixtures of experts, Hopper and Blackwell", "all mixtures of experts"),
    ):
        assert f"| {name} | {' | '.join(found[of])} |" in README, name
    rows, median, _ = found["dense models on Hopper"]
    index = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert f"{rows} published rows of dense models on Hopper" in index
    assert f"off by {median} in the median" in index
    assert f"Version {__version__} (" in index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_and_named_files_exist(page):
    for name, function in re.findall(
        r"`(harness/[\w./-]+|tests/[\w./-]+\.py)(?:::(\w+))?`", page.read_text()
    ):
        assert (ROOT / name).exists(), name
        assert f"def {function}(" in (ROOT / name).read_text() if function else True, function
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = page if not target else page.parent / target
        assert file.exists(), link
        assert not anchor or anchor in anchors_of(file), link


def anchors_of(page):
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_the_page_for_scripts_says_of_every_verb_whether_it_prints_json():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    with_json, without = text.split("\n## Verbs\n")[1].split("\n## ")[0].split("Without `--json`")
    for part, has_json in ((with_json, True), (without, False)):
        named = set(re.findall(r"`(\w+)`", part))
        assert named == {name for name, verb in VERBS.items() if verb.has_json == has_json}
    for name, verb in VERBS.items():
        assert ("--json" in verb.parser().format_help()) == verb.has_json, name


def test_site_lists_all_pages():
    listed = set(
        re.findall(r"- (?:.+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert there <= listed
    for path in listed - there:
        assert (ROOT / path.removeprefix("repository/")).is_file(), path


def test_the_page_of_architecture_is_the_house():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(rooms/\w+\.md\) \| (.+) \|$", page, re.MULTILINE)
    assert tuple(room for room, _ in rows) == ROOMS
    for room, purpose in rows:
        tree = ast.parse((ROOT / "harness" / room / "__init__.py").read_text())
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert purpose == first.replace("``", "`"), room


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What docs/reference.py writes now."""
    folder = tmp_path_factory.mktemp("reference")
    script = str(ROOT / "docs" / "reference.py")
    subprocess.run([sys.executable, script, str(folder)], env=ENVIRONMENT, check=True)
    return folder


def rows_of(page):
    """Rows of the tables of a page."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_reference_is_up_to_date(reference):
    """The site is built from what is committed."""
    committed = ROOT / "docs" / "reference"
    assert {path.name for path in committed.iterdir()} == {
        path.name for path in reference.iterdir()
    }
    for page in reference.iterdir():
        there = (committed / page.name).read_text()
        assert there == page.read_text(), f"{page.name}: make reference writes it"
    names = (ROOT / "docs" / "coming_from.md").read_text()
    assert (reference.parent / "coming_from.md").read_text() == names, "make reference writes it"


def test_the_reference_has_every_field_flag_and_class(reference):
    fields = {row[0].strip("`"): row for row in rows_of(reference / "fields.md")}
    for name, role, _ in leaves(Job()):
        assert fields[name][4] == role
    verbs = (reference / "verbs.md").read_text()
    for schema in JOBS.values():
        for name, _, _ in leaves(schema()):
            assert name in fields or f"| `{name}` |" in verbs, name
    for flag in JOB_FLAGS:
        assert all(f"`{name}`" in verbs for name in flag.names)
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert all(f"| {code} | " in verbs for code in codes)
    classes = re.findall(r"^\| ``(\w+)`` \|", failures.__doc__ or "", re.MULTILINE)
    troubleshooting = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(classes) >= 10
    for name in classes:
        assert f"| `{name}` | " in (reference / "failures.md").read_text()
        assert f"\n## {name}\n" in troubleshooting


FILES = "[pair.jsonl]"
RUNS = {
    "dense": "validation.interval=2 profiling=on profiling.interval=3 profiling.warmup=1 data=mixture "
    f"data.sources.a={{kind:local,paths:{FILES},validation_paths:{FILES},text_field:context}} "
    "data.sources.b.kind=synthetic data.weights={a:1,b:1} data.cache_dir=cache model.vocab_size=258",
    "scheduled": "schedule.batch_size=[{until_step:1,sequences:1}] "
    "schedule.seq_len=[{until_step:1,tokens:8}] "
    "profiling.phases=true metrics.all_ranks=true "
    "debug.spikes=log debug.spike_window=4 debug.spike_zscore=1e-6",
    "evaluated": f"evaluation.interval=5 data=local_jsonl data.paths={FILES} data.validation_paths={FILES} "
    "data.text_field=context data.validation_fraction=0 data.cache_dir=cache model.vocab_size=258",
    "mixture": "model=deepseek_v3_debug model.n_layers=2 model.vocab_size=256 model.mtp.depth=1",
    "pictures": "model=flux_debug model.n_layers=2 data=latents_synthetic",
}


def test_every_column_that_runs_write_is_described_and_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics, of_rank, result = (
        set(),
        set(),
        {f"error.{name}" for name in failures.ERROR_FIELDS_IN_ROW},
    )
    (tmp_path / "pair.jsonl").write_text(2 * (json.dumps({"context": 20 * "a"}) + "\n"))
    for name, overrides in RUNS.items():
        common = f"name={name} training.steps=5 training.seq_len=32 training.global_batch_size=2"
        code, folder, _ = train(tmp_path, *common.split(), *overrides.split())
        assert code == 0
        for line in (folder.path / "metrics.jsonl").read_text().splitlines():
            metrics |= json.loads(line).keys()
        for path in folder.path.glob("metrics/rank0.jsonl"):
            of_rank |= json.loads(path.read_text().splitlines()[-1]).keys()
        result |= json.loads((folder.path / "result.json").read_text()).keys()
    observers = list(OBSERVERS.values())
    for written, described in (
        (metrics, metrics_of_rows(observers)),
        (of_rank, metrics_of_ranks(observers)),
        (result, metrics_of_result()),
    ):
        # The runs have one rank, and lose none.
        of_several = (GOES_ON, "mixtures, `parallelism.ep`")
        alone = [each for each in described if each.when not in of_several]
        names = {column.name for column in alone}
        stems = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
        exact = {name for name in names if not name.endswith("*")}
        assert {
            name for name in written if name not in exact and not name.startswith(stems)
        } == set()
        assert exact - ALLOCATOR.keys() <= written  # its columns need a GPU
        assert all(any(name.startswith(stem) for name in written) for stem in stems)
