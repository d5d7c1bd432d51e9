"""``sweep=optuna``: points that Optuna chooses by the results of earlier ones. Killed studies continue."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compose.composer import SETTINGS, Composed, Composer, SweepSpace, read_space, with_effect
from harness.compose.override import parse
from harness.config.fields import check_rules, from_dict, label
from harness.config.job import Job
from harness.config.types import UNSET
from harness.launch.state import BUSY
from harness.launch.submit import confirm
from harness.launch.sweep.folder import (
    FILE,
    Point,
    Skipped,
    SweepFolder,
    check_swept,
    override_key,
    run_dir_of,
    sets_label,
    unique_points,
)
from harness.launch.sweep.run import Selection, follow_points, in_group, run_point, states_of
from harness.launch.sweep.study import (
    PointFailedError,
    StudyRecord,
    best_in_words,
    check_directions,
    check_objective,
    counted,
    table_of_states,
)
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, ConfigError, UserError, one_line
from harness.util.tables import plural, to_text

if TYPE_CHECKING:
    import optuna

STORE = "study.db"
# Numbers of trials whose process was killed, as an attribute of the study.
_KILLED = "harness_killed"
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
        objective: column of ``result.json`` to optimize, or a list of columns.
        direction: of each column; None: the one in which it improves.
        failed: value of failed and invalid points; None reports them as failed.
        max_failure_rate: share of a batch that may fail before the study ends.
        sampler: a key of ``SAMPLERS``.
        seed: of the sampler.
        sampler_options: more arguments of Optuna's sampler.
        storage: URL of Optuna's storage; None: SQLite in the sweep's folder.
        study_name: its name in the storage; None: that of the sweep.
    """

    n_trials: int = label(20, least=1)
    n_jobs: int = label(2, least=1)
    objective: str | list[str] = label("loss")
    direction: str | list[str] | None = label(None)
    failed: float | None = label(None)
    max_failure_rate: float = label(1.0, least=0, most=1)
    sampler: str = label("tpe", choices=tuple(SAMPLERS))
    seed: int | None = label(None, least=0)
    sampler_options: dict[str, Any] = field(default_factory=dict, metadata={"role": "label"})
    storage: str | None = label(None)
    study_name: str | None = label(None)


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
        objective = check_objective(settings.objective)
        directions = check_directions(settings.direction, objective, f"{SETTINGS}direction")
        if not space.axes:
            works = "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
            raise UserError(f"sweep=optuna: there are no axes to choose from; would work: {works}")
        composer.point_of_sweep(space.fixed)  # raises SecretError before a storage has the overrides
        shared = [each for each in space.fixed if not sets_label(each) and not parse(each).sets_search_path]
        record = StudyRecord("optuna", objective, directions, shared, list(overrides))
        folder = SweepFolder(_folder(composer, space.fixed))
        with folder.controlled():
            _start_record(folder, record)

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
    from_dict(composer.schema, config, unset=UNSET)  # raises for a value that has a wrong type in every point
    job = Job(name=config["name"], runs_dir=config["runs_dir"])
    check_rules(job)
    job.validate_folder()
    return Path(job.runs_dir) / job.name


def _start_record(folder: SweepFolder, record: StudyRecord) -> None:
    """Write the record; a study continues only with the same objective and shared overrides."""
    earlier = StudyRecord.read(folder.path)
    if earlier is not None and not earlier.is_same(record):
        if folder.points():
            now, then = ([each.sweeper, each.describe(), *each.shared] for each in (record, earlier))
            others = [f"without {each}" for each in then if each not in now]
            others += [f"with {each}" for each in now if each not in then]
            raise UserError(
                f"{folder.path}: has points of another study, this one is {', '.join(others)}; would work: "
                "another name=NAME"
            )
        (folder.path / STORE).unlink(missing_ok=True)
    record.write(folder.path)


Value = list[float] | PointFailedError


