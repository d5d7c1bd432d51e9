"""Scripts and options for SLURM, its commands and checks, without SLURM. Tests with SLURM: tests/slurm."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cases import rows
from one_line import one_line

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.slurm import minutes_of
from harness.launch import faults, queue
from harness.launch import slurm as slurm_module
from harness.launch import slurm_attempt as attempt
from harness.launch.begin import begin
from harness.launch.faults import RankDied, dead_ranks
from harness.launch.queue import SlurmError
from harness.launch.slurm import (
    Submission,
    _environment_for_submitting,
    shape_of,
    snapshot_path,
    take_snapshot,
)
from harness.launch.slurm_attempt import srun_command
from harness.launch.state import SlurmJobRecord
from harness.launch.submit import confirm, cost_in_words
from harness.run.folder import RunFolder
from harness.train import setup
from harness.train.process import rank_environment
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
unset CUDA_VISIBLE_DEVICES
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


def job(*overrides):
    cluster = [] if any(each.startswith("cluster=") for each in overrides) else ["cluster=slurm"]
    return compose_job(["training.global_batch_size=64", *cluster, *overrides])


def script(home, *jobs, planned=False):
    return Submission(list(jobs), [home] * len(jobs), home, "x").script(planned=planned)


def test_the_script_is_this_one(tmp_path):
    made = job(
        "model=llama3_8b",
        "parallelism=fsdp_tp",
        "parallelism.dp_shard=8",
        "parallelism.tp=4",
        "cluster=slurm_h100",
        "cluster.account=pretraining",
        "cluster.partition=gpu",
        "cluster.qos=high",
        "cluster.constraint='hbm80&ib'",
        "cluster.exclude='node[13-14]'",
        "cluster.time=4-00:00:00",
        "cluster.gpu_type=h100",
        "cluster.signal_seconds=300",
        "cluster.sbatch={mail-type: END}",
        "cluster.setup=['module load cuda']",
        "cluster.env.NCCL_DEBUG=INFO",
        "cluster.env.GREETING='two words'",
        "cluster.socket_ifname=bond0",
        "cluster.ib_hca='mlx5_0,mlx5_3'",
    )
    text = Submission([made], [tmp_path], tmp_path, f"{made.name}.{made.id}").script()
    digest = snapshot_path(tmp_path).name
    told = {str(tmp_path): "HOME", made.id: "ID", sys.executable: "PYTHON", digest: "DIGEST"}
    for word, name in told.items():
        text = text.replace(word, name)
    assert text == GOLDEN
    assert not any(tmp_path.iterdir()), "a script is only text"


def test_points_of_one_shape_are_one_array_and_a_percent_sign_in_a_path_is_no_field(tmp_path):
    home = tmp_path / "%j"
    jobs = [job("cluster.max_running=2", f"training.seed={seed}") for seed in (1, 2, 3)]
    assert len({shape_of(each) for each in jobs}) == 1
    text = script(home, *jobs)
    assert "#SBATCH --array=0-2%2\n" in text
    assert f"#SBATCH --output={tmp_path}/%%j/slurm/%A_%a_0_log.out\n" in text
    assert f"harness.launch.batch --list {home}/slurm/x.runs" in text
    assert f"#SBATCH --output={tmp_path}/%%j/slurm/%j_0_log.out\n" in script(home, jobs[0])
    assert "#SBATCH --output=slurm-%j_0_log.out\n" in script(home, jobs[0], planned=True)


@pytest.mark.parametrize(
    ("overrides", "nodes", "ranks"),
    rows("""
        cluster=slurm                                                                             1  1
        cluster=slurm parallelism.dp_shard=-1                                                     1  8
        cluster=slurm parallelism.dp_shard=4                                                      1  4
        cluster=slurm parallelism.dp_shard=16                                                     2  8
        cluster=slurm parallelism.dp_shard=-1 cluster.nodes=4                                     4  8
        cluster=slurm parallelism.dp_shard=-1 cluster.ranks=16 cluster.ranks_per_node=4           4  4
        cluster=slurm parallelism.dp_shard=-1 cluster.ranks=8 cluster.nodes=2                     2  4
        cluster=slurm_cpu parallelism.dp_shard=4 parallelism.tp=2                                 4  2
    """),
)
def test_nodes_follow_from_the_layout(overrides, nodes, ranks):
    made = job(*overrides.split())
    asked = shape_of(made)
    options = dict(asked.options)
    assert asked.nodes == options["nodes"] == nodes
    assert asked.ranks_per_node == options["ntasks-per-node"] == ranks
    assert options.get("gpus-per-node") == (None if made.cluster.device == "cpu" else str(ranks))


def test_options_that_the_harness_does_not_set_pass_and_gpus_can_be_asked_for_by_gres(tmp_path):
    options = (
        "{reservation: night, mail-type: END, gres: 'nvme:1', wait-all-nodes: 1, "
        "time-min: 10, hold: true}"
    )
    asked = dict(
        shape_of(job(f"cluster.sbatch={options}", "cluster.srun_args=['--verbose']")).options
    )
    assert asked["gres"] == "nvme:1" and asked["hold"] is True
    gres = ("cluster.gres=true", "cluster.gpu_type=a100", "cluster.gpu_bind=closest")
    made = job(*gres, "cluster.distribution=null")
    asked = dict(shape_of(made).options)
    assert asked["gres"] == "gpu:a100:1" and "gpus-per-node" not in asked
    command = srun_command(made, tmp_path)
    assert "--gpu-bind=closest" in command
    assert not [option for option in command if option.startswith("--distribution")]


def test_the_users_variables_win_over_those_of_fields():
    asked = shape_of(job("cluster.socket_ifname=ib0", "cluster.env.NCCL_SOCKET_IFNAME=ib"))
    assert asked.exports == ("export NCCL_SOCKET_IFNAME=ib", "export GLOO_SOCKET_IFNAME=ib0")


def test_what_the_user_has_set_for_sbatch_does_not_win_over_the_job(monkeypatch):
    for name, value in (
        ("PARTITION", "cpu"),
        ("ACCOUNT", "me"),
        ("TIMELIMIT", "1"),
        ("ARRAY_INX", "0-9"),
    ):
        monkeypatch.setenv(f"SBATCH_{name}", value)
    with _environment_for_submitting(shape_of(job("cluster.partition=gpu"))):
        left = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    assert left == {"SBATCH_ACCOUNT": "me"}
    assert os.environ["SBATCH_TIMELIMIT"] == "1"


def test_times_are_read_as_sbatch_reads_them():
    forms = {"90": 90, "1:30": 2, "1:30:00": 90, "2-12": 3600, "2-1:00:30": 2941, "2-12:30": 3630}
    assert {text: minutes_of(text) for text in forms} == forms
    for text in ("0", "-5", "1:2:3:4", "", "a day"):
        with pytest.raises(ConfigError):
            minutes_of(text)


def test_a_costly_job_needs_confirmation():
    made = job("cluster=slurm_h100", "parallelism.dp_shard=64", "cluster.time=10:00:00")
    assert cost_in_words([made]) == "at most 640 GPU-hours (H100 SXM)"
    with one_line(UserError, r"at most 640 GPU-hours.*would work: cluster.confirm_gpu_hours=640"):
        confirm([made])
    confirm([job("cluster=slurm_h100", "parallelism.dp_shard=8", "cluster.time=12:30:00")])
    # Four ranks on an exclusive node.
    assert cost_in_words([job("cluster=slurm_h100", "parallelism.dp_shard=4")]).startswith(
        "at most 8 GPU"
    )
    unpriced = job("parallelism.dp_shard=4")
    assert cost_in_words([unpriced]) == "at most 4 GPU-hours"
    priced = with_value(unpriced, "cluster.dollars_per_gpu_hour", 2.5)
    assert cost_in_words([priced]) == "at most 4 GPU-hours, $10.00"
    assert cost_in_words([priced, unpriced]) == "at most 8 GPU-hours"


PARTITIONS = """
PartitionName=main Default=YES DefaultTime=02:30:00 MaxTime=7-00:00:00
PartitionName=long DefaultTime=NONE MaxTime=1-00:00:00
PartitionName=free DefaultTime=NONE MaxTime=UNLIMITED
"""


def test_a_time_limit_that_is_not_given_is_the_partitions(put, monkeypatch):
    made = job("cluster.time=null")
    assert "time" not in dict(shape_of(made).options)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "the partition's time limit, which is not known here" in cost_in_words([made])
    with one_line(UserError, r"cluster\.time=null: there is no scontrol here"):
        confirm([made])
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    put(scontrol=f"printf '{PARTITIONS.strip()}'")
    for partition, hours in ((None, "2.5"), ("free,long", "8,760"), ("long", "24")):
        queue.partition_minutes.cache_clear()
        found = cost_in_words([with_value(made, "cluster.partition", partition)])
        assert found == f"at most {hours} GPU-hours"
    queue.partition_minutes.cache_clear()


def test_one_task_a_rank_and_all_end_together(tmp_path, monkeypatch):
    made = job(
        "cluster=slurm_h100", "parallelism.dp_shard=16", "cluster.srun_args=['--cpu-bind=none']"
    )
    command = srun_command(made, tmp_path / "100%")
    sizes = {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12"}
    assert sizes | {"--distribution=block:block", "--cpu-bind=none"} < set(command)
    assert {"--kill-on-bad-exit=1", "--wait=0", "--export=ALL"} < set(command)
    assert f"--output={tmp_path}/100%%/logs/rank%t.out" in command
    assert command[-5:-1] == [sys.executable, "-u", "-m", "harness.train.rank"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = rank_environment(made, 12345, 1.0)
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("16", "8")
    assert (variables["MASTER_PORT"], variables["OMP_NUM_THREADS"]) == ("12345", "12")
    # Ranks of one node need no name of it.
    assert variables["MASTER_ADDR"] != "127.0.0.1" == rank_environment(job(), 1, 1.0)["MASTER_ADDR"]
    for container in ("--container-image=x --container-mounts=/data", "apptainer exec x.sif"):
        inside = job(f"cluster.container='{container}'", "cluster.python=/opt/bin/python")
        assert f" {container} /opt/bin/python " in " ".join(srun_command(inside, tmp_path))


@pytest.mark.parametrize(
    ("record", "found"),
    # Another job has the name of the sixth, and SLURM gave the id of the seventh to another. The only job of
    # the last name has ended.
    rows("""
        [a.1, null, '7']     '7'
        [a.1]                '7'
        [b.2, 1]             '8_1'
        [b.2]                '9'
        [b.2, 2]             null
        [a.1, null, '6']     null
        [a.1, 0, '8_0']      null
        [c|d e, null, '10']  '10'
        [x]                  null
    """),
)
def test_a_records_job_is_found_by_its_id_or_name(record, found, monkeypatch):
    record = SlurmJobRecord(*record)
    shown = (
        "7|a.1|RUNNING|None\n8_0|b.2|RUNNING|None\n8_1|b.2|PENDING|Resources\n9|b.2|PENDING|None\n"
    )
    shown += "10|c|d e|PENDING|Resources\n14|x|COMPLETED|None\n"
    monkeypatch.setattr(queue, "_run", lambda *_: shown)
    listed = queue.jobs()
    job = record.find(listed)
    assert (None if job is None else job.id) == found
    assert job is None or (job.name, listed.states[job.id, job.name]) == (record.name, job.state)
    assert listed.states["14", "x"] == "COMPLETED" and ("8_0", "a.1") not in listed.states


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_requeue_that_ends_scontrol_excludes_nodes(state, monkeypatch):
    """SLURM signals all processes of a job that it requeues, also the scontrol that asked for it."""
    typed = []

    def run(*command):
        typed.append(command)
        if command[1] == "requeue":
            raise SlurmError("scontrol requeue 7: exit code -15")
        return f"JobId=7 JobState={state} ExcNodeList=node9"

    monkeypatch.setattr(queue, "_run", run)
    if state == "RUNNING":
        with one_line(SlurmError, "exit code -15"):
            queue.requeue("7", ["node1"])
    else:
        queue.requeue("7", ["node1"])
    assert (typed[-1] == ("scontrol", "update", "jobid=7", "excnodelist=node9,node1")) == (
        state == "PENDING"
    )


def test_a_scheduler_without_answer_has_not_forgotten(put, monkeypatch):
    def say(words, where=">&2"):
        line = f"echo '{words}' {where}; exit 1"
        put(scontrol=line, squeue=line, sacct=line)

    say("slurm_load_jobs error: Invalid job id specified")
    assert queue.describe("1") == {} and queue.last_states([("1", "a")]) == {}
    say("Job 1_0 not found", where="")  # so does SLURM: a task of an array goes to stdout
    assert queue.describe("1_0") == {}
    say("slurm_load_jobs error: Socket timed out on send/recv operation")
    with pytest.raises(queue.SlurmError):
        queue.last_states([("7", "a")])
    monkeypatch.setattr(attempt, "ANSWER_SECONDS", 0.0)
    assert attempt.Allocation("7", 0).state() == "UNKNOWN"


def test_what_users_write_is_not_read_as_facts(put, monkeypatch):
    names = (
        "JobId=7 JobName=a JobState=COMPLETED UserId=root(0) JobState=RUNNING Restarts=0 "
        "ExcNodeList=node9"
    )
    put(
        scontrol=f"echo '{names} Comment=a Restarts=99 ExcNodeList=node1'",
        squeue='echo "$@" >&2; exit 1',
    )
    assert attempt.Allocation("7", 0).state() == "RUNNING"
    assert queue._with_excluded("7", ["node2"]) == "excnodelist=node9,node2"
    monkeypatch.setenv("LOGNAME", "somebody")
    with one_line(SlurmError, f"--user={os.getuid()} "):
        queue.jobs()


def test_a_missing_configuration_of_slurm_is_named(put, monkeypatch):
    put(sbatch="sleep 60", srun="", squeue="sleep 60")
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    for ask in (queue.require_slurm, queue.jobs):
        with one_line(UserError, "SLURM_CONF=/nonexistent: this file cannot be read"):
            ask()


def test_errors_of_sbatch_are_shown_once(put, tmp_path):
    put(sbatch="echo 'sbatch: error: no such partition' >&2; exit 1")
    with one_line(UserError, r"^sbatch refuses the job: sbatch: error: no such partition$"):
        queue.submit_script(tmp_path / "x.sh")
    put(sbatch="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(queue.SlurmError):
        queue.submit_script(tmp_path / "x.sh")
    put(sbatch="echo '4711;cluster'")
    assert queue.submit_script(tmp_path / "x.sh") == "4711"


def test_two_attempts_without_progress_are_not_followed_by_a_third(tmp_path):
    def has_progress(*attempts):
        """Give the first and last steps of the attempts; the last one is in the run folder itself."""
        places = [*(f"attempts/{9 + number}" for number in range(len(attempts) - 1)), "."]
        for place, (start, step) in zip(places, attempts, strict=True):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / place / "result.json").write_text(
                json.dumps({"start_step": start, "step": step})
            )
        return attempt._has_progress(RunFolder(tmp_path))

    assert has_progress((None, None)), "the first attempt may be stopped before it has begun"
    assert not has_progress((0, 5), (5, 5), (None, None))
    assert has_progress((0, 5), (5, 6), (None, None))
    assert has_progress((0, 5), (5, 5), (5, 6))


def test_ranks_that_srun_names(tmp_path):
    (tmp_path / "rank2.err").write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
    )

    def kinds(said):
        return [(rank, died.kind) for rank, died in dead_ranks(said, tmp_path)]

    said = (
        "srun: error: node2: tasks 2-3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    assert kinds(said) == [(2, "out_of_memory"), (3, "unknown")], "the third was ended by srun"
    aborted = "srun: Job step aborted: Waiting up to 22 seconds for job step to finish.\n"
    killed = "srun: error: node1: task 1: Killed\n"
    assert kinds(f"{aborted}{killed}{said}") == [(2, "out_of_memory")], "its log has the reason"
    assert kinds("srun: error: node1: task 5: Out Of Memory\n") == [(5, "out_of_memory")]
    [(_, died)] = dead_ranks("srun: error: node1: task 5: Exited with exit code 137\n", tmp_path)
    for memory in (died, RankDied.by_code(1, 137, 0, tmp_path)):
        assert str(memory).endswith("killed, probably out of memory")


def run_script(made, folder, monkeypatch):
    """Run the sbatch script of a job by bash, as SLURM does on the first node."""
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    (folder / "job.sh").write_text(script(folder, made))
    return subprocess.run(["bash", str(folder / "job.sh")], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("setup", "line", "code"),
    [
        ("['export A=1','ls /nonexistent && echo','false','echo reached']", "false", 1),
        (
            "['module() { test $2 = gcc; }','module load cuda','echo reached']",
            "module load cuda",
            1,
        ),
        ("['for i in 1 2; do','exit 4','done','echo reached']", "exit 4", 4),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_run_and_is_named(
    setup, line, code, tmp_path, monkeypatch
):
    made = job(f"cluster.setup={setup}", "cluster.snapshot=false")
    folder = RunFolder(tmp_path / "it's 100%")
    begin(folder, made, [], state="submitted")
    ended = run_script(made, folder.path, monkeypatch)
    assert ended.returncode == 2 and "reached" not in ended.stdout, ended.stderr
    says = f"cluster.setup={line}: this line ended with exit code {code} on node7"
    assert f"error: {says}" in ended.stderr
    assert (folder.state, folder.row["error.kind"]) == ("failed", "user")
    assert folder.row["error.message"].startswith(says)


def test_a_script_without_a_run_folder_and_setup_that_bash_cannot_read(put, tmp_path, monkeypatch):
    ended = run_script(job(), tmp_path, monkeypatch)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"error: {tmp_path}/job.json is missing: submit the job with the harness"
    )
    put(sbatch="echo 7", srun="")
    with one_line(ConfigError, r"cluster.setup=.*bash cannot read it: line 2: syntax error"):
        Submission([job("cluster.setup=['if true; then']")], [tmp_path], tmp_path, "x").submit()


@pytest.mark.parametrize(
    ("device", "visible", "driver", "built", "says"),
    rows("""
        cuda  ''   setup.py  '13.0'  built for CUDA 13.0, sees no CUDA device on node7; would work. cpu
        auto  ''   setup.py  '13.0'  null
        auto  '0'  none      '13.0'  null
        cpu   '0'  setup.py  '13.0'  null
        auto  '0'  setup.py  '13.0'  CUDA 13.0, sees no CUDA device.*a build of torch for
        cuda  '0'  none      null    CUDA None, sees no CUDA device.*a build of torch for
    """),
)
def test_gpus_that_torch_cannot_use(device, visible, driver, built, says, monkeypatch):
    monkeypatch.setattr(setup, "DRIVER", Path(setup.__file__).with_name(driver))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = job(f"cluster.device={device}")
    if says is None:
        assert pick_device(made).type == "cpu"
        return
    with one_line(ConfigError, says):
        pick_device(made)


SICK = "0, 12, 81559, 0\n1, 40960, 81559, 0\n2, 0, 81559, 3\n3, 0, 16000, [N/A]"


def test_faults_of_a_node(put, tmp_path):
    (tmp_path / "logs").mkdir()
    put(nvidia_smi=f"printf '{SICK}'")
    assert faults.faults_here(tmp_path, 0) == []
    assert faults.faults_here(tmp_path, 8) == [
        "4 of 8 GPUs found",
        "GPU 1 has 40.0 GiB of memory in use",
        "GPU 2 has 3 uncorrected memory errors",
    ]
    put(nvidia_smi="echo 'Unable to talk: GPU is lost'; exit 15")
    assert faults.faults_here(tmp_path, 1) == ["nvidia-smi: Unable to talk: GPU is lost"]
    (tmp_path / "meminfo").write_text(f"MemTotal: {100 * 2**20} kB\nMemAvailable: {2**20} kB\n")
    assert faults._memory_faults(tmp_path / "meminfo") == [
        "1.0 GiB of 100.0 GiB of memory are free"
    ]
    [missing] = faults._folder_faults(tmp_path / "none")
    assert missing == f"cannot write into {tmp_path / 'none'}: No such file or directory"


def test_unfit_nodes_are_named(put, tmp_path):
    answers = '{"n1": []}\\n{"n2": ["4 of 8 GPUs found"]}'
    srun = f"printf '{answers}'; echo 'srun: error: n3: oops' >&2; exit 1"
    put(srun=srun)
    with pytest.raises(faults.UnfitNodes) as unfit:
        faults.check_nodes(job(), tmp_path, ["n1", "n2", "n3"])
    assert str(unfit.value) == "n2: 4 of 8 GPUs found; n3: srun: error: n3: oops"
    assert unfit.value.kind == "node"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a private module, a link to a file outside, and files that are not code."""
    package = tmp_path / "checkout" / "harness"
    for name, text in (
        ("__init__.py", ""),
        ("model/private.py", "key = 1\n"),
        (".hidden/a.py", ""),
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (package / "model" / "private.py").chmod(0o600)
    (package / "model").chmod(0o710)
    (tmp_path / "id_rsa").write_text("secret")
    (package / "id_rsa").symlink_to(tmp_path / "id_rsa")
    (package / "token").write_text("secret")
    monkeypatch.setattr(slurm_module, "PACKAGE", package)
    return package


def test_a_snapshot_is_the_code_with_its_permissions_and_is_taken_once(package, tmp_path):
    home = tmp_path / "home"
    taken = take_snapshot(home)
    copied = {
        str(path.relative_to(taken / "harness")): stat.S_IMODE(path.lstat().st_mode)
        for path in (taken / "harness").rglob("*")
    }
    init = stat.S_IMODE((package / "__init__.py").stat().st_mode)
    assert copied == {"__init__.py": init, "model": 0o710, "model/private.py": 0o600}
    assert (taken / "harness" / "model" / "private.py").read_text() == "key = 1\n"
    assert os.listdir(home / "code") == [taken.name]
    before = {path: path.stat().st_mtime_ns for path in taken.rglob("*")}
    # What is edited while jobs are submitted does not change a snapshot.
    (package / "__init__.py").write_text("edited\n")
    assert take_snapshot(home) == taken
    assert {path: path.stat().st_mtime_ns for path in taken.rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("linked.py", "snapshots .* do not follow symbolic links.*cluster.snapshot=false"),
        ("folder", "snapshots .* do not follow symbolic links.*cluster.snapshot=false"),
    ],
)
def test_links_are_refused(package, tmp_path, name, says):
    (tmp_path / "elsewhere").mkdir()
    (package / name).symlink_to(tmp_path / "elsewhere")
    with one_line(UserError, f"{package / name}: {says}"):
        take_snapshot(tmp_path / "home")


def test_a_folder_that_cannot_be_read_is_no_missing_code(package, tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    with one_line(UserError, "the code cannot be read for a snapshot: .*Permission denied"):
        take_snapshot(tmp_path / "home")


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "disk full or quota exceeded"), (errno.EACCES, "Permission denied")],
)
def test_a_copy_that_fails_leaves_nothing(package, tmp_path, monkeypatch, number, says):
    written = []

    def fail_at_the_second(original, copy):
        written.append(original)
        if len(written) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copymode", fail_at_the_second)
    with pytest.raises(
        (MachineError, UserError), match=f"the code cannot be copied: .*{says}"
    ) as caught:
        take_snapshot(tmp_path / "home")
    assert isinstance(caught.value, MachineError) == (number == errno.ENOSPC)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "home" / "code") == []
