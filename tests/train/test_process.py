"""Settings of a rank's process: set once, and the user's own settings win."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import tiny

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.local import launch
from harness.run.folder import RunFolder
from harness.train import process
from harness.train.engine import Engine
from harness.train.process import StopRequest, stop_signals_interrupt
from harness.train.setup import local_rank, process_group, set_up_process
from harness.util.errors import UserError

ROOT = Path(__file__).parents[2]
OURS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
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
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without any of these variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_", "PYTORCH_"))}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def job(*overrides: str) -> Job:
    return tiny(*overrides)


def test_what_is_set(environment: dict[str, str]) -> None:
    before = dict(environment)
    process.set_environment(job(), Path("/runs/x"))
    assert {name: value for name, value in environment.items() if name not in before} == OURS


@pytest.mark.parametrize("name", OURS)
def test_the_users_value_wins(environment: dict[str, str], name: str) -> None:
    environment[name] = "theirs"
    process.set_environment(job(), Path("/runs/x"))
    assert {each: environment[each] for each in OURS} == {**OURS, name: "theirs"}


@pytest.mark.parametrize("name", OLDER)
def test_the_users_value_wins_under_an_older_name(environment: dict[str, str], name: str) -> None:
    environment[OLDER[name]] = "theirs"
    process.set_environment(job(), Path("/runs/x"))
    assert name not in environment
    if name in process.SHOWN:
        assert f"{OLDER[name]}=theirs" in process.describe(job(), "cuda")


def test_the_recorder_can_be_switched_off(environment: dict[str, str]) -> None:
    process.set_environment(job("debug.flight_recorder=0"), Path("/runs/x"))
    assert (environment["TORCH_FR_BUFFER_SIZE"], environment["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("0", "0")


def test_changed_settings_are_shown_in_one_line(environment: dict[str, str]) -> None:
    process.set_environment(job(), Path("/runs/x"))
    assert process.describe(job(), "cpu") == process.describe(job("precision=bf16"), "cuda") == ""
    assert process.describe(job(), "cuda").startswith("process: all products in float32, highest precision (")
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    shown = process.describe(job("precision=bf16"), "cuda")
    assert shown == "process: TORCH_NCCL_ASYNC_ERROR_HANDLING=1"


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
def test_freed_memory_is_kept(environment: dict[str, str], theirs: dict[str, str]) -> None:
    plain = {name: value for name, value in environment.items() if not name.startswith(("MALLOC_", "GLIBC"))}
    command = [sys.executable, "-c", BLOCKS_TWICE]
    output = subprocess.run(command, env=plain | theirs, cwd=ROOT, check=True, capture_output=True, text=True)
    done, first, second = output.stdout.split()
    assert (done == "True") == (not theirs)
    assert int(second) < int(first) / 100 if done == "True" else int(second) > int(first) / 2


def test_matmul_precision_is_the_jobs(environment: dict[str, str]) -> None:
    try:
        set_up_process(job("training.matmul_precision=high"))
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    finally:
        set_up_process(job())
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    assert job().numerics_id != job("training.matmul_precision=high").numerics_id


def test_a_missing_interface_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    job = tiny()
    message = r"^GLOO_SOCKET_IFNAME=lo,nope0: .* has no network interface nope0; would work: .*lo"
    with pytest.raises(UserError, match=message), process_group(job, torch.device("cpu")):
        pass


def test_launcher_variables_are_ignored_without_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")
    job = tiny()
    with process_group(job, torch.device("cpu")):
        assert local_rank() == 0


def test_communicators_of_gpus_are_made_with_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device given, torch splits the communicators of all axes off the first one. Otherwise each is
    made at its first use: those of a pipeline in the middle of a step, one for every two ranks."""
    calls: list[dict[str, object]] = []

    def record(*_: object, **options: object) -> None:
        calls.append(options)

    monkeypatch.setattr(torch.distributed, "init_process_group", record)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    device = torch.device("cuda", 1)
    with process_group(job("parallelism=pp", "cluster.device=cpu"), device):
        pass
    assert [each["device_id"] for each in calls] == [device]


TINY = (
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "metrics.console=none"),
    *("training.seq_len=16", "training.global_batch_size=2", "training.steps=4", "checkpoint.enable=false"),
)


@pytest.fixture(autouse=True)
def _python_answers_to_interrupts() -> object:
    """Handle SIGINT as a foreground process does, also if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_handlers_come_back(number: int) -> None:
    # A shell may have started the tests with SIGHUP ignored (nohup), and ignored signals stay ignored.
    outer = signal.signal(number, signal.default_int_handler)
    try:
        with StopRequest() as request:
            assert request.signal is None
            send(number)
            assert request.signal == number and not request.insists
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, outer)


def test_a_pipe_of_stderr_may_be_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with StopRequest() as request:
            send(signal.SIGTERM)
            assert request.signal == signal.SIGTERM
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)


def test_a_second_interrupt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SAME_KEY_PRESS_SECONDS", 0.0)
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_one_key_press_that_arrives_twice_is_one() -> None:
    with StopRequest(raises=False) as request:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert not request.insists


def test_a_second_termination_does_not_insist(monkeypatch: pytest.MonkeyPatch) -> None:
    # Schedulers send SIGTERM to a process and to its group, and a lost terminal several SIGHUPs.
    monkeypatch.setattr(process, "SAME_KEY_PRESS_SECONDS", 0.0)
    with StopRequest(raises=False) as request:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert not request.insists
        send(signal.SIGINT)
        assert request.insists and request.signal == signal.SIGTERM


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            send(signal.SIGHUP)
            assert request.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    seen = []

    def enter() -> None:
        with StopRequest() as request:
            seen.append(request.signal)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]


def test_termination_interrupts_before_the_loop_begins() -> None:
    with stop_signals_interrupt(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_signals_that_are_ignored_meanwhile_stay_so_when_a_request_ends() -> None:
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    try:
        with StopRequest():
            process.ignore_stop_signals()
        send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_row_that_is_being_written_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For completed and failed runs, whether a rank or its controller writes."""
    job = compose_job([*TINY, f"runs_dir={tmp_path}"])
    write_result, ensure_result, seen = RunFolder.write_result, RunFolder.ensure_result, []

    def interrupt(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def interrupted(*arguments: Any) -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                send(number)
            seen.append(name)
            call(*arguments)

        return interrupted

    monkeypatch.setattr(RunFolder, "write_result", interrupt("write_result", write_result))
    monkeypatch.setattr(RunFolder, "ensure_result", interrupt("ensure_result", ensure_result))
    folder = RunFolder(tmp_path / "done")
    begin(folder, job, [])
    assert launch(job, folder) == 0 and folder.row["exit_code"] == 0

    def fail(*_: object) -> None:
        send(signal.SIGINT)  # requests a stop; a second one would end the run at once
        raise LookupError("a bug")

    monkeypatch.setattr(Engine, "update", fail)
    folder = RunFolder(tmp_path / "failed")
    begin(folder, job, [])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launch(job, folder, ends_process=True) == 1 and folder.row["error.type"] == "LookupError"
        send(signal.SIGTERM)  # the interpreter takes a while to end
    finally:
        for number in process.STOP_SIGNALS:
            signal.signal(number, before if number != signal.SIGINT else signal.default_int_handler)
    assert seen == ["write_result", "ensure_result"] * 2
