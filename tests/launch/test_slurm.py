"""Scripts and options for SLURM, its commands and checks, without SLURM. Tests with SLURM: tests/slurm."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from harness.compose.composer import compose_job
from harness.config.cluster import minutes_of
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch import faults, queue
from harness.launch import slurm as slurm_module
from harness.launch import slurm_attempt as attempt
from harness.launch.begin import begin
from harness.launch.faults import RankDied, dead_ranks
from harness.launch.queue import Queued, SlurmError
from harness.launch.slurm import (
    LARGEST_BYTES,
    Submission,
    _environment_for_submitting,
    shape_of,
    snapshot_path,
    take_snapshot,
)
from harness.launch.slurm_attempt import srun_command
from harness.launch.state import JobLost, SlurmJobRecord
from harness.launch.submit import confirm, cost_in_words
from harness.run.folder import RunFolder
from harness.train import setup
from harness.train.process import rank_environment, rendezvous_store
from harness.train.setup import pick_device
from harness.util.errors import ConfigError, MachineError, UserError

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=pretraining
#SBATCH --constraint='hbm80&ib'
#SBATCH --cpus-per-task=12
#SBATCH --exclude='node[13-14]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:8
#SBATCH --job-name=llama3_8b.ID
#SBATCH --mail-type=END
#SBATCH --mem=0
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=HOME/slurm/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=5760

# setup
trap : TERM USR2
[ -f HOME/job.json ] || { echo 'error: HOME/job.json is missing: \
submit the job with the harness, and without cluster.dry_run' >&2; exit 2; }
export NCCL_IB_HCA=mlx5_0,mlx5_3
export NCCL_SOCKET_IFNAME==bond0
export GLOO_SOCKET_IFNAME=bond0
export NCCL_DEBUG=INFO
export GREETING='two words'
setup_failed() {
  trap - EXIT DEBUG
  [ "$1" = 143 ] && exit 143
  export PYTHONPATH=HOME/code/DIGEST${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
  exec PYTHON -u -m harness.launch.batch HOME --code HOME/code/DIGEST \
--setup-failed "$1" --line="$(sed -n "$2p" "$0")"
}
trap 'setup_failed $? $setup_line' EXIT
trap '[ "$LINENO" = 1 ] || setup_line=$LINENO' DEBUG
set -e
# cluster.setup
module load cuda
# end of cluster.setup
set +e
trap - EXIT DEBUG
export PYTHONPATH=HOME/code/DIGEST${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u -m harness.launch.batch HOME --code HOME/code/DIGEST
"""


def job(*overrides: str) -> Job:
    made: Job = compose_job(["training.global_batch_size=64", *overrides])
    return made


def test_the_script_is_this_one(tmp_path: Path) -> None:
    made = job(
        *("model=llama3_8b", "parallelism=fsdp_tp", "parallelism.dp_shard=8", "parallelism.tp=4"),
        *("cluster=slurm_h100", "cluster.account=pretraining", "cluster.partition=gpu", "cluster.qos=high"),
        *("cluster.constraint='hbm80&ib'", "cluster.exclude='node[13-14]'", "cluster.time=4-00:00:00"),
        *("cluster.gpu_type=h100", "cluster.signal_seconds=300", "cluster.sbatch={mail-type: END}"),
        *("cluster.setup=['module load cuda']", "cluster.env.NCCL_DEBUG=INFO"),
        "cluster.env.GREETING='two words'",
        *("cluster.socket_ifname=bond0", "cluster.ib_hca='mlx5_0,mlx5_3'"),
    )
    script = Submission([made], [tmp_path], tmp_path, f"{made.name}.{made.id}").script()
    told = {
        str(tmp_path): "HOME",
        made.id: "ID",
        sys.executable: "PYTHON",
        snapshot_path(tmp_path).name: "DIGEST",
    }
    for word, name in told.items():
        script = script.replace(word, name)
    assert script == GOLDEN
    assert not any(tmp_path.iterdir()), "a script is only text"


