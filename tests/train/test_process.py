"""Settings of a rank's process: set once, and the user's own settings win."""

import os
import platform
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from jobs import tiny

from harness.launch.begin import begin
from harness.launch.local import launch
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.train import process
from harness.train.engine import Engine
from harness.train.process import StopRequest, stop_signals_interrupt
from harness.train.setup import local_rank, process_group, set_up_process
from harness.util.errors import UserError

ROOT = Path(__file__).parents[2]
OURS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_DIST_USE_NCCL2": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "/runs/x/flight_recorder/rank_",
}
OLDER = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


@pytest.fixture
def environment(monkeypatch):
    """An environment without any of these variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH_", "PYTORCH_"))
    }
    monkeypatch.setattr(os, "environ", kept)
    return kept


@pytest.mark.parametrize("theirs", ["", *OURS])
def test_what_is_set_unless_the_user_has(environment, theirs):
    before = dict(environment)
    if theirs:
        environment[theirs] = "theirs"
    process.set_environment(tiny(), Path("/runs/x"))
    changed = {name: value for name, value in environment.items() if name not in before}
    assert changed == OURS | ({theirs: "theirs"} if theirs else {})


@pytest.mark.parametrize("name", OLDER)
def test_the_users_value_wins_under_an_older_name(environment, name):
    environment[OLDER[name]] = "theirs"
    process.set_environment(tiny(), Path("/runs/x"))
    assert name not in environment


def test_the_recorder_can_be_switched_off(environment):
    process.set_environment(tiny("debug.flight_recorder=0"), Path("/runs/x"))
    assert (environment["TORCH_FR_BUFFER_SIZE"], environment["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == (
        "0",
        "0",
    )


BLOCKS_TWICE = """
import resource
from harness.train.process import keep_freed_memory
done = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (64 << 20) for _ in range(2)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(done, faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    "theirs", [{}, {"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}]
)
def test_freed_memory_is_kept(environment, theirs):
    plain = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("MALLOC_", "GLIBC"))
    }
    command = [sys.executable, "-c", BLOCKS_TWICE]
    output = subprocess.run(
        command, env=plain | theirs, cwd=ROOT, check=True, capture_output=True, text=True
    )
    done, first, second = output.stdout.split()
    assert (done == "True") == (not theirs)
    assert int(second) < int(first) / 100 if done == "True" else int(second) > int(first) / 2


def test_matmul_precision_is_the_jobs(environment):
    try:
        set_up_process(tiny("training.matmul_precision=high"))
        assert (
            torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
        )
    finally:
        set_up_process(tiny())
    assert (
        torch.get_float32_matmul_precision() == "highest"
        and not torch.backends.cuda.matmul.allow_tf32
    )
    assert tiny().numerics_id != tiny("training.matmul_precision=high").numerics_id


def test_a_missing_interface_is_one_line(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    message = r"^GLOO_SOCKET_IFNAME=lo,nope0: .* has no network interface nope0; would work: .*lo"
    with pytest.raises(UserError, match=message), process_group(tiny(), torch.device("cpu")):
        pass


def test_launcher_variables_are_ignored_without_a_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")
    with process_group(tiny(), torch.device("cpu")):
        assert local_rank() == 0


def test_communicators_of_gpus_are_made_with_the_mesh(monkeypatch):
    """With a device given, torch splits the communicators of all axes off the first one. Otherwise each is
    made at its first use: those of a pipeline in the middle of a step, one for every two ranks."""
    calls = []

    def record(*_, **options):
        calls.append(options)

    monkeypatch.setattr(torch.distributed, "init_process_group", record)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    device = torch.device("cuda", 1)
    with process_group(tiny("parallelism=pp", "cluster.device=cpu"), device):
        pass
    assert [each["device_id"] for each in calls] == [device]


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def handlers():
    """Handle signals as a foreground process does: a shell may have started the tests with some ignored."""
    before = {
        number: signal.signal(number, signal.default_int_handler) for number in process.STOP_SIGNALS
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def apart(monkeypatch):
    """No two signals are of one key press."""
    monkeypatch.setattr(process, "SAME_KEY_PRESS_SECONDS", 0.0)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("sent", "insists"),
    # Schedulers send SIGTERM to a process and to its group, and a lost terminal several SIGHUPs.
    [
        ([INT], False),
        ([HUP], False),
        ([TERM, TERM, HUP], False),
        ([TERM, INT], True),
        ([INT, INT], True),
    ],
)
def test_a_request_notes_the_first_signal(sent, insists):
    with StopRequest(raises=False) as request:
        assert request.signal is None
        send(*sent)
        assert (request.signal, request.insists) == (sent[0], insists)
    assert {signal.getsignal(number) for number in process.STOP_SIGNALS} == {
        signal.default_int_handler
    }


def test_one_key_press_that_arrives_twice_is_one():
    with StopRequest(raises=False) as request:
        send(INT, INT)
        assert not request.insists


@pytest.mark.usefixtures("apart")
def test_what_raises():
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        send(INT, INT)
    with stop_signals_interrupt(), pytest.raises(KeyboardInterrupt):
        send(TERM)  # before the loop begins


def test_a_pipe_of_stderr_may_be_closed():
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with StopRequest() as request:
            send(TERM)
            assert request.signal == TERM
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)


def test_ignored_signals_stay_ignored():
    signal.signal(HUP, signal.SIG_IGN)
    with StopRequest() as request:
        send(HUP)
        assert request.signal is None
        process.ignore_stop_signals()
    send(TERM)
    assert signal.getsignal(TERM) == signal.SIG_IGN


def test_outside_of_the_main_thread_nothing_is_touched():
    def enter():
        with StopRequest() as request:
            return request.signal

    with ThreadPoolExecutor() as threads:
        assert threads.submit(enter).result() is None


def test_a_row_that_is_being_written_is_not_interrupted(tmp_path, monkeypatch):
    """For completed and failed runs, whether a rank or its controller writes."""
    seen = []

    end = RunRecord.end

    def interrupted(record, *arguments):
        send(INT, TERM)
        seen.append(arguments[0])
        end(record, *arguments)

    def run(name, **options):
        folder = RunFolder(tmp_path / name)
        begin(folder, job, [])
        return launch(job, folder, **options), folder.row

    def fail(*_):
        send(INT)  # requests a stop; a second one would end the run at once
        raise LookupError("a bug")

    job = tiny("training.seq_len=16", "training.steps=2", "checkpoint=disabled")
    monkeypatch.setattr(RunRecord, "end", interrupted)
    code, row = run("done")
    assert code == row["exit_code"] == 0
    monkeypatch.setattr(Engine, "update", fail)
    code, row = run("failed", ends_process=True)
    assert code == 1 and row["error.type"] == "LookupError"
    send(TERM)  # the interpreter takes a while to end
    assert seen == ["completed"] * 2 + ["failed"] * 2


def test_garbage_that_outlives_a_collection_is_freed():
    class Cycle:
        def __init__(self):
            self.itself = self

    made = []
    with process.garbage_collection(2) as collect:
        for step in range(1, 401):
            each = Cycle()  # the one before is garbage after a collection has seen it
            made.append(weakref.ref(each))
            collect(step)
        assert sum(each() is not None for each in made) <= process.COMPLETE_COLLECTION
