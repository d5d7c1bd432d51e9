"""Choose the checkpoint that a run starts from, by examining folders; nothing is loaded. Imports no torch."""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import (
    MANIFEST,
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    UnfinishedCheckpoint,
    is_foreign,
    is_url,
    open_checkpoint,
)
from harness.config.component import without_folders
from harness.config.fields import EXECUTION, REMOVED
from harness.config.job import Job, numerics_of
from harness.run.folder import RunFolder, run_folders
from harness.util.encoding import flat_items, read_object
from harness.util.errors import EXIT_OK, ConfigError, UserError, as_typed
from harness.util.words import plural

# Lists checkpoint folders of the same experiment on other layouts, from which a run may resume.
CONTINUES = "continues.json"
# Number of newest checkpoints to try before giving up with an error.
FALLBACKS = 5
# Number of newest runs of the same name in which a note looks for one to go on from.
_SIBLINGS = 20
# Fields that determine the length of the learning-rate curve.
CURVE_FIELDS = ("training.steps", "schedule.total_steps")
# Mappings among the numerics: their keys are compared, too.
_MAPPINGS = ("data.sources", "data.weights", "data.epochs")


@dataclass(frozen=True)
class Start:
    """Where a run can start from."""

    candidates: list[Checkpoint] = field(default_factory=list)
    """Checkpoints to resume from, best first."""
    initial: Checkpoint | None = None
    """Source of initial values if there is no candidate."""
    warnings: list[str] = field(default_factory=list)
    """Lines for the user about unusable checkpoints and similar runs."""


def folder_of(job: Job, run_dir: Path) -> str:
    """The job's checkpoint folder: inside its run folder unless it is absolute or a URL."""
    folder = job.checkpoint.folder
    return folder if is_url(folder) or Path(folder).is_absolute() else str(run_dir / folder)


def _newest(folder: str) -> Checkpoint | None:
    return next(iter(CheckpointFolder(folder).complete(1)[0]), None)


def find_start(job: Job, run_dir: Path) -> Start:
    """Find the checkpoints that the job can start from."""
    config = job.checkpoint
    if not config.enable:
        return Start()
    going_back = config.resume and config.load_step >= 0
    folder = folder_of(job, run_dir)
    own, wrong = CheckpointFolder(folder).complete(None if going_back else FALLBACKS)
    candidates = own if config.resume else []
    if going_back:
        candidates = _from_load_step(job, candidates, folder)
    elif config.resume:
        for path in _continued(run_dir):
            candidates += CheckpointFolder(path).complete(FALLBACKS)[0]
        candidates.sort(key=lambda each: each.step, reverse=True)
    # A run cannot resume from weights alone. This job's own final weights mean that it has
    # completed.
    own_id = RunFolder(run_dir).id_of(job)
    candidates = [
        each
        for each in candidates
        if each.holds == "full"
        or (each.manifest.get("job_id") == own_id and each.step >= job.steps)
    ]
    newest = candidates[0].step if candidates else -1
    warnings = [
        f"WARNING {path} cannot be used: {reason}"
        for path, reason in wrong.items()
        if int(path.rsplit("-", 1)[1]) > newest
    ]
    if warnings and candidates:
        warnings[-1] += f"; using {candidates[0].path}"
    if candidates:
        refuse_other_numerics(job, candidates[0])
        excludes = "train_state" in config.exclude_from_loading
        if excludes and not written_by(job, candidates[0], run_dir):
            raise ConfigError(
                "checkpoint.exclude_from_loading",
                "train_state",
                "the run would begin at step 0 in a folder of later checkpoints",
                f"another name, with checkpoint.initial_load_path={candidates[0].path} "
                "checkpoint.initial_load_model_only=false",
            )
        # In a shared folder, another job may have written the older ones.
        fallbacks = [each for each in candidates[1:] if not differing(job, each)]
        return Start([candidates[0], *fallbacks], warnings=warnings)
    damaged = [
        f"{path.rsplit('/', 1)[-1]}: {reason}"
        for path, reason in wrong.items()
        if not isinstance(reason, UnfinishedCheckpoint)
    ]
    if damaged and config.resume:
        raise no_usable_error(folder, damaged)
    if config.initial_load_path is not None:
        return Start([], _initial(job, config.initial_load_path), warnings)
    return Start(warnings=[*warnings, *_notes_on_similar_runs(job, run_dir)])


def written_by(job: Job, checkpoint: Checkpoint, run_dir: Path) -> bool:
    """Whether the same job with the same loading options wrote a checkpoint, in whatever layout."""
    manifest = checkpoint.manifest
    return (
        manifest.get("job_id") == RunFolder(run_dir).id_of(job)
        and manifest["options"] == job.checkpoint.options_of_loading()
    )


