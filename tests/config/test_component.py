"""Components in files beside an experiment, as FILE.py:NAME: recorded by content, run, copied, refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cases import texts, words
from one_line import one_line
from processes import python

from harness.compose.composer import compose_job
from harness.config.component import Component
from harness.config.job import Job, differing_numerics
from harness.config.optimizer import KINDS
from harness.launch.inputs import require_inputs
from harness.launch.slurm import snapshot_path, take_snapshot
from harness.util.errors import ConfigError, MissingPackageError

EXTRAS = Path(__file__).parents[1] / "extras" / "harness_extras"
TINY = words("""
    model=llama3_tiny tokenizer=none data=synthetic training.seq_len=16 training.steps=2
    training.global_batch_size=2
""")
SGD = "optimizer.kind=my_conf/sgd.py:SGD"
POWER = "schedule.decay_type=my_conf/power.py:POWER"
SPIKES = "training.observers=[my_conf/spikes.py:Spikes]"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The current folder, with ``my_conf``."""
    monkeypatch.chdir(tmp_path)
    Path("my_conf").mkdir()
    for name in ("sgd", "power", "spikes"):
        write(name, (EXTRAS / f"{name}.py").read_text())
    return tmp_path


def write(name, text, mode=0o644):
    path = Path("my_conf", f"{name}.py")
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_job_records_the_file_and_its_content(home, monkeypatch):
    job = compose_job([*TINY, SGD, POWER, SPIKES])
    pattern = rf"{re.escape(str(home))}/my_conf/sgd\.py@[0-9a-f]{{12}}:SGD"
    assert re.fullmatch(pattern, job.optimizer.kind)
    assert job.optimizer.options == {"momentum": 0.9, "nesterov": False}
    assert job.schedule.options == {"exponent": 2.0}
    assert [each.field for each in job.components] == [
        "optimizer.kind",
        "schedule.decay_type",
        "training.observers",
    ]
    assert job.training.observer_digests == [job.components[2].digest]
    assert compose_job(TINY).training.observer_digests == []
    # The same from another folder, and by the recorded name.
    monkeypatch.chdir("my_conf")
    assert compose_job([*TINY, "optimizer.kind=sgd.py:SGD"]) == compose_job(
        [*TINY, f"optimizer.kind={job.optimizer.kind}"]
    )


def test_the_id_is_that_of_the_content_in_any_folder(home):
    typed = [*TINY, SGD, POWER, SPIKES]
    job = compose_job(typed)
    shutil.copytree("my_conf", "elsewhere")
    copied = compose_job([each.replace("my_conf", "elsewhere") for each in typed])
    assert copied != job and copied.id == job.id and not differing_numerics(copied, job)
    for name, field in (
        ("sgd", "optimizer.kind"),
        ("power", "schedule.decay_type"),
        ("spikes", "training.observer_digests"),
    ):
        with Path("my_conf", f"{name}.py").open("a") as file:
            file.write("# edited\n")
        changed = compose_job(typed)
        assert changed.id != job.id and differing_numerics(changed, job) == [field]
        job = changed


def test_a_group_of_tensors_has_a_kind_of_a_file(home):
    groups = "optimizer.groups=[{match:wq,kind:my_conf/sgd.py:SGD}]"
    job = compose_job([*TINY, groups])
    assert len(job.components) == 1 and job.optimizer.kinds == {"adamw", job.components[0].text}


@pytest.mark.parametrize(
    ("typed", "says"),
    texts("""
        none.py:SGD              /my_conf/none.py cannot be read: No such file or directory; would
        folder.py:SGD            /my_conf/folder.py cannot be read: it is no regular file; would
        sgd.py:SDG               :SDG: the file has no SDG; would work: SGD
        sgd.py                   (entry points of group harness.optimizer), or FILE.py:NAME, the path of a
        sgd.py:SGDOptions        :SGDOptions: is no harness.config.optimizer.Kind
        power.py:POWER           :POWER: is no harness.config.optimizer.Kind
        raises.py:SGD            the file cannot be imported: ModuleNotFoundError: No module na
        broken.py:SGD            the file cannot be imported: SyntaxError: invalid syntax (brok
        leaves.py:SGD            the file cannot be imported: SystemExit: 3
        imports.py:SGD           :SGD: imports a_sibling from its folder, not covered by
        group.py:SGD             others can write it, and it would run as you; would work
        all.py:SGD               others can write it, and it would run as you; would work: c
        sgd.py@0123456789ab:SGD  the file has changed since the job was made, to @
    """),
)
def test_a_file_that_cannot_be_used_is_refused(home, typed, says, monkeypatch):
    monkeypatch.syspath_prepend("my_conf")
    Path("my_conf/folder.py").mkdir()
    write("leaves", "raise SystemExit(3)\n")
    write("a_sibling", "")
    write("imports", "import a_sibling\nSGD = 1\n")
    write("raises", "import no_such_module\n")
    write("broken", "def (\n")
    write("group", "SGD = 1\n", 0o664)
    write("all", "SGD = 1\n", 0o646)
    for _ in range(2):
        with one_line(ConfigError, f"optimizer.kind=.*{re.escape(says)}"):
            compose_job([*TINY, f"optimizer.kind=my_conf/{typed}"])


