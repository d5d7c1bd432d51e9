"""Points that Optuna chooses: values and failures in its storage, continuing, refusals."""

import json
import math
import shlex
import sys
from dataclasses import asdict

import optuna
import pytest
from one_line import one_line
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from harness.compose.composer import Composer, chooses_points, compose_job
from harness.launch.begin import begin
from harness.launch.sweep import optuna as study_module
from harness.launch.sweep.optuna import run_study
from harness.launch.sweep.study import StudyRecord, check_objective, natural_direction
from harness.launch.train import VERB
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.tools.report.listing import list_runs
from harness.tools.report.sweep import resume
from harness.tools.report.verb import report
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, MachineError, UserError

LOG_LR = "optimizer.lr=tag(log,interval(1e-5,1e-1))"
# A global batch of 4 has too few rows for 5 ranks.
LAYOUTS = "parallelism.dp_shard=1,2,5"
OPTUNA = ("sweep=optuna", "sweep.seed=3", "sweep.n_jobs=1")


def loss(lr, ranks):
    """A loss whose best learning rate is 1e-3."""
    return (math.log10(lr) + 3) ** 2 + 0.1 * ranks


class Study:
    """Runs studies named s. Training writes a row at once; high learning rates fail."""

    def __init__(self, runs_dir):
        self.runs_dir, self.folder = runs_dir, runs_dir / "s"
        self.started = []
        self.interrupt_at = None

    def __call__(self, *overrides):
        fixed = ("training.global_batch_size=4", f"runs_dir={self.runs_dir}", "name=s")
        return run_study([*OPTUNA, *fixed, *overrides], check=lambda point: point)

    @property
    def stored(self):
        journal = JournalStorage(JournalFileBackend(f"{self.folder}/study.journal"))
        return optuna.load_study(study_name="s", storage=journal)

    @property
    def trials(self):
        return self.stored.trials

    def train(self, point):
        job = point.job
        self.started.append(job.id)
        if len(self.started) == self.interrupt_at:
            raise KeyboardInterrupt
        folder = RunFolder(point.run_dir)
        begin(folder, job, point.overrides)
        try:
            if job.optimizer.lr > 1e-2:
                folder.errors.record(None, MachineError("too hot"))
                RunRecord(job, folder).end("failed", 3, {"loss": 9.0})
                return 3
            facts = {
                "step": 1,
                "loss": loss(job.optimizer.lr, job.world_size),
                "mfu": job.optimizer.lr,
            }
            RunRecord(job, folder).end("completed", 0, {**facts, "skipped_steps": "nan"})
            return 0
        finally:
            folder.release()


@pytest.fixture
def study(tmp_path, monkeypatch):
    made = Study(tmp_path)
    monkeypatch.setattr(study_module, "run_point", made.train)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return made


def test_values_and_failures_reach_optuna(study, capsys):
    assert study(LOG_LR, LAYOUTS, "sweep.n_trials=10") == EXIT_OK
    seen, legal = study.trials, 0
    assert len(seen) == 10
    for trial in seen:
        lr, ranks = trial.params["optimizer.lr"], trial.params["parallelism.dp_shard"]
        good = lr <= 1e-2 and ranks < 3
        assert trial.state == (TrialState.COMPLETE if good else TrialState.FAIL)
        assert trial.values == ([pytest.approx(loss(lr, ranks))] if good else None)
        legal += ranks < 3
    assert len(study.started) == legal, "an invalid point starts nothing"
    assert len({trial.state for trial in seen}) == 2
    shown = capsys.readouterr()
    assert "s: minimize loss by optuna, 10 trials\n" in shown.err
    assert (
        "not a valid job: training.global_batch_size=4: must have a row for each of " in shown.err
    )
    assert "failed: machine: too hot\n" in shown.err
    assert "Traceback" not in shown.err
    best = study.stored.best_trial
    command = shlex.split(shown.out.splitlines()[-1])
    assert compose_job(command[2:]).optimizer.lr == best.params["optimizer.lr"]
    assert f"optimizer.lr={best.params['optimizer.lr']}" in shown.out.splitlines()[-2]

    shown_now = list_runs(study.folder)
    assert shown_now.text.splitlines()[-1] == shown.out.splitlines()[-1]
    assert shown_now.data["study"]["objective"] == "loss"
    assert "The best (minimize loss): " in report(study.folder).text
    with one_line(UserError, r"optuna chooses its points; would work: harness train -m "):
        resume(study.folder, out_of_memory=False)


def test_a_study_continues_where_it_was_stopped(study, capsys):
    """Stopped in the second point of a batch: the first has run, and Optuna does not know its value yet."""
    typed = ("optimizer.lr=interval(1e-4,1e-2)", "sweep.n_jobs=2")
    study.interrupt_at = 4
    assert study(*typed, "sweep.n_trials=4") == EXIT_INTERRUPTED
    before = study.trials
    assert [trial.state for trial in before] == [TrialState.COMPLETE] * 2 + [TrialState.RUNNING] * 2
    assert study(*typed, "sweep.n_trials=5") == EXIT_OK
    assert "3 of 5 trials left\n" in capsys.readouterr().err
    # The third is not started again, the fourth is.
    assert len(study.started) == 6 and len(set(study.started)) == 5
    assert study.started[3] == study.started[4]
    after = study.trials
    assert [trial.state for trial in after] == [TrialState.COMPLETE] * 5
    assert len({trial.params["optimizer.lr"] for trial in after}) == 5, "a new seed"
    assert [trial.params for trial in after[:4]] == [trial.params for trial in before]


