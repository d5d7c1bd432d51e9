"""Fits of scaling laws: judged by the truth of made-up data, by how often intervals have it, and by scipy."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from tiers import THOROUGH

from harness.compose.composer import compose_points
from harness.compose.verb import guarded
from harness.launch.rows import KEPT, as_planned, read_kept
from harness.model.accounting import account
from harness.model.scale import count
from harness.tools.report.fits import fits_of
from harness.tools.report.power_laws import (
    CHINCHILLA,
    COMPUTE,
    budgets,
    fit,
    fit_frontier,
)
from harness.tools.report.verb import VERB
from harness.util.errors import UserError

# The refit of Chinchilla's data, arXiv:2404.10102, table 1.
TRUTH = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}


def chinchilla(seed, count, noise):
    """Return sizes and tokens of the ranges of the paper, and their losses with normal noise."""
    random = np.random.default_rng(seed)
    sizes = 10 ** random.uniform(7.8, 10.2, count)
    tokens = 10 ** random.uniform(18.8, 21.5, count) / 6 / sizes
    losses = (
        TRUTH["E"] + TRUTH["A"] / sizes ** TRUTH["alpha"] + TRUTH["B"] / tokens ** TRUTH["beta"]
    )
    return np.column_stack([sizes, tokens]), losses * np.exp(noise * random.standard_normal(count))


def ladder(seed, sizes, noise):
    """Return compute and losses of a ladder, without and with noise."""
    flops = np.geomspace(1e18, 1e21, sizes)[:, None]
    losses = 1.7 + 600 / flops[:, 0] ** 0.15
    return flops, losses * np.exp(noise * np.random.default_rng(seed).standard_normal(sizes))


def coverage(made, truth):
    return [value in made.estimate(name) for name, value in truth.items()]


def test_without_noise_the_truth_is_found():
    variables, losses = chinchilla(0, 30, noise=0.0)
    made = fit(CHINCHILLA, variables, losses, replicates=2)
    for name, value in TRUTH.items():
        assert made.values[name] == pytest.approx(value, rel=1e-3), name
    assert made.rms < 1e-6


def test_intervals_contain_the_published_truth():
    seeds = range(60) if THOROUGH else range(3)
    found = [
        coverage(fit(CHINCHILLA, *chinchilla(seed, 80, noise=0.005), replicates=100), TRUTH)
        for seed in seeds
    ]
    # The chance of fewer at a true rate of 0.95 is below 1e-4 for each parameter of 60 sets.
    least = 49 / 60 if THOROUGH else 0.5
    assert (np.mean(found, axis=0) >= least).all() and np.mean(found) >= 0.8, np.mean(found, axis=0)


def test_intervals_of_few_points_are_wide_enough():
    """Seven sizes: the noise is estimated with four degrees of freedom. Predictions are of a new run."""
    seeds, inside, predicted = range(200 if THOROUGH else 40), [], []
    target = np.array([[1e22]])
    for seed in seeds:
        made = fit(COMPUTE, *ladder(seed, 7, noise=0.003), replicates=120)
        inside.append(coverage(made, {"E": 1.7, "K": 600.0, "gamma": 0.15}))
        new = (1.7 + 600 / 1e22**0.15) * np.exp(
            0.003 * np.random.default_rng(1000 + seed).standard_normal()
        )
        predicted.append(float(new) in made.predict(target, noise=True)[0])
    # At a true rate of 0.95, 33 of 40 or fewer have a chance of 0.3 %, 179 of 200 of 0.1 %.
    least = 0.89 if THOROUGH else 0.825
    assert np.mean(inside, axis=0).min() >= least and np.mean(predicted) >= least
    # An interval that always contains the truth says nothing.
    assert np.mean(predicted) <= 0.999 or not THOROUGH


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="3 points do not determine 3 parameters"):
        fit(COMPUTE, *ladder(0, 3, noise=0.0))


def isoflop(noise, curvature=0.03):
    """Return compute, sizes and losses of exact parabolas, whose minima are at 0.1 C^0.5."""
    random, rows = np.random.default_rng(0), []
    for flops in (1e18, 1e19, 1e20):
        best = np.log(0.1 * flops**0.5)
        for away in (-1.5, -0.7, 0.0, 0.7, 1.5):
            loss = 3 - 0.1 * np.log10(flops / 1e18) + curvature * away**2
            rows.append(
                (
                    flops * (1 + 1e-3 * away),
                    np.exp(best + away),
                    loss * (1 + noise * random.normal()),
                )
            )
    columns = zip(*rows, strict=True)
    return tuple([float(value) for value in column] for column in columns)


def test_minima_of_parabolas_and_their_growth():
    flops, sizes, losses = isoflop(noise=2e-3)
    assert [len(group) for group in budgets(flops)] == [5, 5, 5]
    found = fit_frontier(flops, sizes, losses)
    assert found is not None and found.exponent is not None and found.factor is not None
    assert 0.5 in found.exponent and found.exponent.is_within(1.3)
    for each in found.parabolas:
        assert each.best is not None and 0.1 * each.flops**0.5 in each.best
    assert [each.lowest for each in found.parabolas] == pytest.approx([3.0, 2.9, 2.8], rel=4e-3)


def test_what_parabolas_do_not_determine_is_said():
    flops, sizes, losses = isoflop(noise=0.0, curvature=-0.03)
    found = fit_frontier(flops, sizes, losses)
    assert found is not None and found.exponent is None
    assert found.parabolas[0].reason == "the loss does not curve upwards"
    assert found.reason == "0 of 3 budgets have a minimum, and 3 are needed"
    noisy = fit_frontier(*isoflop(noise=0.2))
    assert noisy is not None and noisy.exponent is None
    assert any("noise hides" in each.reason or "outside" in each.reason for each in noisy.parabolas)
    # Only the small sizes of each budget: the minimum is at larger ones.
    kept = [index for index in range(15) if index % 5 < 4]
    shifted = [sizes[index] for index in kept]
    falling = [3 - 0.3 * np.log(size) + 0.005 * np.log(size) ** 2 for size in shifted]
    outside = fit_frontier([flops[index] for index in kept], shifted, falling)
    assert outside is not None
    assert all(each.reason.endswith("at larger values") for each in outside.parabolas)
    assert fit_frontier(flops[:3], sizes[:3], losses[:3]) is None


JOB = [
    "model=llama3_8b",
    "data=synthetic",
    "tokenizer=none",
    "cluster.device=cpu",
    "training.seq_len=4096",
]
LADDER = ["sweep=ladder", *JOB, "scale.parameters=50M,100M,200M,400M,800M,1.6B,3.2B"]
ISOFLOP = ["sweep=isoflop", *JOB, "scale.flops=3e18,1e19,3e19"]


@functools.cache
def points_of(*overrides):
    return compose_points(overrides)


def made(overrides, noise, completed=None):
    """Return rows of a sweep whose losses follow the refit of Chinchilla's law (arXiv:2404.10102)."""
    random, rows = np.random.default_rng(0), []
    for point in points_of(*overrides):
        job = point.job
        name = " ".join(each for each in point.overrides if each.startswith("scale."))
        size, tokens = count(job.model, "non_embedding"), job.sizes.tokens(job.steps)
        loss = (1.8172 + 482.01 / size**0.3478 + 2085.43 / tokens**0.3658) * np.exp(
            noise * random.normal()
        )
        ended = {"state": "completed", "tokens": tokens, "loss": loss + 1, "validation_loss": loss}
        is_planned = completed is not None and len(rows) >= completed
        rows.append(as_planned(name, job, point.overrides) | ({} if is_planned else ended))
    return rows


