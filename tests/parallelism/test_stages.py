"""Stages of pipelines: their modules and ranks, and the rules of schedules against torch's own classes."""

from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace

import pytest
from cases import rows
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


def layers(stage):
    return sum(name.startswith("layers.") for name in stage)


def legal(layout, n_layers):
    try:
        check_stages(layout, n_layers)
        return SCHEDULES[layout.pp_schedule].takes_stages(stages_per_rank(layout, n_layers))
    except ConfigError:
        return False


def combined(sizes, ranks, **choices):
    rows = product(sizes, ranks, *choices.values())
    made = [
        (n, ParallelismConfig(pp=pp, **dict(zip(choices, rest, strict=True))))
        for n, pp, *rest in rows
    ]
    return [(n, layout) for n, layout in made if legal(layout, n)]


BY_SCHEDULE = combined(
    [1, 2, 3, 4, 6, 7, 8, 13, 16, 32, 61, 126], [2, 3, 4, 8, 16], pp_schedule=list(SCHEDULES)
)
BY_WEIGHT = combined(
    [1, 2, 5, 8, 12],
    [2, 3, 4, 6],
    pp_first_stage_less_layers=range(0, 12, 2),
    pp_last_stage_less_layers=range(0, 12, 3),
)


def test_every_module_and_every_stage_once():
    assert len(BY_SCHEDULE) > 200 and len(BY_WEIGHT) > 100
    for n_layers, layout in BY_SCHEDULE + BY_WEIGHT:
        stages = split_modules(layout, n_layers)
        layers_in_order = [f"layers.{i}" for i in range(n_layers)]
        assert [*chain(*stages)] == ["tok_embeddings", *layers_in_order, "norm", "output"], layout
        assert all(stages), (layout, stages)
        assert stages[-1][-2:] == ["norm", "output"]
        held = [stages_of_rank(layout, n_layers, rank) for rank in range(layout.pp)]
        assert all(own == sorted(own) for own in held)
        assert (
            sorted(chain(*held))
            == list(range(num_stages(layout, n_layers)))
            == list(range(len(stages)))
        )


def test_balance():
    """With embedding and head counted as a layer each, weights of stages differ by at most one."""
    for n_layers, layout in BY_SCHEDULE:
        weights = [layers(stage) for stage in split_modules(layout, n_layers)]
        weights[0] += 1
        weights[-1] += 1
        assert max(weights) - min(weights) <= 1, (n_layers, layout, weights)


@pytest.mark.parametrize(
    ("n_layers", "pp", "fields", "expected"),
    # Weights of embedding and head are in layers. In the last row 14 layers and a weight of one for each
    # of them make eight stages of two.
    rows("""
        6    2  {schedule: 1F1B}                                             [3, 3]
        8    4  {schedule: GPipe}                                            [2, 3, 2, 1]
        32   4  {schedule: 1F1B}                                             [8, 9, 8, 7]
        126  8  {schedule: 1F1B}                                             [15, 16, 16, 16, 16, 16, 16, 15]
        6    2  {schedule: ZBVZeroBubble}                                    [1, 2, 2, 1]
        1    2  {schedule: GPipe}                                            [1, 0]
        2    4  {schedule: GPipe}                                            [0, 1, 1, 0]
        8    4  {first_stage_less_layers: 0, last_stage_less_layers: 0}      [2, 2, 2, 2]
        8    4  {first_stage_less_layers: 2, last_stage_less_layers: 2}      [1, 3, 3, 1]
        8    4  {first_stage_less_layers: 0, last_stage_less_layers: 2}      [3, 3, 2, 0]
        8    4  {first_stage_less_layers: 9, last_stage_less_layers: 9}      [0, 4, 4, 0]
        14   2  {schedule: Interleaved1F1B, layers_per_stage: 2}             [1, 2, 2, 2, 2, 2, 2, 1]
    """),
)
def test_layers_by_hand(n_layers, pp, fields, expected):
    layout = ParallelismConfig(pp=pp, **{f"pp_{name}": value for name, value in fields.items()})
    assert [layers(stage) for stage in split_modules(layout, n_layers)] == expected
    assert stages_per_rank(layout, n_layers) == len(expected) // pp


