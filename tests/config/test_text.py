"""Strings of a job: each is one line, and none contains a secret."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from declared import VERBS
from one_line import one_line

from harness.compose.composer import compose_job, compose_points
from harness.compose.resolve import resolve
from harness.config.fields import leaves, with_value
from harness.config.job import Job
from harness.config.texts import TOKENS, SecretError, masked, validate_texts
from harness.launch.begin import begin
from harness.launch.slurm import Submission
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.tools.download import DownloadJob
from harness.util.errors import EXIT_OK, EXIT_USER, ConfigError, UserError

SMALL = [
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.seq_len=32"),
    *("training.global_batch_size=8", "cluster.device=cpu"),
]
SLURM = ["cluster=slurm", "cluster.ranks_per_node=1"]
INJECTED = "x\ntouch F #"


@cache
def composed():
    return compose_job(SMALL)


def refused(name, value):
    with pytest.raises(ConfigError) as caught:
        resolve(with_value(composed(), name, value), gpus=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_control_characters_are_refused_in_every_text():
    """Fields that are null here are strings too."""
    texts = [name for name, _, value in leaves(composed()) if isinstance(value, str)]
    nulls = (
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "mem",
        "gpu_type",
        "python",
        "container",
    )
    rule = "must be one line of printable text, and holds U+000A"
    for name in [*texts, *(f"cluster.{field}" for field in nulls)]:
        assert refused(name, INJECTED) == f"{name}=x\\ntouch F #: {rule}"


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
def test_control_characters_are_refused_inside_lists_and_mappings(name, value, says):
    assert refused(name, value).startswith(says)


def test_what_people_write_is_not_refused():
    for value in ("Zürich 東京 👩‍🔬", "a 'b' \"c\" $HOME #", "data/**/*.txt"):
        validate_texts(with_value(composed(), "name", value))


def test_other_verbs_check_their_texts():
    with one_line(ConfigError, "repo=a"):
        DownloadJob(repo="a\nb").resolve()


SECRET = f"hf_{'AbCdEf012' * 4}"
WORD = SECRET[3:]  # it looks like no token
NAMES = (
    "GITHUB_PAT DB_PASS MYSQL_PWD HF_TOK HF_AUTH HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY DB_PASSWORD "
    "SECRETS KEYS CREDS PW DB_PW SLACK_WEBHOOK TEAMS_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING"
)
PREFIXES = (
    "ghp_ gho_ github_pat_ sk- sk-proj- sk-ant-api03- xoxb- glpat- eyJ wandb_v1_ "
    "npm_ pypi- nvapi- AIza"
)


def read_texts(text):
    """Read a part of ``secrets.txt``, whose head describes it."""
    found = []
    for mark, secret in (("<SECRET>", SECRET), ("<WORD>", WORD), ("<KEY>", "ABCD" * 4)):
        text = text.replace(mark, secret)
    for line in text.splitlines():
        name, mark, value = line.partition(" : ")
        if mark and not line.startswith("#"):
            found.append((name, [value] if name == "cluster.setup" else ast.literal_eval(value)))
    return found


_, REFUSED, TAKEN = (Path(__file__).parent / "secrets.txt").read_text().split("\n## ")
SECRETS = read_texts(REFUSED)
SECRETS += [("cluster.env", {name: WORD}) for name in NAMES.split()]
SECRETS += [("name", f"{prefix}{'aB3' * 12}") for prefix in PREFIXES.split()]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_secrets_are_refused_and_not_repeated(name, value):
    with pytest.raises(SecretError) as caught:
        resolve(with_value(composed(), name, value), gpus=0)
    assert not re.search("[Aa][Bb]C?[dD3]|89abc", masked(str(caught.value)))
    assert str(caught.value).startswith(name)
    assert "environment" in str(caught.value) or "in the shell that starts the job" in str(
        caught.value
    )


@pytest.mark.parametrize(("name", "value"), read_texts(TAKEN))
def test_what_is_no_secret_is_taken(name, value):
    validate_texts(with_value(composed(), name, value))


def test_every_known_token_is_documented_and_tested():
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert [prefix for prefix in TOKENS if f"`{prefix}`" not in page] == []
    assert {prefix for prefix in TOKENS if prefix not in PREFIXES} == {"hf_", "AKIA"}


def test_the_value_of_a_secret_of_the_environment_is_refused_wherever_it_is(monkeypatch, tmp_path):
    (tmp_path / "job.json").write_text(compose_job([*SMALL, "name='correct horse'"]).to_json())
    monkeypatch.setenv("HF_TOKEN", "correct horse")
    monkeypatch.setenv("MY_KEY", "llama")  # too short to be a secret
    monkeypatch.setenv("SSH_KEY", str(tmp_path))  # the path of one
    for typed in ("name=${oc.env:HF_TOKEN}", "runs_dir='/tmp/correct horse/x'"):
        with one_line(SecretError, "the value of HF_TOKEN of the environment"):
            compose_job([*SMALL, typed])
    assert compose_job([*SMALL, "name=llama", f"runs_dir={tmp_path}/x"]).name == "llama"
    assert Job.read(tmp_path / "job.json").name == "correct horse", "another's run can be read"


@pytest.mark.parametrize(
    "typed",
    [
        "metrics.mlflow_uri=https://me:SECRET@host",
        "cluster.evn.HF_TOKEN=SECRET",
        "cluster.evn={HF_TOKEN: SECRET}",
        "nope='login --token SECRET'",
        "nope='password: geheim12345SECRET'",
        "cluster.evn={password: geheim12345SECRET}",
        "training.steps=${oc.env:HF_TOKEN}",
        "SECRET",
        "experiment=SECRET",
        "-m cluster.env.HF_TOKEN=SECRET",
    ],
)
def test_a_mistake_does_not_repeat_a_secret(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    words = typed.replace("SECRET", SECRET).split(" ", maxsplit=typed.startswith("-m"))
    monkeypatch.setattr(sys, "argv", ["harness", *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        VERBS["train"].main()
    out, err = capsys.readouterr()
    assert ended.value.code == EXIT_USER and err.startswith("error: ")
    assert SECRET not in out + err and "geheim" not in out + err and "***" in err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_does_not_write_down_points_with_secrets():
    """An invalid point is recorded with its overrides, unless they hold a secret."""
    typed = [*SMALL, *SLURM, "parallelism.tp=1,7", f"cluster.env.HF_TOKEN={SECRET}"]
    with pytest.raises(SecretError):
        compose_points(typed)
    points = compose_points([*SMALL, *SLURM, "parallelism.tp=1,7"])
    assert [point.job is None for point in points] == [False, True]


def test_secrets_of_the_environment_are_written_nowhere(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    run = compose_job([*SMALL, *SLURM, f"runs_dir={tmp_path}"])
    folder = RunFolder(run.run_dir)
    begin(folder, run, SMALL, state="submitted")
    folder.errors.record(0, UserError("x"))
    RunRecord(run, folder).end("completed", EXIT_OK, {})
    folder.release()
    assert SECRET not in Submission([run], [run.run_dir], run.run_dir, "x").script()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"job.json", "result.json", "overrides.txt"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