def _notes_on_similar_runs(job: Job, run_dir: Path) -> list[str]:
    """A note on a run of the same name that the user may have meant to resume.

    A changed numerics field makes a new run, which starts at step 0; users may not expect that.
    Noted is the last run if it stopped early, or a run that differs in training.steps only.
    """
    others = [
        path
        for path in run_folders(run_dir.parent, levels=1)
        if path != run_dir and (path / "checkpoints").is_dir()
    ]
    others.sort(key=lambda folder: (folder / "job.json").stat().st_mtime, reverse=True)
    for path in others[:_SIBLINGS]:
        newest = _newest(str(path / "checkpoints"))
        if newest is None:
            continue
        names = differing(job, newest)
        steps = _saved(newest).get("training.steps", 0)
        was_stopped = newest.step < steps
        is_extended = set(names) <= {"training.steps"} and newest.step < job.steps
        is_other = names or steps != job.steps
        if is_other and (is_extended or (was_stopped and path == others[0])):
            how = "stopped" if was_stopped else "ended"
            what = _describe(job, newest, names)
            what = what or f"training.steps={steps} there and {job.steps} here"
            allowed = f" checkpoint.allow_changed=[{','.join(names)}]" if names else ""
            load = f"checkpoint.initial_load_path={path} checkpoint.initial_load_model_only=false"
            return [
                f"this is a new run: {path} {how} after step {newest.step} with {what}",
                f"to go on from it: {load}{allowed}",
            ]
    return []


def no_usable_error(folder: str, reasons: list[str]) -> UserError:
    """The error for a folder in which no checkpoint can be used; the user has to decide."""
    return UserError(
        f"checkpoint.folder={folder}: no checkpoint can be used ({'; '.join(reasons)}); would work: "
        "checkpoint.resume=false, which starts over and moves them to superseded/"
    )


def is_finished(job: Job, run_dir: Path) -> bool:
    """Whether the job has completed, and its last checkpoint still exists; ask before an attempt begins."""
    config = job.checkpoint
    if not config.enable or not config.resume or config.load_step >= 0:
        return False
    if RunFolder(run_dir).row.get("exit_reason") != "completed":
        return False
    with contextlib.suppress(DamagedCheckpoint):
        return CheckpointFolder(folder_of(job, run_dir)).find(job.steps).step == job.steps
    return False


def can_resume(job: Job, run_dir: Path) -> bool:
    """Whether there is a complete checkpoint to resume from; file sizes are checked, contents are not.

    What to load is ``find_start``'s question.
    """
    config = job.checkpoint
    return config.enable and config.resume and _newest(folder_of(job, run_dir)) is not None


def show_finished(job: Job, run_dir: Path) -> int:
    """Print that no steps are left; return the exit code."""
    sys.stdout.write(
        f"{job.name}: done after {plural(job.steps, 'step')}, see {run_dir}; checkpoint.resume=false trains "
        "from the start again, harness convert exports the weights\n"
    )
    return EXIT_OK


def refuse_other_numerics(job: Job, checkpoint: Checkpoint, only: str = "") -> None:
    """Check that the job has the numerics of the job that wrote a checkpoint.

    Compared are fields whose names begin with ``only``; by default all except ``checkpoint.*``.
    """
    allowed = job.checkpoint.allow_changed
    known = {*_numerics(job), *(removed.name for removed in REMOVED)}
    for name in allowed:
        if name not in known and not any(_covers(mapping, name) for mapping in _MAPPINGS):
            raise ConfigError("checkpoint.allow_changed", name, "no numerics field has this name")
    names = [name for name in differing(job, checkpoint) if name.startswith(only)]
    if names:
        changed = _describe(job, checkpoint, names)
        raise ConfigError(
            "checkpoint.allow_changed",
            f"[{','.join(allowed)}]",
            f"{checkpoint.path} was written by a job with other numerics: {changed}",
            f"those values, or checkpoint.allow_changed=[{','.join([*allowed, *names])}]",
        )
    if not only and "data_loader" not in job.checkpoint.exclude_from_loading:
        read = checkpoint.state["data_loader"].get("batch", checkpoint.step)
        before = _saved(checkpoint).get("data.leave_out", [])
        late = [each for each in job.data.leave_out if each <= read and each not in before]
        if late:
            raise ConfigError(
                "data.leave_out", late, f"{checkpoint.path} is after batch {read}", "an earlier one"
            )


