"""Strings of a job: each is one line, and none contains a secret."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from processes import python

from harness.compose.composer import compose_job
from harness.compose.multirun import compose_points
from harness.compose.resolve import resolve
from harness.config.fields import SecretError, leaves, validate_texts, with_value
from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.slurm import Submission
from harness.run.folder import RunFolder
from harness.tools.download import DownloadJob
from harness.util.errors import EXIT_OK, EXIT_USER, ConfigError, UserError

SMALL = [
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.seq_len=32"),
    *("training.global_batch_size=8", "cluster.device=cpu"),
]
SLURM = ["cluster=slurm", "cluster.ranks_per_node=1"]
INJECTED = "x\ntouch F #"


@cache
def composed() -> Job:
    return compose_job(SMALL)


def test_control_characters_are_refused_in_every_text() -> None:
    """Fields that are null here are strings too."""
    texts = [name for name, _, value in leaves(composed()) if isinstance(value, str)]
    fields = [
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "mem",
        "gpu_type",
        "python",
        "container",
    ]
    for name in [*texts, *(f"cluster.{field}" for field in fields)]:
        with pytest.raises(ConfigError) as caught:
            resolve(with_value(composed(), name, INJECTED), gpus=0)
        assert str(caught.value) == (
            f"{name}=x\\ntouch F #: must be one line of printable text, and holds U+000A"
        )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("cluster.setup", ["module load cuda", INJECTED], "cluster.setup=x\\ntouch F #: "),
        ("cluster.srun_args", ["--mpi=none\r"], "cluster.srun_args=--mpi=none\\r: "),
        ("cluster.sbatch", {"comment": INJECTED}, "cluster.sbatch.comment=x\\ntouch F #: "),
        ("cluster.sbatch", {"a\nb": "x"}, "cluster.sbatch=a\\nb: "),
        ("cluster.env", {"A\x1bB": "x"}, "cluster.env=A\\x1bB: "),
        ("cluster.env", {"A": "x\u2028y"}, "cluster.env.A=x\\u2028y: "),
        ("data.paths", ["a\udcff"], "data.paths=a\\udcff: "),
        ("parallelism.pp_schedule", "1F1B\x00", "parallelism.pp_schedule=1F1B\\x00: "),
    ],
)
def test_control_characters_are_refused_inside_lists_and_mappings(
    name: str, value: object, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_texts(with_value(composed(), name, value))
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_what_people_write_is_not_refused() -> None:
    for value in ("Zürich 東京 👩‍🔬", "a 'b' \"c\" $HOME #", "data/**/*.txt"):
        validate_texts(with_value(composed(), "name", value))


def test_other_verbs_check_their_texts() -> None:
    with pytest.raises(ConfigError, match="repo=a"):
        DownloadJob(repo="a\nb").resolve()


SECRET = "hf_AbCdEf012"
SECRETS = [
    ("cluster.env", {"HF_TOKEN": SECRET}),
    ("cluster.env", {"WANDB_API_KEY": SECRET}),
    ("cluster.env", {"AWS_SECRET_ACCESS_KEY": SECRET}),
    ("cluster.env", {"DB_PASSWORD": SECRET}),
    ("cluster.env", {"hf_token": SECRET}),
    ("cluster.env", {"HTTPS_PROXY": f"http://me:{SECRET}@proxy:3128"}),
    ("cluster.setup", [f"export HF_TOKEN='{SECRET}'"]),
    ("cluster.srun_args", [f"--export=ALL,HF_TOKEN={SECRET}"]),
    ("cluster.sbatch", {"export": f"ALL,HF_TOKEN={SECRET}"}),
    ("cluster.container", f"apptainer exec --env WANDB_API_KEY={SECRET} x.sif"),
    ("checkpoint.folder", f"s3://key:{SECRET}@bucket/folder"),
    ("checkpoint.initial_load_path", f"https://host/step-1?X-Amz-Signature={SECRET}"),
    ("data.dataset", f"https://{SECRET}@host/data"),
    ("data.data_files", [f"https://account.blob.host/a.json?sv=1&sig={SECRET}"]),
]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_secrets_are_refused_and_not_repeated(name: str, value: object) -> None:
    with pytest.raises(SecretError) as caught:
        resolve(with_value(composed(), name, value), gpus=0)
    assert SECRET not in str(caught.value)
    assert str(caught.value).startswith(name)
    assert "environment" in str(caught.value) or "in the shell that starts the job" in str(caught.value)


NO_SECRETS = [
    ("cluster.env", {"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "HF_TOKEN": ""}),
    ("cluster.env", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token", "MONKEY": "1"}),
    ("cluster.setup", ["export HF_TOKEN=$(cat ~/.token)", 'export A_KEY="$B_KEY"', "module load cuda"]),
    ("cluster.srun_args", ["--export=ALL,HF_TOKEN"]),
    ("checkpoint.folder", "hf://datasets/owner/name@main/folder"),
    ("checkpoint.folder", "abfs://container@account.dfs.core.windows.net/folder"),
    ("data.paths", ["/data/key=5/token=7/*.parquet"]),
]


@pytest.mark.parametrize(("name", "value"), NO_SECRETS)
def test_what_is_no_secret_is_taken(name: str, value: object) -> None:
    validate_texts(with_value(composed(), name, value))


def test_a_sweep_does_not_write_down_points_with_secrets() -> None:
    """An invalid point is recorded with its overrides, unless they hold a secret."""
    typed = [*SMALL, *SLURM, "parallelism.tp=1,7", f"cluster.env.HF_TOKEN={SECRET}"]
    with pytest.raises(SecretError):
        compose_points(typed)
    points = compose_points([*SMALL, *SLURM, "parallelism.tp=1,7"])
    assert [point.job is None for point in points] == [False, True]


def test_the_command_writes_nothing(tmp_path: Path) -> None:
    done = python("-m", "harness.train", "-m", *SMALL, f"cluster.env.HF_TOKEN={SECRET}", cwd=tmp_path)
    assert done.returncode == EXIT_USER
    assert done.stderr.startswith("error: cluster.env.HF_TOKEN=***: ")
    assert SECRET not in done.stdout + done.stderr
    assert list(tmp_path.rglob("*")) == []


def test_secrets_of_the_environment_are_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    run = compose_job([*SMALL, *SLURM, f"runs_dir={tmp_path}"])
    folder = RunFolder(run.run_dir)
    begin(folder, run, SMALL, state="submitted")
    folder.record_error(0, UserError("x"))
    folder.write_result(run, "completed", EXIT_OK, {})
    folder.release()
    assert SECRET not in Submission([run], [run.run_dir], run.run_dir, "x").script()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"job.json", "result.json", "overrides.txt"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
