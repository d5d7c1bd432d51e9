"""Effects of the checkpoint group's fields, on one rank in this process."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import rows
from local_runs import failed, flip, start
from one_line import one_line
from torch.distributed.checkpoint.planner import SavePlan

from harness.checkpoint import save
from harness.checkpoint.catalog import CheckpointFolder, reading, remove
from harness.checkpoint.resume import differing, refuse_other_numerics
from harness.checkpoint.storage import Writer
from harness.metrics.jsonl import read_metrics
from harness.train.engine import Engine
from harness.util.errors import EXIT_BUG, EXIT_MACHINE, EXIT_USER, ConfigError, UserError
from harness.weights import detect

EVERY_2, EVERY_4 = "checkpoint.interval=2", "checkpoint.interval=4"
WHOLE = "checkpoint.initial_load_model_only=false"
PLAIN = "metrics.console=plain"

# -- writing and keeping ----


@pytest.mark.parametrize(
    ("mode", "keep", "kept"),
    rows("""
        sync   0  [1, 3, 6, 8]
        sync   3  [3, 6, 8]
        async  1  [8]
    """),
)
def test_when_checkpoints_are_written_and_kept(tmp_path, mode, keep, kept):
    often = ("checkpoint.interval=3", "checkpoint.enable_first_step_checkpoint=true")
    run = start(tmp_path, f"checkpoint={mode}", *often, f"checkpoint.keep_latest_k={keep}")
    assert run.checkpoints.steps() == kept
    assert run.row["checkpoint.saves"] == 4
    off = start(tmp_path / "off", "checkpoint=disabled")
    assert not (off.path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    rows("""
        [checkpoint.interval=2, checkpoint.keep_every=4]                          [4, 8]
        [checkpoint.interval=100, checkpoint.log2_steps=true]                     [1, 2, 4, 8]
        [checkpoint.interval=2, 'checkpoint.steps=[3,5]']                         [3, 5, 8]
        [checkpoint.interval=100, checkpoint.interval_minutes=1e-6]               [8]
        [checkpoint.interval=3, checkpoint.keep_every=6, 'checkpoint.steps=[1]']  [1, 6, 8]
    """),
)
def test_what_is_kept_beside_the_newest(tmp_path, options, kept):
    run = start(tmp_path, *options, "checkpoint.keep_latest_k=1")
    assert run.checkpoints.steps() == kept


def test_minutes_are_those_of_rank_0(tmp_path, monkeypatch):
    """The others' clocks decide nothing: they may be fast, or stand still."""
    started = time.monotonic()
    clock = SimpleNamespace(
        monotonic=lambda: started, perf_counter=time.perf_counter, time=time.time
    )
    monkeypatch.setattr(save, "time", clock)
    run = start(tmp_path / "slow", "checkpoint.interval=100", "checkpoint.interval_minutes=1e-6")
    assert run.checkpoints.steps() == [8]
    saver = SimpleNamespace(
        config=SimpleNamespace(interval_minutes=1e-6, writes=True),
        ranks=SimpleNamespace(rank=1),
        _saved_at=-1e9,
    )
    assert not save.Saver.is_overdue.fget(saver)
    saver.ranks.rank = 0
    assert save.Saver.is_overdue.fget(saver)


COMMAND_ON_SAVE = """
[ -z "$RANK$HARNESS_CONTROLLER" ] || exit 9
ls "$CHECKPOINT/manifest.json" || exit 8
echo "$STEP" >> "$RUN_FOLDER/saved.txt"
"""


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        ("", None),
        ("[ $STEP != 4 ]", "of step 4 failed with exit code 1"),
        ("kill -9 $$", "of step 8 failed with exit code 137"),
    ],
)
def test_a_command_for_each_save(tmp_path, capsys, ending, problem):
    """It runs for all checkpoints in order, on those that are old by then too; its failure is a warning."""
    script = tmp_path / "on_save.sh"
    script.write_text(COMMAND_ON_SAVE + ending + "\n")
    command = f"checkpoint.on_save=sh {script}"
    run = start(tmp_path, EVERY_2, "checkpoint.keep_latest_k=1", PLAIN, command)
    assert (run.path / "saved.txt").read_text().split() == ["2", "4", "6", "8"]
    assert (run.path / "logs" / "on_save-step-2.log").read_text().count("manifest.json") == 1
    said = capsys.readouterr().out
    warnings = [line for line in said.splitlines() if "on_save of" in line and "WARNING" in line]
    if problem is None:
        assert not warnings
    else:
        assert any(problem in line for line in warnings), said


