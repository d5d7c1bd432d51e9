"""Training on drawn shapes as users do it: sample sheets, exact resume, and pictures of a checkpoint."""

import sys
from pathlib import Path

import numpy as np
from cases import words
from one_line import one_line
from PIL import Image

sys.path.append(str(Path(__file__).parents[3] / "experiments" / "flux_shapes"))
from read_back import judge
from tiny_flux import overrides, save_encoders

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.tools.inference.generate import GenerateJob, generate
from harness.train.rank import run_rank
from harness.util.errors import ConfigError
from harness.weights.detect import WeightFolder
from harness_flux.pictures.encoders import Patches
from harness_flux.pictures.shapes import DrawnShapes
from harness_flux.sampling import trained_size, write_sheet

TINY = tuple(
    words("""
    experiment=flux_debug model.dim=32 model.n_heads=2 model.n_kv_heads=2 model.n_layers=2
    model.options.double_layers=1 model.ffn_hidden_dim=32 model.options.axes_dims=[4,6,6]
    model.options.time_dim=16 data.options.size=8 training.seq_len=12
    training.global_batch_size=4 schedule.warmup_steps=0 cluster.device=cpu metrics.console=none
    validation.steps=1 validation.options.pictures=3 validation.options.picture_steps=2
    model.options.zero_init=false
""")
)


def train(folder, *typed):
    job = compose_job([*TINY, *typed, f"runs_dir={folder}"])
    run = RunFolder(job.run_dir)
    begin(run, job, [*typed])
    try:
        assert run_rank(job, run, started=0.0) == 0
    finally:
        run.release()
    return run


def pictures(run, folder, *typed):
    typed = (f"generate.checkpoint={run}", "model=from_config", "cluster.device=cpu", *typed)
    typed = (*typed, f"generate.options.output={folder}", "generate.options.steps=2")
    result = generate(compose_job([*typed], config_name="generate", schema=GenerateJob), [*typed])
    assert not isinstance(result, int)
    return [np.asarray(Image.open(each["file"])) for each in result.data["pictures"]]


def test_a_run_its_sheets_and_its_pictures(tmp_path, capfd):
    run = train(tmp_path, "training.steps=2", "validation.interval=1", "optimizer.ema_decay=0.5")
    sheets = [Image.open(run.path / "samples" / f"step-{step}.png") for step in (1, 2)]
    assert sheets[0].size == sheets[1].size and sheets[0].width > 3 * 128
    assert np.any(np.asarray(sheets[0]) != np.asarray(sheets[1]))
    prompts = "generate.prompts=[a red circle,a blue square]"
    first = pictures(run.path, tmp_path / "a", prompts)
    assert [each.shape for each in first] == [(8, 8, 3)] * 2 and np.any(first[0] != first[1])
    # A picture depends on the seed and its number, not on the other prompts.
    again = pictures(run.path, tmp_path / "b", prompts, "generate.batch_size=1")
    assert np.abs(np.subtract(first, again, dtype=int)).max() <= 1  # rounded
    for other in (
        "generate.seed=1",
        "generate.options.cfg=3",
        "ema=true",
        "generate.options.shift=false",
    ):
        assert np.any(pictures(run.path, tmp_path / "c", prompts, other)[1] != first[1]), other
    large = pictures(run.path, tmp_path / "d", prompts, "generate.options.size=16")
    assert large[0].shape == (16, 16, 3)
    for typed, says in {
        "generate.temperature=1": "generate.temperature=1.0: has no effect: model=flux_debug makes",
        "generate.options.size=10": "generate.options.size=10: must be a multiple of 4",
        "data.options.text_length=9": "data.options.text_length=9: makes 9 values where",
    }.items():
        with one_line(ConfigError, f"^{says}"):
            pictures(run.path, tmp_path / "e", prompts, typed)


def test_online_encoders_of_folders(tmp_path):
    """The encoders compute in the training loop, and harness generate finds them in the checkpoint."""
    typed = (
        *overrides(save_encoders(tmp_path / "flux")),
        *words("""
        model.options.latent_channels=4 model.options.text_length=10
        model.options.context_dim=16 model.options.pooled_dim=12 training.seq_len=14
        training.steps=1 validation.interval=1
    """),
    )
    run = train(tmp_path, *typed)
    [found] = pictures(run.path, tmp_path / "a", "generate.prompts=[a red circle]")
    assert found.shape == (8, 8, 3)
    with one_line(ConfigError, r"^data.options.autoencoder=patches: makes 12 values where"):
        changed = ("data.options.autoencoder=patches", "data.options.patch=2")
        pictures(run.path, tmp_path / "a", "generate.prompts=[a red circle]", *changed)


def test_pictures_have_the_size_of_training():
    """It follows from the length of sequences: encoded pictures have no other field that says it."""
    typed = (
        "model=flux_debug",
        "model.options.text_length=8",
        "generate.checkpoint=x",
        "cluster.device=cpu",
    )
    job = compose_job([*typed], config_name="generate", schema=GenerateJob)
    trained = WeightFolder("dcp", "x", {"job": {"training": {"seq_len": 8 + 6 * 6}}})
    assert trained_size(job, trained, Patches(2)) == 24
    rule = "must be given, because x records no job that trained it"
    with one_line(ConfigError, f"^generate.options.size=null: {rule}; would work: 1024$"):
        trained_size(job, WeightFolder("hf", "x", {}), Patches(2))


def test_a_sheet_has_the_pictures_and_the_reader_reads_the_rule(tmp_path):
    rule = DrawnShapes("validation", 24, seed=1)
    drawn = [rule.sample(number) for number in range(40)]
    assert all(judge(picture, caption).all for picture, caption in drawn)
    shown, captions = zip(*drawn[:9], strict=True)
    write_sheet(tmp_path / "sheet.png", shown, captions)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    # Eight in a row, six times as large, with a margin of 8 pixels.
    assert sheet.shape[1] == 8 + 8 * (144 + 8)
    for left, (picture, _) in zip((8, 8 + 152), drawn, strict=False):
        assert np.array_equal(sheet[8 : 8 + 144 : 6, left : left + 144 : 6], picture)