def test_points_of_one_shape_are_one_array(tmp_path: Path) -> None:
    jobs = [job("cluster=slurm", "cluster.max_running=2", f"training.seed={seed}") for seed in (1, 2, 3)]
    assert len({shape_of(each) for each in jobs}) == 1
    script = Submission(jobs, [tmp_path] * 3, tmp_path, "many").script()
    assert "#SBATCH --array=0-2%2" in script
    assert f"harness.launch.batch --list {tmp_path}/slurm/many.runs" in script
    assert "%A_%a" in re.search("--output=(.*)", script)[1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ("cluster=slurm", (1, 1)),
        ("cluster=slurm parallelism.dp_shard=-1", (1, 8)),
        ("cluster=slurm parallelism.dp_shard=4", (1, 4)),
        ("cluster=slurm parallelism.dp_shard=16", (2, 8)),
        ("cluster=slurm parallelism.dp_shard=-1 cluster.nodes=4", (4, 8)),
        ("cluster=slurm parallelism.dp_shard=-1 cluster.ranks=16 cluster.ranks_per_node=4", (4, 4)),
        ("cluster=slurm parallelism.dp_shard=-1 cluster.ranks=8 cluster.nodes=2", (2, 4)),
        ("cluster=slurm_cpu parallelism.dp_shard=4 parallelism.tp=2", (4, 2)),
    ],
)
def test_nodes_follow_from_the_layout(overrides: str, shape: tuple[int, int]) -> None:
    made = job(*overrides.split())
    asked = shape_of(made)
    assert (asked.nodes, asked.ranks_per_node) == shape
    options = dict(asked.options)
    assert (options["nodes"], options["ntasks-per-node"]) == shape
    assert options.get("gpus-per-node") == (None if made.cluster.device == "cpu" else str(shape[1]))


MISTAKES = """
cluster=slurm parallelism.dp_shard=9 training.global_batch_size=9
    cluster.ranks_per_node=8: 9 ranks do not fill 2 nodes of 8 evenly
    ; would work: degrees that multiply to 8 or 16
cluster=slurm parallelism.dp_shard=4 cluster.nodes=2
    parallelism.dp_shard=4: the degrees multiply to 4 (dp_shard=4), but there are 16 ranks
cluster=slurm cluster.time=soon
    cluster.time=soon: must be a time in one of sbatch's forms; would work: 90, 1:30:00, 2-12:00:00
cluster=slurm cluster.time=1 cluster.signal_seconds=60
    cluster.signal_seconds=60: must be less than cluster.time=1
cluster=slurm cluster.sbatch.partition=gpu
    cluster.sbatch.partition=gpu: the harness sets --partition itself; would work: cluster.partition
cluster=slurm cluster.sbatch={mail-type:[END,FAIL]}
    cluster.sbatch.mail-type=[END,FAIL]: must be one value, or true for an option without one
cluster=slurm cluster.ranks_per_node=null
    cluster.ranks_per_node=null: must be set with cluster.kind=slurm; would work: 8, GPUs of a node
cluster=slurm cluster.accelerator=H1000
    cluster.accelerator=H1000: no such choice; would work: A100 SXM 40GB
cluster=slurm cluster.max_running=0
    cluster.max_running=0: must be at least 1
cluster.nodes=2
    cluster.nodes=2: this machine is one node; would work: 1, or cluster=slurm
cluster.kind=pbs
    cluster.kind=pbs: no such choice; would work: local, slurm
"""


@pytest.mark.parametrize(
    "mistake", MISTAKES.replace("\n    ; ", "; ").replace("\n    ", " => ").split("\n")[1:-1]
)
def test_mistakes(mistake: str) -> None:
    typed, says = mistake.split(" => ")
    with pytest.raises(ConfigError) as refused:
        job(*typed.split())
    assert str(refused.value).startswith(says)


def test_times_are_read_as_sbatch_reads_them() -> None:
    forms = {"90": 90, "1:30": 2, "1:30:00": 90, "2-12": 3600, "2-1:00:30": 2941, "2-12:30": 3630}
    assert {text: minutes_of(text) for text in forms} == forms
    for text in ("0", "-5", "1:2:3:4", "", "a day"):
        with pytest.raises(ConfigError):
            minutes_of(text)


def test_a_costly_job_needs_confirmation() -> None:
    made = job("cluster=slurm_h100", "parallelism.dp_shard=64", "cluster.time=10:00:00")
    assert cost_in_words([made]) == "at most 640 GPU-hours (H100 SXM)"
    with pytest.raises(UserError, match=r"at most 640 GPU-hours.*would work: cluster.confirm_gpu_hours=640"):
        confirm([made])
    confirm([job("cluster=slurm_h100", "parallelism.dp_shard=8", "cluster.time=12:30:00")])
    # Four ranks on an exclusive node.
    assert cost_in_words([job("cluster=slurm_h100", "parallelism.dp_shard=4")]).startswith("at most 8 GPU")
    assert cost_in_words([job("cluster=slurm", "parallelism.dp_shard=4")]) == "at most 4 GPU-hours"
    priced = job("cluster=slurm", "parallelism.dp_shard=4", "cluster.dollars_per_gpu_hour=2.5")
    assert cost_in_words([priced]) == "at most 4 GPU-hours, $10.00"
    assert cost_in_words([priced, job("cluster=slurm", "parallelism.dp_shard=4")]) == "at most 8 GPU-hours"