def test_a_file_is_compiled_as_it_is(home):
    path = write("typed", "def typed(x: int): ...\n")
    component = Component.of("optimizer.kind", f"{path}:typed")
    assert component.load().__annotations__ == {"x": int}


def test_a_file_of_another_user_is_refused(home, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat("my_conf").st_uid + 1)
    if os.stat("my_conf/sgd.py").st_uid != 0:
        with one_line(
            ConfigError, "is another user's, and would run as you; would work: a copy of your own"
        ):
            compose_job([*TINY, SGD])


def test_digests_are_not_typed(home):
    with one_line(ConfigError, "training.observer_digests=.*: must be those of the files"):
        compose_job([*TINY, SPIKES, "training.observer_digests=[0123456789ab]"])


def test_only_three_fields_take_files(home):
    with one_line(ConfigError, "training.attention=my_conf/sgd.py:SGD: no such choice"):
        compose_job([*TINY, "training.attention=my_conf/sgd.py:SGD"])


def test_observers_are_imported_before_a_run_is_submitted(home):
    write("spikes", "class Spikes: ...\n")
    job = compose_job([*TINY, SPIKES])
    with one_line(ConfigError, "training.observers=.*: is no harness.train.observer.Observer"):
        require_inputs(job)


def test_a_component_that_has_changed_is_not_what_the_job_names(home):
    job = compose_job([*TINY, SGD])
    [component] = job.components
    assert KINDS[component.text].state == ("momentum_buffer",)
    write("sgd", "SGD = None\n")
    read = Job.from_json(job.to_json())
    assert read.components == [component] and read.id == job.id
    with one_line(MissingPackageError, "the file has changed since the job was made, to @"):
        component.read()
    with one_line(ConfigError, "is no harness.config.optimizer.Kind"):
        compose_job([*TINY, SGD])


def test_a_copy_of_the_code_has_the_files(home):
    jobs = [compose_job([*TINY, SGD, SPIKES])]
    taken = take_snapshot(home, jobs)
    assert taken == snapshot_path(home, jobs) != snapshot_path(home)
    copies = {f"{each.digest}.py" for each in jobs[0].components}
    assert len(copies) == 2 and set(os.listdir(taken / "components")) == copies
    # Jobs that wait use it, whatever becomes of the files.
    shutil.rmtree("my_conf")
    program = (
        "import sys; from harness.config.optimizer import KINDS; print(KINDS[sys.argv[1]].state)"
    )
    done = python("-c", program, jobs[0].optimizer.kind, cwd=home, PYTHONPATH=str(taken))
    assert done.stdout == "('momentum_buffer',)\n", done.stderr


def test_two_ranks_train_with_files_and_resume_only_with_the_same(home):
    command = ["-m", "harness", "train", *TINY, SGD, POWER, SPIKES, "parallelism=tp"]
    command += words("parallelism.tp=2 schedule.warmup_steps=0 schedule.decay_ratio=1 name=files")
    done = python(*command, cwd=home, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = home.glob("runs/files/[0-9a-f]*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["spikes"] for row in rows] == [0, 0]
    assert rows[1]["lr"] == rows[0]["lr"] / 4
    # From another folder.
    moved = [word.replace("my_conf", str(home / "my_conf")) for word in command]
    done = python(*moved, f"runs_dir={home}/runs", cwd=home.parent)
    assert "done after 2 steps" in done.stdout, done.stderr
    with Path("my_conf/sgd.py").open("a") as file:
        file.write("# edited\n")
    load = ["checkpoint.initial_load_model_only=false", f"checkpoint.initial_load_path={run}"]
    done = python(*command, *load, cwd=home, OMP_NUM_THREADS="1")
    was = Component.of("", Job.read(run / "job.json").optimizer.kind)
    assert done.returncode == 2 and f"sgd.py@{was.digest}:SGD there and " in done.stderr
    assert "checkpoint.allow_changed=[optimizer.kind" in done.stderr