def test_fitting_layers_per_stage_are_exactly_the_legal_ones():
    for n_layers, pp, schedule in product((2, 6, 8, 13, 32), (2, 3, 4, 8), SCHEDULES):
        base = ParallelismConfig(pp=pp, pp_schedule=schedule)
        fitting = fitting_layers_per_stage(base, n_layers)
        for per_stage in range(1, n_layers + 3):
            assert legal(replace(base, pp_layers_per_stage=per_stage), n_layers) == (
                per_stage in fitting
            )


def test_by_names():
    named = [["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]
    layout = ParallelismConfig(pp=2, pp_modules_per_stage=named)
    check_stages(layout, 2)
    assert split_modules(layout, 2) == named
    assert (num_stages(layout, 2), stages_per_rank(layout, 2)) == (2, 1)


@pytest.mark.parametrize(
    ("schedule", "per_stage", "expected"),
    rows("""
        1F1B           null  [[0], [1], [2], [3]]
        LoopedBFS      1     [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
        ZBVZeroBubble  null  [[0, 7], [1, 6], [2, 5], [3, 4]]
        DualPipeV      2     [[0, 7], [1, 6], [2, 5], [3, 4]]
    """),
)
def test_placement(schedule, per_stage, expected):
    layout = ParallelismConfig(pp=4, pp_schedule=schedule, pp_layers_per_stage=per_stage)
    assert [stages_of_rank(layout, 14, rank) for rank in range(4)] == expected


@pytest.mark.parametrize(
    ("schedule", "placed", "microbatches", "per_rank"),
    # Split, a V, and unequal numbers of stages.
    rows("""
        '0F0,0F1, 0B0,,0B1 | 1F0,1I0,1W0,1F1,1I1,1W1'  [[0], [1]]        2  1
        '0F0,3F0,3B0,0B0 | 1F0,2F0,2B0,1B0'            [[0, 3], [1, 2]]  1  2
        '0F0,2F0,2B0,0B0 | 1F0,1B0'                    [[0, 2], [1]]     1  2
    """),
)
def test_csv_places_stages(tmp_path, schedule, placed, microbatches, per_rank):
    """The file takes precedence over pp_schedule."""
    path = tmp_path / "schedule.csv"
    path.write_text(schedule.replace(" | ", "\n") + "\n")
    read = read_csv_schedule(str(path), pp=2)
    total = len([*chain(*placed)])
    assert (read.stages_of_rank, read.num_stages, read.num_microbatches) == (
        placed,
        total,
        microbatches,
    )
    layout = ParallelismConfig(pp=2, pp_schedule="1F1B", pp_schedule_csv=str(path))
    check_stages(layout, 6)
    assert [stages_of_rank(layout, 6, rank) for rank in range(2)] == placed
    assert (num_stages(layout, 6), stages_per_rank(layout, 6)) == (total, per_rank)
    assert len(split_modules(layout, 6)) == total


def stages(layout, per_rank, rank=0):
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


def torch_takes(name, pp, per_rank, microbatches):
    """Whether torch can build the schedule; building it orders all ranks' work and fails on a deadlock."""
    made = stages(ParallelismConfig(pp=pp, pp_schedule=name), per_rank)
    schedule_class = get_schedule_class(name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    try:
        schedule_class(
            made[0] if single else made, microbatches, loss_fn=lambda output, target: output
        )
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_agrees(name, monkeypatch):
    """Except that torch accepts a looping schedule with one stage, which is another schedule."""
    monkeypatch.setattr(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None)
    rule = SCHEDULES[name]
    taken = [per_rank for per_rank in (1, 2, 3) if rule.takes_stages(per_rank)]
    single = issubclass(get_schedule_class(name), PipelineScheduleSingle)
    assert taken == ([1] if single else [2] if rule.placement == "v" else [2, 3])
    for pp, per_rank, microbatches in product((2, 3, 4), taken, (1, 2, 3, 4, 5, 6, 8, 9, 12)):
        ours = rule.takes_microbatches(microbatches, pp, per_rank)
        assert ours == torch_takes(name, pp, per_rank, microbatches), (pp, per_rank, microbatches)


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_a_csv_written_by_torch_can_be_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None)
    layout = ParallelismConfig(pp=4, pp_schedule=name)
    made = get_schedule_class(name)(stages(layout, 2), 8, loss_fn=lambda output, target: output)
    path = tmp_path / "schedule.csv"
    made._dump_csv(path, format="compute_only")
    read = read_csv_schedule(str(path), pp=4)
    assert (read.num_stages, read.num_microbatches) == (8, 8)
    assert read.stages_of_rank == [sorted(stages_of_rank(layout, 6, rank)) for rank in range(4)]
