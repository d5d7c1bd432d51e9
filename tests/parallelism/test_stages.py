"""Stages of pipelines: their modules and ranks, and the rules of schedules against torch's own classes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import (
    SCHEDULES,
    check_stages,
    fitting_layers_per_stage,
    num_stages,
    read_csv_schedule,
    split_modules,
    stages_of_rank,
    stages_per_rank,
)
from harness.util.errors import ConfigError


def model(n_layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def layers(stage: list[str]) -> int:
    return sum(name.startswith("layers.") for name in stage)


def legal(layout: ParallelismConfig, n_layers: int) -> bool:
    try:
        check_stages(layout, n_layers)
        return SCHEDULES[layout.pp_schedule].takes_stages(stages_per_rank(layout, n_layers))
    except ConfigError:
        return False


COMBINATIONS = [
    (n_layers, ParallelismConfig(pp=pp, pp_schedule=schedule))
    for n_layers, pp, schedule in product(
        (1, 2, 3, 4, 6, 7, 8, 13, 16, 32, 61, 126), (2, 3, 4, 8, 16), SCHEDULES
    )
]


def test_enough_combinations_are_legal() -> None:
    assert sum(legal(layout, n) for n, layout in COMBINATIONS) > 200


def test_every_module_once_in_order_and_no_stage_empty() -> None:
    for n_layers, layout in COMBINATIONS:
        if legal(layout, n_layers):
            stages = split_modules(layout, n_layers)
            assert [name for stage in stages for name in stage] == model(n_layers), layout
            assert all(stages), (layout, stages)
            assert len(stages) == num_stages(layout, n_layers)
            assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ["norm", "output"]


def test_balance() -> None:
    """With embedding and head counted as a layer each, weights of stages differ by at most one."""
    for n_layers, layout in COMBINATIONS:
        if legal(layout, n_layers):
            stages = split_modules(layout, n_layers)
            weights = [layers(stage) for stage in stages]
            weights[0] += 1
            weights[-1] += 1
            assert max(weights) - min(weights) <= 1, (n_layers, layout, weights)


@pytest.mark.parametrize(
    ("n_layers", "pp", "schedule", "expected"),
    [
        (6, 2, "1F1B", [3, 3]),
        (8, 2, "1F1B", [4, 4]),
        (8, 4, "GPipe", [2, 3, 2, 1]),
        (32, 4, "1F1B", [8, 9, 8, 7]),
        (126, 8, "1F1B", [15, 16, 16, 16, 16, 16, 16, 15]),
        (6, 2, "Interleaved1F1B", [1, 2, 2, 1]),
        (6, 2, "ZBVZeroBubble", [1, 2, 2, 1]),
        (1, 2, "GPipe", [1, 0]),
        (2, 4, "GPipe", [0, 1, 1, 0]),
    ],
)
def test_layers_by_hand(n_layers: int, pp: int, schedule: str, expected: list[int]) -> None:
    layout = ParallelismConfig(pp=pp, pp_schedule=schedule)
    assert [layers(stage) for stage in split_modules(layout, n_layers)] == expected


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 0, [2, 2, 2, 2]),
        (2, 2, [1, 3, 3, 1]),
        (0, 2, [3, 3, 2, 0]),
        (2, 1, [1, 3, 3, 1]),
        (9, 9, [0, 4, 4, 0]),
    ],
)
def test_weight_of_embedding_and_head(first: int, last: int, expected: list[int]) -> None:
    layout = ParallelismConfig(pp=4, pp_first_stage_less_layers=first, pp_last_stage_less_layers=last)
    assert [layers(stage) for stage in split_modules(layout, 8)] == expected


def test_no_weights_leave_a_stage_empty_or_a_layer_out() -> None:
    for n_layers, pp, first, last in product(
        (1, 2, 5, 8, 12), (2, 3, 4, 6), range(0, 12, 2), range(0, 12, 3)
    ):
        layout = ParallelismConfig(pp=pp, pp_first_stage_less_layers=first, pp_last_stage_less_layers=last)
        if legal(layout, n_layers):
            stages = split_modules(layout, n_layers)
            assert [name for stage in stages for name in stage] == model(n_layers), (n_layers, layout)
            assert all(stages), (n_layers, layout, stages)


def test_layers_per_stage() -> None:
    layout = ParallelismConfig(pp=2, pp_schedule="Interleaved1F1B", pp_layers_per_stage=2)
    # 14 layers, and a weight of one each for embedding and head, make eight stages of two.
    assert num_stages(layout, 14) == 8 and stages_per_rank(layout, 14) == 4
    assert [layers(stage) for stage in split_modules(layout, 14)] == [1, 2, 2, 2, 2, 2, 2, 1]


def test_fitting_layers_per_stage_are_exactly_the_legal_ones() -> None:
    for n_layers, pp, schedule in product((2, 6, 8, 13, 32), (2, 3, 4, 8), SCHEDULES):
        base = ParallelismConfig(pp=pp, pp_schedule=schedule)
        fitting = fitting_layers_per_stage(base, n_layers)
        for per_stage in range(1, n_layers + 3):
            layout = ParallelismConfig(pp=pp, pp_schedule=schedule, pp_layers_per_stage=per_stage)
            assert legal(layout, n_layers) == (per_stage in fitting), (n_layers, layout)


def test_by_names() -> None:
    named = [["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]
    layout = ParallelismConfig(pp=2, pp_modules_per_stage=named)
    check_stages(layout, 2)
    assert split_modules(layout, 2) == named
    assert (num_stages(layout, 2), stages_per_rank(layout, 2)) == (2, 1)


def test_every_stage_is_on_one_rank() -> None:
    for n_layers, layout in COMBINATIONS:
        if legal(layout, n_layers):
            held = [stages_of_rank(layout, n_layers, rank) for rank in range(layout.pp)]
            flat = sorted(stage for stages in held for stage in stages)
            assert flat == list(range(num_stages(layout, n_layers)))
            assert all(stages == sorted(stages) for stages in held)


@pytest.mark.parametrize(
    ("schedule", "per_stage", "expected"),
    [
        ("1F1B", None, [[0], [1], [2], [3]]),
        ("Interleaved1F1B", None, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("LoopedBFS", 1, [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        ("ZBVZeroBubble", None, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("DualPipeV", 2, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_placement(schedule: str, per_stage: int | None, expected: list[list[int]]) -> None:
    layout = ParallelismConfig(pp=4, pp_schedule=schedule, pp_layers_per_stage=per_stage)
    assert [stages_of_rank(layout, 14, rank) for rank in range(4)] == expected


def write(folder: Path, rows: list[str]) -> str:
    path = folder / "schedule.csv"
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path, ["0F0,0F1, 0B0,,0B1", "1F0,1I0,1W0,1F1,1I1,1W1"])
    read = read_csv_schedule(path, pp=2)
    assert (read.stages_of_rank, read.num_stages, read.num_microbatches) == ([[0], [1]], 2, 2)


def test_csv_places_stages(tmp_path: Path) -> None:
    """A V, and ranks with unequal numbers of stages: the file takes precedence over pp_schedule."""
    path = write(tmp_path, ["0F0,3F0,3B0,0B0", "1F0,2F0,2B0,1B0"])
    layout = ParallelismConfig(pp=2, pp_schedule="1F1B", pp_schedule_csv=path)
    check_stages(layout, 6)
    assert [stages_of_rank(layout, 6, rank) for rank in range(2)] == [[0, 3], [1, 2]]
    assert (num_stages(layout, 6), stages_per_rank(layout, 6)) == (4, 2)
    assert [layers(stage) for stage in split_modules(layout, 6)] == [1, 2, 2, 1]
    path = write(tmp_path, ["0F0,2F0,2B0,0B0", "1F0,1B0"])
    layout = ParallelismConfig(pp=2, pp_schedule_csv=path)
    assert [stages_of_rank(layout, 6, rank) for rank in range(2)] == [[0, 2], [1]]
    assert stages_per_rank(layout, 6) == 2


def stages(layout: ParallelismConfig, per_rank: int, rank: int = 0) -> list[Any]:
    """Stand-ins for one rank's stages, with the attributes that a schedule's constructor reads."""
    total = layout.pp * per_rank
    layout = replace(layout, pp_layers_per_stage=1)
    indices = stages_of_rank(layout, total - 2, rank)
    assert len(indices) == per_rank
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=total,
            group_size=layout.pp,
            group_rank=rank,
            group=None,
            has_backward=False,
            is_first=index == 0,
            is_last=index == total - 1,
            submod=None,
            stage_index_to_group_rank={},
        )
        for index in indices
    ]


def torch_takes(name: str, pp: int, per_rank: int, microbatches: int) -> bool:
    """Whether torch can build the schedule; building it orders all ranks' work and fails on a deadlock."""
    made = stages(ParallelismConfig(pp=pp, pp_schedule=name), per_rank)
    schedule_class = get_schedule_class(name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    if single and per_rank > 1:
        return False
    try:
        schedule_class(made[0] if single else made, microbatches, loss_fn=lambda output, target: output)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None)
    rule = SCHEDULES[name]
    for pp, per_rank, microbatches in product((2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 5, 6, 8, 9, 12)):
        if rule.placement == "v" and per_rank != 2:
            # stages_of_rank supports a V of two stages only; torch refuses others.
            assert not rule.takes_stages(per_rank)
            continue
        ours = rule.takes_stages(per_rank) and rule.takes_microbatches(microbatches, pp, per_rank)
        theirs = torch_takes(name, pp, per_rank, microbatches)
        if not rule.takes_stages(per_rank):
            # torch accepts a looping schedule with one stage, we do not: that is another schedule.
            assert not ours
            continue
        assert ours == theirs, (name, pp, per_rank, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_names_are_torchs(name: str) -> None:
    assert get_schedule_class(name).__name__ == f"Schedule{name}"


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_csv_written_by_torch_can_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None)
    layout = ParallelismConfig(pp=4, pp_schedule=name)
    made = get_schedule_class(name)(stages(layout, 2), 8, loss_fn=lambda output, target: output)
    path = tmp_path / "schedule.csv"
    made._dump_csv(path, format="compute_only")
    read = read_csv_schedule(str(path), pp=4)
    assert (read.num_stages, read.num_microbatches) == (8, 8)
    assert read.stages_of_rank == [sorted(stages_of_rank(layout, 6, rank)) for rank in range(4)]