def test_what_the_user_has_set_for_sbatch_does_not_win_over_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PARTITION", "cpu"), ("ACCOUNT", "me"), ("TIMELIMIT", "1"), ("ARRAY_INX", "0-9")):
        monkeypatch.setenv(f"SBATCH_{name}", value)
    with _environment_for_submitting(shape_of(job("cluster=slurm", "cluster.partition=gpu"))):
        left = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    assert left == {"SBATCH_ACCOUNT": "me"}
    assert os.environ["SBATCH_TIMELIMIT"] == "1"


def test_one_task_a_rank_and_all_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("cluster=slurm_h100", "parallelism.dp_shard=16", "cluster.srun_args=['--cpu-bind=none']")
    command = srun_command(made, tmp_path / "100%")
    for option in (
        "--distribution=block:block",
        "--nodes=2",
        "--ntasks=16",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
    ):
        assert option in command
    assert {"--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--cpu-bind=none"} < set(command)
    assert f"--output={tmp_path}/100%%/logs/rank%t.out" in command
    assert command[-4:-1] == ["-u", "-m", "harness.train.rank"] and command[-5] == sys.executable
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = rank_environment(made, 12345, 1.0)
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("16", "8")
    assert (variables["MASTER_PORT"], variables["OMP_NUM_THREADS"]) == ("12345", "12")


@pytest.mark.parametrize(
    "container", ["--container-image=x --container-mounts=/data", "apptainer exec x.sif"]
)
def test_ranks_in_a_container(container: str, tmp_path: Path) -> None:
    made = job("cluster=slurm", f"cluster.container='{container}'", "cluster.python=/opt/bin/python")
    command = srun_command(made, tmp_path)
    place = command.index("/opt/bin/python")
    assert command[place - len(container.split()) : place] == container.split()


def test_jobs_on_one_node_use_their_own_ports() -> None:
    with rendezvous_store() as one, rendezvous_store() as other:
        assert one != other
        for port in (one, other):
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
            store.set("here", str(port))
            assert store.get("here") == str(port).encode()


