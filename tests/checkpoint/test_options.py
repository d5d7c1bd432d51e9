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
from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER, UserError


def start(tmp_path: Path, *overrides: str, adopt: bool = False) -> tuple[int, RunFolder]:
    """Train like the user's command; return the exit code and the run folder."""
    done = jobs.train(tmp_path, *SMALL, "training.steps=8", *overrides, adopt=adopt)
    return done.code, done.folder


class Finished(Protocol):
    def __call__(self, tmp_path: Path, *overrides: str) -> RunFolder: ...


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Copy a finished run into a folder; runs of the same overrides are made once."""
    made: dict[tuple[str, ...], tuple[Path, RunFolder]] = {}

    def copy(tmp_path: Path, *overrides: str) -> RunFolder:
        if overrides not in made:
            runs_dir = tmp_path_factory.mktemp("finished")
            code, folder = start(runs_dir, *overrides)
            assert code == EXIT_OK
            made[overrides] = runs_dir, folder
        runs_dir, folder = made[overrides]
        shutil.copytree(runs_dir, tmp_path, symlinks=True, dirs_exist_ok=True)
        return RunFolder(tmp_path / folder.path.relative_to(runs_dir))

    return copy


def steps_of(folder: RunFolder) -> list[int]:
    return CheckpointFolder(str(folder.path / "checkpoints")).steps()


def losses_of(folder: RunFolder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder.path / "metrics.jsonl") if "loss" in row}


def error_of(folder: RunFolder) -> str:
    error = folder.first_error()
    assert error is not None
    assert "\n" not in error["message"]
    return error["message"]


def forget_the_end(folder: RunFolder, *steps: int) -> None:
    """Make a finished run look as if killed before it wrote the checkpoints of ``steps``."""
    (folder.path / "result.json").unlink()
    for step in steps:
        remove(str(folder.path / "checkpoints" / f"step-{step}"))


def test_when_checkpoints_are_written(tmp_path: Path) -> None:
    _, folder = start(tmp_path, "checkpoint.interval=3", "checkpoint.enable_first_step_checkpoint=true")
    assert steps_of(folder) == [1, 3, 6, 8]
    assert folder.row["checkpoint.saves"] == 4


def test_nothing_is_written_when_disabled_or_only_loading(tmp_path: Path) -> None:
    for number, option in enumerate(("checkpoint=disabled", "checkpoint.load_only=true")):
        code, folder = start(tmp_path / str(number), option)
        assert code == EXIT_OK
        assert not (folder.path / "checkpoints").exists()


KEPT = {0: [2, 4, 6, 8], 1: [8], 3: [4, 6, 8]}
MODES = [(mode, keep) for mode in ("sync", "async") for keep in KEPT]


@pytest.mark.parametrize("row", rest_is_thorough(MODES, ("sync", 0), ("sync", 3), ("async", 1)), ids=str)
def test_the_newest_are_kept(tmp_path: Path, row: tuple[str, int]) -> None:
    mode, keep = row
    _, folder = start(
        tmp_path, f"checkpoint={mode}", "checkpoint.interval=2", f"checkpoint.keep_latest_k={keep}"
    )
    assert steps_of(folder) == KEPT[keep]


def test_one_that_is_being_read_is_not_purged(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path, "checkpoint.interval=2")
    checkpoints = CheckpointFolder(str(folder.path / "checkpoints"))
    with reading(checkpoints.path_of(2)):
        checkpoints.purge(1)
    assert checkpoints.steps() == [2, 8]
    checkpoints.purge(1)
    assert checkpoints.steps() == [8]


def test_the_newest_complete_one_outlives_damaged_newer_ones(tmp_path: Path, finished: Finished) -> None:
    """A truncated checkpoint must not count as kept, or the last good one would be removed."""
    folder = finished(tmp_path, "checkpoint.interval=2")
    checkpoints = CheckpointFolder(str(folder.path / "checkpoints"))
    for step in (6, 8):
        data = Path(checkpoints.path_of(step)) / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    checkpoints.purge(1)
    assert [each.step for each in checkpoints.complete()[0]] == [4]


def test_load_step_goes_back_and_keeps_what_came_later(tmp_path: Path, finished: Finished) -> None:
    options = ("checkpoint.interval=2",)
    folder = finished(tmp_path, *options)
    whole = losses_of(folder)
    code, folder = start(tmp_path, *options, "checkpoint.load_step=4")
    assert code == EXIT_OK
    assert folder.row["start_step"] == 4
    assert losses_of(folder) == whole
    aside = folder.path / "checkpoints" / "superseded" / "1"
    assert sorted(p.name for p in aside.iterdir()) == ["step-6", "step-8"]
    # The same command then resumes from its own checkpoints, and does not go back a second time.
    forget_the_end(folder, 8)
    _, folder = start(tmp_path, *options, "checkpoint.load_step=4")
    assert folder.row["start_step"] == 6
    assert losses_of(folder) == whole


def test_load_step_that_is_not_there(tmp_path: Path, finished: Finished) -> None:
    finished(tmp_path, "checkpoint.interval=4")
    code, folder = start(tmp_path, "checkpoint.interval=4", "checkpoint.load_step=5")
    assert code == EXIT_USER
    assert error_of(folder).startswith("checkpoint.load_step=5: there is no complete checkpoint of that step")
    assert error_of(folder).endswith("would work: 4, 8")


def test_starting_from_step_0_keeps_the_old_ones(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path, "checkpoint.interval=4")
    first = losses_of(folder)
    _, folder = start(tmp_path, "checkpoint.interval=4", "checkpoint.resume=false")
    assert folder.row["start_step"] == 0
    assert losses_of(folder) == first
    assert steps_of(folder) == [4, 8]
    assert len(list((folder.path / "checkpoints" / "superseded" / "1").iterdir())) == 2


def test_excluded_parts_are_not_taken_once(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path, "checkpoint.interval=4")
    whole = losses_of(folder)
    forget_the_end(folder, 8)
    options = ("checkpoint.interval=1", "checkpoint.exclude_from_loading=[data_loader,lr_scheduler]")
    _, folder = start(tmp_path, *options)
    changed = losses_of(folder)
    assert {s: changed[s] for s in range(1, 5)} == {s: whole[s] for s in range(1, 5)}
    # From the first batch again; its loss has fallen since.
    assert changed[5] != whole[5]
    rates = {r["step"]: r["lr"] for r in read_metrics(folder.path / "metrics.jsonl") if "lr" in r}
    assert rates[5] == rates[1]
    manifest = CheckpointFolder(str(folder.path / "checkpoints")).find(8).manifest
    assert manifest["state"]["data_loader"] == {"step": 8, "samples": 4 * 8}
    # After a stop, the same command resumes from its own newest checkpoint.
    forget_the_end(folder, 7, 8)
    _, folder = start(tmp_path, *options)
    assert losses_of(folder) == changed


@pytest.mark.parametrize("part", rest_is_thorough(["optimizer", "rng"], "optimizer"))
def test_every_part_can_be_left_out(tmp_path: Path, finished: Finished, part: str) -> None:
    folder = finished(tmp_path, "checkpoint.interval=4")
    whole = losses_of(folder)
    forget_the_end(folder, 8)
    code, folder = start(tmp_path, "checkpoint.interval=4", f"checkpoint.exclude_from_loading=[{part}]")
    assert code == EXIT_OK
    after = losses_of(folder)
    if part == "optimizer":
        assert after[5] == whole[5] and after[7] != whole[7]
    else:
        assert after == whole  # training uses no random numbers yet


def test_counters_are_left_out_only_for_another_run(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path, "checkpoint.interval=4")
    forget_the_end(folder, 8)
    exclude = "checkpoint.exclude_from_loading=[train_state,optimizer]"
    code, folder = start(tmp_path, "checkpoint.interval=4", exclude)
    assert code == EXIT_USER and "the run would begin at step 0" in error_of(folder)
    step = folder.path / "checkpoints" / "step-4"
    options = (f"checkpoint.initial_load_path={step}", "checkpoint.initial_load_model_only=false", exclude)
    code, other = start(tmp_path / "other", *options)
    assert code == EXIT_OK and other.row["start_step"] == 0
    # Excluded for this run, whatever the loading options of the one before.
    _, third = start(tmp_path / "third", *options[1:], f"checkpoint.initial_load_path={other.path}")
    assert third.row["start_step"] == 0


def test_falling_back_to_the_seed_forgets_the_optimizer(tmp_path: Path) -> None:
    start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    _, folder = start(tmp_path)
    whole = losses_of(folder)
    forget_the_end(folder)
    data = folder.path / "checkpoints" / "step-8" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-20000] ^= 4  # late in the file, when much has been loaded
    data.write_bytes(content)
    code, folder = start(tmp_path)
    assert code == EXIT_OK and folder.row["start_step"] == 0
    assert losses_of(folder) == whole
    # The damaged one was moved aside, not removed.
    assert (folder.path / "checkpoints" / "superseded" / "1" / "step-8").is_dir()


def test_a_seed_is_not_written_over_a_run(tmp_path: Path, finished: Finished) -> None:
    finished(tmp_path)
    code, folder = start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert code == EXIT_USER and "is already at step 8;" in error_of(folder)
    assert CheckpointFolder(str(folder.path / "checkpoints")).find(8).holds == "full"


def test_an_export_outlives_its_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = save.remove

    def remove(path: str) -> None:
        if "export" in path and Path(path).exists():
            raise OSError(39, "Directory not empty")
        real(path)

    monkeypatch.setattr(save, "remove", remove)
    options = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
    code, folder = start(tmp_path, *options, "model.vocab_size=258")
    assert code == EXIT_OK
    assert CheckpointFolder(str(folder.path / "checkpoints")).find(8).holds == "hf"


def test_files_that_are_not_seen_are_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other nodes may write to another disk: all listed files must be visible."""

    class Elsewhere(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            Path(self.path, "__0_0.distcp").unlink()
            super().finish(metadata, results)

    monkeypatch.setattr(save, "Writer", Elsewhere)
    code, folder = start(tmp_path)
    assert code == EXIT_MACHINE and "__0_0.distcp is missing" in error_of(folder)
    assert steps_of(folder) == []


def test_a_failed_copy_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens on one rank; continuing would pair its next save with the others' last."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(save.DefaultStager, "_stage", fail)
    _, folder = start(tmp_path, "checkpoint=async", "checkpoint.interval=2")
    error = folder.first_error()
    assert error is not None and (error["kind"], error["message"]) == (
        "out_of_memory",
        "no room for the copy",
    )
    assert (folder.row["exit_code"], folder.row["step"]) == (EXIT_MACHINE, 2)


def test_a_changed_job_gets_a_note_on_the_earlier_run(
    tmp_path: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(tmp_path, "checkpoint.interval=4")
    forget_the_end(folder, 8)
    _, other = start(tmp_path, "optimizer.lr=0.02", "metrics.console=plain")
    said = capsys.readouterr().out
    assert "stopped after step 4 with optimizer.lr=0.01 there and 0.02 here" in said
    assert "checkpoint.allow_changed=[optimizer.lr]" in said
    assert other.row["start_step"] == 0


def test_a_longer_job_gets_a_note_on_how_to_resume(
    tmp_path: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    first = finished(tmp_path)
    code, longer = start(tmp_path, "training.steps=10", "metrics.console=plain")
    said = capsys.readouterr().out
    assert code == EXIT_OK and longer.row["start_step"] == 0
    assert f"{first.path} ended after step 8 with training.steps=8 there and 10 here; to go on" in said
    # The suggested overrides work.
    named = said.split("to go on from it: ")[1].split("\n")[0].split()[:3]
    code, longer = start(tmp_path / "again", "training.steps=10", *named)
    assert code == EXIT_OK and longer.row["start_step"] == 8


def test_seed_checkpoint(tmp_path: Path, finished: Finished) -> None:
    plain = finished(tmp_path / "plain")
    code, folder = start(tmp_path, "checkpoint.create_seed_checkpoint=true")
    assert code == EXIT_OK and steps_of(folder) == [0]
    seed = folder.path / "checkpoints" / "step-0"
    # The same job resumes from it, and another job starts from it.
    _, folder = start(tmp_path)
    assert folder.row["resumed_from"] == str(seed)
    assert losses_of(folder) == losses_of(plain)
    _, other = start(tmp_path / "other", "training.seed=1", f"checkpoint.initial_load_path={seed}")
    _, initialized = start(tmp_path / "drawn", "training.seed=1")
    assert losses_of(other)[1] != losses_of(initialized)[1]


def test_initial_load_of_weights_and_of_everything(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path / "first", "checkpoint.interval=4")
    whole = losses_of(folder)
    # A run folder means its newest checkpoint.
    _, tuned = start(tmp_path / "a", "training.seed=2", f"checkpoint.initial_load_path={folder.path}")
    assert tuned.row["start_step"] == 0 and steps_of(tuned) == [8]
    step = folder.path / "checkpoints" / "step-4"
    options = (f"checkpoint.initial_load_path={step}", "checkpoint.initial_load_model_only=false")
    _, continued = start(tmp_path / "b", *options)
    assert continued.row["start_step"] == 4
    assert losses_of(continued) == {s: whole[s] for s in range(5, 9)}
    # When started again, it prefers its own checkpoints.
    forget_the_end(continued)
    _, again = start(tmp_path / "b", *options)
    assert again.row["resumed_from"] == str(again.path / "checkpoints" / "step-8")


def test_other_numerics_are_refused_by_name(tmp_path: Path) -> None:
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    start(tmp_path, shared)
    longer = ("training.steps=12", "optimizer.lr=0.02", shared)
    code, folder = start(tmp_path, *longer)
    assert code == EXIT_USER
    message = error_of(folder)
    assert "training.steps=8 there and 12 here, optimizer.lr=0.01 there and 0.02 here" in message
    assert message.endswith("checkpoint.allow_changed=[training.steps,optimizer.lr]")
    code, folder = start(tmp_path, *longer, "checkpoint.allow_changed=[training.steps,optimizer.lr]")
    assert code == EXIT_OK
    assert sorted(losses_of(folder)) == [9, 10, 11, 12]
    rates = [r["lr"] for r in read_metrics(folder.path / "metrics.jsonl") if "lr" in r]
    assert rates[0] == 0.02


def test_a_changed_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    allowed = "checkpoint.allow_changed=[training.global_batch_size]"
    shared = (f"checkpoint.folder={tmp_path / 'shared'}", allowed)
    start(tmp_path, *shared, "training.global_batch_size=6", "checkpoint.interval=4", "data.mask_fraction=0")
    remove(str(tmp_path / "shared" / "step-8"))
    start(tmp_path, *shared, "training.global_batch_size=4", "data.mask_fraction=0")
    state = CheckpointFolder(str(tmp_path / "shared")).find(8).state
    assert state["data_loader"]["samples"] == 4 * 6 + 4 * 4


def test_another_model_is_refused(tmp_path: Path, finished: Finished) -> None:
    folder = finished(tmp_path / "first")
    path = folder.path / "checkpoints" / "step-8"
    code, folder = start(tmp_path, "model.rope.theta=20000", f"checkpoint.initial_load_path={path}")
    assert code == EXIT_USER
    assert "model.rope.theta=500000 there and 20000" in error_of(folder).replace(".0", "")


def test_a_finished_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    """A longer run cannot resume from weights alone; when it reaches their step again, it keeps them."""
    options = (f"checkpoint.folder={tmp_path / 'shared'}", "checkpoint.interval=4")
    start(tmp_path, *options, "checkpoint.last_save_model_only=true")
    code, folder = start(tmp_path, *options, "training.steps=12", "checkpoint.allow_changed=[training.steps]")
    assert code == EXIT_OK and folder.row["start_step"] == 4
    checkpoints = CheckpointFolder(str(tmp_path / "shared"))
    assert [(each.step, each.holds) for each in checkpoints.complete()[0]] == [
        (12, "full"),
        (8, "full"),
        (4, "full"),
    ]
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


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    shared = CheckpointFolder(str(tmp_path / "shared"))
    shared.hold()
    code, folder = start(tmp_path, f"checkpoint.folder={tmp_path / 'shared'}")
    assert code == EXIT_USER and "another run writes checkpoints there" in error_of(folder)
    shared.release()
    assert start(tmp_path, f"checkpoint.folder={tmp_path / 'shared'}")[0] == EXIT_OK


def test_last_save_model_only_in_another_format(tmp_path: Path) -> None:
    """Trap 16: the requested format is written."""
    options = ("checkpoint.last_save_model_only=true", "checkpoint.export_dtype=bfloat16")
    code, folder = start(tmp_path, "checkpoint.interval=4", *options)
    assert code == EXIT_OK
    last = CheckpointFolder(str(folder.path / "checkpoints")).find(8)
    assert last.holds == "model"
    facts = dcp.FileSystemReader(last.path).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in facts.values()} == {torch.bfloat16}  # type: ignore[union-attr]
    assert not any(name.startswith(("optimizer", "rng")) for name in facts)
    # No steps are left, which is not an error.
    (folder.path / "result.json").unlink()
    code, folder = start(tmp_path, "checkpoint.interval=4", *options)
    assert code == EXIT_OK and folder.row["step"] == 8


def test_a_run_goes_on_from_another_layout_of_the_same_experiment(tmp_path: Path, finished: Finished) -> None:
    options = ("checkpoint.interval=4",)
    first = finished(tmp_path, *options)
    whole = losses_of(first)
    other = (*options, "training.local_batch_size=4")  # another execution of the same numerics
    # A completed run is a result of its own: no other run resumes from it.
    _, second = start(tmp_path, *other, adopt=True)
    assert second.row["start_step"] == 0
    forget_the_end(first, 8)
    first.set_status("interrupted")
    third = (*options, "training.local_batch_size=2")
    _, alone = start(tmp_path, *third)
    assert alone.row["start_step"] == 0
    fourth = (*options, "training.local_batch_size=1")
    _, adopted = start(tmp_path, *fourth, adopt=True)
    assert adopted.row["resumed_from"] == str(first.path / "checkpoints" / "step-4")
    assert losses_of(adopted)[8] == pytest.approx(whole[8], rel=1e-5)


def test_failed_saves_by_policy(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporarily full disk costs one checkpoint, a permanently full one the run; earlier ones stay."""

    class Full(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError(28, "No space left on device")

    class FullAtFour(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            if self.manifest["step"] == 4:
                raise OSError(28, "No space left on device")
            super().finish(metadata, results)

    whole = losses_of(finished(tmp_path / "whole"))
    for number, mode in enumerate(("sync", "async")):
        options = (f"checkpoint={mode}", "checkpoint.interval=2")
        with monkeypatch.context() as patch:
            patch.setattr(save, "Writer", FullAtFour)
            code, folder = start(tmp_path / str(number), *options)
        assert code == EXIT_OK
        assert steps_of(folder) == [2, 6, 8]
        result = folder.row
        assert (result["checkpoint.saves"], result["checkpoint.failed"]) == (3, 1)
        assert losses_of(folder) == whole
        with monkeypatch.context() as patch:
            patch.setattr(save, "Writer", FullAtFour)
            code, folder = start(tmp_path / f"{number}-strict", *options, "checkpoint.max_failed_saves=0")
        assert code == EXIT_MACHINE
        assert "checkpoint of step 4 could not be written" in error_of(folder)
        assert "No space left on device" in error_of(folder)
        assert steps_of(folder) == [2]
        code, folder = start(tmp_path / f"{number}-strict", *options)
        assert code == EXIT_OK and folder.row["start_step"] == 2
        assert losses_of(folder) == whole
    with monkeypatch.context() as patch:
        patch.setattr(save, "Writer", Full)
        code, folder = start(tmp_path / "last", "checkpoint.interval=100")
    assert code == EXIT_MACHINE and "step 8 could not be written" in error_of(folder)


def test_a_bug_while_saving_is_reported_as_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(save.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            raise KeyError("a bug")

    monkeypatch.setattr(save, "Writer", Broken)
    code, folder = start(tmp_path)
    error = folder.first_error()
    assert code == 1 and error is not None and error["kind"] == "bug" and "a bug" in error["traceback"]


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, folder = start(tmp_path, f"checkpoint.folder={tmp_path / 'file'}")
    assert code == EXIT_USER
    assert error_of(folder).startswith(f"checkpoint.folder={tmp_path / 'file'}: cannot be written: ")
    assert folder.row["exit_reason"] == "failed"
    assert not (folder.path / "metrics.jsonl").exists()


def test_fsspec_urls(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    options = (f"checkpoint.folder={url}", "checkpoint.interval=4", "checkpoint.keep_latest_k=1")
    _, folder = start(tmp_path, *options)
    whole = losses_of(folder)
    remote = CheckpointFolder(url)
    assert remote.steps() == [8]
    remove(remote.path_of(8))
    start(tmp_path, *options, "checkpoint.keep_latest_k=0")
    remove(remote.path_of(8))
    _, folder = start(tmp_path, *options)
    assert folder.row["resumed_from"] == f"{url}/step-4"
    assert losses_of(folder) == whole


def test_unknown_protocol(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nosuch://bucket.*cannot be opened"):
        CheckpointFolder("nosuch://bucket/x")


def test_mistakes_found_when_starting(tmp_path: Path) -> None:
    for number, (typed, says) in enumerate(
        [
            (f"checkpoint.initial_load_path={tmp_path}", "not a checkpoint: it was not finished"),
            (
                "checkpoint.allow_changed=[no.field]",
                "checkpoint.allow_changed=no.field: no numerics field has this name",
            ),
        ]
    ):
        first = () if "initial" in typed else (f"checkpoint.folder={tmp_path / 'shared'}",)
        if first:
            start(tmp_path / "x", *first)
        code, folder = start(tmp_path / str(number), *first, typed)
        assert code == EXIT_USER and says in error_of(folder)
