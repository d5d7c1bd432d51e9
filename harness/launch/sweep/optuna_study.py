"""Optuna's studies under Hydra's sweeper: where they are stored, and how one continues."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.launch.sweep.registry import Registry
from harness.util.errors import UserError

STORE = "study.db"
# Numbers of trials whose process was killed, as an attribute of the study.
_KILLED = "harness_killed"


def is_optuna(sweeper: Any) -> bool:
    """Whether a config of ``hydra.sweeper`` is of Optuna's sweeper."""
    return str(sweeper.get("_target_")).startswith("hydra_plugins.hydra_optuna_sweeper.")


def forget(folder: Path) -> None:
    """Remove the stored study of a sweep's folder."""
    (folder / STORE).unlink(missing_ok=True)


def take_up(sweeper: Any, registry: Registry) -> tuple[int, int]:
    """Create or load the study, and set the number of trials that are left in the sweeper's config.

    The sweeper runs ``n_trials`` more trials whenever it starts, so ``n_trials`` becomes the number that is
    left. A trial of a killed process is asked for again with the same parameters, so that its run resumes.

    Args:
        sweeper: ``hydra.sweeper``; gets the default storage and name of the study.
        registry: the sweep's folder, locked.

    Returns:
        the number of trials left, and of those before.

    Raises:
        UserError: the storage cannot be used.
    """
    _check_versions()
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sweeper.storage = sweeper.storage or f"sqlite:///{(registry.path / STORE).absolute()}"
    sweeper.study_name = sweeper.study_name or registry.name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls enqueue_trial experimental
            study = optuna.create_study(
                storage=sweeper.storage,
                study_name=sweeper.study_name,
                directions=list(sweeper.direction),
                load_if_exists=True,
            )
            killed = set(study.user_attrs.get(_KILLED, []))
            for trial in study.trials:
                if trial.state == TrialState.RUNNING:
                    # In this order, so that nothing is lost if this process is killed too.
                    if trial.params:
                        study.enqueue_trial(trial.params)
                    killed.add(trial.number)
                    study.set_user_attr(_KILLED, sorted(killed))
                    study.tell(trial.number, state=TrialState.FAIL)
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"hydra.sweeper.storage={sweeper.storage}: cannot be used: {message}") from error
    done = sum(each.state.is_finished() and each.number not in killed for each in study.trials)
    if study.trials and (sweeper.get("sampler") or {}).get("seed") is not None:
        sweeper.sampler.seed += len(study.trials)  # the same seed would repeat the first trials
    sweeper.n_trials = max(0, sweeper.n_trials - done)
    return sweeper.n_trials, done


def _check_versions() -> None:
    """Refuse Optuna 2 with SQLAlchemy 2, where it creates no tables (optuna/optuna#4375).

    Raises:
        UserError: naming the versions that work.
    """
    found = {name: version(name) for name in ("optuna", "sqlalchemy", "alembic")}
    # alembic 1.19 needs SQLAlchemy 2.
    new = [int(part) for part in found["alembic"].split(".")[:2]] >= [1, 19]
    if found["optuna"].startswith("2.") and (not found["sqlalchemy"].startswith("1.") or new):
        shown = ", ".join(f"{name} {each}" for name, each in found.items())
        works = "pip install 'sqlalchemy<2' 'alembic<1.19'"
        raise UserError(
            f"hydra/sweeper=optuna: Optuna 2 stores studies by SQLAlchemy 1 ({shown}); would work: {works}"
        )
