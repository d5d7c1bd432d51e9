"""Rehearsals, as far as no build of torch for CUDA is needed: what is asked, read, compared and shown."""

import dataclasses
from collections import Counter

import pytest
from one_line import one_line
from processes import python

from harness.compose.composer import compose_job
from harness.tools.plan.config import PlanJob
from harness.tools.plan.make import make_plan
from harness.tools.rehearse import build, server
from harness.tools.rehearse.config import RehearseConfig, RehearseJob, ranks_to_rehearse
from harness.tools.rehearse.figures import (
    OUT_OF_MEMORY,
    CollectiveCount,
    Product,
    RankFigures,
    RehearsalFailure,
    Wait,
)
from harness.tools.rehearse.gpu import read_calls, virtual_device
from harness.tools.rehearse.render import (
    as_dict,
    memory_lines,
    render,
    traffic_lines,
)
from harness.tools.rehearse.substitutes import rows_by_rank
from harness.util.errors import UserError
from harness.util.hardware import ACCELERATORS, CUDA_DEVICES, find_accelerator

BASE = ["model=llama3_debug", "data=synthetic", "tokenizer=bytes", "precision=bf16"]


def job_of(*overrides, config_name="rehearse", schema=RehearseJob):
    return compose_job([*BASE, *overrides], config_name=config_name, schema=schema)


def test_a_job_without_hardware_is_rehearsed_on_eight_h100():
    job = job_of("parallelism=fsdp")
    device = virtual_device(job)
    assert (job.world_size, job.cluster.device, job.cluster.accelerator) == (8, "cuda", "H100 SXM")
    assert (device.name, device.major, device.count) == ("NVIDIA H100 80GB HBM3", 9, 8)
    job = job_of("rehearse=true", "parallelism=fsdp", config_name="plan", schema=PlanJob)
    assert (job.world_size, job.cluster.accelerator) == (8, "H100 SXM")


@pytest.mark.parametrize("name", CUDA_DEVICES)
def test_a_virtual_gpu_says_what_the_driver_would(name):
    device, accelerator = virtual_device(job_of(f"cluster.accelerator={name}")), ACCELERATORS[name]
    assert find_accelerator(device.name) == (None if name == "H100 96GB" else accelerator)
    assert 0.98 < device.bytes / (accelerator.memory_gib * 2**30) <= 1
    assert device.multiprocessors == accelerator.units


def test_ranks_that_differ_are_the_first_ones_of_three_pipeline_ranks():
    job = job_of("parallelism=fsdp_pp", "parallelism.pp=4", "model.n_layers=8")
    assert ranks_to_rehearse(job, job.rehearse) == [0, 4, 6]
    assert ranks_to_rehearse(job, RehearseConfig(ranks=[5])) == [5]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("skew", [-1.0, 0.0, 0.5])
def test_every_row_goes_to_some_rank(ranks, skew):
    sent = rows_by_rank(1000, ranks, skew)
    assert (len(sent), sum(sent)) == (ranks, 1000)
    assert sent[0] == round(1000 / ranks * (1 + skew if ranks > 1 else 1))
    assert max(sent[1:], default=0) - min(sent[1:], default=0) <= 1


def test_calls_are_read():
    text = (
        "3\t0\tkernel\tvoid f<int>(int)\n"
        "1\t0\tkernel\ttriton_poi_fused_0\n"
        "4\t0\tkernel\ttriton_poi_fused_0\n"
        "2\t64\tproduct\tbfloat16\tfloat8_e4m3\t1\t2\t4\t8\n"
        "5\t100\tcollective\tall_gather\tid 0\n"
        "4\t40\tpoint to point\tsend\tid 1\n"
        "1\t2\tcommunicator\tid 0\n"
        "1\t24\tcopy\tdevice to pinned\n"
        "1\t0\tunknown\tcudaGraphLaunch\n"
        "7\t0\tmemset\n"
    )
    calls = read_calls(text, Counter({("stream", "train/engine.py:1"): 2}))
    assert calls.kernels == {"void f<int>(int)": 3, "triton_poi_fused_0": 5}
    assert calls.products == {("bfloat16", "float8_e4m3", "1", "2", "4", "8"): (2, 64.0)}
    assert calls.collectives == {("all_gather", "id 0"): (5, 100.0)}
    assert calls.sends == {("send", "id 1"): (4, 40.0)}
    assert (calls.communicators, calls.unknown) == (["id 0"], ["cudaGraphLaunch"])
    assert calls.waits == {("stream", "train/engine.py:1"): 2}


