"""harness bench: jobs run in turn, results come from the runs' rows, a failure does not hide the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import python

from harness.metrics.jsonl import read_metrics
from harness.tools.study import bench
from harness.tools.study.bench import (
    BASE,
    BenchConfig,
    Spread,
    Variant,
    compose_variants,
    measure,
    ratios,
    report,
    summary,
)
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK

ROOT = Path(__file__).resolve().parents[3]
TINY = ["model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "training.seq_len=16"]


pytestmark = pytest.mark.usefixtures("alone")


def ran(rate: float, **more: Any) -> dict[str, Any]:
    """The row of a completed run."""
    return {
        "exit_reason": "completed",
        "world_size": 2,
        "device": "x CPU",
        "window.tokens_per_second": rate,
        "tokens_per_second_per_rank": rate / 2,
        "window.step_seconds_median": 10 / rate,
        "first_step_seconds": 3.0,
        "memory_gib": 1.5,
        "mfu": None,
        "mfu_causal": None,
        "peak_origin": "no known peak",
        **more,
    }


def failed(kind: str, message: str) -> dict[str, Any]:
    return {"exit_reason": "failed", "world_size": 2, "error.kind": kind, "error.message": message}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, list[tuple[int, dict[str, Any]]]]]:
    """Simulated runs: the names in the order in which they ran, and the results to return."""
    order: list[str] = []
    given: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def run_once(variant: Variant) -> tuple[int, dict[str, Any]]:
        [name] = variant.overrides
        order.append(name)
        return given[name].pop(0)

    monkeypatch.setattr(bench, "run_once", run_once)
    return order, given


def named(*names: str) -> dict[str, Variant]:
    return {name: Variant(None, [name]) for name in names}  # type: ignore[arg-type]


def test_the_order_changes_from_round_to_round(runs: Any) -> None:
    order, given = runs
    for name in (BASE, "b", "c"):
        given[name] = [(EXIT_OK, ran(10.0)) for _ in range(3)]
    measure(named(BASE, "b", "c"), 3)
    assert order == [BASE, "b", "c", "c", "b", BASE, BASE, "b", "c"]


def test_what_fails_is_not_run_again_and_the_others_go_on(runs: Any) -> None:
    order, given = runs
    given[BASE] = [(EXIT_OK, ran(10.0)) for _ in range(3)]
    given["b"] = [(EXIT_OK, ran(20.0)), (3, failed("out_of_memory", "no\nmemory"))]
    rows = measure(named(BASE, "b"), 3)
    assert rows is not None
    assert order == [BASE, "b", "b", BASE, BASE]
    assert "FAILED (out_of_memory): no\n" in report(rows)
    # The round that it completed still counts.
    row = summary("b", rows, ["precision=bf16"])
    assert (row["rounds"], row["ratio.median"], row["error.kind"]) == (1, 2.0, "out_of_memory")
    assert summary(BASE, rows, [])["rounds"] == 3


def test_a_request_to_stop_ends_all(runs: Any) -> None:
    order, given = runs
    given[BASE] = [(EXIT_OK, ran(10.0))]
    given["b"] = [(EXIT_INTERRUPTED, {"exit_reason": "interrupted"})]
    assert measure(named(BASE, "b"), 3) is None
    assert order == [BASE, "b"]


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down for both does not change their ratio."""
    base = {0: ran(100.0), 1: ran(50.0), 2: ran(10.0), 3: ran(1.0)}
    ours = {0: ran(110.0), 1: ran(60.0), 2: ran(9.0), 3: failed("bug", "x")}
    assert ratios(ours, base) == pytest.approx([1.1, 1.2, 0.9])
    row = summary("b", {BASE: base, "b": ours}, [])
    assert (row["ratio.median"], row["ratio.min"], row["ratio.max"]) == pytest.approx((1.1, 0.9, 1.2))
    assert row["tokens_per_second.median"] == 60.0
    assert report({BASE: base, "b": ours}).splitlines()[-1].split() == [
        "b",
        "1.100",
        *["0.900", "to", "1.200"],
    ]


def test_an_unknown_figure_stays_unknown() -> None:
    assert Spread.of([None, None]) is None
    assert Spread.of([3.0, None, 1.0]) == Spread(2.0, 1.0, 3.0)
    rows = {BASE: {0: ran(100.0)}}
    assert summary(BASE, rows, [])["mfu.median"] is None
    assert ["MFU", "-", "no", "known", "peak"] in [line.split() for line in report(rows).splitlines()]
    known = report({BASE: {0: ran(100.0, mfu=0.5, mfu_causal=0.4)}})
    assert [line.split()[-4:] for line in known.splitlines() if line.startswith("MFU")] == [
        ["50.0%", "50.0%", "to", "50.0%"],
        ["40.0%", "40.0%", "to", "40.0%"],
    ]


def test_a_variant_is_the_job_with_its_overrides() -> None:
    overrides = [*TINY, "bench.rounds=1", '++bench.variants.b="precision=bf16 training.global_batch_size=4"']
    variants = compose_variants(
        BenchConfig(variants={"b": "precision=bf16 training.global_batch_size=4"}), overrides
    )
    base, other = variants[BASE].job, variants["b"].job
    assert (base.precision.param_dtype, base.global_batch_size) == ("float32", 8)
    assert (other.precision.param_dtype, other.global_batch_size) == ("bfloat16", 4)
    assert base.runs_dir == other.runs_dir == "runs/bench"
    assert not (base.checkpoint.enable or base.validation.interval or base.metrics.tensorboard)
    # A run's own overrides contain no bench.* fields: harness.train accepts them.
    assert variants["b"].overrides == [*TINY, "precision=bf16", "training.global_batch_size=4"]


def test_two_jobs_and_one_that_fails(tmp_path: Path) -> None:
    """Real runs; one job fails only on its ranks."""
    done = python(
        *("-m", "harness", "bench", *TINY),
        *("training.steps=5", "training.global_batch_size=2", f"runs_dir={tmp_path}/runs", "bench.rounds=1"),
        'bench.variants.two="parallelism=ddp parallelism.dp_replicate=2"',
        f'bench.variants.lost="tokenizer=llama3 tokenizer.path={tmp_path}/none"',
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED (user): tokenizer file" in done.stdout
    rows = {row["variant"]: row for row in read_metrics(tmp_path / "runs" / "bench.jsonl")}
    assert set(rows) == {"base", "two", "lost"}
    base, two, lost = rows["base"], rows["two"], rows["lost"]
    assert (base["world_size"], two["world_size"], lost["rounds"]) == (1, 2, 0)
    assert two["ratio.median"] == pytest.approx(
        two["tokens_per_second.median"] / base["tokens_per_second.median"], rel=1e-9
    )
    # 2 x 16 tokens a step, 2 counted steps; their mean is close to the median step.
    assert 0.2 < base["tokens_per_second.median"] * base["step_seconds.median"] / 32 < 5
    assert base["first_step_seconds.median"] > base["step_seconds.median"] > 0
    assert base["memory_gib.median"] > 0.05
    assert base["mfu.median"] is None
    assert base["job.training.steps"] == 5
    assert base["code.versions.torch"] and base["host.cores"]
    assert lost["error.kind"] == "user" and lost["ratio.median"] is None
    run = tmp_path / "runs" / "bench" / "llama3_tiny" / base["id"]
    assert (run / "result.json").is_file()
    assert not list(run.glob("checkpoints/*"))