def differing(job: Job, checkpoint: Checkpoint) -> list[str]:
    """Names of the numerics fields, except allow_changed, in which a job differs from a checkpoint's job.

    With the same learning-rate curve, training.steps only says when the run ends, and does not
    count.
    """
    saved = _saved(checkpoint)
    own = _numerics(job)
    curve = max(saved.get("training.steps") or 0, saved.get("schedule.total_steps") or 0)
    same_curve = curve == job.schedule.curve_steps(job.steps)
    # Fields added since the checkpoint was written cannot be compared.
    names = [
        name
        for name, value in own.items()
        if name in saved and without_folders(saved[name]) != without_folders(value)
    ]
    for removed in REMOVED:
        is_other = removed.name in saved and saved[removed.name] != removed.value
        if is_other and removed.role != EXECUTION:
            names.append(removed.name)
    for name in _MAPPINGS if "data" in (checkpoint.job or {}) else ():
        names += sorted(_keys(name, own) ^ _keys(name, saved))
    differing = []
    for name in names:
        is_allowed = any(_covers(allowed, name) for allowed in job.checkpoint.allow_changed)
        is_free = name.startswith("checkpoint.") or (same_curve and name in CURVE_FIELDS)
        if not is_allowed and not is_free:
            differing.append(name)
    return differing


def _describe(job: Job, checkpoint: Checkpoint, names: list[str]) -> str:
    saved = _saved(checkpoint)
    own = _numerics(job)
    return ", ".join(
        f"{name}={_shown(name, saved)} there and {_shown(name, own)} here" for name in names
    )


def _shown(name: str, values: dict[str, Any]) -> str:
    return as_typed(values.get(name, values.get(f"{name}.kind", "none")))


def _numerics(job: Job) -> dict[str, Any]:
    return dict(flat_items(numerics_of(job)))


def _covers(field: str, name: str) -> bool:
    """Whether a name is that of a field, or below it."""
    return name == field or name.startswith(f"{field}.")


def _keys(mapping: str, values: dict[str, Any]) -> set[str]:
    """Dotted names of the keys of a mapping among flat values."""
    depth = mapping.count(".") + 2
    return {".".join(name.split(".")[:depth]) for name in values if name.startswith(f"{mapping}.")}


def _saved(checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(
        flat_items({"model": checkpoint.manifest.get("model") or {}, **(checkpoint.job or {})})
    )


def _from_load_step(job: Job, own: list[Checkpoint], folder: str) -> list[Checkpoint]:
    """The checkpoint of load_step, and newer ones that this command wrote after it went back to that step."""
    wanted = job.checkpoint.load_step
    found = [
        each
        for each in own
        if each.step == wanted
        or (each.step > wanted and each.manifest["options"].get("load_step") == wanted)
    ]
    if not found:
        steps = ", ".join(str(each.step) for each in reversed(own))
        rule = f"there is no complete checkpoint of that step in {folder}"
        raise ConfigError("checkpoint.load_step", wanted, rule, steps or "-1")
    return found


def _continued(run_dir: Path) -> list[str]:
    """Checkpoint folders of other layouts, as written by the controller to ``continues.json``.

    A damaged file is a UserError: ignoring it could mean starting from step 0.
    """
    path = run_dir / CONTINUES
    try:
        folders = read_object(path).get("folders")
    except FileNotFoundError:
        return []
    if not isinstance(folders, list) or not all(isinstance(each, str) for each in folders):
        raise UserError(f"{path}: damaged: folders is not a list of paths")
    return folders


def _initial(job: Job, path: str) -> Checkpoint:
    """The checkpoint of initial_load_path: that folder, or the newest in a run or checkpoint folder."""
    name = "checkpoint.initial_load_path"
    if job.checkpoint.initial_load_in_hf:
        return Checkpoint(path, {})
    for folder in (path, f"{path.rstrip('/')}/checkpoints"):
        newest = _newest(folder)
        if newest is not None:
            break
    else:
        if is_foreign(path):
            rule = "was written by other software, and the meaning of its tensors is unknown"
            raise ConfigError(name, path, rule, "the output of harness convert")
        try:
            newest = open_checkpoint(path)
        except DamagedCheckpoint as error:
            works = f"a folder step-<n> with a {MANIFEST}, or a run folder"
            raise ConfigError(name, path, f"not a checkpoint: {error}", works) from None
    if newest.holds == "hf":
        raise ConfigError(
            name,
            newest.path,
            "holds Hugging Face's safetensors",
            "checkpoint.initial_load_in_hf=true too",
        )
    if job.checkpoint.initial_load_model_only:
        refuse_other_numerics(job, newest, only="model.")
    elif newest.holds != "full":
        rule = "holds only weights"
        raise ConfigError(name, newest.path, rule, "checkpoint.initial_load_model_only=true")
    else:
        refuse_other_numerics(job, newest)
    return newest
