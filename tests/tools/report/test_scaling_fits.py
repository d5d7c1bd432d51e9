"""harness report --fits: which law the runs determine, what it predicts, and what it says about the rest."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compose.composer import Composed, compose_points
from harness.compose.scale import count
from harness.compose.verb import guarded
from harness.launch.rows import KEPT, as_planned, read_kept
from harness.model.accounting import account
from harness.tools.report.fits import fits_of
from harness.tools.report.power_laws import CHINCHILLA, COMPUTE
from harness.tools.report.verb import VERB
from harness.util.errors import EXIT_USER, UserError

Row = dict[str, Any]
JOB = ["model=llama3_8b", "data=synthetic", "tokenizer=none", "cluster.device=cpu", "training.seq_len=4096"]
LADDER = ["sweep=ladder", *JOB, "scale.parameters=50M,100M,200M,400M,800M,1.6B,3.2B"]
ISOFLOP = ["sweep=isoflop", *JOB, "scale.flops=3e18,1e19,3e19"]


@functools.cache
def points_of(*overrides: str) -> list[Composed]:
    return compose_points(overrides)


def made(overrides: list[str], noise: float, completed: int | None = None) -> list[Row]:
    """Return rows of a sweep whose losses follow the refit of Chinchilla's law (arXiv:2404.10102)."""
    random, rows = np.random.default_rng(0), []
    for point in points_of(*overrides):
        job = point.job
        name = " ".join(each for each in point.overrides if each.startswith("scale."))
        size, tokens = count(job.model, "non_embedding"), job.sizes.tokens(job.steps)
        loss = (1.8172 + 482.01 / size**0.3478 + 2085.43 / tokens**0.3658) * np.exp(noise * random.normal())
        ended = {"state": "completed", "tokens": tokens, "loss": loss + 1, "validation_loss": loss}
        is_planned = completed is not None and len(rows) >= completed
        rows.append(as_planned(name, job, point.overrides) | ({} if is_planned else ended))
    return rows


def run(folder: Path, rows: list[Row], *arguments: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / KEPT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return guarded(lambda: VERB.run_line([str(folder), *arguments]))


def test_a_ladder_is_fitted_to_compute_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = made(LADDER, noise=0.001, completed=6)
    assert run(tmp_path / "made", rows, "--fits", "--hold-out", "1") == 0
    out = capsys.readouterr().out
    assert "5 runs are fitted, with their validation loss." in out
    assert "model size and tokens cannot be separated" in out and "`sweep=isoflop`" in out
    assert "`scale.parameters=1.6B`" in out and "inside the 95% interval" in out
    assert "`scale.parameters=3.2B`" in out and "not measured yet" in out
    found = fits_of(rows, hold_out=1)
    assert found.law is not None and found.law.law is COMPUTE and found.by_parameters is None
    held, planned = found.forecasts
    assert held.run.loss is not None and held.run.loss in held.predicted and planned.run.loss is None
    assert held.error == pytest.approx(held.run.loss / held.predicted.value - 1)
    text = (tmp_path / "made" / "report" / "fits.md").read_text()
    assert f"| scale.parameters=1.6B | {held.run.parameters:,} |" in text
    assert "![Law](fits_law.png)" in text
    assert (tmp_path / "made" / "report" / "fits_law.png").stat().st_size > 10_000


def test_the_compute_of_a_run_is_that_of_mfu() -> None:
    point = points_of(*LADDER)[0]
    row = as_planned("", point.job, []) | {"state": "completed", "tokens": 12_345, "loss": 3.0}
    [found] = fits_of([row]).runs
    assert found.flops == account(point.job.model, 4096).flops_per_token_full * 12_345


def test_isoflop_runs_determine_chinchillas_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(ISOFLOP, noise=0.001)
    assert run(tmp_path / "made", rows, "--fits", "--json") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    found = fits_of(rows)
    assert found.law is not None and found.law.law is CHINCHILLA and found.by_parameters is not None
    for name, value in (("E", 1.8172), ("alpha", 0.3478), ("beta", 0.3658)):
        assert value in found.law.estimate(name), name
    assert any("the best N grows as C^" in line for line in summary)
    # beta / (alpha + beta) is the exponent of the best size (arXiv:2203.15556, equation 4).
    [words] = [line for line in summary if "beta / (alpha + beta)" in line]
    low, high = words.partition("(alpha + beta) = ")[2].partition("(")[2].rstrip(").").split(" to ")
    assert float(low) < 0.3658 / (0.3478 + 0.3658) < float(high)
    assert (tmp_path / "made" / "report" / "fits_isoflop.png").is_file()


def test_what_the_data_do_not_determine_is_said() -> None:
    noisy = fits_of(made(LADDER, noise=0.05))
    [words] = [each for each in noisy.words if each.startswith("The data do not determine")]
    assert "gamma" in words and "K" in words
    few = fits_of(made(LADDER, noise=0.0, completed=3))
    assert (
        few.law is None
        and not few.forecasts
        and few.words[-1] == ("No fit: a power law of compute needs 5 different runs, and there are 3.")
    )
    rows = [{**row, "validation_loss": None} for row in made(LADDER, noise=0.0)]
    assert any("loss of one batch" in each for each in fits_of(rows).words)


def test_losses_that_cannot_be_compared_are_refused() -> None:
    rows = made(LADDER, noise=0.0)
    with pytest.raises(UserError, match="no run has completed"):
        fits_of(made(LADDER, noise=0.0, completed=0))
    with pytest.raises(
        UserError, match=r"^training.seq_len: is 4096 in .* and 2048 in .*; would work: a folder"
    ):
        fits_of([*rows[:-1], {**rows[-1], "job.training.seq_len": 2048}])
    with pytest.raises(UserError, match=r"--hold-out=7: .* 7 different computes.*would work: --hold-out 6"):
        fits_of(rows, hold_out=7)


def test_the_ladder_that_ran_predicts_its_largest_size() -> None:
    """The committed text is that of the committed rows; six sizes are fitted, a larger one is held out."""
    folder = Path(__file__).parents[3] / "experiments" / "ladder"
    found = fits_of(read_kept(folder), hold_out=1)
    assert len({run.parameters for run in found.runs}) >= 6
    [held] = found.forecasts
    assert held.run.flops > 2 * max(run.flops for run in found.runs)
    assert held.run.loss is not None and held.run.loss in held.predicted
    text = (folder / "fits.md").read_text()
    assert f"measured {held.run.loss:.4f} ({held.error:+.2%}), inside the 95% interval" in text


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        (["--hold-out", "1"], "--hold-out=1: is for fits; would work: --fits --hold-out 1"),
        (["--fits", "--rehearse"], "--rehearse: predicts speed and memory"),
        (["phases", "--hold-out", "1"], "--hold-out: cannot be combined with phases"),
        (["--fits", "--hold-out", "-1"], "--hold-out=-1: must be at least 0"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, typed: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "made", [], *typed) == EXIT_USER
    assert capsys.readouterr().err.startswith(f"error: {error}")