def run(folder, rows, *arguments):
    folder.mkdir(exist_ok=True)
    (folder / KEPT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return guarded(lambda: VERB.run_line([str(folder), *arguments]))


def test_a_ladder_is_fitted_to_compute_and_predicts(tmp_path, capsys):
    rows = made(LADDER, noise=0.001, completed=6)
    assert run(tmp_path / "made", rows, "--fits", "--hold-out", "1") == 0
    out = capsys.readouterr().out
    assert "5 runs are fitted, with their validation loss." in out
    assert "model size and tokens cannot be separated" in out and "`sweep=isoflop`" in out
    assert "`scale.parameters=1.6B`" in out and "inside the 95% interval" in out
    assert "`scale.parameters=3.2B`" in out and "not measured yet" in out
    found = fits_of(rows, hold_out=1)
    assert found.law is not None and found.law.law is COMPUTE and not found.frontiers
    held, planned = found.forecasts
    assert held["inside"] and held["low"] < held["loss"] < held["high"] and planned["loss"] is None
    assert held["error"] == pytest.approx(held["loss"] / held["predicted"] - 1)
    text = (tmp_path / "made" / "report" / "fits.md").read_text()
    assert f"| scale.parameters=1.6B | {held['N']:,} |" in text
    assert "![Law](fits_law.png)" in text
    assert (tmp_path / "made" / "report" / "fits_law.png").stat().st_size > 10_000


def test_the_compute_of_a_run_is_that_of_mfu():
    point = points_of(*LADDER)[0]
    row = as_planned("", point.job, []) | {"state": "completed", "tokens": 12_345, "loss": 3.0}
    [found] = fits_of([row]).runs
    assert found["C"] == account(point.job.model, 4096).flops_per_token_full * 12_345


def test_isoflop_runs_determine_chinchillas_law(tmp_path, capsys):
    rows = made(ISOFLOP, noise=0.001)
    assert run(tmp_path / "made", rows, "--fits", "--json") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    found = fits_of(rows)
    assert found.law is not None and found.law.law is CHINCHILLA and "N" in found.frontiers
    for name, value in (("E", 1.8172), ("alpha", 0.3478), ("beta", 0.3658)):
        assert value in found.law.estimate(name), name
    assert any("the best N grows as C^" in line for line in summary)
    # beta / (alpha + beta) is the exponent of the best size (arXiv:2203.15556, equation 4).
    [words] = [line for line in summary if "beta / (alpha + beta)" in line]
    low, high = words.partition("(alpha + beta) = ")[2].partition("(")[2].rstrip(").").split(" to ")
    assert float(low) < 0.3658 / (0.3478 + 0.3658) < float(high)
    assert (tmp_path / "made" / "report" / "fits_isoflop.png").is_file()


def test_what_the_data_do_not_determine_is_said():
    noisy = fits_of(made(LADDER, noise=0.05))
    [words] = [each for each in noisy.words if each.startswith("The data do not determine")]
    assert "gamma" in words and "K" in words
    few = fits_of(made(LADDER, noise=0.0, completed=3))
    assert few.law is None and not few.forecasts
    assert (
        few.words[-1] == "No fit: a power law of compute needs 5 different runs, and there are 3."
    )
    rows = [{**row, "validation_loss": None} for row in made(LADDER, noise=0.0)]
    assert any("loss of one batch" in each for each in fits_of(rows).words)


def test_losses_that_cannot_be_compared_are_refused():
    rows = made(LADDER, noise=0.0)
    with pytest.raises(UserError, match="no run has completed"):
        fits_of(made(LADDER, noise=0.0, completed=0))
    with pytest.raises(
        UserError, match=r"^training.seq_len: is 4096 in .* and 2048 in .*; would work: a fol"
    ):
        fits_of([*rows[:-1], {**rows[-1], "job.training.seq_len": 2048}])
    with pytest.raises(UserError, match=r"its row has no tokens; would work"):
        fits_of([{name: value for name, value in row.items() if name != "tokens"} for row in rows])
    with pytest.raises(
        UserError, match=r"--hold-out=7: .* 7 different computes.*would work: --hold-out 6"
    ):
        fits_of(rows, hold_out=7)


def test_the_ladder_that_ran_predicts_its_largest_size():
    """The committed text is that of the committed rows; six sizes are fitted, a larger one is held out."""
    folder = Path(__file__).parents[3] / "experiments" / "ladder"
    found = fits_of(read_kept(folder), hold_out=1)
    assert len({run["N"] for run in found.runs}) >= 6
    [held] = found.forecasts
    assert held["C"] > 2 * max(run["C"] for run in found.runs) and held["inside"]
    text = (folder / "fits.md").read_text()
    assert f"measured {held['loss']:.4f} ({held['error']:+.2%}), inside the 95% interval" in text