def test_a_command_that_hangs_is_ended(tmp_path, capsys):
    command = ("checkpoint.on_save=sleep 1000", "checkpoint.on_save_timeout_seconds=1")
    start(tmp_path, EVERY_4, PLAIN, *command)
    said = capsys.readouterr().out
    for step in (4, 8):
        assert f"checkpoint.on_save of step {step} was ended after on_save_timeout" in said


def test_commands_end_with_a_run_that_fails(tmp_path, capsys, monkeypatch):
    """None is started any more; those that did not end are named, and their checkpoints are there."""
    update = Engine.update

    def fails_in_step_6(engine, norm):
        if engine.schedule.last_epoch == 5:
            raise RuntimeError("planted")
        update(engine, norm)

    monkeypatch.setattr(Engine, "update", fails_in_step_6)
    options = (EVERY_2, "checkpoint.keep_latest_k=1", PLAIN, "checkpoint.on_save=sleep 1000")
    run = start(tmp_path, *options, code=EXIT_BUG)
    said = capsys.readouterr().out
    for step in (2, 4):
        assert f"WARNING checkpoint.on_save of step {step} was ended, because the run ends" in said
    assert run.checkpoints.steps() == [2, 4]


def test_goodput_counts_steps_once_and_all_attempts(tmp_path):
    """Steps that are lost with an attempt are time of the run, but no steps that count."""
    options = (EVERY_2, "checkpoint.keep_latest_k=0")
    first = start(tmp_path, *options).row
    assert 0 < first["train_seconds"] < first["wall_seconds"]
    assert first["goodput"] == first["train_seconds"] / first["wall_seconds"]
    run = start(tmp_path, *options, "checkpoint.load_step=2")
    saved = run.checkpoints.find(2).state["train_state"]["train_seconds"]
    laps = [row["step_seconds"] for row in read_metrics(run.path / "metrics.jsonl")[2:]]
    assert run.row["train_seconds"] == pytest.approx(saved + sum(laps))
    assert run.row["wall_seconds"] > first["wall_seconds"] + sum(laps)
    # One that was killed: its status says that it runs, and its last row is what is known of its end.
    status = json.loads((run.path / "status.json").read_text())
    killed = {**status, "state": "running", "started": 100.0, "time": 101.0, "earlier_seconds": 7.0}
    (run.path / "status.json").write_text(json.dumps(killed))
    os.utime(run.path / "metrics.jsonl", (150.0, 150.0))
    assert run.folder.seconds() == 57.0


def test_what_is_not_purged(tmp_path, finished):
    """One that is read; the newest complete one, where newer ones are damaged."""
    read = finished(tmp_path / "read", EVERY_2).checkpoints
    with reading(read.path_of(2)):
        read.purge(1)
    assert read.steps() == [2, 8]
    read.purge(1)
    assert read.steps() == [8]
    run = finished(tmp_path / "damaged", EVERY_2)
    for step in (6, 8):
        data = run.step(step) / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    run.checkpoints.purge(1)
    assert [each.step for each in run.checkpoints.complete()[0]] == [4]


def test_a_checkpoint_that_is_chosen_from_a_running_run(tmp_path, finished, monkeypatch):
    """The run removes the newest one before it is locked; the next newest is chosen, and stays."""
    run = finished(tmp_path, EVERY_2)
    lock = detect.reading
    shutil.copytree(run.step(8), tmp_path / "newer")

    def remove_then_lock(path):
        monkeypatch.setattr(detect, "reading", lock)
        remove(path)
        return lock(path)

    monkeypatch.setattr(detect, "reading", remove_then_lock)
    assert detect.chosen_source(str(run.path), "checkpoint").path == run.checkpoints.path_of(6)
    (tmp_path / "newer").rename(run.step(8))
    run.checkpoints.purge(1)
    assert run.checkpoints.steps() == [6, 8]


