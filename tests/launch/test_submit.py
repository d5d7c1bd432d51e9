"""Jobs that cannot be submitted, are lost, or miss their run folder, with a mocked SLURM."""

import errno

import pytest
from one_line import one_line

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.launch import queue, slurm, submit
from harness.launch import state as lost
from harness.launch.queue import Jobs, Queued
from harness.launch.state import SlurmJobRecord
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.util.errors import EXIT_MACHINE, EXIT_OK, UserError


@pytest.fixture
def job(tmp_path):
    return compose_job(
        [
            f"runs_dir={tmp_path}",
            "name=one",
            "cluster=slurm_cpu",
            "model=llama3_tiny",
            "data=synthetic",
        ]
    )


@pytest.fixture(autouse=True)
def scheduler(monkeypatch):
    """The jobs in the queue; a mocked sbatch accepts every job as job 12."""
    waiting = []
    for module in (slurm, submit):
        monkeypatch.setattr(module, "require_slurm", lambda: None)
    monkeypatch.setattr(slurm, "submit_script", lambda _: "12")
    monkeypatch.setattr(submit, "jobs", lambda: Jobs(waiting))
    monkeypatch.setattr(lost, "queued_jobs", lambda _: Jobs(waiting))
    monkeypatch.setattr(lost, "last_states", lambda wanted: dict.fromkeys(wanted, "FAILED"))
    monkeypatch.setattr(lost, "LAST_WRITES_SECONDS", 0.0)
    return waiting


def fail(error):
    def call(*_):
        raise error

    return call


def test_without_slurm_the_line_says_so(job, monkeypatch):
    monkeypatch.setattr(submit, "require_slurm", queue.require_slurm)
    monkeypatch.setenv("PATH", "/nowhere")
    with one_line(UserError, "there is no sbatch here"):
        submit.submit_one(job, RunFolder(job.run_dir), [])
    assert not job.run_dir.exists()