@dataclass
class Study:
    """Asks Optuna for points, runs them as points of a sweep, and tells it their values.

    A point that has already run gives its value at once. A point that failed is not started again by the same
    process, but when the study continues.
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
        names = [override_key(name) for name in self.space.axes]
        # Each value of a label that is an axis has a run of its own.
        self._axes, self._swept = set(names), check_swept([name for name in names if sets_label(name)])
        self._storage = self.settings.storage or f"sqlite:///{(self.folder.path / STORE).absolute()}"

    def run(self) -> None:
        """Run the trials that are left."""
        from optuna.trial import TrialState

        stored = self._stored
        killed = stored.user_attrs.get(_KILLED, [])
        self._done = sum(each.state.is_finished() and each.number not in killed for each in stored.trials)
        if self._done and not self.folder.points() and not self.folder.skipped():
            rule = f"has none of the {self._done} points of the stored study"
            raise UserError(f"{self.folder.path / FILE}: {rule}; would work: another name=NAME")
        left, total = max(0, self.settings.n_trials - self._done), self.settings.n_trials
        words = f"{left} of {max(total, self._done)} trials left" if self._done else plural(total, "trial")
        sys.stderr.write(f"{self.folder.path}: {self.record.describe()} by optuna, {words}\n")
        distributions = {override_key(name): distribution(each) for name, each in self.space.axes.items()}
        while left:
            try:
                trials = [stored.ask(distributions) for _ in range(min(left, self.settings.n_jobs))]
            except Exception as error:
                raise UserError(f"sweep=optuna: {one_line(str(error))}") from error
            values = self._run_batch([self.compose(self._overrides(trial.params)) for trial in trials])
            for trial, value in zip(trials, values, strict=True):
                if isinstance(value, PointFailedError):
                    stored.tell(trial, state=TrialState.FAIL)
                else:
                    stored.tell(trial, value)
            left -= len(trials)
            self._done += len(trials)
            failed = [value for value in values if isinstance(value, PointFailedError)]
            if len(failed) > self.settings.max_failure_rate * len(values):
                works = (
                    f"{SETTINGS}max_failure_rate=1, or {SETTINGS}failed=VALUE, the value of a failed point"
                )
                raise UserError(f"sweep=optuna: ends at a failed point: {failed[0]}; would work: {works}")

    def show(self) -> int:
        """Print the table of all points and the best of them; return the exit code."""
        points = self.folder.points()
        seen = states_of(points)
        best = best_in_words(self.record, points)
        table = to_text(table_of_states(points, seen, self.record.objective))
        sys.stdout.write(f"{table}{counted(seen, self.folder.skipped())}{best}")
        return EXIT_OK if best else 1

    @cached_property
    def _stored(self) -> optuna.Study:
        """The study, created or loaded.

        A trial of a killed process is asked for again with the same parameters, so that its run resumes.
        """
        import optuna
        from optuna.study import StudyDirection
        from optuna.trial import TrialState

        settings = self.settings
        try:
            study = optuna.create_study(
                storage=self._storage,
                study_name=settings.study_name or self.folder.name,
                directions=[StudyDirection[each.upper()] for each in self.record.direction],
                load_if_exists=True,
            )
            killed = set(study.user_attrs.get(_KILLED, []))
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                # In this order, so that nothing is lost if this process is killed too.
                if trial.params:
                    study.enqueue_trial(trial.params)
                killed.add(trial.number)
                study.set_user_attr(_KILLED, sorted(killed))
                study.tell(trial.number, state=TrialState.FAIL)
            # The same seed would repeat the first trials.
            seed = None if settings.seed is None else settings.seed + len(study.trials)
        except Exception as error:
            message = one_line(str(error)) or type(error).__name__
            raise UserError(f"{SETTINGS}storage={self._storage}: cannot be used: {message}") from error
        try:
            sampler = getattr(optuna.samplers, SAMPLERS[settings.sampler])
            study.sampler = sampler(seed=seed, **settings.sampler_options)
        except (TypeError, ValueError, ImportError) as error:
            raise UserError(f"{SETTINGS}sampler={settings.sampler}: {one_line(str(error))}") from error
        return study

    def _overrides(self, params: dict[str, Any]) -> list[str]:
        values = {name: params[override_key(name)] for name in self.space.axes}
        chosen = [f"{name}={'null' if value is None else value}" for name, value in values.items()]
        return [*self.space.fixed, *chosen]

    def _run_batch(self, batch: Sequence[Composed]) -> list[Value]:
        legal = [each for each in batch if each.job is not None]
        points = [in_group(point, self.folder) for point in unique_points(legal, self._swept)]
        for point in points:
            if point.job.cluster.dry_run:
                rule = "shows a sweep whose points are known before it starts"
                raise ConfigError("cluster.dry_run", True, rule, "the overrides of one point, without -m")
            RunFolder(point.run_dir).plan(point.job, point.overrides)
        skipped = [Skipped(each.overrides, each.reason) for each in batch if each.job is None]
        self.folder.add(points, skipped)
        here = self._submit(points, len(batch))
        values: list[Value | None] = []
        for index, each in enumerate(batch):
            chosen = [o for o in each.overrides if override_key(o) in self._axes]
            sys.stderr.write(f"{self._number(index)} {' '.join(chosen)}\n")
            left = None if each.job is None else here.pop(run_dir_of(each.job, self._swept), None)
            if left is not None and run_point(left) in STOPPED:
                raise KeyboardInterrupt
            values.append(self._value(index, each))
        busy = [index for index, value in enumerate(values) if value is None]
        waiting = [self._point(batch[index]) for index in busy]
        if waiting and follow_points(waiting, [self._number(index) for index in busy]):
            raise KeyboardInterrupt
        for index in busy:
            values[index] = self._value(index, batch[index])
        known = [value for value in values if value is not None]
        if self.settings.failed is None:
            return known
        instead = [self.settings.failed] * len(self.record.objective)
        return [instead if isinstance(value, PointFailedError) else value for value in known]

    def _submit(self, points: Sequence[Point], batch: int) -> dict[Path, Point]:
        """Submit the points that need it to SLURM; return those to run here, by run folder."""
        fresh = [point for point in points if point.run_dir not in self._tried]
        selection = Selection.of(self.folder, fresh, states_of(fresh))
        self._tried |= {point.run_dir for point in selection.wanted}
        if selection.remote:
            if not self._is_confirmed:  # once, for the cost of all points, estimated by the first batch
                batches = math.ceil((self.settings.n_trials - self._done) / batch)
                confirm([point.job for point in selection.remote] * batches)
                self._is_confirmed = True
            selection.submit()
        return {point.run_dir: point for point in selection.wanted if point not in selection.remote}

    def _point(self, composed: Composed) -> Point:
        return Point(composed.job.id, run_dir_of(composed.job, self._swept), composed.overrides)

    def _value(self, index: int, point: Composed) -> Value | None:
        """Return and print the value of a point, or its failure; None while it is pending or running."""
        value: Value
        if point.job is None:
            value = PointFailedError(f"not a valid job: {point.reason}")
        else:
            [seen] = states_of([self._point(point)])
            if seen.state in BUSY:
                return None
            value = PointFailedError(f"{seen.state}: {seen.about}")
            if seen.state == "completed":
                try:
                    value = self.record.values(RunFolder(seen.run_dir).row)
                except PointFailedError as error:
                    value = error
        shown = value if isinstance(value, PointFailedError) else self.record.format(value)
        sys.stderr.write(f"{self._number(index)} {shown}\n")
        return value

    def _number(self, index: int) -> str:
        return f"[{self._done + index + 1}/{self.settings.n_trials}]"


def distribution(axis: Any) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution of an axis that Hydra has parsed; numbers of a range keep their order."""
    from hydra.core.override_parser.types import RangeSweep, Transformer
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = axis.value()
    if axis.is_interval_sweep():
        kind: Any = IntDistribution if isinstance(value.start + value.end, int) else FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    values = list(axis.sweep_iterator(transformer=Transformer.encode))
    if isinstance(value, RangeSweep) and not value.shuffle:
        kind = IntDistribution if isinstance(sum(values), int) else FloatDistribution
        return kind(min(values), max(values), step=abs(value.step))
    return CategoricalDistribution(values)
