"""docs/howto/extend.md: its package is installed into a fresh environment, where the page's commands run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from one_line import one_line
from plugins import EXTENSIONS, install
from processes import python, until

from harness.compose import paths
from harness.config.job import Job
from harness.launch.slurm import take_snapshot
from harness.model.spec import tensor_shapes
from harness.util.errors import ConfigError, UserError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "howto" / "extend.md").read_text()
PACKAGE = ROOT / "tests" / "extras"
COMMANDS = [line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ")]
SECONDS = 300


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the package, and a folder to work in."""

    python: Path
    home: Path

    def succeed(self, *arguments, **environment):
        """Run Python, with the harness of the checkout, to a successful end; return its standard output."""
        kept = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.home,
            env={**kept, **fixed, **environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def extras(tmp_path_factory):
    """The package in a fresh environment that sees the packages of this one."""
    home = tmp_path_factory.mktemp("extras")
    # Building writes into the sources.
    built = shutil.ignore_patterns("build", "*.egg-info")
    shutil.copytree(PACKAGE, home / "package", ignore=built)
    shutil.copytree(EXTENSIONS, home / "extensions", ignore=built)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    interpreter = home / "venv" / "bin" / "python"
    [packages] = (home / "venv").glob("lib/python*/site-packages")
    (packages / "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    folders = [str(home / name) for name in ("package", "extensions", "extensions/flux")]
    done = subprocess.run([*pip, *offline, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Installed(interpreter, home)


def command(verb, word=""):
    """A command of the page, as arguments of Python."""
    [found] = [each for each in COMMANDS if each.startswith(f"harness {verb} ") and word in each]
    return ["-m", *shlex.split(found)]


@pytest.fixture(scope="module")
def trained(extras):
    """The run of the page's first training: two ranks that this machine starts."""
    extras.succeed(*command("train", "parallelism=tp"))
    [job] = extras.home.glob("runs/arcee_debug/[0-9a-f]*/job.json")
    return job.parent


def test_the_page_shows_every_file():
    files = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".yaml", ".toml") and path.name != "__init__.py"
    }
    assert len(files) == 19
    assert set(re.findall(r'^--8<-- "(.+)"$', PAGE, re.MULTILINE)) == files


def test_verbs_of_packages_are_listed_and_run(extras):
    listed = extras.succeed("-m", "harness", "--help")
    assert re.search(r"^  tensors +list the tensors of a model\.$", listed, re.MULTILINE)
    assert re.search(r"^  train +train the job that ", listed, re.MULTILINE)
    shown = extras.succeed(*command("tensors"))
    assert "layers.1.feed_forward.w2.weight [64, 192]\n" in shown and "feed_forward.w3" not in shown


def test_extensions_are_typed_as_if_built_in(extras):
    shown = extras.succeed("-m", "harness", "train", "metrics=mlflow", "--cfg", "job")
    assert "mlflow:\n      tracking_uri: null" in shown
    formats = extras.succeed("-m", "harness", "train", "--help", "data.format")
    assert "llmc" in formats and "datatrove" in formats


def test_train(trained):
    job, row = (json.loads((trained / name).read_text()) for name in ("job.json", "result.json"))
    assert (row["exit_reason"], row["world_size"], row["step"]) == ("completed", 2, 4)
    assert job["optimizer"]["options"] == {"momentum": 0.9, "nesterov": False}
    assert (job["schedule"]["options"], job["data"]["options"]) == (
        {"exponent": 2.0},
        {"largest": 99},
    )
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    # Two steps of warm-up, the peak, then (1 - 1/2)^2 of it.
    assert [row["lr"] for row in rows] == pytest.approx([0.005, 0.01, 0.01, 0.0025])
    assert [row["spikes"] for row in rows] == [0] * 4
    header, *lines = (trained / "metrics.csv").read_text().splitlines()
    assert header == "step,loss,grad_norm,tokens_per_second"
    assert [line.split(",")[:2] for line in lines] == [
        [str(row["step"]), str(row["loss"])] for row in rows
    ]


def test_parity(extras):
    assert "2 of 2 layouts agree with one process" in extras.succeed(*command("parity"))


def test_plan(extras):
    """Its block and optimizer have costs: a momentum for each parameter; tables of rotation beside them."""
    plan = json.loads(extras.succeed(*command("plan"), "--json"))
    kinds = plan["memory"][0]["kinds"]
    assert kinds["optimizer"] == 4 * plan["parameters_per_rank"][0]
    assert (
        kinds["optimizer"] < kinds["parameters"] < 1.2 * kinds["optimizer"]
        and kinds["activations"] > 0
    )


CHECK = """
import sys, torch
import torch.distributed.checkpoint as dcp
from pathlib import Path
from transformers import AutoModelForCausalLM
from harness.config.job import Job
from harness.model.decoder import Decoder

run = Path(sys.argv[1])
model = Decoder(Job.read(run / "job.json").model, 16)
dcp.load(model.state_dict(), checkpoint_id=run / "checkpoints" / "step-4")
theirs = AutoModelForCausalLM.from_pretrained("arcee_hf", dtype=torch.float32)
tokens = torch.arange(32).view(2, 16)
with torch.no_grad():
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
print(type(theirs).__name__)

# What the block declares for the plan, and what autograd saves.
sys.path[:0] = sys.argv[2:]
from test_memory import ActivationBytes, compose_job, saved_by_autograd
job = compose_job(["model=arcee_debug", "data=synthetic", "tokenizer=bytes", "cluster.device=cpu",
                   "training.global_batch_size=2", "training.seq_len=32"])
print(ActivationBytes(job).block(1).kept - saved_by_autograd(job, 1))
"""


def test_the_model_is_that_of_transformers_and_of_the_plan(extras, trained):
    pytest.importorskip("transformers")
    words = command("convert")
    extras.succeed(*[word.replace("runs/arcee_debug/ID", str(trained)) for word in words])
    folders = str(ROOT / "tests"), str(ROOT / "tests" / "tools" / "plan")
    shown = extras.succeed("-c", CHECK, str(trained), *folders, HF_HUB_OFFLINE="1")
    assert shown.split() == ["ArceeForCausalLM", "0.0"]


def test_a_cluster_of_a_package(extras, trained):
    shown = extras.succeed(*command("train", "cluster=background"))
    run = Path(re.search(r"^run folder (.+)$", shown, re.MULTILINE)[1])
    until((extras.home / run / "result.json").is_file)
    row = json.loads((extras.home / run / "result.json").read_text())
    assert (row["exit_reason"], row["step"]) == ("completed", 2)
    assert "step     2/2" in (extras.home / run / "background.log").read_text()


def test_ranks_find_the_package_beside_a_copy_of_the_code(extras, trained):
    copy = take_snapshot(extras.home)
    program = """
import sys, harness
from pathlib import Path
from harness.config.job import Job
from harness.config.training import ATTENTION
from harness.model.architecture import block_of
job = Job.read(Path(sys.argv[1]) / "job.json")
print(harness.__file__, type(block_of(job.model)).__name__, ATTENTION[job.training.attention].__name__)
"""
    shown = extras.succeed("-c", program, str(trained), PYTHONPATH=str(copy))
    assert shown.split() == [str(copy / "harness" / "__init__.py"), "Relu2", "PlainKernel"]


MISTAKES = {
    "optimizer.options.momentum=2": "optimizer.options.momentum=2: must be in [0, 1)",
    "schedule.options.power=2": "schedule.options.power=2: no such field; schedule.options has: exponent",
    "data.options.largest=1.5": "data.options.largest=1.5: must be an integer",
    "optimizer.momentum=0.5": "optimizer.momentum=0.5: has no effect with optimizer.kind=sgd; ",
    "optimizer.beta2=0.5": "optimizer.beta2=0.5: has no effect with optimizer.kind=sgd; ",
    "optimizer.eps=1e-3": "optimizer.eps=0.001: has no effect with optimizer.kind=sgd; ",
    "optimizer.kind=adam": "optimizer.options.momentum=0.9: optimizer.kind=adam has no options; ",
    "model.moe.num_experts=4": "model.block=relu2: has no experts; would work: pre_norm",
}


def test_options_are_checked(extras):
    program = """
import sys
from harness.compose.composer import compose_job
from harness.util.errors import ConfigError
*typed, mistakes = sys.argv[1:]
for mistake in mistakes.split():
    try:
        compose_job([*typed, mistake])
    except ConfigError as error:
        print(error)
"""
    shown = extras.succeed(
        "-c", program, *command("train", "parallelism=tp")[3:], " ".join(MISTAKES)
    )
    for line, start in zip(shown.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(start)


def test_without_the_package_a_job_is_refused_and_a_run_can_be_read(trained):
    job = Job.read(trained / "job.json")
    assert job.id == trained.name
    rule = "no installed package adds this name (entry points of group harness.block)"
    with one_line(ConfigError, re.escape(f"model.block=relu2: {rule}; would work: pre_norm, or ")):
        tensor_shapes(job.model)
    for verb in ("runs", "report"):
        done = python("-m", "harness", verb, str(trained))
        assert done.returncode == 0 and "completed" in done.stdout


def test_a_package_without_its_configurations_is_named(tmp_path, monkeypatch):
    install(tmp_path, "no_conf", {"harness.conf": {"all": "no_conf.conf"}})
    monkeypatch.syspath_prepend(tmp_path)
    paths.folders_of_packages.cache_clear()
    try:
        with one_line(UserError, r"^the package no_conf names the folder no_conf\.conf in group "):
            paths.folders_of_packages()
    finally:
        paths.folders_of_packages.cache_clear()
