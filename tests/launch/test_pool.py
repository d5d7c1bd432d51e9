"""The pool of ranks: values, failures, deaths, hangs, and its own end."""

import multiprocessing as mp
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from processes import is_alive, until

from harness.compose.composer import compose_job
from harness.launch.pool import RankFailed, RankPool
from harness.tools.inference.inference import run_on_ranks
from harness.util.errors import UserError


def sum_of_ranks(offset):
    value = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(value)
    return float(value)


def own_rank():
    return dist.get_rank()


def refuse_on_last(job, device):
    if dist.get_rank() == job.world_size - 1:
        raise UserError("x=1: is refused")
    dist.barrier()


def fail_on(rank, how):
    if dist.get_rank() == rank:
        if how == "raises":
            raise LookupError("broken here")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    if how != "hangs":
        dist.barrier()


def tensors():
    doubled = 2 * torch.ones(2, 3, requires_grad=True)
    return [torch.tensor(1.5), torch.zeros(0, 4), doubled.T.bfloat16()]


def not_picklable():
    return lambda: None


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout_seconds=60) as ranks:
        yield ranks


def test_tensors_come_back_without_shared_memory(pair):
    [found] = pair.run(1, tensors)
    for own, expected in zip(found, tensors(), strict=True):
        assert not own.is_shared() and own.dtype == expected.dtype and torch.equal(own, expected)


def test_values_come_back_by_rank_and_failures_name_theirs(pair):
    assert pair.run(2, own_rank) == [0, 1]
    assert pair.run(1, own_rank) == [0]
    assert pair.run(2, sum_of_ranks, 1.0) == [3.0, 3.0]
    for works, says in (
        (
            (fail_on, 1, "raises"),
            r"rank 1 of 2: Traceback(.|\n)*fail_on(.|\n)*LookupError: broken here",
        ),
        ((fail_on, 1, "dies"), r"rank 1 of 2: the process died \(exit code -9\)"),
        ((not_picklable,), "pickle"),
    ):
        with pytest.raises(RankFailed, match=says):
            pair.run(2, *works)
        assert pair.run(2, own_rank) == [0, 1], "the next job runs"
    pair.timeout_seconds = 5
    with pytest.raises(RankFailed, match=r"no answer from rank 1 of 2 in 5 s"):
        pair.run(2, fail_on, 1, "hangs")


def own_a_pool(connection):
    pool = RankPool(2)
    pool.run(2, own_rank)
    connection.send([process.pid for process, _ in pool._ranks])
    pool.run(2, fail_on, 1, "hangs")


def test_a_killed_owner_leaves_no_ranks():
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own_a_pool, args=(theirs,))
    owner.start()
    pids = ours.recv()
    assert all(is_alive(pid) for pid in pids) and len(pids) == 2
    owner.kill()
    owner.join()
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_an_error_of_the_user_on_one_rank_ends_all():
    job = compose_job(["model=llama3_tiny", "cluster.device=cpu", "parallelism.dp_shard=2"])
    with pytest.raises(UserError, match=r"^x=1: is refused$"):
        run_on_ranks(job, f"{__name__}:refuse_on_last")
