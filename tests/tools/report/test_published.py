"""Published tables: rows are points, what one change does, errors, and memory rehearsed beside."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from harness.compose.composer import Composed, compose_points
from harness.config.pipeline import num_stages, split_modules
from harness.tools.rehearse import verb
from harness.tools.rehearse.figures import RankFigures, RehearsalFailure
from harness.tools.report import experiment, published
from harness.tools.report.experiment import REHEARSED, read_rehearsed, rehearse_missing
from harness.tools.report.published import Recipe, find, recipe_of
from harness.tools.report.runs import effects, errors_in_words, spearman
from harness.util.errors import UserError
from harness.util.hardware import ACCELERATORS

FOLDER = Path(__file__).parents[3] / "experiments" / "llama3_h100"
ROWS = published.read(FOLDER)
TABLES = [f"table{number}" for number in range(1, 7)]


@functools.cache
def points_of(table: str) -> tuple[Composed, ...]:
    return tuple(compose_points([f"experiment=llama3_h100/{table}", "cluster=slurm_h100"]))


def test_the_tables_are_the_experiments() -> None:
    assert [path.stem for path in experiment.spaces_of(FOLDER)] == TABLES
    sizes = Counter(row.table for row in ROWS)
    assert sizes == {"table1": 3, "table2": 4, "table3": 3, "table4": 2, "table5": 2, "table6": 4}


@pytest.mark.parametrize("table", TABLES)
def test_each_row_is_one_point_and_each_point_one_row(table: str) -> None:
    own = [row for row in ROWS if row.table == table]
    points = points_of(table)
    assert [point.reason for point in points] == [""] * len(own)
    # In the order of the table, which is the order of the file.
    assert [find(point.job, ROWS) for point in points] == own
    for row in own:
        assert sum(recipe_of(point.job) == row.recipe for point in points) == 1
    for point in points:
        assert point.job.name == f"llama3_h100-{table}"
        assert point.job.cluster.accelerator == "H100 SXM"


def test_rows_are_read_unchanged() -> None:
    row = next(row for row in ROWS if row.recipe.schedule == "Interleaved1F1B")
    assert (row.tokens_per_second_per_rank, row.memory_gib, row.global_batch_size) == (128.0, 72.7, 256)
    assert (row.recipe.dp_shard, row.recipe.tp, row.recipe.pp, row.recipe.cp) == (8, 8, 8, 1)
    assert (row.recipe.async_tp, row.recipe.compiled, row.recipe.linear) == (True, True, "float8_tensorwise")
    assert row.source == "benchmarks/llama3_h100_202412_torchtitan.md Table 5"
    assert all(row.accelerator in ACCELERATORS for row in ROWS)


def test_the_recipes_of_december_2024() -> None:
    eager, compiled, float8 = (point.job for point in points_of("table1"))
    assert all(job.activation_checkpoint.save_every_nth_matmul == 2 for job in (eager, compiled, float8))
    assert (eager.precision.param_dtype, eager.precision.reduce_dtype) == ("bfloat16", "float32")
    for table in TABLES:
        for job in (point.job for point in points_of(table)):
            # torchtitan gathered in float8 only with dp_shard > 1 (its float8.py, dp_shard_enabled).
            in_float8 = job.precision.linear == "float8_tensorwise" and job.parallelism.dp_shard > 1
            assert job.precision.enable_fsdp_float8_all_gather == in_float8
            assert job.precision.precompute_float8_dynamic_scale_for_fsdp == in_float8
            assert job.model.vocab_size == 128256
            assert job.parallelism.cp_method == "ring" and job.parallelism.cp_rotate_method == "allgather"
            assert job.data.kind == "synthetic"
            assert job.parallelism.pp_microbatch_size == (4 if table == "table5" else 1)
            assert job.compile.components == ["blocks"]


def test_126_layers_in_16_stages() -> None:
    [_, interleaved] = points_of("table5")
    layout, layers = interleaved.job.parallelism, interleaved.job.model.n_layers
    assert (layers, num_stages(layout, layers)) == (126, 16)
    held = [sum(name.startswith("layers.") for name in stage) for stage in split_modules(layout, layers)]
    assert held == [7, *[8] * 14, 7]


def test_a_row_without_a_point_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plan_with: Callable[[Any], None]
) -> None:
    plan_with(lambda job, calibration: pytest.fail("nothing is to be predicted"))
    rows = [*ROWS, ROWS[0]]
    monkeypatch.setattr(published, "read", lambda folder: rows)
    with pytest.raises(UserError, match=r"table1.yaml: its points do not match the published rows of table1"):
        experiment.tables_of(FOLDER)
    monkeypatch.setattr(published, "read", lambda folder: ROWS[1:])
    with pytest.raises(UserError, match=r"table1.yaml: its points do not match the published rows of table1"):
        experiment.tables_of(FOLDER)


def test_a_damaged_file_is_reported_by_line(tmp_path: Path) -> None:
    lines = (FOLDER / published.FILE).read_text().splitlines()
    (tmp_path / published.FILE).write_text("\n".join([*lines[:3], lines[3].replace("yes", "maybe")]))
    with pytest.raises(UserError, match=r"published.csv: line 4: KeyError: 'maybe'"):
        published.read(tmp_path)
    assert published.read(tmp_path / "none") == []


def test_names_say_what_differs() -> None:
    named = published.names([row for row in ROWS if row.table == "table1"])
    assert named == ["eager, bf16", "compile, bf16", "compile, float8"]
    assert published.names([row for row in ROWS if row.table == "table4"]) == ["no async TP", "async TP"]
    assert published.names([row for row in ROWS if row.table == "table2"])[1] == "FSDP4 CP2, 65,536 tokens"


BASE = Recipe("llama3_8b", 8, 8, 1, 1, 1, 2, 8192, "full", False, "none", False, "")


def test_errors_are_median_and_worst_by_amount() -> None:
    rows = [{"x": -0.3}, {"x": 0.1}, {"x": 0.02}, {"x": None}, {}]
    assert errors_in_words(rows, "x") == "median error 10.0%, worst 30.0% (3 rows)"
    assert errors_in_words([{}], "x") == ""


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 300)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        # 1 - 6 * (1 + 1 + 0 + 1 + 1) / (5 * 24)
        ([(1, 2), (2, 1), (3, 3), (4, 5), (5, 4)], 0.8),
        # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
        ([(1, 1), (2, 2), (2, 3), (4, 4)], 4.5 / (4.5 * 5) ** 0.5),
        ([(1, 1), (1, 2), (1, 3)], None),
        ([(1, 1), (2, 2)], None),
    ],
)
def test_spearman(pairs: list[tuple[float, float]], expected: float | None) -> None:
    found = spearman(pairs)
    assert found == (None if expected is None else pytest.approx(expected))


def figures(published: float, predicted: float | None) -> dict[str, float | None]:
    name = "tokens_per_second_per_rank"
    return {f"published.{name}": published, f"predicted.{name}": predicted}


def test_effects_are_of_one_change() -> None:
    compiled = replace(BASE, compiled=True)
    float8 = replace(compiled, linear="float8_tensorwise")
    found = effects(
        "table1", [(BASE, figures(100, 100)), (compiled, figures(120, 90)), (float8, figures(150, 99))]
    )
    # Eager bf16 and compiled float8 differ in two things.
    assert [each.what for each in found] == ["compile", "float8"]
    assert [each.is_right for each in found] == [False, True]
    assert (found[0].published, found[0].predicted) == (pytest.approx(0.2), pytest.approx(-0.1))
    longer = replace(BASE, seq_len=16384)
    assert effects("table1", [(BASE, figures(1, 1)), (longer, figures(2, 2))]) == []
    [unknown] = effects("table1", [(BASE, figures(100, None)), (compiled, figures(120, None))])
    assert unknown.is_right is None


def test_schedules_are_named() -> None:
    one, other = (replace(BASE, pp=8, schedule=name) for name in ("1F1B", "Interleaved1F1B"))
    [found] = effects("table1", [(one, figures(100, 100)), (other, figures(128, 120))])
    assert found.what == "schedule: 1F1B to Interleaved1F1B"


JOB = ["model=llama3_8b", "parallelism=fsdp_pp", "data=synthetic", "tokenizer=bytes", "precision=bf16"]
GIB = 2**30


class FakeRehearsals:
    """Ranks with more memory the higher they are; counts them."""

    ran: list[int]
    failure: RehearsalFailure | None = None

    def __enter__(self) -> FakeRehearsals:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        return

    def run(self, job: object, rank: int, config: object) -> RankFigures:
        self.ran.append(rank)
        figures = RankFigures(rank, 0, "H100", memory={"reserved": (1.0 + rank) * GIB})
        figures.failure = self.failure
        return figures


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRehearsals]:
    monkeypatch.setattr(FakeRehearsals, "ran", [], raising=False)
    monkeypatch.setattr(FakeRehearsals, "failure", None)
    monkeypatch.setattr(verb, "Rehearsals", FakeRehearsals)
    monkeypatch.setattr(verb, "require_no_gpu", lambda config: None)
    return FakeRehearsals


def test_the_fullest_rank_is_kept_and_not_rehearsed_again(tmp_path: Path, fake: type[FakeRehearsals]) -> None:
    for _ in range(2):
        rehearse_missing(tmp_path, [("id", JOB, "H100 SXM")])
        assert fake.ran == [0, 2]
    [found] = read_rehearsed(tmp_path).values()
    assert (found["rank"], found["memory_gib"]) == (2, 3.0)


def test_a_failed_rehearsal_is_not_kept(tmp_path: Path, fake: type[FakeRehearsals]) -> None:
    fake.failure = RehearsalFailure("out of memory", "Tried to allocate 6.00 GiB", "model/decoder.py:1", 0)
    with pytest.raises(UserError, match="rank 0 could not be rehearsed: out of memory: Tried to allocate"):
        rehearse_missing(tmp_path, [("id", JOB, "H100 SXM")])
    assert read_rehearsed(tmp_path) == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / REHEARSED).write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_rehearsed(tmp_path)