def test_a_finished_checkpoint_is_never_written_over(tmp_path):
    """A longer run cannot resume from weights alone; when it reaches their step again, it keeps them."""
    shared = CheckpointFolder(str(tmp_path / "shared"))
    options = (f"checkpoint.folder={shared.path}", EVERY_4)
    start(tmp_path, *options, "checkpoint.last_save_model_only=true")
    run = start(
        tmp_path, *options, "training.steps=12", "checkpoint.allow_changed=[training.steps]"
    )
    assert run.start_step == 4
    complete = [(each.step, each.holds) for each in shared.complete()[0]]
    assert complete == [(12, "full"), (8, "full"), (4, "full")]
    assert CheckpointFolder(str(tmp_path / "shared" / "superseded" / "1")).find(8).holds == "model"


def test_the_place_is_cleared_when_no_rank_writes(tmp_path):
    """Ranks plan in parallel: removing leftovers while another rank creates its folder would fail a save."""
    left = tmp_path / "step-3" / "half"
    left.parent.mkdir()
    left.write_text("of a killed run")
    writer = Writer(str(left.parent), {})
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(SavePlan([])) for _ in range(2)]
    assert left.exists()
    writer.prepare_global_plan(plans)
    assert not left.exists()


def test_the_folder_is_tried_at_the_start(tmp_path):
    """Another run writes there, or it cannot be written."""
    shared = CheckpointFolder(str(tmp_path / "shared"))
    shared.hold()
    option = f"checkpoint.folder={shared.path}"
    assert "another run writes checkpoints there" in failed(tmp_path, option)
    shared.release()
    start(tmp_path, option)
    (tmp_path / "file").write_text("")
    option = f"checkpoint.folder={tmp_path / 'file'}"
    run = start(tmp_path, option, code=EXIT_USER)
    assert run.error["message"].startswith(f"{option}: cannot be written: ")
    assert run.row["exit_reason"] == "failed" and not (run.path / "metrics.jsonl").exists()


def test_last_save_model_only_in_another_format(tmp_path):
    """Trap 16: the requested format is written."""
    options = (EVERY_4, "checkpoint.last_save_model_only=true", "checkpoint.export_dtype=bfloat16")
    run = start(tmp_path, *options)
    last = run.checkpoints.find(8)
    assert last.holds == "model"
    facts = dcp.FileSystemReader(last.path).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in facts.values()} == {torch.bfloat16}
    assert not any(name.startswith(("optimizer", "rng")) for name in facts)
    # No steps are left, which is not an error.
    run.forget_the_end()
    assert start(tmp_path, *options).row["step"] == 8


def test_fsspec_urls(tmp_path):
    url = f"memory://{tmp_path.name}"
    options = (f"checkpoint.folder={url}", EVERY_4, "checkpoint.keep_latest_k=1")
    whole = start(tmp_path, *options).losses
    remote = CheckpointFolder(url)
    assert remote.steps() == [8]
    remove(remote.path_of(8))
    start(tmp_path, *options, "checkpoint.keep_latest_k=0")
    remove(remote.path_of(8))
    run = start(tmp_path, *options)
    assert run.row["resumed_from"] == f"{url}/step-4" and run.losses == whole
    with one_line(UserError, r"nosuch://bucket.*cannot be opened"):
        CheckpointFolder("nosuch://bucket/x")


# -- saves that fail ----


def test_failed_saves_by_policy(tmp_path, finished, monkeypatch):
    """A temporarily full disk costs one checkpoint, a permanently full one the run; earlier ones stay."""

    class Full(save.Writer):
        steps: tuple[int, ...] = (4,)

        def finish(self, metadata, results):
            if self.manifest["step"] in self.steps:
                raise OSError(28, "No space left on device")
            super().finish(metadata, results)

    whole = finished(tmp_path / "whole").losses
    for mode in ("sync", "async"):
        options = (f"checkpoint={mode}", EVERY_2)
        with monkeypatch.context() as patch:
            patch.setattr(save, "Writer", Full)
            run = start(tmp_path / mode, *options)
            patch.setattr(Full, "steps", (3, 4))
            often = (*options, "checkpoint.interval=1")
            said = failed(tmp_path / "twice" / mode, *often, code=EXIT_MACHINE)
        assert run.checkpoints.steps() == [2, 6, 8] and run.losses == whole
        assert (run.row["checkpoint.saves"], run.row["checkpoint.failed"]) == (3, 1)
        assert (
            "checkpoint of step 4 could not be written" in said
            and "No space left on device" in said
        )
        run = start(tmp_path / "twice" / mode, *options)
        assert run.start_step == 2 and run.losses == whole
    Full.steps = (8,)
    monkeypatch.setattr(save, "Writer", Full)
    said = failed(tmp_path / "last", "checkpoint.interval=100", code=EXIT_MACHINE)
    assert "step 8 could not be written" in said