def test_a_full_disk_is_one_line_and_nothing_is_submitted(job, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(slurm, "take_snapshot", fail(full))
    folder = RunFolder(job.run_dir)
    message = r"cannot write the job's files, so it was not submitted: .*No space left"
    with one_line(UserError, message):
        submit.submit_one(job, folder, [])
    assert folder.state == "planned"
    # Nor can the status be written.
    set_status = RunFolder.set_status

    def refuse(folder, state, **facts):
        if state == "planned":
            raise full
        set_status(folder, state, **facts)

    monkeypatch.setattr(RunFolder, "set_status", refuse)
    with one_line(UserError, "so it was not submitted"):
        submit.submit_one(job, folder, [])


def test_an_interrupt_before_sbatch_leaves_a_planned_job(job, monkeypatch):
    folder = RunFolder(job.run_dir)
    monkeypatch.setattr(slurm, "take_snapshot", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        submit.submit_one(job, folder, [])
    assert folder.state == "planned"


def test_all_that_a_job_reads_is_there_before_sbatch(job, monkeypatch):
    found = []

    def sbatch(script):
        run_dirs = submission._list_path.read_text().splitlines()
        found.append(script.read_text() == submission.script())
        found.append(run_dirs == [str(path) for path in submission.run_dirs])
        found.extend(SlurmJobRecord.read(path) is not None for path in submission.run_dirs)
        return "12"

    monkeypatch.setattr(slurm, "submit_script", sbatch)
    folders = [RunFolder(job.run_dir.with_name(name)) for name in ("a", "b")]
    submission = slurm.Submission(
        [job, job], [each.path for each in folders], job.run_dir.parent, "many"
    )
    assert submit.submit(submission, folders, [[], []]) == ["12_0", "12_1"]
    assert found == [True] * 4


def test_a_run_folder_that_was_removed_while_the_job_waits(job, scheduler):
    scheduler.append(Queued("12", f"one.{job.id}", "PENDING", "Resources"))
    rule = r"SLURM job 12 \(PENDING\) has this run's name.*would work: scancel 12"
    with one_line(UserError, rule):
        submit.submit_one(job, RunFolder(job.run_dir), [])


def test_the_end_of_a_lost_job_is_shown_before_the_next(job, capsys):
    folder = RunFolder(job.run_dir)
    submit.submit_one(job, folder, [])
    (job.run_dir / "slurm" / "12_0_log.out").write_text("/bin/bash: no such interpreter\n")
    submit.submit_one(job, folder, [])
    said = capsys.readouterr()
    assert "SLURM job 12 ended without a result" in said.err and "SLURM says FAILED" in said.err
    assert "no such interpreter" in said.err
    assert said.out.count("submitted as job 12") == 2
    assert "JobLost" in (job.run_dir / "attempts" / "1" / "result.json").read_text()


@pytest.mark.parametrize("why", ["interrupted", "requeued", "another user's"])
def test_a_job_that_slurm_will_start_is_not_submitted_again(
    why, job, scheduler, monkeypatch, capsys
):
    folder = RunFolder(job.run_dir)
    if why == "interrupted":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(slurm, "submit_script", fail(KeyboardInterrupt()))
            submit.submit_one(job, folder, [])
        assert folder.state == "submitted", "and the id was not written"
        scheduler.append(Queued("12", f"one.{job.id}", "PENDING", "interrupted"))
    else:
        submit.submit_one(job, folder, [])
    monkeypatch.setattr(slurm, "submit_script", fail(AssertionError("submitted twice")))
    if why == "requeued":
        RunRecord(job, folder).end("failed", EXIT_MACHINE, {})
        scheduler.append(Queued("12", f"one.{job.id}", "PENDING", "BeginTime"))
    elif why == "another user's":
        monkeypatch.setattr(lost, "last_states", lambda wanted: dict.fromkeys(wanted, "PENDING"))
    assert submit.submit_one(job, folder, []) == EXIT_OK
    said = capsys.readouterr().out
    assert "one: already submitted (" in said and why in said and ") as job 12, " in said


def followed(job, monkeypatch):
    """The exit code of a command that follows the job."""
    monkeypatch.setattr(submit, "FOLLOW_SECONDS", 0.01)
    return submit.submit_one(with_value(job, "cluster.wait", True), RunFolder(job.run_dir), [])


def test_a_late_row_is_no_lost_job(job, monkeypatch, capsys):
    def end_meanwhile(wanted):
        if wanted:
            RunRecord(job, RunFolder(job.run_dir)).end("completed", EXIT_OK, {})
        return dict.fromkeys(wanted, "COMPLETED")

    monkeypatch.setattr(lost, "last_states", end_meanwhile)
    assert followed(job, monkeypatch) == EXIT_OK
    assert "one: completed\n" in capsys.readouterr().err


def test_a_lost_job_gets_its_row(job, monkeypatch, capsys):
    monkeypatch.setattr(lost, "last_states", lambda wanted: dict.fromkeys(wanted, "NODE_FAIL"))
    assert followed(job, monkeypatch) == EXIT_MACHINE
    row = RunFolder(job.run_dir).row
    assert row["error.kind"] == "node" and "one: failed (node: " in capsys.readouterr().err
    assert f"without {job.run_dir}/slurm/12_0_log.out" in row["error.message"]


def test_a_job_that_can_never_start_is_the_users_error(job, scheduler, monkeypatch):
    blocked = Queued("12", f"one.{job.id}", "PENDING", "DependencyNeverSatisfied")
    monkeypatch.setattr(slurm, "submit_script", lambda _: scheduler.append(blocked) or "12")
    with one_line(UserError, "job 12 can never start: DependencyNeverSatisfied; would work: "):
        followed(job, monkeypatch)


@pytest.mark.parametrize(("state", "code"), [("completed", EXIT_OK), ("failed", EXIT_MACHINE)])
def test_an_unreadable_row(job, monkeypatch, state, code):
    def end_meanwhile(wanted):
        if wanted:
            RunFolder(job.run_dir).set_status(state)
            (job.run_dir / "result.json").write_text("{")
        return {}

    monkeypatch.setattr(lost, "last_states", end_meanwhile)
    assert followed(job, monkeypatch) == code
