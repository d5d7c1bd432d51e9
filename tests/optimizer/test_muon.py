"""Muon: its orthogonalization, the ranks that own matrices, and what they send."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import layout
from torch.utils.flop_counter import FlopCounterMode

from harness.optimizer import assignment
from harness.optimizer.assignment import Matrices
from harness.optimizer.muon import orthogonalize
from harness.tools.parity.parity import trace
from harness.tools.plan.parameters import muon_update, parameters_of

MUON = ("optimizer=muon",)
MOE = (*MUON, "model=qwen3_moe_debug")


def sent_in_a_step(job_json):
    """Bytes that this rank sends to others in the all-to-alls of an update."""
    sent = 0.0
    original = dist.all_to_all_single

    def counted(received, values, into, out, **options):
        nonlocal sent
        sent += (sum(out) - out[options["group"].rank()]) * values.element_size()
        return original(received, values, into, out, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        trace(job_json, 1)
    return sent


@pytest.mark.parametrize(
    ("name", "overrides"), [("fsdp_tp_pp", MUON), ("ep_hsdp", MOE), ("fsdp_experts_uneven", MOE)]
)
def test_ranks_send_what_the_plan_says(pool, name, overrides):
    job = layout(name, *overrides)
    sent = pool.run(job.world_size, sent_in_a_step, job.to_json())
    each = job.world_size // job.parallelism.pp
    for stage in range(job.parallelism.pp):
        planned = muon_update(job, parameters_of(job, stage))
        busiest = max(sent[stage * each : (stage + 1) * each])
        assert busiest > 0
        assert planned.sent == pytest.approx(busiest, rel=0.1)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=str)
def test_singular_values_become_about_one(shape):
    """The iteration changes singular values only, to 0.7 to 1.2 (the published range of five steps)."""
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonalize(matrices.clone()) @ right.mT
    values = found.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-9)
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_a_matrix_of_zeros_stays_zero():
    assert not orthogonalize(torch.zeros(1, 4, 6)).any()


SHARED = [Matrices(1, 512, 512, 4)] * 5 + [Matrices(1, 1536, 512, 4)] * 6 + [Matrices(6, 64, 32, 2)]


@pytest.mark.parametrize("round_values", [2**24, 2**20], ids=["one round", "rounds"])
def test_every_matrix_has_one_owner(monkeypatch, round_values):
    monkeypatch.setattr(assignment, "ROUND_VALUES", round_values)
    units = [unit for units in assignment.assign(SHARED) for unit in units]
    owned = sorted(
        (unit.tensor, matrix) for unit in units for matrix in range(unit.first, unit.stop)
    )
    assert owned == [
        (index, matrix) for index, of in enumerate(SHARED) for matrix in range(of.count)
    ]
    work = [0.0] * 4
    for unit in units:
        if SHARED[unit.tensor].holders == 4:
            work[unit.owner] += assignment.orthogonalization_flops(
                SHARED[unit.tensor].rows, SHARED[unit.tensor].columns
            )
    largest = assignment.orthogonalization_flops(1536, 512)
    assert max(work) - min(work) <= largest
    for each in assignment.assign(SHARED):
        for owner in range(4):
            values = sum(
                SHARED[unit.tensor].values * unit.count for unit in each if unit.owner == owner
            )
            assert values <= max(round_values, 1536 * 512)


def test_flops_are_those_of_the_products():
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, 12, 8))
    assert counter.get_total_flops() == assignment.orthogonalization_flops(12, 8)
