"""The rules of pipeline schedules against torch's own classes: both refuse the same settings."""

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
from harness.config.pipeline import SCHEDULES, read_csv_schedule, stages_of_rank


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
