"""The comparison of two jobs: every line of it, and JSON; tests/test_user_errors.py has the mistakes."""

from dataclasses import replace

import pytest
from cases import words

from harness.compose.composer import compose_job
from harness.tools.plan.compare import changed_fields, render_differences
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import KINDS, PARTS, Speed, Traffic
from harness.tools.plan.verb import plan
from harness.util.encoding import dumps, loads

GIB = 2**30
SMALL = words("""
    model=llama3_debug cluster=slurm_h100 cluster.dollars_per_gpu_hour=2
    training.global_batch_size=8
""")


def planned(*overrides):
    return make_plan(compose_job([*SMALL, *overrides], config_name="plan", schema=PlanJob).plain)


@pytest.fixture(scope="module")
def pair():
    """Plans with made-up values, of a job on 4 GPUs and one on 8."""
    first, second = (
        planned("parallelism.dp_shard=4"),
        planned("parallelism.dp_shard=2", "parallelism.tp=4"),
    )
    none = dict.fromkeys(PARTS, 0.0)

    def made(plan, kinds, parts, *traffic):
        held = dict.fromkeys(KINDS, 0.0)
        held |= {"parameters": kinds[0] * GIB, "activations": kinds[1] * GIB}
        step = sum(parts.values())
        return replace(
            plan,
            memory=[replace(plan.memory[0], kinds=held)],
            memory_limit=10 * GIB,
            traffic=list(traffic),
            speed=Speed(step, none | parts, 16384 / step / plan.job.world_size, 0.5),
        )

    gathers = [Traffic("dp", "all_gather", 4, 10, 4 * GIB, "NVLink", 0.2, 0.1)]
    gathers += [Traffic("dp", "all_gather", 2, 10, 1 * GIB, "NVLink", 0.1, 0.0)]
    reduces = Traffic("tp", "all_reduce", 4, 10, 8 * GIB, "NVLink", 0.3, 0.3)
    a = made(first, (2, 7), {"compute": 0.9, "dp": 0.1}, gathers[0])
    b = made(second, (1, 9.5), {"compute": 0.52, "tp": 0.28}, gathers[1], reduces)
    return a, b


def test_every_line(pair):
    """Half the step's time on twice the GPUs would be as cheap; what costs more is named."""
    assert (
        render_differences(*pair)
        == """\
A  llama3_debug on 4 x H100 SXM: dp_shard 4
B  llama3_debug on 8 x H100 SXM: dp_shard 2 x tp 4

  field                      A  B
  training.local_batch_size  2  4
  parallelism.dp_shard       4  2
  parallelism.tp             1  4

memory at its peak, GiB on the fullest rank
  kind            A      B  B - A
  parameters   2.00   1.00  -1.00
  activations  7.00   9.50  +2.50
  peak         9.00  10.50  +1.50
  left         1.00  -0.50  -1.50

communication in a step, GiB that the busiest rank sends
  axis              A     B  B - A
  dp all_gather  4.00  1.00  -3.00
  tp all_reduce     -  8.00  +8.00

a step, predicted; change: of A's device time for a token
  part                            A       B  change
  computing                  900 ms  520 ms  +14.0%
  dp communication, exposed  100 ms       -  -10.0%
  tp communication, exposed       -  280 ms  +56.0%
  the step                   1.00 s  800 ms  +60.0%

                             A       B  change
tokens/s per GPU         4,096   2,560  -37.5%
tokens/s in all         16,384  20,480  +25.0%
MFU                      50.0%   50.0%   +0.0%
GPU-hours of all steps   0.111   0.178  +60.0%
dollars                  0.222   0.356  +60.0%
fits                       yes      NO
"""
    )


def test_other_models_differ_by_name():
    """Their other fields are not listed; those of the job are, with what changes the numbers."""
    fields = changed_fields(planned().job, planned("model=qwen3_debug").job)
    names = [each["name"] for each in fields]
    assert [name for name in names if name.startswith("model.")] == ["model.name"]
    fields = changed_fields(planned().job, planned("precision=bf16", "compile=on").job)
    assert {each["name"]: each["numerics"] for each in fields} == {
        "precision.param_dtype": True,
        "compile.enable": False,
    }


def compared(against, *overrides):
    typed = [*SMALL, *overrides, f"against={against}"]
    return plan(compose_job(typed, config_name="plan", schema=PlanJob), typed)


def test_from_the_command_line():
    """The second job has the overrides of the first and its own; both are planned as they are alone."""
    result = compared("parallelism.tp=2 data.paths=[a,b]", "parallelism=fsdp", "cluster.nodes=1")
    plain = loads(dumps(result.data))
    assert plain["a"]["mesh"]["dp_shard"] == 8 and plain["b"]["mesh"]["dp_shard"] == 4
    assert {each["name"] for each in plain["fields"]} >= {"parallelism.tp", "data.paths"}
    alone = planned("parallelism=fsdp", "cluster.nodes=1", "parallelism.tp=2")
    assert plain["b"]["memory_peak"] == alone.peak
    assert result.text.startswith("A  llama3_debug on 8 x H100 SXM: dp_shard 8\nB  ")


def test_without_a_known_device_there_is_memory_only():
    result = compared("parallelism.tp=2", "cluster.accelerator=null", "parallelism.dp_shard=2")
    assert result.data["b"]["speed"] is None and "tokens/s" not in result.text
    assert "\na step: unknown; a plan without against says" in result.text
    assert "peak" in result.text


def test_a_file_of_a_calibration_is_that_of_both(tmp_path):
    file = tmp_path / "own.json"
    Calibration(Constants(matmul=0.1)).write(str(file))
    usual, own = (
        compared("parallelism.tp=2"),
        compared("parallelism.tp=2", f"calibration={tmp_path}/own.json"),
    )
    assert all(usual.data[job]["speed"] != own.data[job]["speed"] for job in "ab")