class Elsewhere(save.Writer):
    """Ranks of other nodes may write to another disk: all listed files must be visible."""

    def finish(self, metadata, results):
        Path(self.path, "__0_0.distcp").unlink()
        super().finish(metadata, results)


class Broken(save.Writer):
    def finish(self, metadata, results):
        raise KeyError("a bug")


def no_room(*_, **__):
    """It happens on one rank; continuing would pair its next save with the others' last."""
    raise MemoryError("no room for the copy")


@pytest.mark.parametrize(
    ("part", "instead", "mode", "step", "code", "kind", "says"),
    [
        # The first of these failures is survived.
        ("Writer", Elsewhere, "sync", 4, EXIT_MACHINE, "machine", "__0_0.distcp is missing"),
        (
            "DefaultStager._stage",
            no_room,
            "async",
            2,
            EXIT_MACHINE,
            "out_of_memory",
            "no room for the copy",
        ),
        ("Writer", Broken, "sync", 2, EXIT_BUG, "bug", "a bug"),
    ],
)
def test_saves_that_end_the_run(part, instead, mode, step, code, kind, says, tmp_path, monkeypatch):
    monkeypatch.setattr(f"harness.checkpoint.save.{part}", instead)
    run = start(tmp_path, f"checkpoint={mode}", EVERY_2, code=code)
    assert run.error["kind"] == kind and says in run.error["traceback"]
    assert (run.row["exit_code"], run.row["step"]) == (code, step)
    assert run.checkpoints.complete()[0] == []


# -- starting and resuming ----


def test_load_step_goes_back_and_keeps_what_came_later(tmp_path, finished):
    whole = finished(tmp_path, EVERY_2).losses
    said = failed(tmp_path, EVERY_2, "checkpoint.load_step=5")
    assert said.startswith("checkpoint.load_step=5: there is no complete checkpoint of that step")
    assert said.endswith("would work: 2, 4, 6, 8")
    run = start(tmp_path, EVERY_2, "checkpoint.load_step=4")
    assert run.start_step == 4 and run.losses == whole
    assert run.superseded() == ["step-6", "step-8"]
    # The same command then resumes from its own checkpoints, and does not go back a second time.
    run.forget_the_end(8)
    run = start(tmp_path, EVERY_2, "checkpoint.load_step=4")
    assert run.start_step == 6 and run.losses == whole
    # From step 0.
    run = start(tmp_path, EVERY_2, "checkpoint.resume=false")
    assert run.start_step == 0 and run.losses == whole
    assert len(list((run.path / "checkpoints" / "superseded").rglob("step-*"))) == 6


def test_excluded_parts_are_not_taken_once(tmp_path, finished):
    run = finished(tmp_path, EVERY_4)
    whole = run.losses
    run.forget_the_end(8)
    options = (
        "checkpoint.interval=1",
        "checkpoint.exclude_from_loading=[data_loader,lr_scheduler]",
    )
    run = start(tmp_path, *options)
    changed, rates = run.losses, run.series("lr")
    assert {s: changed[s] for s in range(1, 5)} == {s: whole[s] for s in range(1, 5)}
    # From the first batch again; its loss has fallen since.
    assert changed[5] != whole[5] and rates[5] == rates[1]
    state = run.checkpoints.find(8).state
    assert state["data_loader"] == {"step": 8, "samples": 4 * 8, "batch": 4}
    # After a stop, the same command resumes from its own newest checkpoint.
    run.forget_the_end(7, 8)
    assert start(tmp_path, *options).losses == changed