def figures_of(**changes):
    found = RankFigures(
        rank=0,
        pp_rank=0,
        device="NVIDIA H100 80GB HBM3",
        steps=3,
        memory={"parameters": 2.0**30, "allocated": 3.0 * 2**30, "reserved": 4.0 * 2**30},
        kernels={"triton_poi_fused_0": 7},
        products=[Product(2, 1, 8, 4, 16, "bfloat16", 2048.0)],
        collectives=[
            CollectiveCount("dp", "all_gather", 8, 15, 1e6),
            CollectiveCount("ep", "exchange", 8, 4, 1e6),
        ],
        waits=[Wait("parallelism/expert.py:145", "stream", 4)],
        host_seconds=100.0,
        cpu_seconds=100.0,
    )
    return dataclasses.replace(found, **changes)


def test_figures_stand_beside_the_plan():
    plan = make_plan(job_of("parallelism=fsdp").plain)
    memory = {line.name: line for line in memory_lines(figures_of(), plan)}
    assert memory["reserved"].planned == plan.memory[0].peak
    assert memory["reserved"].difference == pytest.approx(4 * 2**30 / plan.memory[0].peak - 1)
    traffic = {(line.name, line.unit): line for line in traffic_lines(figures_of(), plan)}
    assert traffic["dp all_gather", "count"].rehearsed == 15
    assert traffic["dp all_gather", "count"].planned == 15
    assert traffic["dp reduce_scatter", "count"].rehearsed == 0
    assert traffic["ep all_to_all", "count"].planned is None


def test_what_is_shown():
    plan = make_plan(job_of("parallelism=fsdp").plain)
    text = render(plan, [figures_of()])
    assert "THE HOST WOULD KEEP THE GPU WAITING: a step takes 100 s of CPU time here, and" in text
    assert "host waits for the device: parallelism/expert.py:145 4 x (stream)" in text
    assert "2 x [8, 4] [4, 16] bfloat16" in text
    failure = RehearsalFailure(
        OUT_OF_MEMORY, "CUDA out of memory.\nTried to allocate 448.00 MiB.", "model/a.py:1", 0
    )
    figures = figures_of(failure=failure)
    failed = render(plan, [figures])
    assert (
        "OUT OF MEMORY in step 1 at model/a.py:1: CUDA out of memory. Tried to allocate 448.00 MiB."
        in failed
    )
    assert "collectives" not in failed
    plain = as_dict(plan, [figures_of()])["ranks"][0]
    assert {"name": "reserved", "unit": "bytes"}.items() <= plain["against_plan"][2].items()


def test_without_a_build_for_cuda_one_line_says_so():
    if build.cuda_version() is not None:
        pytest.skip("this build of torch has CUDA")
    done = python("-m", "harness", "rehearse", *BASE)
    assert (done.returncode, done.stdout) == (UserError.exit_code, "")
    [line] = done.stderr.splitlines()
    assert (
        line.startswith("error: rehearsals need a build of torch for CUDA")
        and "make rehearsal" in line
    )


def test_a_rank_that_ends_while_it_writes_its_result(tmp_path, monkeypatch):
    """Its exit code and its last words are shown; what it wrote is not read."""
    program = "import sys; open(sys.argv[1], 'w').write('{'); sys.exit('no space left')"
    rank = tmp_path / "harness" / "tools" / "rehearse" / "rank.py"
    rank.parent.mkdir(parents=True)
    rank.write_text(program)
    monkeypatch.setattr(server, "library", lambda: tmp_path)
    monkeypatch.setattr(server, "environment", lambda _: {})
    monkeypatch.chdir(tmp_path)
    figures = server.rehearse_rank(job_of("parallelism=fsdp").plain, 1, RehearseConfig())
    assert figures.failure.message == "ended with exit code 1: no space left"


def test_machines_that_cannot_rehearse(monkeypatch, tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(server, "_DRIVER", tmp_path)
    with one_line(UserError, r"this machine has a GPU.*rehearse.real_gpu=true"):
        server.require_no_gpu(RehearseConfig())
    server.require_no_gpu(RehearseConfig(real_gpu=True))
    monkeypatch.setattr(build, "cuda_version", lambda: "13.0")
    monkeypatch.setenv("PATH", "")
    with one_line(UserError, r"rehearsals need g\+\+; would work: the system's package of GCC"):
        build.require_build()
