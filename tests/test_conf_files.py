"""Every file that ships in conf/, Flux's conf/, experiments/ and sweeps/ composes, validates and builds."""

from pathlib import Path

import pytest
import torch
from declared import JOBS
from omegaconf import OmegaConf
from plugins import CONFS

from harness.compose.composer import Composer, compose_job
from harness.config.job import Job
from harness.config.pipeline import num_stages, split_modules, stages_of_rank
from harness.model.accounting import account
from harness.model.architecture import architecture_of
from harness.tools.download import DownloadJob
from harness.tools.parity.parity import ParityJob

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
PACKAGE = "# @package _global_"


def files_of(group):
    """Files of a group by option; for experiment and sweep only those with the required first line."""
    files = {}
    for conf in CONFS:
        folder = conf / group
        for file in sorted(folder.rglob("*.yaml")):
            if group not in ("experiment", "sweep") or is_global(file):
                files[str(file.relative_to(folder).with_suffix(""))] = file
    return files


def options(group):
    return sorted(files_of(group))


def is_global(file):
    return file.read_text().startswith(PACKAGE)


GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())
# Sizes of one family differ in numbers only: tests/model/test_accounting.py reads and builds every size.
FILES = [
    (group, option)
    for group in GROUPS
    for option in options(group)
    if group != "model" or option.endswith("_debug")
]
ENCODERS = ("data.options.t5=t5", "data.options.clip=clip")
PICTURES = {
    "drawn_shapes": (),
    "latents_synthetic": (),
    "latents": ("data.paths=[latents]",),
    "pictures": ("data.paths=[photos/*]", *ENCODERS),
    "cc12m": ENCODERS,
    "hub_pictures": ("data.dataset=photos", *ENCODERS),
}
"""Overrides that data with pictures needs, by option."""

pytestmark = pytest.mark.usefixtures("alone")


def splits_experts(option):
    """Whether a layout needs a model with experts."""
    return "ep" in option.split("_")


def required_overrides(group, option):
    """Further overrides that an option needs."""
    needed = []
    if group == "data" and option.startswith(("local_", "tokens", "chat")):
        needed.append("data.paths=[corpus/*]")
    if group == "data" and option in PICTURES:
        needed += ["model=flux_debug", "training.seq_len=20", *PICTURES[option]]
    if (group, option) == ("model", "flux_debug"):
        needed += ["data=latents_synthetic", "training.seq_len=20"]
    if (group, option) == ("tokenizer", "none"):
        needed.append("data=synthetic")
    if (group, option) == ("data", "mixture"):
        needed += ["data.sources.a.kind=synthetic", "data.weights.a=1"]
    if group == "parallelism":
        # This batch fits pipelines with two stages per rank, and eight data-parallel ranks.
        needed += ["training.global_batch_size=64", "cluster.device=cpu"]
        needed += ["model=qwen3_moe_debug"] if splits_experts(option) else []
    if option == "memory_budget":
        needed.append("compile=on")
    if group == "precision" and "fp8" in option.replace("float8", "fp8"):
        needed.append("precision.emulate=true")
    return needed


def build_on_meta(job):
    """Build every pipeline stage of the model on meta, and count its parameters."""
    stages = (
        split_modules(job.parallelism, job.model.n_layers) if job.parallelism.pp > 1 else [None]
    )
    counted = 0
    with torch.device("meta"):
        for modules in stages:
            part = architecture_of(job.model).build_part(job, modules)
            counted += sum(parameter.numel() for parameter in part.parameters())
    assert counted == account(job.model, 16).parameters


def test_experiments_and_sweeps_are_the_folders_at_the_top():
    assert (CONF / "experiment").resolve() == ROOT / "experiments"
    assert (CONF / "sweep").resolve() == ROOT / "sweeps"
    assert len(FILES) > 40 and {"cluster", "model", "optimizer", "parallelism", "schedule"} <= set(
        GROUPS
    )


GLOBAL = [*files_of("experiment").values(), *files_of("sweep").values()]
ALL = [file for conf in CONFS for file in conf.rglob("*.yaml")]


@pytest.mark.parametrize(
    "file", [*ALL, *GLOBAL], ids=lambda file: str(file.absolute().relative_to(ROOT))
)
def test_a_file_starts_with_a_comment(file):
    """The first line, or the second after Hydra's ``@package`` line, is a comment."""
    first, second = (file.read_text() + "\n\n").splitlines()[:2]
    comment = second if first.startswith(PACKAGE) else first
    assert comment.startswith("# ") and len(comment) > 10, comment


def test_primary_configs_are_known():
    assert {file.stem for conf in CONFS for file in conf.glob("*.yaml")} == {*JOBS}
    assert compose_job([], config_name="download", schema=DownloadJob) == DownloadJob()


@pytest.mark.parametrize("name", [name for name, schema in JOBS.items() if issubclass(schema, Job)])
def test_primary_config(name):
    job = compose_job([], config_name=name, schema=JOBS[name])
    assert job.world_size == 1
    build_on_meta(job)


@pytest.mark.parametrize("file", FILES, ids="-".join)
def test_every_option_composes_and_validates(file):
    group, option = file
    job = compose_job([f"{group}={option}", *required_overrides(group, option)])
    # The resolved job survives JSON, as which it is sent to the ranks.
    assert Job.from_json(job.to_json()) == job
    if group in ("model", "parallelism", "experiment"):
        build_on_meta(job)
    if group == "model":
        assert job.model.name == job.name
    if group == "parallelism":
        require_axes_of_the_name(option, job)


def require_axes_of_the_name(option, job):
    """A layout has the axes in its name, and every other axis is 1."""
    named = {
        "ddp": "dp_replicate",
        "fsdp": "dp_shard",
        "hsdp": "dp_replicate dp_shard",
        "single": "",
    }
    # Expert parallel uses the ranks of dp_shard.
    named["ep"] = named["fsdp"]
    assert (job.parallelism.ep > 1) == splits_experts(option)
    axes = {axis for word in option.split("_") for axis in named.get(word, word).split()}
    assert {axis for axis, degree in job.parallelism.degrees.items() if degree > 1} == axes
    if job.parallelism.pp > 1:
        layers = job.model.n_layers
        held = [
            stage
            for rank in range(job.parallelism.pp)
            for stage in stages_of_rank(job.parallelism, layers, rank)
        ]
        assert sorted(held) == list(range(num_stages(job.parallelism, layers)))


@pytest.mark.parametrize("option", options("parallelism"))
def test_every_layout_fits_models_of_all_sizes(option):
    sizes = (
        ("qwen3_moe_debug", "deepseek_v3_671b")
        if splits_experts(option)
        else ("llama3_tiny", "llama3_8b")
    )
    for model in sizes:
        compose_job([f"parallelism={option}", f"model={model}", "training.global_batch_size=64"])


def test_parity_matrix():
    """Every layout of the matrix is a valid job that differs from a single process only in execution."""
    base = compose_job([], config_name="parity", schema=ParityJob)
    assert len(base.parity.matrix) > 30
    composer = Composer("parity", ParityJob)
    for layout, overrides in base.parity.matrix.items():
        job = composer.job(overrides.split())
        assert job.numerics_id == base.numerics_id, layout
        assert job.id != base.id, layout


def test_models_hold_only_fields_of_the_model():
    """A file without one of these fields would silently use a default."""
    for option, file in files_of("model").items():
        values = OmegaConf.load(file)
        keys = set(values)
        required = "name vocab_size dim n_layers n_heads n_kv_heads ffn_hidden_dim rope max_seq_len norm_eps"
        assert {*required.split(), "tied_embeddings"} <= keys, option
        assert values.name == option
