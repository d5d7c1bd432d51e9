"""Processes that read ahead: the same samples, errors in one line, and no process is left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from equal import assert_equal
from loaders import loader, write_jsonl
from one_line import one_line
from processes import PATIENCE, is_alive, until, workers_of_this_process

from harness.config.data import DataConfig
from harness.data.prefetch import Prefetcher
from harness.data.read_ahead import ReaderPool
from harness.data.stream_reader import RowReader, TokenizedDocument
from harness.util.errors import DataError, MachineError

# The library starts them, which tests/uses.py does not see.
pytestmark = pytest.mark.process


def write(shards=3):
    for shard in range(shards):
        write_jsonl(f"{shard}.jsonl", [f"{shard} {i} " * (i % 50) for i in range(300)])


def loader_of(rows=range(4), **settings):
    files = sorted(map(str, Path.cwd().glob("*.jsonl")))
    data = DataConfig("hub", dataset="json", data_files=files, streaming=True, **settings)
    return loader(data, rows, seq_len=64, global_batch_size=4)


def batches_of(a_loader, count):
    return [a_loader.next().inputs_BT for _ in range(count)]


def test_samples_and_positions_are_the_same_with_any_number_of_processes():
    write()
    alone, many, one = (
        loader_of(range(2, 4), shuffle_buffer=20, workers=workers) for workers in (0, 9, 1)
    )
    assert not workers_of_this_process(), "they start with the first batch"
    for step in range(30):
        assert_equal(many.next(), alone.next(), f"step {step}")
        assert many.state_dict() == alone.state_dict()
    assert len(workers_of_this_process()) == 2, "one for each row"
    one.load_state_dict(json.loads(json.dumps(many.state_dict())))
    assert_equal(batches_of(one, 30), batches_of(alone, 30))
    many.reset()
    alone.reset()
    assert_equal(batches_of(many, 20), batches_of(alone, 20))
    many.close()
    assert len(workers_of_this_process()) == 1
    one.close()
    assert not workers_of_this_process()
    one.load_state_dict(alone.state_dict())
    assert_equal(batches_of(one, 3), batches_of(alone, 3))
    del one
    assert not workers_of_this_process(), "a loader that is not used any more ends its processes"


def test_they_have_no_torch_and_no_signal_stops_them():
    write()
    ahead, alone = loader_of(workers=1), loader_of(workers=0)
    assert_equal(batches_of(ahead, 1), batches_of(alone, 1))
    [process] = workers_of_this_process()
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        os.kill(process, number)
    assert_equal(batches_of(ahead, 100), batches_of(alone, 100))
    os.kill(process, signal.SIGKILL)
    with one_line(MachineError, r"row \d of 4: a process that reads ahead was killed by SIGKILL, "):
        batches_of(ahead, 10_000)


class WaitingReader(RowReader):
    """Reads a document when the rows 0 and 1 have been opened."""

    def read(self, position):
        Path(f"{self.row}.opened").touch()
        until(lambda: len(list(Path().glob("*.opened"))) == 2, 60)
        yield TokenizedDocument(position, np.zeros(9))


def test_rows_are_opened_at_the_same_time():
    readers = {row: WaitingReader(None, None, row, 2, "text", "x", 0, None) for row in range(2)}
    pool = ReaderPool(readers, 2, chunk_tokens=1)
    rows = [pool.reader(row).read({}) for row in range(2)]
    assert len(next(rows[0]).tokens) == 9
    pool.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_where_it_would_be_without_processes(prefetch):
    write(shards=8)
    Path("6.jsonl").write_text('{"text": "the second shard of row 2"}\n{"text": ')
    said = []
    for workers in (0, 1):
        reading = loader_of(shuffle=False, workers=workers)
        if prefetch:
            reading = Prefetcher(reading, prefetch, torch.device("cpu"))
        with one_line(DataError, r"split train, row 2 of 4 cannot be read: \w+") as caught:
            for step in range(10_000):  # noqa: B007
                reading.next()
        said.append((step, str(caught.value)))
        reading.close()
    assert said[0] == said[1]
    assert said[0][0] > 10 and "\n" not in said[0][1]
    assert not workers_of_this_process()


RANK = """
import test_read_ahead
loader = test_read_ahead.loader_of(workers=2)
loader.next()
print(*test_read_ahead.workers_of_this_process(), flush=True)
while True: loader.next()
"""


def test_they_end_with_the_rank():
    write()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert rank.stdout is not None
    processes = rank.stdout.readline().split()
    assert len(processes) == 2
    rank.kill()
    rank.communicate(timeout=PATIENCE)
    until(
        lambda: not any(is_alive(process) for process in processes), what="the end of the processes"
    )
