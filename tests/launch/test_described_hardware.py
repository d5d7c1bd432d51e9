"""An accelerator that the user describes: plan, search, precision and MFU read the one description."""

from dataclasses import replace

import pytest
from cases import words

from harness.compose.composer import compose_job
from harness.compose.paths import using_folders
from harness.config.cluster import ClusterConfig
from harness.config.fields import leaves, with_value
from harness.config.hardware import HardwareConfig
from harness.config.job import Job
from harness.metrics.mfu import peak_of
from harness.tools.plan.constants import ACHIEVED, Calibration
from harness.tools.plan.machine import device_of, machine_of
from harness.tools.plan.make import START, Measured, calibrate, make_plan, predicted_rate
from harness.tools.report.predictions import machine_of as machine_of_row
from harness.tools.report.predictions import predicted
from harness.util.errors import UserError
from harness.util.hardware import ACCELERATORS, find_accelerator

H20 = """
defaults: [slurm, _self_]
accelerator: H20
network_gbps: 200
hardware:
  device_name: NVIDIA H20
  half_tflops: 148
  float32_tflops: 44
  float8_tflops: 296
  memory_gib: 96
  memory_tb_s: 4.0
  link_gb_s: 450
  units: 78
"""
JOB = words("""
    model=llama3_8b data=synthetic tokenizer=bytes precision=bf16 parallelism.dp_shard=8
""")
SAME = words("""
    half_tflops=989.4 float32_tflops=66.9 float8_tflops=1978.9 memory_gib=80 memory_tb_s=3.35
    link_gb_s=450 units=132
""")
CLUSTER = "cluster=slurm_h100"


@pytest.fixture(scope="module")
def on_h20(tmp_path_factory):
    """A job on the user's cluster, composed from a file of the user."""
    folder = tmp_path_factory.mktemp("my_conf")
    (folder / "cluster").mkdir()
    (folder / "cluster" / "h20.yaml").write_text(H20)
    with using_folders([folder]):
        return compose_job([*JOB, "cluster=h20"])


def test_a_file_of_the_user_describes_an_accelerator(on_h20):
    device = on_h20.cluster.gpu
    assert device is not None and device.name == "H20" and device.source == "cluster.hardware"
    halves = {"bfloat16": 148e12, "float16": 148e12}
    assert device.peak_flops == {**halves, "float32": 44e12, "float8": 296e12}
    assert (device.memory_bandwidth, device.link_bandwidth, device.link) == (4e12, 450e9, "in-node")
    plan = make_plan(on_h20)
    assert plan.speed is not None and plan.speed.mfu is not None and plan.fits is not None
    rate = plan.speed.tokens_per_second_per_rank
    assert plan.speed.mfu == pytest.approx(rate * plan.accounting.flops_per_token_full / 148e12)
    machine = machine_of(on_h20)
    assert machine is not None and machine.network_bandwidth == 25e9
    smaller = with_value(on_h20, "cluster.hardware.memory_gib", 48.0)
    assert (make_plan(smaller).memory_limit or 0) < 48 * 2**30 < (plan.memory_limit or 0)
    # The job is the same on any hardware.
    assert on_h20.id == compose_job([*JOB, "cluster=slurm"]).id
    assert {role for name, role, _ in leaves(on_h20) if name.startswith("cluster.hardware")} == {
        "label"
    }
    assert Job.from_json(on_h20.to_json()).cluster == on_h20.cluster


def test_an_h100_described_by_its_numbers_is_planned_as_an_h100(monkeypatch):
    monkeypatch.setattr("harness.tools.plan.machine.OTHER", ACHIEVED["H100 SXM"])
    known = compose_job([*JOB, CLUSTER, "compile=on"])
    typed = ("cluster.accelerator=Mine", *(f"cluster.hardware.{each}" for each in SAME))
    plan, described = (
        make_plan(job) for job in (known, compose_job([*JOB, CLUSTER, "compile=on", *typed]))
    )
    assert described.speed is not None and plan.speed is not None
    assert described.speed.step_seconds == pytest.approx(plan.speed.step_seconds, rel=1e-9)
    assert described.memory_limit == plan.memory_limit
    # Single numbers of a known accelerator change.
    job, table = with_value(known, "cluster.hardware.memory_gib", 94.0), ACCELERATORS["H100 SXM"]
    changed = replace(table, memory_gib=94.0, source=f"{table.source}, changed by cluster.hardware")
    assert job.cluster.gpu == device_of(job) == changed


def test_runs_are_compared_with_the_described_peaks(on_h20):
    cluster = on_h20.cluster
    assert (
        cluster.with_device("NVIDIA H20") == cluster
        and cluster.with_device("NVIDIA H20-3e") is None
    )
    other = cluster.with_device("NVIDIA H200")
    assert other is not None and (other.accelerator, other.hardware) == (
        "H200 SXM",
        HardwareConfig(),
    )
    assert peak_of("NVIDIA H20", "bfloat16", cluster.gpu).flops == 148e12
    assert find_accelerator("NVIDIA H20") is None
    # A device that drivers do not tell from others is recognized where the user says so.
    described = HardwareConfig(device_name="NVIDIA H100")
    found = ClusterConfig(accelerator="H100 96GB", hardware=described).with_device("NVIDIA H100")
    assert found is not None and found.gpu is not None and found.gpu.memory_gib == 96
    # Rows are predicted on the device that they were measured on.
    here = machine_of_row(
        {"device": "NVIDIA H20", **{f"job.{n}": value for n, _, value in leaves(on_h20)}}
    )
    assert here == cluster
    h100 = compose_job([*JOB, CLUSTER])
    rates = [
        predicted(job, machine)["tokens_per_second_per_rank"]
        for job, machine in ((h100, here), (on_h20, None), (h100, None))
    ]
    assert rates[0] == rates[1] < rates[2]


def test_constants_are_fitted_on_the_described_accelerator(on_h20, tmp_path):
    """Of runs that name no accelerator, the command's cluster describes it."""
    truth = Calibration(replace(START, matmul=0.5))
    unnamed = on_h20.on_accelerator_of(ClusterConfig())
    rows = [Measured(unnamed, predicted_rate(on_h20, truth), "NVIDIA H20")]
    found, runs = calibrate(rows, tmp_path, on_h20.cluster)
    assert found.constants.matmul == pytest.approx(0.5, rel=0.03) and runs[0].job == on_h20
    with pytest.raises(
        UserError, match=r"unknown hardware; would work: .*device_name='NVIDIA H20'"
    ):
        calibrate(rows, tmp_path)
