"""Effects of the checkpoint group's fields, on one rank in this process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from resumable_runs import SMALL
from tiers import rest_is_thorough
from torch.distributed.checkpoint.planner import SavePlan

from harness.checkpoint import save
from harness.checkpoint.catalog import CheckpointFolder, reading, remove
from harness.checkpoint.storage import Writer
from harness.metrics.jsonl import read_metrics
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_BUG, EXIT_MACHINE, EXIT_OK, EXIT_USER, UserError


class Run:
    """A run folder after a run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path, self.row = folder, folder.path, folder.row
        self.checkpoints = CheckpointFolder(str(folder.path / "checkpoints"))

    @property
    def start_step(self) -> int:
        return self.row["start_step"]

    def series(self, name: str) -> dict[int, float]:
        """A metric by step."""
        return {row["step"]: row[name] for row in read_metrics(self.path / "metrics.jsonl") if name in row}

    @property
    def losses(self) -> dict[int, float]:
        return self.series("loss")

    def step(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"

    def superseded(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints" / "superseded" / "1").iterdir())

    def forget_the_end(self, *steps: int) -> None:
        """Make the run look as if killed before it wrote the checkpoints of ``steps``."""
        (self.path / "result.json").unlink()
        for step in steps:
            remove(str(self.step(step)))


def start(tmp_path: Path, *overrides: str, adopt: bool = False, code: int = EXIT_OK) -> Run:
    """Train like the user's command, to the given exit code."""
    done = jobs.train(tmp_path, *SMALL, "training.steps=8", *overrides, adopt=adopt)
    assert done.code == code
    return Run(done.folder)


def failed(tmp_path: Path, *overrides: str, code: int = EXIT_USER) -> str:
    """The one-line error of a run."""
    error = start(tmp_path, *overrides, code=code).folder.first_error()
    assert error is not None and "\n" not in error["message"]
    return error["message"]


class Finished(Protocol):
    def __call__(self, tmp_path: Path, *overrides: str) -> Run: ...


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Copy a finished run into a folder; runs of the same overrides are made once."""
    made: dict[tuple[str, ...], tuple[Path, Path]] = {}

    def copy(tmp_path: Path, *overrides: str) -> Run:
        if overrides not in made:
            runs_dir = tmp_path_factory.mktemp("finished")
            made[overrides] = runs_dir, start(runs_dir, *overrides).path
        runs_dir, path = made[overrides]
        shutil.copytree(runs_dir, tmp_path, symlinks=True, dirs_exist_ok=True)
        return Run(RunFolder(tmp_path / path.relative_to(runs_dir)))

    return copy


EVERY_2, EVERY_4 = "checkpoint.interval=2", "checkpoint.interval=4"
WHOLE = "checkpoint.initial_load_model_only=false"

# -- writing and keeping ----


def test_when_checkpoints_are_written(tmp_path: Path) -> None:
    run = start(tmp_path, "checkpoint.interval=3", "checkpoint.enable_first_step_checkpoint=true")
    assert run.checkpoints.steps() == [1, 3, 6, 8]
    assert run.row["checkpoint.saves"] == 4
    for number, option in enumerate(("checkpoint=disabled", "checkpoint.load_only=true")):
        assert not (start(tmp_path / str(number), option).path / "checkpoints").exists()


KEPT = {0: [2, 4, 6, 8], 1: [8], 3: [4, 6, 8]}
MODES = [(mode, keep) for mode in ("sync", "async") for keep in KEPT]


@pytest.mark.parametrize("row", rest_is_thorough(MODES, ("sync", 0), ("sync", 3), ("async", 1)), ids=str)
def test_the_newest_are_kept(tmp_path: Path, row: tuple[str, int]) -> None:
    mode, keep = row
    run = start(tmp_path, f"checkpoint={mode}", EVERY_2, f"checkpoint.keep_latest_k={keep}")
    assert run.checkpoints.steps() == KEPT[keep]


def test_what_is_not_purged(tmp_path: Path, finished: Finished) -> None:
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


def test_a_finished_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    """A longer run cannot resume from weights alone; when it reaches their step again, it keeps them."""
    options = (f"checkpoint.folder={tmp_path / 'shared'}", EVERY_4)
    start(tmp_path, *options, "checkpoint.last_save_model_only=true")
    run = start(tmp_path, *options, "training.steps=12", "checkpoint.allow_changed=[training.steps]")
    assert run.start_step == 4
    complete = CheckpointFolder(str(tmp_path / "shared")).complete()[0]
    assert [(each.step, each.holds) for each in complete] == [(12, "full"), (8, "full"), (4, "full")]
    assert CheckpointFolder(str(tmp_path / "shared" / "superseded" / "1")).find(8).holds == "model"


def test_the_place_is_cleared_when_no_rank_writes(tmp_path: Path) -> None:
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


def test_the_folder_is_tried_at_the_start(tmp_path: Path) -> None:
    """Another run writes there, or it cannot be written."""
    shared = CheckpointFolder(str(tmp_path / "shared"))
    shared.hold()
    option = f"checkpoint.folder={tmp_path / 'shared'}"
    assert "another run writes checkpoints there" in failed(tmp_path, option)
    shared.release()
    start(tmp_path, option)
    (tmp_path / "file").write_text("")
    run = start(tmp_path, f"checkpoint.folder={tmp_path / 'file'}", code=EXIT_USER)
    says = f"checkpoint.folder={tmp_path / 'file'}: cannot be written: "
    assert (run.folder.first_error() or {})["message"].startswith(says)
    assert run.row["exit_reason"] == "failed" and not (run.path / "metrics.jsonl").exists()


def test_last_save_model_only_in_another_format(tmp_path: Path) -> None:
    """Trap 16: the requested format is written."""
    options = (EVERY_4, "checkpoint.last_save_model_only=true", "checkpoint.export_dtype=bfloat16")
    run = start(tmp_path, *options)
    last = run.checkpoints.find(8)
    assert last.holds == "model"
    facts = dcp.FileSystemReader(last.path).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in facts.values()} == {torch.bfloat16}  # type: ignore[union-attr]
    assert not any(name.startswith(("optimizer", "rng")) for name in facts)
    # No steps are left, which is not an error.
    run.forget_the_end()
    assert start(tmp_path, *options).row["step"] == 8


def test_an_export_outlives_its_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = save.remove

    def remove(path: str) -> None:
        if "export" in path and Path(path).exists():
            raise OSError(39, "Directory not empty")
        real(path)

    monkeypatch.setattr(save, "remove", remove)
    options = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
    assert start(tmp_path, *options, "model.vocab_size=258").checkpoints.find(8).holds == "hf"


def test_fsspec_urls(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"nosuch://bucket.*cannot be opened"):
        CheckpointFolder("nosuch://bucket/x")


# -- saves that fail ----


def test_failed_saves_by_policy(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporarily full disk costs one checkpoint, a permanently full one the run; earlier ones stay."""

    class Full(save.Writer):
        steps: tuple[int, ...] = (4,)

        def finish(self, metadata: Any, results: Any) -> None:
            if self.manifest["step"] in self.steps:
                raise OSError(28, "No space left on device")
            super().finish(metadata, results)

    whole = finished(tmp_path / "whole").losses
    for mode in ("sync", "async"):
        options = (f"checkpoint={mode}", EVERY_2)
        with monkeypatch.context() as patch:
            patch.setattr(save, "Writer", Full)
            run = start(tmp_path / mode, *options)
            strict = (*options, "checkpoint.max_failed_saves=0")
            said = failed(tmp_path / "strict" / mode, *strict, code=EXIT_MACHINE)
        assert run.checkpoints.steps() == [2, 6, 8] and run.losses == whole
        assert (run.row["checkpoint.saves"], run.row["checkpoint.failed"]) == (3, 1)
        assert "checkpoint of step 4 could not be written" in said and "No space left on device" in said
        run = start(tmp_path / "strict" / mode, *options)
        assert run.start_step == 2 and run.losses == whole
    Full.steps = (8,)
    monkeypatch.setattr(save, "Writer", Full)
    said = failed(tmp_path / "last", "checkpoint.interval=100", code=EXIT_MACHINE)
    assert "step 8 could not be written" in said


def test_files_that_are_not_seen_are_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other nodes may write to another disk: all listed files must be visible."""

    class Elsewhere(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            Path(self.path, "__0_0.distcp").unlink()
            super().finish(metadata, results)

    monkeypatch.setattr(save, "Writer", Elsewhere)
    run = start(tmp_path, code=EXIT_MACHINE)
    assert "__0_0.distcp is missing" in (run.folder.first_error() or {})["message"]
    assert run.checkpoints.steps() == []


def test_a_failed_copy_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens on one rank; continuing would pair its next save with the others' last."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(save.DefaultStager, "_stage", fail)
    run = start(tmp_path, "checkpoint=async", EVERY_2, code=EXIT_MACHINE)
    error = run.folder.first_error() or {}
    assert (error["kind"], error["message"]) == ("out_of_memory", "no room for the copy")
    assert (run.row["exit_code"], run.row["step"]) == (EXIT_MACHINE, 2)


def test_a_bug_while_saving_is_reported_as_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            raise KeyError("a bug")

    monkeypatch.setattr(save, "Writer", Broken)
    error = start(tmp_path, code=EXIT_BUG).folder.first_error()
    assert error is not None and error["kind"] == "bug" and "a bug" in error["traceback"]


# -- starting and resuming ----


def test_load_step_goes_back_and_keeps_what_came_later(tmp_path: Path, finished: Finished) -> None:
    whole = finished(tmp_path, EVERY_2).losses
    run = start(tmp_path, EVERY_2, "checkpoint.load_step=4")
    assert run.start_step == 4 and run.losses == whole
    assert run.superseded() == ["step-6", "step-8"]
    # The same command then resumes from its own checkpoints, and does not go back a second time.
    run.forget_the_end(8)
    run = start(tmp_path, EVERY_2, "checkpoint.load_step=4")
    assert run.start_step == 6 and run.losses == whole


def test_load_step_that_is_not_there(tmp_path: Path, finished: Finished) -> None:
    finished(tmp_path, EVERY_4)
    said = failed(tmp_path, EVERY_4, "checkpoint.load_step=5")
    assert said.startswith("checkpoint.load_step=5: there is no complete checkpoint of that step")
    assert said.endswith("would work: 4, 8")


def test_starting_from_step_0_keeps_the_old_ones(tmp_path: Path, finished: Finished) -> None:
    whole = finished(tmp_path, EVERY_4).losses
    run = start(tmp_path, EVERY_4, "checkpoint.resume=false")
    assert run.start_step == 0 and run.losses == whole
    assert run.checkpoints.steps() == [4, 8] and len(run.superseded()) == 2


def test_excluded_parts_are_not_taken_once(tmp_path: Path, finished: Finished) -> None:
    run = finished(tmp_path, EVERY_4)
    whole = run.losses
    run.forget_the_end(8)
    options = ("checkpoint.interval=1", "checkpoint.exclude_from_loading=[data_loader,lr_scheduler]")
    run = start(tmp_path, *options)
    changed, rates = run.losses, run.series("lr")
    assert {s: changed[s] for s in range(1, 5)} == {s: whole[s] for s in range(1, 5)}
    # From the first batch again; its loss has fallen since.
    assert changed[5] != whole[5] and rates[5] == rates[1]
    state = run.checkpoints.find(8).state
    assert state["data_loader"] == {"step": 8, "samples": 4 * 8}
    # After a stop, the same command resumes from its own newest checkpoint.
    run.forget_the_end(7, 8)
    assert start(tmp_path, *options).losses == changed


@pytest.mark.parametrize("part", rest_is_thorough(["optimizer", "rng"], "optimizer"))
def test_every_part_can_be_left_out(tmp_path: Path, finished: Finished, part: str) -> None:
    run = finished(tmp_path, EVERY_4)
    whole = run.losses
    run.forget_the_end(8)
    after = start(tmp_path, EVERY_4, f"checkpoint.exclude_from_loading=[{part}]").losses
    assert after[5] == whole[5]
    # Training uses no random numbers yet.
    assert after[7] != whole[7] if part == "optimizer" else after == whole


def test_counters_are_left_out_only_for_another_run(tmp_path: Path, finished: Finished) -> None:
    run = finished(tmp_path, EVERY_4)
    run.forget_the_end(8)
    exclude = "checkpoint.exclude_from_loading=[train_state,optimizer]"
    assert "the run would begin at step 0" in failed(tmp_path, EVERY_4, exclude)
    options = (WHOLE, exclude)
    other = start(tmp_path / "other", f"checkpoint.initial_load_path={run.step(4)}", *options)
    # Excluded for this run, whatever the loading options of the one before.
    third = start(tmp_path / "third", f"checkpoint.initial_load_path={other.path}", *options)
    assert other.start_step == third.start_step == 0


def test_falling_back_to_the_seed_forgets_the_optimizer(tmp_path: Path) -> None:
    start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    run = start(tmp_path)
    whole = run.losses
    run.forget_the_end()
    data = run.step(8) / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-20000] ^= 4  # late in the file, when much has been loaded
    data.write_bytes(content)
    run = start(tmp_path)
    assert run.start_step == 0 and run.losses == whole
    assert run.superseded() == ["step-8"]  # moved aside, not removed


def test_seed_checkpoint(tmp_path: Path, finished: Finished) -> None:
    plain = finished(tmp_path / "plain")
    seed = start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert seed.checkpoints.steps() == [0]
    # The same job resumes from it, and another job starts from it.
    run = start(tmp_path)
    assert run.row["resumed_from"] == str(seed.step(0)) and run.losses == plain.losses
    path = f"checkpoint.initial_load_path={seed.step(0)}"
    other, drawn = (start(tmp_path / str(len(typed)), "training.seed=1", *typed) for typed in ([path], []))
    assert other.losses[1] != drawn.losses[1]
    # It is not written over a run.
    assert "is already at step 8;" in failed(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert run.checkpoints.find(8).holds == "full"


def test_initial_load_of_weights_and_of_everything(tmp_path: Path, finished: Finished) -> None:
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


def test_a_run_goes_on_from_another_layout_of_the_same_experiment(tmp_path: Path, finished: Finished) -> None:
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


def test_a_changed_job_gets_a_note_on_the_earlier_run(
    tmp_path: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, EVERY_4).forget_the_end(8)
    other = start(tmp_path, "optimizer.lr=0.02", "metrics.console=plain")
    said = capsys.readouterr().out
    assert "stopped after step 4 with optimizer.lr=0.01 there and 0.02 here" in said
    assert "checkpoint.allow_changed=[optimizer.lr]" in said
    assert other.start_step == 0


def test_a_longer_job_gets_a_note_on_how_to_resume(
    tmp_path: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    first = finished(tmp_path)
    assert start(tmp_path, "training.steps=10", "metrics.console=plain").start_step == 0
    said = capsys.readouterr().out
    assert f"{first.path} ended after step 8 with training.steps=8 there and 10 here; to go on" in said
    # The suggested overrides work.
    named = said.split("to go on from it: ")[1].split("\n")[0].split()[:3]
    assert start(tmp_path / "again", "training.steps=10", *named).start_step == 8


def test_other_numerics_are_refused_by_name(tmp_path: Path) -> None:
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


def test_a_changed_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    shared = CheckpointFolder(str(tmp_path / "shared"))
    options = (f"checkpoint.folder={shared.path}", "data.mask_fraction=0")
    allowed = "checkpoint.allow_changed=[training.global_batch_size]"
    start(tmp_path, *options, allowed, "training.global_batch_size=6", EVERY_4)
    remove(shared.path_of(8))
    start(tmp_path, *options, allowed, "training.global_batch_size=4")
    assert shared.find(8).state["data_loader"]["samples"] == 4 * 6 + 4 * 4


def test_another_model_is_refused(tmp_path: Path, finished: Finished) -> None:
    path = finished(tmp_path / "first").step(8)
    said = failed(tmp_path, "model.rope.theta=20000", f"checkpoint.initial_load_path={path}")
    assert "model.rope.theta=500000 there and 20000" in said.replace(".0", "")
    said = failed(tmp_path / "empty", f"checkpoint.initial_load_path={tmp_path}")
    assert "not a checkpoint: it was not finished" in said