def test_a_journal_that_was_cut_off_continues(study):
    """A killed process can leave half a line, and a trial without its parameters."""
    typed = ("optimizer.lr=interval(1e-4,1e-2)", "sweep.n_trials=1")
    assert study(*typed) == EXIT_OK
    study.stored.ask()
    journal = study.folder / "study.journal"
    with journal.open("a") as file:
        file.write('{"op_code":')
    assert study(*typed[:1], "sweep.n_trials=3") == EXIT_OK
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    journal.write_text("nothing of Optuna's\nmore\n")
    with one_line(UserError, r"study\.journal: cannot be used: .*; would work: another name=NAME"):
        study(*typed)


def test_values_of_a_label_have_own_runs(study):
    sampler = ("sweep.sampler=random", "sweep.seed=1", "sweep.n_trials=4")
    assert study("cluster.threads_per_rank=1,2", *sampler) == EXIT_OK
    chosen = {trial.params["cluster.threads_per_rank"] for trial in study.trials}
    assert chosen == {1, 2} and len(study.started) == 2


def test_a_finished_study_runs_nothing_and_another_one_needs_another_name(study):
    typed = ("optimizer.lr=1e-3,1e-4", "sweep.n_trials=2")
    # A label does not make another study.
    for more in ("metrics.log_interval=1", "metrics.log_interval=2"):
        assert study(*typed, more) == EXIT_OK
        assert len(study.trials) == 2 and len(study.started) == len(set(study.started))
    with one_line(
        UserError,
        r"differs in maximize mfu, minimize loss, training\.steps=7; would work: another name",
    ):
        study(*typed, "training.steps=7", "sweep.objective=mfu")
    with one_line(UserError, r"sweep=optuna: CategoricalDistribution does not support"):
        study("optimizer.lr=1e-3,1e-2", "sweep.n_trials=3")


def test_nothing_valid_can_be_corrected(study):
    wrong = ("optimizer.lr=1e-3,1e-4", "parallelism.dp_shard=5", "sweep.n_trials=2")
    assert study(*wrong) == 1
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2
    assert study(wrong[0], "parallelism.dp_shard=2", wrong[2]) == EXIT_OK
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2


def test_a_failure_may_have_a_value(study):
    assert study("optimizer.lr=0.05,0.02", "sweep.n_trials=2", "sweep.failed=50") == 1
    assert study.trials[-1].values == [50.0]


@pytest.mark.parametrize(
    ("typed", "chooses"),
    [
        ("training.seed=1,2", False),
        ("sweep=degrees", False),
        ("training.seed=1,2 sweep=optuna", True),
        ("sweep=degrees sweep.n_trials=3", True),
    ],
)
def test_a_setting_or_a_file_with_one_chooses_points_by_results(typed, chooses):
    assert chooses_points(Composer(), typed.split()) == chooses


def test_a_dry_run_is_of_points_that_are_known(study):
    with one_line(UserError, "^cluster.dry_run=true: shows a sweep whose points are known"):
        study("optimizer.lr=1e-3,1e-4", "cluster=slurm_cpu", "cluster.dry_run=true")


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(sys, "argv", ["train", "-m", "sweep=optuna"])
    with pytest.raises(SystemExit):
        VERB.main()
    says = "the package optuna is not installed; would work: pip install -e '.[optuna]'"
    assert capsys.readouterr().err == f"error: {says}\n"


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("validation_loss.web", "minimize"),
        ("window.tokens_per_second", "maximize"),
        ("mfu", "maximize"),
        ("memory_gib", "minimize"),
    ],
)
def test_objectives_have_directions(name, direction):
    check_objective(name)
    assert natural_direction(name, "f") == direction


@pytest.mark.parametrize(
    "change",
    [{"objective": ["a"]}, {"direction": "up"}, {"shared": [3]}, {"more": 1}],
    ids=str,
)
def test_a_damaged_record_is_one_line(change, tmp_path):
    record = StudyRecord("loss", "minimize", [], [])
    record.write(tmp_path)
    assert StudyRecord.read(tmp_path) == record
    (tmp_path / "study.json").write_text(json.dumps(asdict(record) | change))
    with one_line(UserError, r"study\.json: damaged, or another version wrote it: "):
        StudyRecord.read(tmp_path)


@pytest.mark.parametrize(
    ("direction", "ranked"), [("minimize", [2, 0, 1]), ("maximize", [0, 1, 2])]
)
def test_runs_are_ranked_by_the_objective(direction, ranked):
    rows = [{"exit_reason": "completed", "a": value} for value in (3, 3, 1, "nan", True)]
    rows += [{"exit_reason": "failed", "a": 0}, {"exit_reason": "failed", "a": 9}, {}]
    assert StudyRecord("a", direction, [], []).ranked(rows) == ranked
