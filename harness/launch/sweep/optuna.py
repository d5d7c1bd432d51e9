"""``sweep=optuna``: points that Optuna chooses by the results of earlier ones. Killed studies continue."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compose.composer import (
    SETTINGS,
    Composed,
    Composer,
    SweepSpace,
    read_space,
    with_effect,
)
from harness.compose.override import parse
from harness.config.fields import check_rules, from_dict, label
from harness.config.job import Job
from harness.config.types import UNSET
from harness.launch.listing import counted, rows_of, table_of
from harness.launch.state import BUSY, RunState
from harness.launch.submit import confirm, follow_points, states_of
from harness.launch.sweep.folder import (
    Point,
    Skipped,
    SweepFolder,
    names_of,
    override_key,
    run_dir_of,
    sets_label,
    unique_points,
)
from harness.launch.sweep.run import Selection, in_group, run_point
from harness.launch.sweep.study import (
    DIRECTIONS,
    PointFailedError,
    StudyRecord,
    best_in_words,
    check_objective,
    natural_direction,
)
from harness.metrics.jsonl import repair_tail
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, ConfigError, UserError, one_line
from harness.util.tables import to_text
from harness.util.words import plural

if TYPE_CHECKING:
    import optuna

STORE = "study.journal"
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
}


@dataclass(frozen=True)
class StudySettings:
    """The settings ``sweep.NAME`` of a study.

    Attributes:
        n_trials: points of the study, those before it was stopped included.
        n_jobs: points that are chosen at once.
        objective: column of ``result.json`` to optimize.
        direction: of the objective; None: the one in which it improves.
        failed: value of failed and invalid points; None reports them as failed.
        sampler: a key of ``SAMPLERS``.
        seed: of the sampler.
        sampler_options: more arguments of Optuna's sampler.
    """

    n_trials: int = label(20, least=1)
    n_jobs: int = label(2, least=1)
    objective: str = label("loss")
    direction: str | None = label(None, choices=DIRECTIONS)
    failed: float | None = label(None)
    sampler: str = label("tpe", choices=tuple(SAMPLERS))
    seed: int | None = label(None, least=0)
    sampler_options: dict[str, Any] = field(default_factory=dict, metadata={"role": "label"})


def run_study(
    overrides: Sequence[str], *, config_name: str = "train", check: Callable[[Composed], Composed]
) -> int:
    """Run points that Optuna chooses; return the exit code: 0 if any point completed.

    ``check`` returns a point without its job if its inputs cannot be used.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    composer = Composer(config_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls some samplers experimental
        space = read_space(composer, overrides)
        settings: StudySettings = from_dict(StudySettings, space.settings, SETTINGS)
        check_rules(settings, SETTINGS)
        check_objective(settings.objective)
        direction = settings.direction or natural_direction(
            settings.objective, f"{SETTINGS}direction"
        )
        if not space.axes:
            works = "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
            raise UserError(f"sweep=optuna: there are no axes to choose from; would work: {works}")
        composer.point_of_sweep(space.fixed)  # raises SecretError before a file has the overrides
        shared = [
            typed
            for typed in space.fixed
            if not sets_label(typed) and not parse(typed).sets_search_path
        ]
        record = StudyRecord(settings.objective, direction, shared, list(overrides))
        folder = SweepFolder(_folder(composer, space.fixed))
        with folder.controlled():
            earlier = StudyRecord.read(folder.path)
            # A study continues only with the same objective and shared overrides.
            if earlier is not None and not earlier.is_same(record):
                if folder.points():
                    now = {record.describe(), *record.shared}
                    then = {earlier.describe(), *earlier.shared}
                    raise UserError(
                        f"{folder.path}: has points of another study, which differs in "
                        f"{', '.join(sorted(now ^ then))}; would work: another name=NAME"
                    )
                (folder.path / STORE).unlink(missing_ok=True)
            record.write(folder.path)

            def composed(point: list[str]) -> Composed:
                [found] = with_effect([composer.point_of_sweep(point)])
                return check(found)

            study = Study(folder, record, settings, space, composed)
            try:
                study.run()
            except KeyboardInterrupt:
                sys.stderr.write("stopped; the same command continues the study\n")
                return EXIT_INTERRUPTED
            return study.show()


def _folder(composer: Composer, fixed: list[str]) -> Path:
    # Its name is composed without the axes.
    config = composer.config(fixed, resolve=True)
    from_dict(
        composer.schema, config, unset=UNSET
    )  # raises for a value that has a wrong type in every point
    job = Job(name=config["name"], runs_dir=config["runs_dir"])
    check_rules(job)
    job.validate_folder()
    return Path(job.runs_dir) / job.name


@dataclass
class Study:
    """Asks Optuna for points, runs them as points of a sweep, and tells it their values.

    A point that has already run gives its value at once. A point that failed is not started again
    by the same process, but when the study continues.
    """

    folder: SweepFolder
    record: StudyRecord
    settings: StudySettings
    space: SweepSpace
    compose: Callable[[list[str]], Composed]
    _done: int = 0
    _is_confirmed: bool = False
    _tried: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._axes = {override_key(name) for name in self.space.axes}
        # Each value of a label that is an axis has a run of its own.
        self._swept = set(filter(sets_label, self._axes))

    def run(self) -> None:
        """Run the trials that are left."""
        from optuna.trial import TrialState

        stored = self._open()
        trials = stored.get_trials(deepcopy=False)
        self._done = sum(trial.state.is_finished() for trial in trials)
        # Of a process that was killed: their points are run first, and resume.
        waiting: list[Any] = [trial for trial in trials if trial.state == TrialState.RUNNING]
        left = max(0, self.settings.n_trials - self._done)
        words = plural(left, "trial")
        if self._done:
            words = f"{left} of {self._done + left} trials left"
        sys.stderr.write(f"{self.folder.path}: {self.record.describe()} by optuna, {words}\n")
        distributions = {
            override_key(name): distribution(axis) for name, axis in self.space.axes.items()
        }
        while self._done < self.settings.n_trials:
            size = min(self.settings.n_trials - self._done, self.settings.n_jobs)
            batch = waiting[:size]
            waiting = waiting[size:]
            try:
                while len(batch) < size:
                    batch.append(stored.ask(distributions))
            except Exception as error:
                raise UserError(f"sweep=optuna: {one_line(str(error))}") from error
            self._run_batch(stored, batch)
            self._done += size

    def show(self) -> int:
        """Print the table of all points and the best of them; return the exit code."""
        points = self.folder.points()
        seen = states_of(points)
        best = best_in_words(self.record, points)
        objective = self.record.objective
        table = to_text(table_of(rows_of(points, seen, objective), objective))
        sys.stdout.write(f"{table}{counted(seen, self.folder.skipped())}{best}")
        return EXIT_OK if best else 1

    def _open(self) -> optuna.Study:
        """Create or load the study of the folder, without trials that cannot be run again."""
        import optuna
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState

        path = self.folder.path / STORE
        try:
            repair_tail(path)  # a killed process may have left half a line
            study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))),
                study_name=self.folder.name,
                direction=optuna.study.StudyDirection[self.record.direction.upper()],
                load_if_exists=True,
            )
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                # It was killed while it was asked for, or the axes were others.
                if trial.params.keys() != self._axes:
                    study.tell(trial.number, state=TrialState.FAIL)
        except Exception as error:
            message = one_line(str(error)) or type(error).__name__
            works = "would work: another name=NAME"
            raise UserError(f"{path}: cannot be used: {message}; {works}") from error
        seed = self.settings.seed
        if seed is not None:
            seed += len(study.trials)  # the same seed would repeat the first trials
        try:
            sampler = getattr(optuna.samplers, SAMPLERS[self.settings.sampler])
            study.sampler = sampler(seed=seed, **self.settings.sampler_options)
        except (TypeError, ValueError, ImportError) as error:
            raise UserError(
                f"{SETTINGS}sampler={self.settings.sampler}: {one_line(str(error))}"
            ) from error
        return study

    def _run_batch(self, stored: optuna.Study, trials: Sequence[Any]) -> None:
        """Run the points of trials, here or on SLURM, and tell Optuna their values."""
        from optuna.trial import TrialState

        batch = []
        asked = ""
        for index, trial in enumerate(trials, start=self._done + 1):
            chosen = []
            for name in self.space.axes:
                found = trial.params[override_key(name)]
                chosen.append(f"{name}={'null' if found is None else found}")
            name = f"[{index}/{self.settings.n_trials}]"
            batch.append((name, trial, self.compose([*self.space.fixed, *chosen])))
            asked += f"{name} {' '.join(chosen)}\n"
        legal = [composed for _, _, composed in batch if composed.job is not None]
        points = [in_group(point, self.folder) for point in unique_points(legal, self._swept)]
        for point in points:
            if point.job.cluster.dry_run:
                rule = "shows a sweep whose points are known before it starts"
                works = "the overrides of one point, without -m"
                raise ConfigError("cluster.dry_run", True, rule, works)
            RunFolder(point.run_dir).plan(point.job, point.overrides)
        skipped = [
            Skipped(composed.overrides, composed.reason)
            for _, _, composed in batch
            if composed.job is None
        ]
        self.folder.add(points, skipped)
        here = self._submit(points, len(batch))
        sys.stderr.write(asked)
        for point in here:
            if run_point(point) in STOPPED:
                raise KeyboardInterrupt
        busy = points
        while busy:
            states = states_of(busy)
            busy = [each for each, seen in zip(busy, states, strict=True) if seen.state in BUSY]
            # A point that SLURM starts again is followed once more.
            if busy and follow_points(busy, names_of(busy)) is None:
                raise KeyboardInterrupt
        ended = {each.run_dir: each for each in states_of(points)}
        for name, trial, composed in batch:
            value = self.settings.failed
            try:
                value = self._value(composed, ended)
                shown = self.record.format(value)
            except PointFailedError as error:
                shown = str(error)
            state = TrialState.FAIL if value is None else TrialState.COMPLETE
            stored.tell(trial.number, value, state)
            sys.stderr.write(f"{name} {shown}\n")

    def _submit(self, points: Sequence[Point], batch: int) -> list[Point]:
        """Submit the points that need it to SLURM; return those to run here."""
        fresh = [point for point in points if point.run_dir not in self._tried]
        selection = Selection.of(self.folder, fresh, states_of(fresh))
        self._tried |= {point.run_dir for point in selection.wanted}
        if selection.remote:
            if not self._is_confirmed:
                # Once, for the cost of all points, estimated by the first batch.
                batches = math.ceil((self.settings.n_trials - self._done) / batch)
                confirm([point.job for point in selection.remote] * batches)
                self._is_confirmed = True
            selection.submit()
        return [point for point in selection.wanted if point not in selection.remote]

    def _value(self, composed: Composed, ended: dict[Path, RunState]) -> float:
        """Return the value of a point that has ended; PointFailedError without one."""
        if composed.job is None:
            raise PointFailedError(f"not a valid job: {composed.reason}")
        seen = ended[run_dir_of(composed.job, self._swept)]
        if seen.state != "completed":
            raise PointFailedError(f"{seen.state}: {seen.about}")
        return self.record.value(RunFolder(seen.run_dir).row)


def distribution(axis: Any) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution of an axis that Hydra has parsed; numbers of a range keep their order."""
    from hydra.core.override_parser.types import RangeSweep, Transformer
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = axis.value()
    if axis.is_interval_sweep():
        kind: Any = (
            IntDistribution if isinstance(value.start + value.end, int) else FloatDistribution
        )
        return kind(value.start, value.end, log="log" in value.tags)
    values = list(axis.sweep_iterator(transformer=Transformer.encode))
    if isinstance(value, RangeSweep) and not value.shuffle:
        kind = IntDistribution if isinstance(sum(values), int) else FloatDistribution
        return kind(min(values), max(values), step=abs(value.step))
    return CategoricalDistribution(values)