def test_sizes_follow_the_step_where_the_data_begins_again(tmp_path, finished):
    options = (
        EVERY_4,
        "schedule.batch_size=[{until_step:3,sequences:4},{until_step:6,sequences:6}]",
        "schedule.seq_len=[{until_step:2,tokens:8},{until_step:5,tokens:16}]",
    )
    finished(tmp_path, *options).forget_the_end(8)
    run = start(tmp_path, *options, "checkpoint.exclude_from_loading=[data_loader]")
    sizes = [run.series("schedule.batch_size"), run.series("schedule.seq_len")]
    assert [(each[5], each[8]) for each in sizes] == [(6, 8), (16, 32)]


def test_the_optimizer_and_the_counters_can_be_left_out(tmp_path, finished):
    run = finished(tmp_path / "first", EVERY_4)
    whole = run.losses
    run.forget_the_end(8)
    after = start(tmp_path / "first", EVERY_4, "checkpoint.exclude_from_loading=[optimizer]").losses
    assert after[5] == whole[5] and after[7] != whole[7]
    # Counters only for another run.
    run = finished(tmp_path / "again", EVERY_4)
    run.forget_the_end(8)
    exclude = "checkpoint.exclude_from_loading=[train_state,optimizer]"
    assert "the run would begin at step 0" in failed(tmp_path / "again", EVERY_4, exclude)
    options = (WHOLE, exclude)
    other = start(tmp_path / "other", f"checkpoint.initial_load_path={run.step(4)}", *options)
    # Excluded for this run, whatever the loading options of the one before.
    third = start(tmp_path / "third", f"checkpoint.initial_load_path={other.path}", *options)
    assert other.start_step == third.start_step == 0


