"""Orders of passes: every schedule runs every pass once, after the passes that it needs."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import SCHEDULES, num_stages, stages_of_rank
from harness.tools.plan.order import fullest, pipeline_order
from harness.tools.plan.plan import Action


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_every_stage_runs_every_microbatch_once(name: str, pp: int, microbatches: int) -> None:
    layout = ParallelismConfig(pp=pp, pp_schedule=name)
    order = pipeline_order(layout, 32, microbatches)
    assert len(order) == pp
    for rank, actions in enumerate(order):
        stages = stages_of_rank(layout, 32, rank)
        everything = {(stage, i) for stage in stages for i in range(microbatches)}
        forwards = [(a.stage, a.microbatch) for a in actions if a.kind == "F"]
        assert len(forwards) == len(everything) and set(forwards) == everything
        whole = {(a.stage, a.microbatch) for a in actions if a.kind == "B"}
        halves = [{(a.stage, a.microbatch) for a in actions if a.kind == kind} for kind in ("I", "W")]
        assert halves[0] == halves[1] and whole | halves[0] == everything and not whole & halves[0]
        done: set[tuple[str, int, int]] = set()
        for action in actions:
            needs = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
            assert needs is None or (needs, action.stage, action.microbatch) in done
            done.add((action.kind, action.stage, action.microbatch))
    assert num_stages(layout, 32) == sum(len(stages_of_rank(layout, 32, rank)) for rank in range(pp))


def test_a_schedule_of_a_file_runs_as_it_is_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B1,0B0\n1F0,1F1,1I1,1B0,1W1\n")
    layout = ParallelismConfig(pp=2, pp_schedule_csv=str(file))
    first, second = pipeline_order(layout, 4, 2)
    assert [f"{a.stage}{a.kind}{a.microbatch}" for a in first] == ["0F0", "0F1", "0B1", "0B0"]
    assert [f"{a.stage}{a.kind}{a.microbatch}" for a in second] == ["1F0", "1F1", "1I1", "1B0", "1W1"]


def test_without_a_pipeline_passes_follow_each_other() -> None:
    [order] = pipeline_order(ParallelismConfig(), 4, 2)
    assert [f"{a.kind}{a.microbatch}" for a in order] == ["F0", "B0", "F1", "B1"]


def counts_at(
    before: list[Action], now: Action, equal: dict[int, int], *, keeps_outputs: bool
) -> dict[tuple[str, int], int]:
    """The counts of a moment, from all passes before it."""
    counts = Counter((action.kind, equal[action.stage]) for action in before)
    found = {}
    for stage in equal.values():
        own = {action.stage for action in (*before, now) if equal[action.stage] == stage}
        done = {a.stage for a in before if equal[a.stage] == stage and a.kind in "BW"}
        found |= {("ran", stage): len(own), ("gradients", stage): len(done)}
        found["F", stage] = counts["F", stage] - counts["B", stage] - counts["I", stage]
        found["I", stage] = counts["I", stage] - counts["W", stage]
        if keeps_outputs:
            found["left", stage] = counts["B", stage] + counts["W", stage]
    if now.kind != "F":
        found["I" if now.kind == "W" else "F", equal[now.stage]] -= 1
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_passes_have_at_least_as_much_as_every_other(name: str) -> None:
    layout = ParallelismConfig(pp=4, pp_schedule=name)
    for rank, actions in enumerate(pipeline_order(layout, 32, 16)):
        stages = stages_of_rank(layout, 32, rank)
        partitions = ({each: each for each in stages}, dict.fromkeys(stages, stages[0]))
        for equal, keeps in product(partitions, (False, True)):
            moments, found = fullest(actions, equal, keeps_outputs=keeps), []
            for number, now in enumerate(actions):
                again = any(a.stage == now.stage and a.kind in "BW" for a in actions[:number])
                counts = counts_at(actions[:number], now, equal, keeps_outputs=keeps)
                found.append((equal[now.stage], now.kind, again, counts))
            assert all((m.stage, m.kind, m.again, m.counts) in found for m in moments)
            for stage, kind, again, held in found:
                alike = [m.counts for m in moments if (m.stage, m.kind, m.again) == (stage, kind, again)]
                assert any(all(more[key] >= held[key] for key in held) for more in alike)
            assert len(moments) < len(actions)
