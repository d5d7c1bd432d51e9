"""From command-line overrides to a typed, validated job: the only module that knows Hydra's composition.

The size of this boundary is deliberate: overrides are checked against the dataclasses before Hydra sees
them (so that every typo gets the same one-line error), Hydra merges the YAML, and what comes out is a
plain ``Job``. Nothing behind this door imports Hydra or OmegaConf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from harness.errors import ConfigError, UserError
from harness.job import Job, from_dict, launched_ranks
from harness.overrides import (
    OVERRIDE,
    check_overrides,
    fields_of,
    groups,
    is_value,
    options_of,
    reject_unknown_keys,
    unknown_field,
    with_own_keys,
)
from harness.paths import conf_dir

_UNSAID = (
    "full_key:",
    "object_type=",
    "reference_type=",
    "set_env",
    "See ",
    "Config search path",
    "provider=",
)
POINTS = "points"
"""Name in ``hydra.sweeper.params`` of points that no axes multiply to: one a line, as they are typed."""
_MISSING = "{}: must be given, on the command line or in a file of the job"


def register_schema(schema: type = Job) -> None:
    """Makes a dataclass known to Hydra as ``job_schema``, the root that every primary config starts from."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="job_schema", node=schema)


def compose_job(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> Any:
    """Composes, types, resolves and validates a job.

    Args:
        overrides: ``group=option`` and ``field=value`` strings, as typed.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.

    Raises:
        UserError: one line that says which override, field or value is wrong, and what would work.
    """
    overrides = list(overrides)
    check_overrides(overrides, schema)  # before Hydra is imported
    with Composer(config_name, schema) as composer:
        return composer.job(overrides)


class Composer:
    """Composes many jobs of one primary config, inside ``with``.

    Hydra takes a fifth of a second for a job. Jobs that choose the same options of groups are composed once,
    and the values in which they differ are put into copies of that.

    Args:
        config_name: the primary config, a file of conf/.
        schema: dataclass of the jobs.
    """

    def __init__(self, config_name: str = "train", schema: type = Job) -> None:
        self.config_name, self.schema = config_name, schema
        self._bases: dict[tuple[str, ...], Any] = {}
        self._hydra = ExitStack()

    def __enter__(self) -> Composer:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser

        register_schema(self.schema)
        GlobalHydra.instance().clear()
        self._hydra.enter_context(initialize_config_dir(config_dir=conf_dir(), version_base="1.3"))
        self.parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        return self

    def __exit__(self, *_raised: object) -> None:
        self._hydra.close()

    def job(self, overrides: Iterable[str]) -> Any:
        """One job, as ``compose_job`` gives it.

        Raises:
            UserError: one line that says which override, field or value is wrong, and what would work.
        """
        overrides = list(overrides)
        check_overrides(overrides, self.schema)
        return self.point(with_own_keys(overrides, self.schema))

    def point(self, overrides: list[str]) -> Any:
        """The same, of overrides that are checked and spelled for Hydra."""
        from hydra import compose
        from hydra._internal.config_loader_impl import ConfigLoaderImpl

        try:
            values, rest = [], []
            for typed, parsed in zip(overrides, self.parser.parse_overrides(overrides), strict=True):
                # Hydra says what is wrong with several values of one.
                if is_value(typed) and not parsed.is_sweep_override():
                    values.append(parsed)
                else:
                    rest.append(typed)
            if tuple(rest) not in self._bases:
                self._bases[tuple(rest)] = compose(config_name=self.config_name, overrides=rest)
            config = copy.deepcopy(self._bases[tuple(rest)])
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        except Exception as error:
            raise translated(error, self.schema) from error
        return job_from_config(config, self.schema)


@dataclass(frozen=True)
class Composed:
    """A point of a sweep: its overrides, and the job they make or the reason why they make none."""

    overrides: list[str]
    job: Any
    reason: str = ""


def compose_points(
    overrides: Iterable[str], *, config_name: str = "train", schema: type = Job
) -> list[Composed]:
    """Composes every point of a multirun, as Hydra's own sweeper spells them out.

    Args:
        overrides: as typed; several values of one, by commas, are an axis.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.

    Raises:
        UserError: something is wrong with the overrides whatever the point.
    """
    from hydra import compose
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = list(overrides)
    check_overrides(overrides, schema)
    typed = with_own_keys(overrides, schema)
    points = []
    with Composer(config_name, schema) as composer:
        read = composer.parser.parse_overrides
        try:
            once = [str(o.input_line) for o in read(typed) if not o.is_sweep_override()]
            shared = compose(config_name=config_name, overrides=once, return_hydra_config=True)
            params = dict(shared.hydra.sweeper.params or {})
            listed = _listed_points(params.pop(POINTS, ""), schema)
            axes = [f"{name}={values}" for name, values in params.items()]
            spelled = [
                point
                for own in listed or [[]]
                for point in BasicSweeper.split_arguments(read([*axes, *own, *typed]), None)[0]
            ]
        except UserError:
            raise
        except Exception as error:
            raise translated(error, schema) from error
        for point in spelled:
            try:
                points.append(Composed(point, composer.point(point)))
            except UserError as error:
                points.append(Composed(point, None, str(error)))
    return points


def _listed_points(text: str, schema: type) -> list[list[str]]:
    """The overrides of each line; of what stands on the command line as well, that counts.

    Raises:
        UserError: a line has something that is no override.
    """
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    for line in lines:
        check_overrides(line, schema)
    return [with_own_keys(line, schema) for line in lines]


def option_values(group: str) -> dict[str, dict[str, Any]]:
    """What the files of a group say, by option; for those that have no defaults of their own."""
    from omegaconf import OmegaConf

    folder = groups()[group]
    loaded = {option: OmegaConf.load(folder / f"{option}.yaml") for option in options_of(folder)}
    return {option: cast("dict[str, Any]", OmegaConf.to_container(of)) for option, of in loaded.items()}


def job_from_config(config: Any, schema: type = Job) -> Any:
    """Turns what Hydra composed into a resolved and validated job.

    Raises:
        UserError: an unknown key, a value of the wrong type, a missing value, or a broken rule.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UserError(_MISSING.format(", ".join(missing)))
        plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise translated(error, schema) from error
    reject_unknown_keys(plain, schema)
    return from_dict(schema, plain).resolve(launched_ranks=launched_ranks())


def translated(error: BaseException, schema: type = Job) -> UserError:
    """What Hydra or OmegaConf has to say, on one line and in the words of the other errors."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

    chain = _chain(error)
    text = "; ".join(dict.fromkeys(part for each in chain[:2] for part in _lines(each)))
    typed = OVERRIDE.match(_after(text, "Error merging override ", "; "))
    place = _after(text, "In '", "'")
    place = f" (in {place}.yaml)" if place and place != "train" else ""
    for each in chain:
        if isinstance(each, OverrideParseException):
            works = "closed brackets and quotes, and quotes around other signs: field='\"a b\"'"
            return UserError(f"{each.override}: cannot be read, {_lines(each)[0]}; would work: {works}")
        if isinstance(each, MissingConfigException) and each.missing_cfg_file:
            group, _, option = str(each.missing_cfg_file).rpartition("/")
            return UserError(
                f"{group}={option}{place}: no such option; options: {', '.join(each.options or ())}"
            )
        if not isinstance(each, OmegaConfBaseException):
            continue
        key = "" if each.full_key is None else str(each.full_key)
        if isinstance(each, ConfigKeyError) and dataclasses.is_dataclass(each.object_type):
            if place and key in ("experiment", "sweep"):
                return UserError(f"{text.split(':')[0]}: the file must begin with '# @package _global_'")
            known, prefix = fields_of(each.object_type), key.removesuffix(str(each.key))
            return UserError(f"{unknown_field(key, None, str(each.key), known, prefix)}{place}")
        if isinstance(each, ValidationError):
            # An element of a list knows only its index; the override it came with knows the field.
            if key.isdigit():
                key = typed["key"] if typed else ""
            owner = each.object_type if dataclasses.is_dataclass(each.object_type) else None
            wanted = _wanted(owner, str(each.key), key) if owner else _wanted(schema, key, key)
            if wanted:
                value = typed["value"] if typed and typed["key"] == key else each.value
                return ConfigError(key, value, f"must be {wanted}{place}")
        if "Missing mandatory value: " in text:
            return UserError(_MISSING.format(_after(text, "Missing mandatory value: ", ";")))
        return UserError(f"{key}{place}: {text}" if key and key not in text else text)
    if text.startswith("Ambiguous value for argument"):
        works = "-m to run one job for each, [...] around a list, quotes around one text with commas"
        return UserError(f"{text.split(chr(39))[1]}: has several values; would work: {works}")
    if text.startswith("Multiple values for "):
        group = _after(text, "Multiple values for ", ".")
        works = f"'- override /{group}: OPTION' in the defaults of the file that comes later"
        return UserError(f"{group}: two files choose an option of this group; would work: {works}")
    return UserError(text or type(error).__name__)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those it came from, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _lines(error: BaseException) -> list[str]:
    """What an error says, without the parts that speak of Python."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line and not line.startswith(_UNSAID)]


def _after(text: str, start: str, end: str) -> str:
    """What stands between two marks in a text; empty when the first is missing."""
    return text.split(start, 1)[1].split(end, 1)[0] if start in text else ""


def _wanted(schema: Any, path: str, key: str) -> str | None:
    """In words, what the field ``key`` takes, found at ``path`` in ``schema``; None when there is none."""
    hint = schema
    for name in path.split("."):
        owner = next((t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)), None)
        if owner is None or name not in get_type_hints(owner):
            return None
        hint = get_type_hints(owner)[name]
    kinds = [t for t in get_args(hint) if t is not type(None)] if get_origin(hint) is UnionType else [hint]
    words = " or ".join(_in_words(kind, key) for kind in kinds)
    return words + (", or null" if type(None) in get_args(hint) else "")


def _in_words(kind: Any, key: str) -> str:
    if dataclasses.is_dataclass(kind):
        return f"set by its fields, {', '.join(f'{key}.{field.name}' for field in dataclasses.fields(kind))}"
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return "a list of lists, like [[a,b],[c]]" if get_origin(inner) is list else "a list, like [a,b]"
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return simple.get(kind, "a mapping, like {a: b}")
