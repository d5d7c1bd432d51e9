"""Run one of Hydra's sweepers that choose points by their results, such as Optuna's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.compose.composer import POINTS, Composed, Composer
from harness.compose.hydra import sets_search_path
from harness.compose.overrides import LAUNCHER, in_hydra_syntax, to_user_error, typed_value
from harness.config.fields import check_rules
from harness.config.job import Job
from harness.launch.sweep import optuna_study
from harness.launch.sweep.registry import FILE, Registry, sets_label
from harness.launch.sweep.run import states_of
from harness.launch.sweep.study import Study
from harness.launch.sweep.study_record import (
    MINIMIZE,
    PointFailedError,
    StudyRecord,
    check_directions,
    check_objective,
)
from harness.launch.sweep.table import best_in_words, counted, rows_of, table_text
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, HarnessError, UserError


def run_study(
    overrides: Sequence[str], *, config_name: str = "train", check: Callable[[Composed], Composed]
) -> int:
    """Run a multirun whose points a sweeper of Hydra chooses; return the exit code: 0 if any point completed.

    Args:
        overrides: as typed, checked.
        config_name: the primary config.
        check: returns a point without its job if its inputs cannot be used.

    Raises:
        UserError: the sweeper or its settings cannot be used, or the folder has another study.
    """
    typed = in_hydra_syntax(overrides)
    with Composer(config_name) as composer:
        launcher = [] if typed_value(typed, "hydra/launcher") else [f"hydra/launcher={LAUNCHER}"]
        config = composer.sweep_config([*launcher, *typed])
        axes, shared = _axes(composer, config)
        record = _record(config, shared, list(overrides))
        registry = Registry(_folder(config))
        folders = [each for each in typed if sets_search_path(each)]
        with registry.controlled():
            _start_record(registry, record)
            trials, before = _trials(config, registry, record)
            study = Study(
                registry,
                record,
                lambda point: check(composer.point_of_sweep([*folders, *point])),
                axes=axes,
                failed=config.hydra.launcher.failed,
                trials=trials,
                before=before,
            )
            return _sweep(study, config)


def _axes(composer: Composer, config: Any) -> tuple[list[str], list[str]]:
    """Return the fields and groups that the sweeper chooses, and the overrides of all points.

    Raises:
        UserError: there is nothing to choose.
        SecretError: an override holds a secret.
    """
    sweeper = config.hydra.sweeper
    for name in ("n_trials", "n_jobs"):
        if (count := sweeper.get(name)) is not None and count < 1:
            raise ConfigError(f"hydra.sweeper.{name}", count, "must be at least 1")
    params = dict(sweeper.get("params") or {})
    if POINTS in params:
        rule = "is a list of points, so there is nothing to choose"
        raise UserError(f"hydra.sweeper.params.{POINTS}: {rule}; would work: hydra/sweeper=basic")
    if str(sweeper.get("sampler", {}).get("_target_")).endswith(".GridSampler"):
        works = "-m without hydra/sweeper=optuna, which runs all combinations"
        raise UserError(f"hydra/sweeper/sampler=grid: chooses nothing by results; would work: {works}")
    in_files = [f"{name}={values}" for name, values in params.items()]
    try:
        parsed = composer.parser.parse_overrides([*in_files, *config.hydra.overrides.task])
    except Exception as error:
        raise to_user_error(error) from error
    swept = {each.key_or_group for each in parsed if each.is_sweep_override()}
    swept |= set(sweeper.get("ax_config", {}).get("params", {}))
    fixed = {each.key_or_group: str(each.input_line) for each in parsed if not each.is_sweep_override()}
    axes = sorted(swept - fixed.keys())
    if not axes and not sweeper.get("custom_search_space"):
        rule, works = "there are no axes to choose from", "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
        raise UserError(f"hydra/sweeper={_name(config)}: {rule}; would work: {works}")
    composer.point_of_sweep([*fixed.values()])  # raises SecretError before a storage has the overrides
    return axes, [each for each in fixed.values() if not sets_label(each)]


def _name(config: Any) -> str:
    return str(config.hydra.runtime.choices["hydra/sweeper"])


def _folder(config: Any) -> Path:
    """Return the folder of the study: its name is composed without the axes.

    Raises:
        UserError: the name cannot be resolved, or is no folder inside runs_dir.
    """
    try:
        job = Job(name=str(config.name), runs_dir=str(config.runs_dir))
    except Exception as error:
        raise to_user_error(error) from error
    check_rules(job)
    job.validate_folder()
    return Path(job.runs_dir) / job.name


def _record(config: Any, shared: list[str], command: list[str]) -> StudyRecord:
    """Return the objective that the settings describe, with its direction."""
    from omegaconf import OmegaConf

    sweeper = config.hydra.sweeper
    plain: Any = OmegaConf.to_container(config.hydra.launcher)
    objective = check_objective(plain["objective"])
    if optuna_study.is_optuna(sweeper):
        given = sweeper.direction
        directions = check_directions(
            list(given) if OmegaConf.is_list(given) else given, objective, "hydra.sweeper.direction"
        )
        sweeper.direction = directions
    else:
        if len(objective) > 1:
            rule = f"hydra/sweeper={_name(config)} takes one column"
            raise UserError(
                f"hydra.launcher.objective={','.join(objective)}: {rule}; would work: {objective[0]}"
            )
        directions = check_directions(None, objective, "hydra.launcher.objective")
        if "ax_config" in sweeper:
            for part in (sweeper.ax_config.experiment, sweeper.ax_config.early_stop):
                part.minimize = directions == [MINIMIZE]
    return StudyRecord(_name(config), objective, directions, shared, command)


def _start_record(registry: Registry, record: StudyRecord) -> None:
    """Write the record; a study continues only with the same objective and shared overrides.

    Raises:
        UserError: the folder has points of another study.
    """
    earlier = StudyRecord.read(registry.path)
    if earlier is not None and not earlier.is_same(record):
        if registry.points():
            now, then = ([each.sweeper, each.describe(), *each.shared] for each in (record, earlier))
            others = [*(f"without {each}" for each in then if each not in now)]
            others += [f"with {each}" for each in now if each not in then]
            raise UserError(
                f"{registry.path}: has points of another study, this one is {', '.join(others)}; would work: "
                "another name=NAME"
            )
        optuna_study.forget(registry.path)
    record.write(registry.path)


def _trials(config: Any, registry: Registry, record: StudyRecord) -> tuple[int | None, int]:
    """Return how many points the sweeper will choose (None if unknown), and how many it has chosen before."""
    sweeper = config.hydra.sweeper
    if optuna_study.is_optuna(sweeper):
        trials, before = optuna_study.take_up(sweeper, registry)
        if before and not registry.points() and not registry.skipped():
            rule = f"has none of the {before} points of the stored study"
            raise UserError(f"{registry.path / FILE}: {rule}; would work: another name=NAME")
        words = f"{trials} of {trials + before} trials left" if before else f"{trials} trials"
    else:
        trials, before = sweeper.get("ax_config", {}).get("max_trials"), 0
        words = "" if trials is None else f"at most {trials} trials"
    sys.stderr.write(f"{registry.path}: {record.describe()} by {record.sweeper}, {words}\n")
    return trials, before


def _sweep(study: Study, config: Any) -> int:
    """Let Hydra's sweeper choose points until it ends; show the points and the best."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext
    from omegaconf import OmegaConf, open_dict

    # Its messages repeat those of Study.
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)
    with open_dict(config):
        config.hydra.sweep.dir = str(study.registry.path)  # for optimization_results.yaml
    arguments: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    task: Any = study
    try:
        sweeper = Plugins.instance().instantiate_sweeper(
            config=config,
            hydra_context=HydraContext(GlobalHydra.instance().config_loader(), Callbacks()),
            task_function=task,
        )
        sweeper.sweep(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command continues the study\n")
        return EXIT_INTERRUPTED
    except PointFailedError as error:
        raise UserError(
            f"hydra/sweeper={study.record.sweeper}: ends at a failed point: {error}; would work: "
            f"{_on_failure(config)}"
        ) from error
    except HarnessError:
        raise
    except Exception as error:
        if study.bug is not None:
            raise
        if study.done == 0 or study.record.best_of(study.registry.points()):
            raise _refused(study, error) from error
        # Without a completed point the sweeper has no best one to report.
    return _show(study)


def _on_failure(config: Any) -> str:
    rate = "hydra.sweeper.max_failure_rate=1, or " if optuna_study.is_optuna(config.hydra.sweeper) else ""
    return f"{rate}hydra.launcher.failed=VALUE, the value of a failed point"


def _refused(study: Study, error: Exception) -> UserError:
    """Return the error of a sweeper that cannot use its settings or its storage."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    return UserError(f"hydra/sweeper={study.record.sweeper}: {to_user_error(error)}")


def _show(study: Study) -> int:
    """Print the table of all points and the best of them; return the exit code."""
    points = study.registry.points()
    seen = states_of(points)
    sys.stdout.write(table_text(rows_of(points, seen, study.record.objective)))
    sys.stdout.write(counted(seen, study.registry.skipped()))
    best = best_in_words(study.record, points)
    sys.stdout.write(best)
    return EXIT_OK if best else 1
