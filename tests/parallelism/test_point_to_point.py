"""Sends and receives between pipeline stages: their order must not deadlock with one stream per rank.

NCCL executes a rank's sends and receives in one group sequentially, and each waits for the other side. gloo
does not, so an order that deadlocks with NCCL works on CPUs.
"""

import random
from functools import partial

import pytest
import torch
from jobs import batches_of

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.pipeline import read_csv_schedule
from harness.util.errors import ConfigError


def unfinished(ranks):
    """Replay the batches of every rank sequentially; return each rank's number of unfinished batches.

    An operation finishes when its counterpart is in the other rank's current batch.
    """
    waiting = [[list(batch) for batch in batches] for batches in ranks]
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(waiting):
            for kind, other in list(batches[0]) if batches else []:
                meets = ("receive" if kind == "send" else "send", rank)
                if waiting[other] and meets in waiting[other][0]:
                    batches[0].remove((kind, other))
                    waiting[other][0].remove(meets)
                    moved = True
        waiting = [[batch for batch in batches if batch] for batches in waiting]
    return list(map(len, waiting))


def exchanged(job_json):
    """This rank's sends and receives in a step, and in a validation, in torch's batches."""
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    from harness.train.engine import Engine

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = batches_of(job, engine.rows).next()
    found = []
    original = schedules._batch_p2p

    def recorded(operations, *args, **kwargs):
        found.append(
            [("send" if o.op is dist.isend else "receive", o.group_peer) for o in operations]
        )
        return original(operations, *args, **kwargs)

    parts = []
    schedules._batch_p2p = recorded
    try:
        for run in (engine.gradients, engine.evaluate):
            run(batch)
            parts.append([operations for operations in found if operations])
            found.clear()
    finally:
        schedules._batch_p2p = original
    return parts


def one_by_one(batches):
    """Batches as torch 2.13 passes them to NCCL: one with sends only or receives only is split up."""
    split = [[[each] for each in batch] if len(dict(batch)) == 1 else [batch] for batch in batches]
    return [batch for parts in split for batch in parts]


@pytest.mark.parametrize("row", ["1F1B-4-2", "InterleavedZeroBubble-4-1", "DualPipeV-4-1"])
def test_one_stream_per_rank_does_not_deadlock(pool, row):
    name, pp, times = row.split("-")
    job = compose_job(
        [
            *("model=llama3_tiny", "model.n_layers=8", "data=synthetic", "tokenizer=bytes"),
            *(
                "training.seq_len=16",
                f"training.global_batch_size={8 * int(times)}",
                "cluster.device=cpu",
            ),
            *(f"parallelism.pp={pp}", f"parallelism.pp_schedule={name}"),
        ]
    )
    ranks = pool.run(int(pp), exchanged, job.to_json())
    for run in range(2):
        batches = [parts[run] for parts in ranks]
        assert all(batches)
        assert unfinished(batches) == [0] * int(pp)
        assert unfinished(list(map(one_by_one, batches))) == [0] * int(pp)


def lowered(rows):
    """Sends and receives of every rank, as torch adds them to the rows of a file.

    Raises:
        AssertionError: there is no order of them.
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    ranks = {int(cell[0]): rank for rank, row in enumerate(rows) for cell in row}
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    added = _add_send_recv(actions, ranks.__getitem__, len(ranks))
    batches = []
    for rank in range(len(rows)):
        names = [(each.stage_index, each.computation_type.name) for each in added[rank]]
        moves = [
            (stage, *name.split("_")) for stage, name in names if name.startswith(("SEND", "RECV"))
        ]
        batches.append(
            [
                [
                    (
                        "send" if kind == "SEND" else "receive",
                        ranks[stage + (1 if kind + way in AHEAD else -1)],
                    )
                ]
                for stage, kind, way in moves
            ]
        )
    return batches


AHEAD = ("SENDF", "RECVB")


def is_in_order(row):
    """Whether the passes of each stage and microbatch are in the order F, B or F, I, W."""
    return all(
        [kind for kind in "FBIW" if cell[0] + kind + cell[2:] in row]
        == [each[1] for each in row if each[0] + each[2:] == cell[0] + cell[2:]]
        for cell in row
    )


def test_an_order_in_a_file_is_accepted_if_it_ends(tmp_path):
    """Random orders: a schedule with more and more noise, until most are wrong."""
    generator, counts = random.Random(0), {True: 0, False: 0}
    for number in range(300):
        noise = partial(generator.gauss, 0, number / 300)
        pp, numbers = generator.choice((2, 3)), range(generator.randint(1, 3))
        ranks = [*range(pp), *generator.sample(range(pp), generator.randint(0, pp))]
        kinds = ["FIW" if generator.random() < 0.4 else "FB" for _ in ranks]
        last = len(ranks) - 1
        timed = [
            (
                3 * i + (s if kind == "F" else 2 * last + 1 - s) + (kind == "W") + noise(),
                s,
                f"{s}{kind}{i}",
            )
            for s, own in enumerate(kinds)
            for kind in own
            for i in numbers
        ]
        rows = [[cell for _, s, cell in sorted(timed) if ranks[s] == rank] for rank in range(pp)]
        path = tmp_path / "schedule.csv"
        path.write_text("\n".join(map(",".join, rows)))
        try:
            batches, ends = lowered(rows), all(map(is_in_order, rows))
        except AssertionError:
            ends = False
        counts[ends] += 1
        if ends:
            read_csv_schedule(str(path), pp)
            assert unfinished(batches) == [0] * pp, rows
        else:
            with pytest.raises(ConfigError, match=r"for ever|one I and then one W"):
                read_csv_schedule(str(path), pp)
    assert min(counts.values()) > 60, counts
