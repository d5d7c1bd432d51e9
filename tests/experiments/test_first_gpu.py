"""A first measurement: rows and their table, limits, checks that can fail, and the script without a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import python

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "first_gpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "cpu_baseline"))

import bare_loop
import checks
import first_gpu
import pack
import run

from harness.compose.composer import compose_job
from harness.config.cluster import ClusterConfig
from harness.launch.rows import read_kept
from harness.model.accounting import account
from harness.tools.plan.verb import _calibrate
from harness.tools.rehearse.build import library
from harness.tools.rehearse.rank import CONTROLLER
from harness.tools.rehearse.server import environment
from harness.util.errors import UserError

FOLDER = Path(first_gpu.__file__).parent
H100 = {
    "device": "NVIDIA H100 80GB HBM3",
    "software": {"torch": "2.13.0", "triton": "3.7", "cudnn": 9},
}
POINT = "8 layers of 8B, compiled"


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A call on an H100 that trains at 26,000 tokens/s, and the bare loop at 25,000."""
    for name in (CONTROLLER, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def trained(overrides, *_):
        figures = {"tokens_per_second": 26000.0, "step_seconds": 0.3, "memory_gib": 50.0}
        return figures | {"first_step_seconds": 20.0, "overrides": overrides}

    def bare(command, *_):
        output = Path(command[command.index("--output") + 1])
        output.write_text(json.dumps({"tokens_per_second": 25000.0, "memory_gib": 40.0}))
        return ""

    real = run.run_for_output
    monkeypatch.setattr(run, "run_for_output", lambda *_: (json.dumps(H100), ""))
    made = first_gpu.Session(first_gpu.parse_arguments(["speed", "--out", str(tmp_path)]))
    monkeypatch.setattr(run, "run_for_output", real)
    monkeypatch.setattr(run, "run_job", trained)
    monkeypatch.setattr(run, "run_process", bare)
    return made


def test_a_plan_is_calibrated_by_the_rows(session):
    """And the table has the bare loop, the plan and the ceiling of the same call beside a job."""
    session.keep("product", tflops=700.0)
    session.train(POINT, 100, 100)
    session.keep(POINT, "torchtitan", tokens_per_second=24000.0)
    rows = read_kept(session.out)
    fitted = _calibrate(session.out, None, ClusterConfig())
    assert "1 run of" in fitted.text and "3 rows without a throughput" in fitted.text
    table = first_gpu.render(rows)
    [line] = [line for line in table.splitlines() if line.startswith(f"| {POINT}")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:4] == [POINT, "26,000", "25,000", "1.040"]
    assert cells[-1] == "24,000"
    job = compose_job([*first_gpu.JOBS[POINT], "cluster=slurm_h100"])
    flops = 26000 * account(job.model, 8192).flops_per_token_full
    assert cells[6:8] == [f"{flops / 989.4e12:.1%}", f"{flops / 700e12:.1%}"]
    planned = rows[1]["planned.tokens_per_second"]
    assert cells[4:6] == [f"{planned:,.0f}", f"{26000 / planned:.3f}"]


def test_a_virtual_gpu_calibrates_nothing(session):
    session.is_virtual = True
    session.train(POINT, 100, 100)
    assert {row["state"] for row in read_kept(session.out)} == {"virtual"}
    with pytest.raises(UserError, match="no completed run"):
        _calibrate(session.out, None, ClusterConfig())
    assert "no value and no time here means anything" in first_gpu.render(read_kept(session.out))


def test_a_job_over_its_limit_is_ended(session, tmp_path):
    """With the rows that it had printed; and none begins when the call's time is over."""
    script = tmp_path / "slow.py"
    row = {"point": "copy", "gb_per_second": 3000.0}
    script.write_text(f"import time\nprint('{json.dumps(row)}', flush=True)\ntime.sleep(600)\n")
    session.script("ceilings", 5, str(script))
    session.began -= first_gpu.CALL_SECONDS
    session.train(POINT, 100)
    first, ended, late = read_kept(session.out)
    assert (first["point"], first["state"]) == ("copy", "completed")
    assert (ended["state"], ended["reason"]) == ("failed", "took longer than 5 s")
    assert (late["point"], late["kind"]) == (POINT, "no time")
    assert f"- {POINT}, harness: no time" in first_gpu.render(read_kept(session.out))


@pytest.mark.parametrize("point", first_gpu.BARE)
def test_the_bare_loop_has_as_many_parameters(point):
    job = compose_job([*first_gpu.JOBS[point], "cluster=slurm_h100"])
    with torch.device("meta"):
        bare = bare_loop.Llama(bare_loop.Shape(**first_gpu.shape_of(job)))
    assert sum(each.numel() for each in bare.parameters()) == account(job.model, 8192).parameters


def test_checks_find_what_is_wrong(monkeypatch):
    for name, error, allowed in checks.kernels("cpu"):
        assert error <= allowed, name
    right = checks.in_plain_operations
    monkeypatch.setattr(
        checks, "in_plain_operations", lambda q, k, table, way, lace: right(q, k, table, -way, lace)
    )
    assert checks.largest(checks.rotation_errors("cpu", torch.float32)) > 0.1
    assert math.isnan(checks.largest([0.0, math.nan, 1.0]))
    assert checks.largest_difference([2.0, 4.0], [2.0, 5.0]) == pytest.approx(0.2)


def test_packages_are_those_of_the_lock():
    for names in (pack.PACKAGES, pack.SOURCES):
        lines = pack.locked(names).splitlines()
        assert [line.partition("==")[0] for line in lines if "==" in line] == list(names)
        assert all("==" in line or "--hash=sha256:" in line for line in lines)


def test_what_is_packed_has_no_links(tmp_path):
    pack.copy_files(tmp_path)
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert (tmp_path / "conf/model/llama3_8b.yaml").is_file()
    assert json.loads((tmp_path / "commit.json").read_text()).keys() == {"commit", "dirty"}


def test_the_script_without_a_gpu(tmp_path):
    """A job and its bare loop end to end; the large ones are refused."""
    script = str(FOLDER / "first_gpu.py")
    refused = python(script, "speed", "--out", str(tmp_path))
    assert refused.returncode == 1 and "--tiny tries the script" in refused.stderr
    words = ["--tiny", "--only", "eager", "--patience", "10", "--out", str(tmp_path)]
    done = python(script, "speed", *words)
    assert done.returncode == 0, done.stderr
    rows = read_kept(tmp_path)
    assert {row["state"] for row in rows} == {"completed"}
    sides = [row["side"] for row in rows if row["point"] == "8 layers of 8B, eager"]
    assert sides == ["harness", "bare"]
    assert "Tiny models" in done.stdout


@pytest.mark.rehearsal
@pytest.mark.parametrize("call", first_gpu.CALLS)
def test_the_script_on_a_virtual_gpu(call, tmp_path):
    """All of it at full size, by flash attention: only rehearsals have a substitute for cuDNN."""
    variables = environment(library()) | {
        "CUDA_VISIBLE_DEVICES": "0",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    command = [sys.executable, str(FOLDER / "first_gpu.py"), call, "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--patience", "8"], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = read_kept(tmp_path)
    failed = [row for row in rows if row["state"] == "failed" and row["kind"] != "absent"]
    assert not failed
    assert all(row.get("passed") is None for row in rows)
    assert "measured.tokens_per_second_per_rank" not in {key for row in rows for key in row}
