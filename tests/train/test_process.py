"""Settings of a rank's process: set once, and the user's own settings win."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import tiny

from harness.config.job import Job
from harness.train import process
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


def test_one_line_describes_the_settings_in_force(environment: dict[str, str]) -> None:
    process.set_environment(job(), Path("/runs/x"))
    assert process.describe(job(), "cpu") == "process: float32 products in highest precision"
    assert "all products are; several times as fast on most GPUs: precision=bf16" in process.describe(
        job(), "cuda"
    )
    assert process.describe(job("training.matmul_precision=high", "precision=bf16"), "cuda") == (
        "process: float32 products in high precision, PYTORCH_ALLOC_CONF=expandable_segments:True, "
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"
    )
    assert process.describe(job(), "cpu", keeps_memory=True).endswith("precision, freed memory is kept")


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