def test_a_tickets_job_is_found_by_its_id_or_by_its_name() -> None:
    jobs = [Queued("7", "a.1", "RUNNING", "None"), Queued("8_0", "b.2", "RUNNING", "None")]
    jobs += [Queued("8_1", "b.2", "PENDING", "Resources"), Queued("9", "b.2", "PENDING", "None")]
    listed = queue.Jobs(jobs)
    assert SlurmJobRecord("a.1", None, "7").find(listed) == jobs[0]
    assert SlurmJobRecord("a.1").find(listed) == jobs[0]
    assert SlurmJobRecord("b.2", 1).find(listed) == jobs[2]
    assert SlurmJobRecord("b.2").find(listed) == jobs[3]
    assert SlurmJobRecord("b.2", 2).find(listed) is None
    assert SlurmJobRecord("a.1", None, "6").find(listed) is None, "another job of that name is not this one"
    assert SlurmJobRecord("a.1", 0, "8_0").find(listed) is None, "SLURM gave the id to another job"
    assert listed.states.get(SlurmJobRecord("a.1", 0, "8_0").key) is None


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_requeue_that_ends_its_own_scontrol_still_excludes_nodes(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM signals all processes of a job that it requeues, also the scontrol that asked for it."""
    typed = []

    def run(*command: str) -> str:
        typed.append(command)
        if command[1] == "requeue":
            raise SlurmError("scontrol requeue 7: exit code -15")
        return f"JobId=7 JobState={state} ExcNodeList=node9"

    monkeypatch.setattr(queue, "_run", run)
    if state == "RUNNING":
        with pytest.raises(SlurmError, match="exit code -15"):
            queue.requeue("7", ["node1"])
    else:
        queue.requeue("7", ["node1"])
    assert (typed[-1] == ("scontrol", "update", "jobid=7", "excnodelist=node9,node1")) == (state == "PENDING")


def test_the_queue_is_read_whatever_a_name_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "12|a|b c|PENDING|Resources\n13_4|x|RUNNING|None\n14|x|COMPLETED|None\n"
    monkeypatch.setattr(queue, "_run", lambda *_: shown)
    assert queue.jobs().find(None, "a|b c", None) == Queued("12", "a|b c", "PENDING", "Resources")
    assert queue.jobs().find("13_4", "x", None) == Queued("13_4", "x", "RUNNING", "None")
    assert queue.jobs().find(None, "x", None) is None
    assert queue.jobs().states["14", "x"] == "COMPLETED"


def test_a_scheduler_that_does_not_answer_is_not_one_that_has_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def say(words: str, where: str = ">&2") -> None:
        for name in ("scontrol", "squeue", "sacct"):
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{words}' {where}\nexit 1\n")
            (tmp_path / name).chmod(0o755)

    say("slurm_load_jobs error: Invalid job id specified")
    assert queue.describe("1") == {} and queue.last_states([("1", "a")]) == {}
    say("Job 1_0 not found", where="")  # so does SLURM: a task of an array goes to stdout
    assert queue.describe("1_0") == {}
    say("slurm_load_jobs error: Socket timed out on send/recv operation")
    with pytest.raises(queue.SlurmError):
        queue.last_states([("7", "a")])
    monkeypatch.setattr(attempt, "ANSWER_SECONDS", 0.0)
    assert attempt.Allocation("7", 0).state() == "UNKNOWN"


def test_two_attempts_without_progress_are_not_followed_by_a_third(tmp_path: Path) -> None:
    def end(path: Path, start: int | None, step: int | None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "result.json").write_text(json.dumps({"start_step": start, "step": step}))

    folder = RunFolder(tmp_path)
    end(tmp_path, None, None)
    assert attempt._has_progress(folder), "the first attempt may be stopped before it has begun"
    end(tmp_path / "attempts" / "9", 0, 5)
    end(tmp_path / "attempts" / "10", 5, 5)
    assert not attempt._has_progress(folder)
    end(tmp_path / "attempts" / "10", 5, 6)
    assert attempt._has_progress(folder)
    end(tmp_path / "attempts" / "10", 5, 5)
    end(tmp_path, 5, 6)
    assert attempt._has_progress(folder)


@pytest.mark.parametrize(
    ("state", "kind"),
    [("NODE_FAIL", "node"), ("OUT_OF_MEMORY", "out_of_memory"), ("TIMEOUT", "preempted"), (None, "unknown")],
)
def test_a_job_that_is_gone_is_sorted_by_what_slurm_says(state: str | None, kind: str) -> None:
    assert JobLost(SlurmJobRecord("a", None, "7"), state).kind == kind
    assert JobLost(SlurmJobRecord("a", None, "7", cancelled=True), state).kind == "cancelled"


def test_ranks_that_srun_names(tmp_path: Path) -> None:
    (tmp_path / "rank2.err").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n")
    said = (
        "srun: error: node2: tasks 2-3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    dead = dead_ranks(said, tmp_path)
    kinds = [(rank, died.kind) for rank, died in dead]
    assert kinds == [(2, "out_of_memory"), (3, "unknown")], "the third was ended by srun"
    aborted = "srun: Job step aborted: Waiting up to 22 seconds for job step to finish.\n"
    dead = dead_ranks(f"{aborted}srun: error: node1: task 1: Killed\n{said}", tmp_path)
    assert [(rank, died.kind) for rank, died in dead] == [(2, "out_of_memory")], "its log has the reason"
    [(_, died)] = dead_ranks("srun: error: node1: task 5: Exited with exit code 137\n", tmp_path)
    assert str(died) == "rank 5 ended with 'Exited with exit code 137': killed, probably out of memory"
    assert "probably out of memory" in str(RankDied.by_code(1, 137, 0, tmp_path))
    starved = dead_ranks("srun: error: node1: task 5: Out Of Memory\n", tmp_path)
    assert [(rank, died.kind) for rank, died in starved] == [(5, "out_of_memory")]


def test_a_snapshot_is_the_code_and_is_taken_once(tmp_path: Path) -> None:
    taken = take_snapshot(tmp_path)
    package = Path(attempt.__file__).parents[1]
    assert (taken / "harness" / "train" / "rank.py").read_bytes() == (
        package / "train" / "rank.py"
    ).read_bytes()
    assert not list(taken.rglob("__pycache__"))
    before = {path: path.stat().st_mtime_ns for path in taken.rglob("*")}
    assert take_snapshot(tmp_path) == taken
    assert {path: path.stat().st_mtime_ns for path in taken.rglob("*")} == before


def slurm(*overrides: str) -> Job:
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
        slurm(typed)
    assert str(refused.value).startswith(
        f"cluster.{says}" if "sbatch" not in typed else f"cluster.sbatch.{says}"
    )


def test_other_options_pass() -> None:
    options = (
        "{reservation: night, mail-type: END, gres: 'nvme:1', wait-all-nodes: 1, time-min: 10, hold: true}"
    )
    asked = dict(
        shape_of(slurm(f"cluster.sbatch={options}", "cluster.srun_args=['--cpu-bind=none','-v']")).options
    )
    assert asked["gres"] == "nvme:1" and asked["hold"] is True


def test_gpus_are_asked_for_by_gres_and_ranks_are_bound(tmp_path: Path) -> None:
    made = slurm(
        "cluster.gres=true", "cluster.gpu_type=a100", "cluster.gpu_bind=closest", "cluster.distribution=null"
    )
    options = dict(shape_of(made).options)
    assert options["gres"] == "gpu:a100:1" and "gpus-per-node" not in options
    command = srun_command(made, tmp_path)
    assert "--gpu-bind=closest" in command
    assert not [option for option in command if option.startswith("--distribution")]


def test_the_users_variables_win_over_those_of_fields() -> None:
    asked = shape_of(slurm("cluster.socket_ifname=ib0", "cluster.env.NCCL_SOCKET_IFNAME=ib"))
    assert asked.exports == ("export NCCL_SOCKET_IFNAME=ib", "export GLOO_SOCKET_IFNAME=ib0")


PARTITIONS = """
PartitionName=main Default=YES DefaultTime=02:30:00 MaxTime=7-00:00:00
PartitionName=long DefaultTime=NONE MaxTime=1-00:00:00
PartitionName=free DefaultTime=NONE MaxTime=UNLIMITED
"""


def test_a_time_limit_that_is_not_given_is_the_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slurm("cluster.time=null")
    assert "time" not in dict(shape_of(made).options)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the partition's time limit, which is not known here" in cost_in_words([made])
    with pytest.raises(UserError, match=r"cluster\.time=null: there is no scontrol here"):
        confirm([made])
    commands_in(tmp_path, monkeypatch, scontrol=f"printf '{PARTITIONS.strip()}'")
    queue.partition_minutes.cache_clear()
    assert cost_in_words([made]) == "at most 2.5 GPU-hours"
    assert (
        cost_in_words([slurm("cluster.time=null", "cluster.partition='free,long'")])
        == "at most 8760 GPU-hours"
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
    made = slurm(f"cluster.setup={setup}", "cluster.snapshot=false")
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
    ended = run_script(slurm(), tmp_path, monkeypatch)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path}/job.json is missing: submit the job with the harness")
    planned = Submission([slurm()], [tmp_path], tmp_path, "x").script(planned=True)
    assert "#SBATCH --output=slurm-%j_0_log.out\n" in planned


def test_setup_that_bash_cannot_read_is_refused_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands_in(tmp_path, monkeypatch, sbatch="echo 7", srun="")
    with pytest.raises(ConfigError, match=r"cluster.setup=.*bash cannot read it: line 2: syntax error"):
        Submission([slurm("cluster.setup=['if true; then']")], [tmp_path], tmp_path, "x").submit()


def test_a_percent_sign_in_a_path_is_not_a_field_of_slurms(tmp_path: Path) -> None:
    home = tmp_path / "%j"
    assert f"--output={tmp_path}/%%j/slurm/%j_0_log.out" in Submission([slurm()], [home], home, "x").script()
    jobs = [slurm("training.seed=1"), slurm("training.seed=2")]
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
        assert pick_device(slurm(f"cluster.device={device}")).type == "cpu"
        return
    with pytest.raises(ConfigError, match=says):
        pick_device(slurm(f"cluster.device={device}"))


SICK = "0, 12, 81559, 0\n1, 40960, 81559, 0\n2, 0, 81559, 3\n3, 0, 16000, [N/A]"


def test_faults_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    commands_in(tmp_path, monkeypatch, nvidia_smi=f"printf '{SICK}'")
    assert faults.faults_here(tmp_path, 0) == []
    assert faults.faults_here(tmp_path, 8) == [
        "4 of 8 GPUs found",
        "GPU 1 has 40.0 GiB of memory in use",
        "GPU 2 has 3 uncorrected memory errors",
    ]
    commands_in(tmp_path, monkeypatch, nvidia_smi="echo 'Unable to talk: GPU is lost'; exit 15")
    assert faults.faults_here(tmp_path, 1) == ["nvidia-smi: Unable to talk: GPU is lost"]
    (tmp_path / "meminfo").write_text(f"MemTotal: {100 * 2**20} kB\nMemAvailable: {2**20} kB\n")
    assert faults._memory_faults(tmp_path / "meminfo") == ["1.0 GiB of 100.0 GiB of memory are free"]
    assert faults._folder_faults(tmp_path / "none") == [
        f"cannot write into {tmp_path / 'none'}: No such file or directory"
    ]


def test_nodes_that_fail_the_check_or_do_not_answer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = '{"n1": []}\\n{"n2": ["4 of 8 GPUs found"]}'
    srun = f"printf '{answers}'; echo 'srun: error: n3: oops' >&2; exit 1"
    commands_in(tmp_path, monkeypatch, srun=srun, scontrol="echo n1 n2 n3")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    with pytest.raises(faults.UnfitNodes) as unfit:
        faults.check_nodes(slurm(), tmp_path)
    assert str(unfit.value) == "n2: 4 of 8 GPUs found; n3: srun: error: n3: oops"
    assert unfit.value.kind == "node"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a private module, a link to a file outside, and files that are not code."""
    package = tmp_path / "checkout" / "harness"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model" / "private.py").write_text("key = 1\n")
    (package / "model" / "private.py").chmod(0o600)
    (package / "model").chmod(0o710)
    (tmp_path / "id_rsa").write_text("secret")
    (package / "id_rsa").symlink_to(tmp_path / "id_rsa")
    (package / "token").write_text("secret")
    (package / ".hidden").mkdir()
    (package / ".hidden" / "a.py").write_text("")
    with (package / "core.1234").open("wb") as core:
        core.truncate(100 * LARGEST_BYTES)
    monkeypatch.setattr(slurm_module, "PACKAGE", package)
    return package


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def test_only_code_is_copied_with_its_permissions(package: Path, tmp_path: Path) -> None:
    taken = take_snapshot(tmp_path / "home")
    assert modes(taken / "harness") == {
        "__init__.py": stat.S_IMODE((package / "__init__.py").stat().st_mode),
        "model": 0o710,
        "model/private.py": 0o600,
    }
    assert (taken / "harness" / "model" / "private.py").read_text() == "key = 1\n"
    assert sorted(os.listdir(tmp_path / "home" / "code")) == [taken.name]


@pytest.mark.parametrize("name", ["linked.py", "folder"])
def test_links_are_refused(package: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (package / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        UserError,
        match=f"{package / name}: snapshots .* do not follow symbolic links.*cluster.snapshot=false",
    ):
        take_snapshot(tmp_path / "home")


def test_a_large_file_is_refused_by_name(package: Path, tmp_path: Path) -> None:
    with (package / "generated.py").open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    with pytest.raises(UserError, match=f"{package / 'generated.py'}: has 10 MB"):
        snapshot_path(tmp_path / "home")


@pytest.mark.parametrize(
    ("number", "raised", "says"),
    [
        (errno.ENOSPC, MachineError, "disk full or quota exceeded"),
        (errno.EACCES, UserError, "Permission denied"),
    ],
)
def test_a_copy_that_fails_leaves_nothing(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    raised: type[Exception],
    says: str,
) -> None:
    written: list[Path] = []

    def fail_at_the_second(original: Path, copy: Path) -> None:
        written.append(original)
        if len(written) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copymode", fail_at_the_second)
    with pytest.raises(raised, match=f"the code cannot be copied: .*{says}") as caught:
        take_snapshot(tmp_path / "home")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "home" / "code") == []


def test_the_copy_matches_its_digest(package: Path, tmp_path: Path) -> None:
    """Editing a file while jobs are submitted does not change the content of an existing snapshot."""
    before = snapshot_path(tmp_path / "home")
    (package / "__init__.py").write_text("edited\n")
    assert take_snapshot(tmp_path / "home") == before
    assert (before / "harness" / "__init__.py").read_text() == ""
