"""A model that was trained here generates what its export for transformers generates, on ranks too."""

import keyword
import pkgutil
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import conversions
import pytest
import torch
from cases import words
from inference_jobs import generation
from jobs import train
from test_models import CPU, LAYOUTS, NEW, generated, require_greedy

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankFailed
from harness.tools.inference.generate import GenerateJob, Prompt, read_prompts, read_texts
from harness.tools.inference.inference import use_checkpoint
from harness.tools.inference.model import InferenceModel
from harness.train.setup import process_group
from harness.util.errors import UserError
from harness.weights.detect import find_source

TRAINED = tuple(
    words("""
    model=mixtral_debug model.vocab_size=258 data=python_stdlib data.validation_fraction=0
    checkpoint=sync training.steps=50 training.seq_len=64 optimizer.lr=1e-2
    schedule.warmup_steps=10
""")
)


class Trained(NamedTuple):
    """A run folder, its export, prompts, and the model of transformers with its weights."""

    run_dir: Path
    export: Path
    prompts: list[Prompt]
    theirs: Any

    def job(self, *overrides):
        given = [
            "generate.prompts=[while with,'import ',return raise pass]",
            "generate.stop_at_end=false",
        ]
        job = generation(self.run_dir, *given, f"generate.max_new_tokens={NEW}", *overrides)
        return with_value(job, "training.seq_len", NEW + 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("trained")
    (folder / "words.txt").write_text(" ".join([*keyword.kwlist, *keyword.kwlist[::-1]]) * 30)
    run = train(folder, f"data.paths=[{folder / 'words.txt'}]", *TRAINED)
    assert run.code == 0
    conversions.run(run.folder.path, folder / "hf", "convert.format=hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "hf", attn_implementation="eager", dtype=torch.float32
    ).eval()
    made = Trained(run.folder.path, folder / "hf", [], theirs)
    job = made.job()
    return made._replace(prompts=read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer)))


def test_one_process(trained):
    job = trained.job()
    with process_group(job, CPU):
        made = generated(job, trained.run_dir, trained.prompts)
    require_greedy(made, trained.theirs, trained.prompts)
    assert all(len(set(tokens)) > 5 for tokens in made), "the text is not one token again and again"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("tools.inference.model.open_checkpoint", "there is no manifest.json"),
        ("checkpoint.catalog.check_files", "it has been removed"),
        ("checkpoint.load.reading", ".metadata is missing (rank 0)"),
        ("checkpoint.storage.Reader.read_data", "No such file or directory"),
    ],
)
def test_weights_removed_while_they_are_read(place, says, trained, tmp_path, monkeypatch):
    step = tmp_path / "step-50"
    shutil.copytree(trained.run_dir / "checkpoints" / "step-50", step)
    job, found = trained.job(), find_source(str(step))
    original = pkgutil.resolve_name(f"harness.{place}")

    def remove_and_call(*arguments):
        shutil.rmtree(step, ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(f"harness.{place}", remove_and_call)
    with process_group(job, CPU), pytest.raises(UserError) as raised:
        InferenceModel(job, CPU).load(found)
    assert str(raised.value).startswith(f"{step}: ") and says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damaged_metadata(trained, tmp_path, pool):
    """From torch 2.13 on, DCP turns what its reader raises into text."""
    step = tmp_path / "step-50"
    shutil.copytree(trained.run_dir / "checkpoints" / "step-50", step)
    (step / ".metadata").write_bytes((step / ".metadata").read_bytes()[::-1])
    job = trained.job(*LAYOUTS["tp"].split())
    with pytest.raises(RankFailed) as raised:
        pool.run(job.world_size, generated, job, step, trained.prompts)
    failure = raised.value.failure
    assert failure is not None and failure.kind == "user"
    assert (
        failure.message
        == f"{step}: .metadata does not have the checksum it was written with (rank 0)"
    )


def test_another_tokenizer(trained, capfd):
    """A warning if it gives other ids than the weights' own; the export's tokenizer.json gives the same."""
    for folder in (trained.run_dir, trained.export):
        for tokenizer, warned in (("bytes", False), ("python_2k", True)):
            typed = [f"checkpoint={folder}", f"tokenizer={tokenizer}", "prompt=x"]
            job = compose_job(typed, config_name="generate", schema=GenerateJob)
            use_checkpoint(job, typed)
            error = capfd.readouterr().err
            assert ("gives other ids; would work: no tokenizer= at all" in error) is warned
            assert error.count("\n") == warned


@pytest.mark.parametrize("precision", ["bf16", "bf16_full"])
def test_one_process_holds_weights_once(trained, precision):
    """In the format of its products; the text is that of float32 weights cast by FSDP, which needs a copy."""
    job = trained.job(f"precision={precision}")
    cast = with_value(job, "precision.master_dtype", "float32")
    assert cast.uses_fsdp and not job.uses_fsdp
    assert not trained.job(*LAYOUTS["ddp"].split()).uses_fsdp
    with process_group(job, CPU):
        made = [generated(each, trained.run_dir, trained.prompts) for each in (job, cast)]
    assert made[0] == made[1]