def test_seed_checkpoint(tmp_path, finished):
    plain = finished(tmp_path / "plain")
    seed = start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert seed.checkpoints.steps() == [0]
    for _ in range(2):
        twice = start(tmp_path / "twice", "checkpoint.create_seed_checkpoint=true")
        assert twice.checkpoints.steps() == [0]
    # The same job resumes from it, and another job starts from it.
    run = start(tmp_path)
    assert run.row["resumed_from"] == str(seed.step(0)) and run.losses == plain.losses
    path = f"checkpoint.initial_load_path={seed.step(0)}"
    other, drawn = (
        start(tmp_path / str(len(typed)), "training.seed=1", *typed) for typed in ([path], [])
    )
    assert other.losses[1] != drawn.losses[1]
    # It is not written over a run.
    assert "is already at step 8;" in failed(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert run.checkpoints.find(8).holds == "full"
    # Falling back to it forgets the optimizer, of which much has been loaded when the damage is found.
    run.forget_the_end()
    flip(run.step(8) / "__0_0.distcp", -20000)
    run = start(tmp_path)
    assert run.start_step == 0 and run.losses == plain.losses
    assert run.superseded() == ["step-8"]  # moved aside, not removed


def test_initial_load_of_weights_and_of_everything(tmp_path, finished):
    run = finished(tmp_path / "first", EVERY_4)
    # A run folder means its newest checkpoint.
    tuned = start(tmp_path / "a", "training.seed=2", f"checkpoint.initial_load_path={run.path}")
    assert tuned.start_step == 0 and tuned.checkpoints.steps() == [8]
    options = (f"checkpoint.initial_load_path={run.step(4)}", WHOLE)
    continued = start(tmp_path / "b", *options)
    assert continued.start_step == 4
    assert continued.losses == {s: run.losses[s] for s in range(5, 9)}
    # When started again, it prefers its own checkpoints.
    continued.forget_the_end()
    again = start(tmp_path / "b", *options)
    assert again.row["resumed_from"] == str(again.step(8))


def test_a_run_goes_on_from_another_layout_of_the_same_experiment(tmp_path, finished):
    first = finished(tmp_path, EVERY_4)
    whole = first.losses
    # Other executions of the same numerics. No other run resumes from a completed one, a result of its own.
    assert start(tmp_path, EVERY_4, "training.local_batch_size=4", adopt=True).start_step == 0
    first.forget_the_end(8)
    first.folder.set_status("interrupted")
    assert start(tmp_path, EVERY_4, "training.local_batch_size=2").start_step == 0
    adopted = start(tmp_path, EVERY_4, "training.local_batch_size=1", adopt=True)
    assert adopted.row["resumed_from"] == str(first.step(4))
    assert adopted.losses[8] == pytest.approx(whole[8], rel=1e-5)


# -- other jobs ----


def test_notes_say_how_to_go_on_from_an_earlier_run(tmp_path, finished, capsys):
    first = finished(tmp_path)
    start(tmp_path, "optimizer.lr=0.02", EVERY_4)  # another job, and newer
    assert start(tmp_path, "training.steps=10", PLAIN).start_step == 0
    said = capsys.readouterr().out
    assert f"{first.path} ended after step 8 with training.steps=8 there and 10 here\n" in said
    # The suggested overrides work.
    named = said.split("to go on from it: ")[1].split("\n")[0].split()[:3]
    assert start(tmp_path / "again", "training.steps=10", *named).start_step == 8
    # A run that was stopped, of a job that differs in more.
    finished(tmp_path / "stopped", EVERY_4).forget_the_end(8)
    assert start(tmp_path / "stopped", "optimizer.lr=0.02", PLAIN).start_step == 0
    said = capsys.readouterr().out
    assert "stopped after step 4 with optimizer.lr=0.01 there and 0.02 here" in said
    assert "checkpoint.allow_changed=[optimizer.lr]" in said


def test_a_longer_run_of_the_same_curve_goes_on_without_permission(tmp_path):
    curve = ("schedule.total_steps=8", EVERY_2)
    long = start(tmp_path / "long", *curve)
    short = start(tmp_path / "short", *curve, "training.steps=4")
    again = start(
        tmp_path / "again", *curve, f"checkpoint.initial_load_path={short.step(4)}", WHOLE
    )
    assert again.losses == {step: loss for step, loss in long.losses.items() if step > 4}


def test_other_numerics_are_refused_by_name(tmp_path):
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    start(tmp_path, shared)
    longer = ("training.steps=12", "optimizer.lr=0.02", shared)
    said = failed(tmp_path, *longer)
    assert "training.steps=8 there and 12 here, optimizer.lr=0.01 there and 0.02 here" in said
    assert said.endswith("checkpoint.allow_changed=[training.steps,optimizer.lr]")
    run = start(tmp_path, *longer, "checkpoint.allow_changed=[training.steps,optimizer.lr]")
    assert sorted(run.losses) == [9, 10, 11, 12] and run.series("lr")[9] == 0.02
    said = failed(tmp_path / "x", shared, "checkpoint.allow_changed=[no.field]")
    assert "checkpoint.allow_changed=no.field: no numerics field has this name" in said


def test_numerics_of_an_older_version_are_refused_too():
    """A checkpoint of a job with another value of a field that is gone was trained in another way."""
    job = jobs.tiny()
    plain = job.to_dict()
    plain["optimizer"] |= {"decay_vectors": False, "newton_schulz_steps": 3}
    checkpoint = SimpleNamespace(job=plain, manifest={}, path="step-8")
    assert differing(job, checkpoint) == ["optimizer.newton_schulz_steps"]
    with one_line(ConfigError, "newton_schulz_steps=3 there and none here"):
        refuse_other_numerics(job, checkpoint)


def test_a_changed_batch_goes_on_with_the_next_sample(tmp_path):
    shared = CheckpointFolder(str(tmp_path / "shared"))
    options = (f"checkpoint.folder={shared.path}", "data.mask_fraction=0")
    allowed = "checkpoint.allow_changed=[training.global_batch_size]"
    start(tmp_path, *options, allowed, "training.global_batch_size=6", EVERY_4)
    remove(shared.path_of(8))
    start(tmp_path, *options, allowed, "training.global_batch_size=4")
    assert shared.find(8).state["data_loader"]["samples"] == 4 * 6 + 4 * 4


def test_another_model_is_refused(tmp_path, finished):
    path = finished(tmp_path / "first").step(8)
    said = failed(tmp_path, "model.rope.theta=20000", f"checkpoint.initial_load_path={path}")
    assert "model.rope.theta=500000 there and 20000" in said.replace(".0", "")
    said = failed(tmp_path / "empty", f"checkpoint.initial_load_path={tmp_path}")
    assert "not a checkpoint: it was not finished" in said
