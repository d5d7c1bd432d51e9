"""Fields of ``cluster`` that change a SLURM job's options; without SLURM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch import node_check, queue
from harness.launch.begin import begin
from harness.launch.slurm import Submission, shape_of
from harness.launch.slurm_attempt import srun_command
from harness.launch.submit import confirm, cost_in_words
from harness.run.folder import RunFolder
from harness.train import setup
from harness.train.setup import pick_device
from harness.util.errors import ConfigError, UserError


def job(*overrides: str) -> Job:
    made: Job = compose_job(["training.global_batch_size=64", "cluster=slurm", *overrides])
    return made


def commands_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put shell scripts first in PATH."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, text in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


REFUSED = """
cluster.sbatch={job-name: x} => job-name=x: the harness sets --job-name itself; would work: name
cluster.sbatch={job_name: x} => job_name=x: the harness sets --job-name itself; would work: name
cluster.sbatch={job-n: x} => job-n=x: the harness sets --job-name itself
cluster.sbatch={wait: true} => wait=true: the harness sets --wait itself; would work: cluster.wait
cluster.sbatch={output: x} => output=x: the harness sets --output itself; would work: runs_dir
cluster.sbatch={parsable: true} => parsable=true: the harness sets --parsable itself
cluster.sbatch={gpus-per-task: 1} => gpus-per-task=1: the harness sets --gpus-per-task itself
cluster.sbatch={wrap: ls} => wrap=ls: the harness sets --wrap itself; would work: cluster.setup
cluster.sbatch={gres: gpu:8} => gres=gpu:8: the harness asks for GPUs itself
cluster.sbatch={J: x} => J=x: must be the long name of an option
cluster.srun_args=['--ntasks=1'] => srun_args=--ntasks=1: the harness sets --ntasks of srun itself
cluster.srun_args=['-n4'] => srun_args=-n4: the harness sets --ntasks of srun itself
cluster.srun_args=['--kill=0'] => srun_args=--kill=0: the harness sets --kill-on-bad-exit of srun itself
cluster.distribution=cyclic => distribution=cyclic: must begin with block
cluster.socket_ifname='^lo' => socket_ifname=^lo: must be full interface names
cluster.ib_hca='mlx5 0' => ib_hca=mlx5 0: must have the form of NCCL_IB_HCA
cluster.gpu_bind='a b' => gpu_bind=a b: must be a value of SLURM's --gpu-bind
cluster.node_check=on => node_check=on: no such choice; would work: off, fail, exclude
cluster.env={a-b: 1} => env.a-b=1: is not a valid variable name
"""


@pytest.mark.parametrize("line", REFUSED.splitlines()[1:])
def test_an_option_that_the_harness_sets_is_refused_with_the_field_to_use(line: str) -> None:
    typed, says = line.split(" => ")
    with pytest.raises(ConfigError) as refused:
        job(typed)
    assert str(refused.value).startswith(
        f"cluster.{says}" if "sbatch" not in typed else f"cluster.sbatch.{says}"
    )


def test_other_options_pass() -> None:
    options = (
        "{reservation: night, mail-type: END, gres: 'nvme:1', wait-all-nodes: 1, time-min: 10, hold: true}"
    )
    asked = dict(
        shape_of(job(f"cluster.sbatch={options}", "cluster.srun_args=['--cpu-bind=none','-v']")).options
    )
    assert asked["gres"] == "nvme:1" and asked["hold"] is True


def test_gpus_are_asked_for_by_gres_and_ranks_are_bound(tmp_path: Path) -> None:
    made = job(
        "cluster.gres=true", "cluster.gpu_type=a100", "cluster.gpu_bind=closest", "cluster.distribution=null"
    )
    options = dict(shape_of(made).options)
    assert options["gres"] == "gpu:a100:1" and "gpus-per-node" not in options
    command = srun_command(made, tmp_path)
    assert "--gpu-bind=closest" in command
    assert not [option for option in command if option.startswith("--distribution")]


def test_the_users_variables_win_over_those_of_fields() -> None:
    asked = shape_of(job("cluster.socket_ifname=ib0", "cluster.env.NCCL_SOCKET_IFNAME=ib"))
    assert asked.exports == ("export NCCL_SOCKET_IFNAME=ib", "export GLOO_SOCKET_IFNAME=ib0")


PARTITIONS = """
PartitionName=main Default=YES DefaultTime=02:30:00 MaxTime=7-00:00:00
PartitionName=long DefaultTime=NONE MaxTime=1-00:00:00
PartitionName=free DefaultTime=NONE MaxTime=UNLIMITED
"""


def test_a_time_limit_that_is_not_given_is_the_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("cluster.time=null")
    assert "time" not in dict(shape_of(made).options)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the partition's time limit, which is not known here" in cost_in_words([made])
    with pytest.raises(UserError, match=r"cluster\.time=null: there is no scontrol here"):
        confirm([made])
    commands_in(tmp_path, monkeypatch, scontrol=f"printf '{PARTITIONS.strip()}'")
    queue.partition_minutes.cache_clear()
    assert cost_in_words([made]) == "at most 2.5 GPU-hours"
    assert (
        cost_in_words([job("cluster.time=null", "cluster.partition='free,long'")]) == "at most 8760 GPU-hours"
    )
    made = with_value(made, "cluster.partition", "long")
    assert cost_in_words([made]) == "at most 24 GPU-hours"
    queue.partition_minutes.cache_clear()


def run_script(made: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    """Run the sbatch script of a job by bash, as SLURM does on the first node."""
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    script = folder / "job.sh"
    script.write_text(Submission([made], [folder], folder, "x").script())
    return subprocess.run(["bash", str(script)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("setup", "line", "code"),
    [
        ("['export A=1','ls /nonexistent && echo','false','echo reached']", "false", 1),
        ("['module() { test $2 = gcc; }','module load cuda','echo reached']", "module load cuda", 1),
        ("['for i in 1 2; do','exit 4','done','echo reached']", "exit 4", 4),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_run_and_is_named(
    setup: str, line: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(f"cluster.setup={setup}", "cluster.snapshot=false")
    folder = RunFolder(tmp_path / "it's 100%")
    begin(folder, made, [], state="submitted")
    ended = run_script(made, folder.path, monkeypatch)
    assert ended.returncode == 2 and "reached" not in ended.stdout, ended.stderr
    says = f"cluster.setup={line}: this line ended with exit code {code} on node7"
    assert f"error: {says}" in ended.stderr
    assert folder.state == "failed"
    assert folder.row["error.kind"] == "user" and folder.row["error.message"].startswith(says)


def test_a_script_whose_run_folder_is_not_there_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_script(job(), tmp_path, monkeypatch)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path}/job.json is missing: submit the job with the harness")
    planned = Submission([job()], [tmp_path], tmp_path, "x").script(planned=True)
    assert "#SBATCH --output=slurm-%j_0_log.out\n" in planned


def test_setup_that_bash_cannot_read_is_refused_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_in(tmp_path, monkeypatch, sbatch="echo 7", srun="")
    with pytest.raises(ConfigError, match=r"cluster.setup=.*bash cannot read it: line 2: syntax error"):
        Submission([job("cluster.setup=['if true; then']")], [tmp_path], tmp_path, "x").submit()


def test_a_percent_sign_in_a_path_is_not_a_field_of_slurms(tmp_path: Path) -> None:
    home = tmp_path / "%j"
    assert f"--output={tmp_path}/%%j/slurm/%j_0_log.out" in Submission([job()], [home], home, "x").script()
    jobs = [job("training.seed=1"), job("training.seed=2")]
    assert f"{tmp_path}/%%j/slurm/%A_%a_0_log.out" in Submission(jobs, [home] * 2, home, "x").script()


def test_a_configuration_of_slurms_that_is_not_there_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_in(tmp_path, monkeypatch, sbatch="sleep 60", srun="", squeue="sleep 60")
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    for ask in (queue.require_slurm, queue.jobs):
        with pytest.raises(UserError, match="SLURM_CONF=/nonexistent: this file cannot be read"):
            ask()


def test_errors_of_sbatch_are_shown_once_and_waiting_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "ANSWER_SECONDS", 0.05)
    commands_in(
        tmp_path, monkeypatch, sbatch="sleep 0.3; echo 'sbatch: error: no such partition' >&2; exit 1"
    )
    with pytest.raises(UserError) as refused:
        queue.submit_script(tmp_path / "x.sh")
    assert str(refused.value) == "sbatch refuses the job: sbatch: error: no such partition"
    assert capsys.readouterr().err.startswith("waiting for sbatch, which has not reached the scheduler yet")
    commands_in(tmp_path, monkeypatch, sbatch="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(queue.SlurmError):
        queue.submit_script(tmp_path / "x.sh")
    commands_in(tmp_path, monkeypatch, sbatch="echo '4711;cluster'")
    assert queue.submit_script(tmp_path / "x.sh") == "4711"


TORCH = "torch sees no CUDA device on node7"


@pytest.mark.parametrize(
    ("device", "visible", "driver", "built", "says"),
    [
        ("cuda", "", None, "13.0", f"{TORCH}; would work: cpu, auto"),
        ("cuda", "NoDevFiles", "535.104.05", "13.0", f"{TORCH}; would work: cpu, auto"),
        ("auto", "", "535.104.05", "13.0", None),
        ("auto", "0", None, "13.0", None),
        ("cpu", "0", "535.104.05", "13.0", None),
        ("auto", "0", "535.104.05", "13.0", "driver 535.104.05: .* 13.0; would work: .* CUDA 12.6, or cpu"),
        ("cuda", "0", "595.45", None, "without CUDA; would work: a build of torch for CUDA 13.0, or cpu"),
        ("auto", "0", "470.82.01", "12.6", "would work: a driver of at least 525, or cpu"),
        ("auto", "0", "580.65.06", "13.0", "would work: GPUs that nvidia-smi shows without errors, or cpu"),
    ],
)
def test_gpus_that_torch_cannot_use(
    device: str,
    visible: str,
    driver: str | None,
    built: str | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr(setup, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if driver is not None:
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19 01:15:15 UTC 2023\n"
        (tmp_path / "version").write_text(f"{line}GCC version:  gcc version 12.3.0 (Ubuntu)\n")
    if says is None:
        assert pick_device(job(f"cluster.device={device}")).type == "cpu"
        return
    with pytest.raises(ConfigError, match=says):
        pick_device(job(f"cluster.device={device}"))


SICK = "0, 12, 81559, 0\n1, 40960, 81559, 0\n2, 0, 81559, 3\n3, 0, 16000, [N/A]"


def test_faults_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    commands_in(tmp_path, monkeypatch, nvidia_smi=f"printf '{SICK}'")
    assert node_check.faults_here(tmp_path, 0) == []
    assert node_check.faults_here(tmp_path, 8) == [
        "4 of 8 GPUs found",
        "GPU 1 has 40.0 GiB of memory in use",
        "GPU 2 has 3 uncorrected memory errors",
    ]
    commands_in(tmp_path, monkeypatch, nvidia_smi="echo 'Unable to talk: GPU is lost'; exit 15")
    assert node_check.faults_here(tmp_path, 1) == ["nvidia-smi: Unable to talk: GPU is lost"]
    (tmp_path / "meminfo").write_text(f"MemTotal: {100 * 2**20} kB\nMemAvailable: {2**20} kB\n")
    assert node_check._memory_faults(tmp_path / "meminfo") == ["1.0 GiB of 100.0 GiB of memory are free"]
    assert node_check._folder_faults(tmp_path / "none") == [
        f"cannot write into {tmp_path / 'none'}: No such file or directory"
    ]


def test_nodes_that_fail_the_check_or_do_not_answer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = '{"n1": []}\\n{"n2": ["4 of 8 GPUs found"]}'
    srun = f"printf '{answers}'; echo 'srun: error: n3: oops' >&2; exit 1"
    commands_in(tmp_path, monkeypatch, srun=srun, scontrol="echo n1 n2 n3")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    with pytest.raises(node_check.UnfitNodes) as unfit:
        node_check.check_nodes(job(), tmp_path)
    assert str(unfit.value) == "n2: 4 of 8 GPUs found; n3: srun: error: n3: oops"
    assert unfit.value.kind == "node"
