"""Orders of passes of every schedule: after the passes that they need, with the bubbles of the papers."""

from itertools import product
from unittest import mock

import pytest
import torch
from cases import rows
from plans import LLAMA_8B, job_of

from harness.config.fields import with_value
from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import SCHEDULES, num_stages, stages_of_rank
from harness.data.batch import Batch
from harness.tools.plan.machine import machine_of
from harness.tools.plan.order import pipeline_order, simulate
from harness.tools.plan.plan import Action
from harness.tools.plan.step_time import StepModel


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_every_stage_runs_every_microbatch_once(name, pp, microbatches):
    layout = ParallelismConfig(pp=pp, pp_schedule=name)
    order = pipeline_order(layout, 32, microbatches)
    simulate(order, lambda action: 1.0, 0.0)  # fails if a pass comes before those that it needs
    assert len(order) == pp
    for rank, actions in enumerate(order):
        stages = stages_of_rank(layout, 32, rank)
        ran = {
            kind: sorted((a.stage, a.microbatch) for a in actions if a.kind == kind)
            for kind in "FBIW"
        }
        assert (
            ran["F"] == sorted(ran["B"] + ran["I"]) == sorted(product(stages, range(microbatches)))
        )
        assert ran["I"] == ran["W"]
    assert num_stages(layout, 32) == sum(
        len(stages_of_rank(layout, 32, rank)) for rank in range(pp)
    )


def test_orders_by_hand(tmp_path):
    """Without a pipeline, and of a file, which is run as it is written."""
    [order] = pipeline_order(ParallelismConfig(), 4, 2)
    assert [f"{a.kind}{a.microbatch}" for a in order] == ["F0", "B0", "F1", "B1"]
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B1,0B0\n1F0,1F1,1I1,1B0,1W1\n")
    made = pipeline_order(ParallelismConfig(pp=2, pp_schedule_csv=str(file)), 4, 2)
    rows = [[f"{a.stage}{a.kind}{a.microbatch}" for a in rank] for rank in made]
    assert rows == [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1I1", "1B0", "1W1"]]


def gathers_of(job_json):
    """Number of FSDP's all-gathers in a real step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from harness.train.engine import Engine

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    tokens = torch.zeros(len(engine.rows), job.training.seq_len, dtype=torch.int64)
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", side_effect=gather) as counted:
        engine.gradients(Batch(tokens, tokens))
    return counted.call_count


@pytest.mark.parametrize(
    ("schedule", "reshard"),
    [("1F1B", "always"), ("InterleavedZeroBubble", "always"), ("DualPipeV", "never")],
)
def test_parameters_are_gathered_as_often_as_planned(pool, schedule, reshard):
    layout = f"pp=2 dp_shard=2 pp_schedule={schedule} reshard_after_forward={reshard}"
    shape = "training.seq_len=16 training.global_batch_size=8"
    job = job_of(f"model=llama3_tiny data=synthetic tokenizer=bytes {shape} {layout}")
    on_gpus = with_value(
        with_value(job, "cluster.device", "cuda"), "cluster.accelerator", "H100 SXM"
    )
    machine = machine_of(on_gpus)
    assert machine is not None
    traffic = [StepModel(on_gpus, machine).traffic(rank) for rank in (0, 1)]
    planned = [
        sum(each.count for each in own if each.collective == "all_gather") for own in traffic
    ]
    real = pool.run(4, gathers_of, job.to_json())
    assert planned == [real[0], real[2]]


FORWARD, BACKWARD = 1.0, 2.0


def span(name, pp, microbatches, stages_per_rank):
    """Duration of a schedule if all stages together take 3 seconds times pp."""
    order = pipeline_order(ParallelismConfig(pp=pp, pp_schedule=name), 64, microbatches)
    each = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD / 2, "W": BACKWARD / 2}
    timed = simulate(order, lambda action: each[action.kind] / stages_per_rank, 0.0)
    return max(actions[-1].end for actions in timed)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_bubbles_are_those_of_the_papers(pp, microbatches):
    """arXiv:1811.06965; arXiv:2104.04473, section 2.2: two stages on each rank halve the bubble."""
    step = FORWARD + BACKWARD
    for name in ("GPipe", "1F1B"):
        assert span(name, pp, microbatches, 1) == (microbatches + pp - 1) * step
    if microbatches > pp:
        assert span("Interleaved1F1B", pp, microbatches, 2) == (microbatches + (pp - 1) / 2) * step


def test_splitting_backward_fills_the_bubble():
    """arXiv:2401.10241: with equal thirds, ZBV's only bubble is the first microbatch's forward."""
    names = ("ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B")
    zbv, zero, interleaved = (span(name, 4, 16, 2) for name in names)
    assert zbv <= zero < interleaved and zbv - 16 * (FORWARD + BACKWARD) <= 3 * FORWARD / 2


def test_passes_wait_for_their_inputs():
    order = [
        [Action(0, "F", 0), Action(0, "B", 0)],
        [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    ]
    first, second = simulate(
        order, lambda action: {"F": 1.0, "B": 4.0, "I": 2.0, "W": 2.0}[action.kind], 0.5
    )
    assert [(a.start, a.end) for a in first] == [(0.0, 1.0), (5.0, 9.0)]
    assert [(a.start, a.end) for a in second] == [(1.5, 2.5), (2.5, 4.5), (4.5, 6.5)]
    with pytest.raises(ValueError, match="deadlocks"):
        simulate([[Action(0, "B", 0), Action(0, "F", 0)]], lambda action: 1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "sends"),
    rows("""
        1F1B             [8, 16, 16, 8]
        Interleaved1F1B  [24, 32, 32, 24]
        ZBVZeroBubble    [16, 32, 32, 16]
    """),
)
def test_sends_of_every_rank(name, sends):
    """Eight microbatches: a stage sends each once to a neighbour, unless the neighbour is on the same rank.

    In a V the first rank has the first and the last stage, and the last rank the two in the middle.
    """
    job = job_of(f"{LLAMA_8B} pp=4 pp_schedule={name} training.local_batch_size=8")
    machine = machine_of(job)
    assert machine is not None
    found = [StepModel(job, machine).traffic(rank) for rank in range(4)]
    assert [each.count for own in found for each in own if each.axis == "pp"] == sends
