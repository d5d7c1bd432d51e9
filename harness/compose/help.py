"""``--help``: a screen of groups and flags, one group or field by its name, or all fields."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.compose.composer import Composer
from harness.compose.overrides import check_field, groups, named_options, options_of
from harness.compose.paths import config_folders
from harness.config.cluster import CLUSTERS
from harness.config.data_kinds import DATA_KINDS
from harness.config.fields import default_of, docstrings
from harness.config.job import Job
from harness.config.metrics import VIEWS
from harness.config.model import ARCHITECTURES, BLOCKS
from harness.config.optimizer import DECAYS, KINDS
from harness.config.types import rule_in_words, type_hints, type_in_words
from harness.util.errors import UserError, as_typed
from harness.util.words import shortened

if TYPE_CHECKING:
    from harness.compose.arguments import Parser

WIDTH = 100
"""Columns of the text."""
ROLES = {
    "numerics": "another value computes other numbers",
    "execution": "another value computes the same numbers in another way",
    "label": "a name, a path or output",
}
_REGISTRIES: dict[str, tuple[Any, str]] = {
    "model.options": (ARCHITECTURES, "model.architecture"),
    "model.block_options": (BLOCKS, "model.block"),
    "optimizer.options": (KINDS, "optimizer.kind"),
    "schedule.options": (DECAYS, "schedule.decay_type"),
    "data.options": (DATA_KINDS, "data.kind"),
    "cluster.options": (CLUSTERS, "cluster.kind"),
}
"""Mappings of options, each with the registry and the field of the choice that they belong to."""


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """A field as ``--help`` and the generated reference show it."""

    name: str
    type: str
    rule: str
    value: Any
    """The composed value."""
    role: str
    meaning: str

    @property
    def line(self) -> str:
        rule = f"  # {self.rule}" if self.rule else ""
        return shortened(f"{self.name}={as_typed(self.value)}", WIDTH) + rule

    @property
    def text(self) -> str:
        facts = "; ".join(filter(None, [self.type, self.rule, f"{self.role}: {ROLES[self.role]}"]))
        lines = [
            shortened(f"{self.name}={as_typed(self.value)}", WIDTH),
            *_wrapped(self.meaning),
            *_wrapped(facts),
        ]
        return "\n".join(lines)


def field_helps(kind: type, values: dict[str, Any], prefix: str = "") -> Iterator[FieldHelp]:
    """Yield every field of a dataclass and of its parts.

    Args:
        kind: the dataclass.
        values: its composed values, as plain containers; defaults for those that are missing.
        prefix: prefix of the fields' names.
    """
    texts = docstrings(kind)
    hints = type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from field_helps(hint, values.get(field.name, {}), f"{name}.")  # type: ignore[arg-type]
            continue
        value = values[field.name] if field.name in values else default_of(field)
        meaning = " ".join(texts.get(field.name, "").split()).replace("``", "`")
        kind_of_value = type_in_words(hint, name)
        rule = rule_in_words(field).removesuffix(", or null")
        yield FieldHelp(name, kind_of_value, rule, value, field.metadata["role"], meaning)


def help_text(what: str, overrides: list[str], parser: Parser, composer: Composer) -> str:
    """Return the text of ``--help WHAT``.

    Args:
        what: a field, a group or part of the job, ``all``, or empty for the screen.
        overrides: as typed; fields are shown with the values that they compose to.
    """
    schema = composer.schema
    if not what:
        return _screen(parser, schema)
    config = composer.config(overrides)
    fields = [*field_helps(schema, config), *_added(config)]
    if what == "all":
        shown = [field.line for field in fields]
        return "\n".join([_screen(parser, schema), "fields and their current values", *shown, ""])
    chosen = [field for field in fields if f"{field.name}.".startswith(f"{what}.")]
    is_group = issubclass(schema, Job) and what in groups()
    if not chosen and not is_group:
        check_field(what, None, schema, list(groups()))
        raise UserError(
            f"--help {what}: no such field; would work: --help {what.rpartition('.')[0]}"
        )
    parts = [field.text for field in chosen]
    if is_group:
        parts.insert(0, "\n".join([f"Options ({what}=OPTION):", *_options(what)]))
    return "\n\n".join(parts) + "\n"


def _screen(parser: Parser, schema: type) -> str:
    lines = [
        f"usage: {parser.prog} [GROUP=OPTION ...] [FIELD=VALUE ...] [flags]",
        str(parser.description),
    ]
    if issubclass(schema, Job):
        width = max(map(len, groups()))
        lines += [
            "",
            f"groups, GROUP=OPTION ({parser.prog} --help GROUP explains options and fields)",
        ]
        for name in sorted(groups()):
            lines.append(shortened(f"  {name:<{width}}  {', '.join(options_of(name))}", WIDTH))
    lines += [
        "",
        f"fields, FIELD=VALUE: {parser.prog} --help FIELD explains one, --help all lists all",
        "",
    ]
    return "\n".join(
        [*lines, "flags", parser.format_help().partition("options:\n")[2].rstrip(), ""]
    )


def _options(group: str) -> Iterator[str]:
    """Yield the options of a group, each with the comment that its file begins with."""
    names = named_options(group)
    width = max(map(len, names), default=0)
    for name in names:
        file = config_folders().find(f"{group}/{name}")
        comment = (
            leading_comment(file.read_text(encoding="utf-8"))
            if file
            else "the model of a config.json"
        )
        yield from textwrap.wrap(
            comment,
            WIDTH,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        ) or [f"  {name}"]


def leading_comment(text: str) -> str:
    """The comment that a YAML file begins with, as one line."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        found.append(line.lstrip("# "))
    return " ".join(line for line in found if not line.startswith("@package"))


def _added(config: Any) -> Iterator[FieldHelp]:
    """Yield the fields of the options that belong to a choice of the config."""
    chosen = []
    for name, (registry, choice) in _REGISTRIES.items():
        part, _, key = choice.partition(".")
        entry = config.get(part, {}).get(key)
        chosen.append((name, registry, registry.recorded(entry) if entry else entry))
    views = config.get("metrics", {}).get("views") or {}
    chosen += [(f"metrics.views.{view}", VIEWS, view) for view in views]
    for name, registry, entry in chosen:
        options = registry[entry].options if entry in registry else None
        if options is not None:
            values: Any = config
            for key in name.split("."):
                values = values.get(key) or {}
            yield from field_helps(options, values, f"{name}.")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
