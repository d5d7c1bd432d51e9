"""Processes that read ahead: the same samples, errors in one line, and no process is left."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import test_tokenizer_json
import torch
from equal import assert_equal
from test_data_tokenizer import write_tiktoken
from test_tokenizer_json import CHAT
from tiers import rest_is_thorough

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.loader import build_loader
from harness.data.prefetch import Prefetcher
from harness.data.read_ahead import pickle_for_reader
from harness.data.stream_reader import RowReader
from harness.data.tokenizer import build_tokenizer
from harness.util.errors import DataError, MachineError

# The library starts them, which tests/uses.py does not see.
pytestmark = pytest.mark.process

BYTES = build_tokenizer(TokenizerConfig("bytes"))
ROWS = 4
SECONDS = 60  # much longer than anything here takes


def write(folder, shards=3):
    for shard in range(shards):
        texts = [f"{shard} {i} " * (i % 50) for i in range(300)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def loader_of(folder, rows=range(ROWS), **settings):
    files = sorted(map(str, folder.glob("*.jsonl")))
    data = DataConfig("hub", dataset="json", data_files=files, streaming=True, **settings)
    data.validate()
    return build_loader(
        data, BYTES, seq_len=64, global_batch_size=ROWS, seed=0, rows=rows, model_vocab_size=258
    )


def batches_of(loader, count):
    return [loader.next().inputs_BT for _ in range(count)]


def processes_of():
    """Process ids of this process's processes that read ahead."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "read_ahead" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_samples_and_positions_are_the_same_with_any_number_of_processes(tmp_path):
    write(tmp_path)
    alone, many, one = (
        loader_of(tmp_path, range(2, 4), shuffle_buffer=20, workers=workers) for workers in (0, 9, 1)
    )
    assert not processes_of(), "they start with the first batch"
    for step in range(60):
        assert_equal(many.next(), alone.next(), f"step {step}")
        assert many.state_dict() == alone.state_dict()
    assert len(processes_of()) == 2, "one for each row"
    one.load_state_dict(json.loads(json.dumps(many.state_dict())))
    assert_equal(batches_of(one, 60), batches_of(alone, 60))
    many.reset()
    alone.reset()
    assert_equal(batches_of(many, 20), batches_of(alone, 20))
    many.close()
    assert len(processes_of()) == 1
    one.close()
    assert not processes_of()
    one.load_state_dict(alone.state_dict())
    assert_equal(batches_of(one, 3), batches_of(alone, 3))
    del one
    assert not processes_of(), "a loader that is not used any more ends its processes"


def test_they_have_no_torch_and_no_signal_stops_them(tmp_path):
    write(tmp_path)
    loader, alone = loader_of(tmp_path, workers=1), loader_of(tmp_path, workers=0)
    assert_equal(batches_of(loader, 1), batches_of(alone, 1))
    [process] = processes_of()
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        os.kill(process, number)
    assert_equal(batches_of(loader, 100), batches_of(alone, 100))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(
        MachineError, match=r"row 0 of 4: a process that reads ahead was killed by SIGKILL, "
    ) as caught:
        batches_of(loader, 10_000)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_where_it_would_be_without_processes(tmp_path, prefetch):
    write(tmp_path, shards=8)
    (tmp_path / "6.jsonl").write_text('{"text": "the second shard of row 2"}\n{"text": ')
    said = []
    for workers in (0, 1):
        loader = loader_of(tmp_path, shuffle=False, workers=workers)
        if prefetch:
            loader = Prefetcher(loader, prefetch, torch.device("cpu"))
        with pytest.raises(DataError, match=r"split train, row 2 of 4 cannot be read: \w+") as caught:
            for step in range(10_000):  # noqa: B007
                loader.next()
        said.append((step, str(caught.value)))
        loader.close()
    assert said[0] == said[1]
    assert said[0][0] > 10 and "\n" not in said[0][1]
    assert not processes_of()


RANK = """
import sys, test_read_ahead
from pathlib import Path
loader = test_read_ahead.loader_of(Path(sys.argv[1]), workers=2)
loader.next()
print(*test_read_ahead.processes_of(), flush=True)
{then}
"""


READS = "while True: loader.next()"


@pytest.mark.parametrize("then", rest_is_thorough([READS, "import time; time.sleep(600)", "1 / 0"], READS))
def test_they_end_with_the_rank(tmp_path, then):
    write(tmp_path)
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK.format(then=then), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert rank.stdout is not None
    processes = rank.stdout.readline().split()
    assert len(processes) == 2
    if then != "1 / 0":
        rank.kill()
    rank.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_tokenizers_are_sent_as_they_are(tmp_path):
    text = "the  text, \u2581 \U0001f600 <|im_end|><s></s><think>\n\n" * 3
    dataset = datasets.Dataset.from_dict({"text": [text]}).to_iterable_dataset()
    for config in (
        TokenizerConfig("bytes"),
        TokenizerConfig("sentencepiece", "asset:python_2k.model"),
        write_tiktoken(tmp_path / "tokenizer.model"),
        TokenizerConfig("huggingface", str(test_tokenizer_json.write(tmp_path / "hf", CHAT))),
    ):
        reader = RowReader(dataset, build_tokenizer(config), 0, 1, "text", "it", 0, None)
        sent = pickle.loads(pickle_for_reader(reader))
        expected = next(reader.read(reader.beginning))
        assert next(sent.read(sent.beginning)).tokens.tolist() == expected.tokens.tolist(), config.kind
        assert sent.tokenizer.fingerprint == reader.tokenizer.fingerprint
