"""Show a job instead of running it: ``--help`` and ``--cfg``."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

from harness.compose.arguments import CommandLine, Parser
from harness.compose.composer import Composer
from harness.compose.errors import to_user_error
from harness.compose.overrides import check_overrides, groups, options_of
from harness.config.fields import default_of, docstrings, leaf_fields, rules_of
from harness.config.job import Job
from harness.config.registry import Registry
from harness.util.errors import EXIT_OK, UserError


def show(line: CommandLine, parser: Parser, *, config_name: str, schema: type) -> int:
    """Show a job as the flags of the command line say; return the exit code."""
    check_overrides(line.overrides, schema)
    if line.help:
        text = help_text(line.overrides, parser, config_name=config_name, schema=schema)
    else:
        names = {"config_name": config_name, "schema": schema}
        text = shown_config(
            line.overrides, str(line.cfg), package=line.package, resolve=line.resolve, **names
        )
    sys.stdout.write(text)
    return EXIT_OK


def shown_config(
    overrides: list[str],
    kind: str,
    *,
    package: str | None = None,
    resolve: bool = False,
    config_name: str = "train",
    schema: type = Job,
) -> str:
    """Return the composed configuration as YAML, before it becomes a job.

    Args:
        overrides: checked.
        kind: ``job``, ``hydra`` (Hydra's own part) or ``all``.
        package: dotted name of the part to show.
        resolve: whether to replace ``${...}`` by values.
        config_name: the primary config.
        schema: dataclass of the job.

    Raises:
        UserError: the configuration cannot be composed, or has no such part.
    """
    from omegaconf import OmegaConf

    composer = Composer(config_name, schema)
    plain = composer.config(overrides, resolve=resolve)
    config: Any = OmegaConf.create({} if kind == "hydra" else plain)
    if kind != "job":
        config = OmegaConf.merge(config, {"hydra": composer.settings(overrides)})
    try:
        if resolve:
            OmegaConf.resolve(config)
        shown = config if package in (None, "_global_") else OmegaConf.select(config, package)
    except Exception as error:
        raise to_user_error(error) from error
    if shown is None:
        raise UserError(f"--package={package}: no such part; would work: {', '.join(map(str, config))}")
    head = "" if package is None else f"# @package {package}\n"
    return f"{head}{OmegaConf.to_yaml(shown)}" if OmegaConf.is_config(shown) else f"{shown}\n"


def help_text(overrides: list[str], parser: Parser, *, config_name: str, schema: type) -> str:
    """Return the text of ``--help``: all groups, fields and flags.

    Hydra's own help searches the groups in 160 copies of its registry, which takes a second.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.create(Composer(config_name, schema).config(overrides))
    rules = {name: rules_of(field) for name, field, _ in leaf_fields(schema())}
    for name, kind in _options_of_entries(config):
        texts = docstrings(kind)
        for field in dataclasses.fields(kind):
            of_option = f"{name}.{field.name}"
            if OmegaConf.select(config, of_option) is None:
                OmegaConf.update(config, of_option, default_of(field), force_add=True)
            meaning = " ".join(texts.get(field.name, "").split()).replace("``", "`")
            rules[of_option] = "; ".join(filter(None, (rules_of(field), meaning)))
    fields = _with_rules(OmegaConf.to_yaml(config), rules)
    options = {name: ", ".join(options_of(name)) for name in sorted(groups())}
    parts = {
        "Groups and their options (group=option)": "\n".join(map(": ".join, options.items())),
        "Fields and their current values (field=value)": fields,
        "Flags": parser.format_help().partition("options:\n")[2],
    }
    if not issubclass(schema, Job):
        del parts["Groups and their options (group=option)"]
    return "\n\n".join([str(parser.description), *(f"{head}:\n\n{text}" for head, text in parts.items())])


def _options_of_entries(config: Any) -> Iterator[tuple[str, type]]:
    """Yield the fields with options of the chosen entries of tables, each with the options' dataclass."""
    from omegaconf import OmegaConf

    from harness.config.cluster import CLUSTERS
    from harness.config.data_kinds import DATA_KINDS
    from harness.config.metrics import VIEWS
    from harness.config.model import BLOCKS
    from harness.config.optimizer import DECAYS, KINDS

    entries: list[tuple[str, Registry[Any], str]] = [
        ("model.block_options", BLOCKS, "model.block"),
        ("optimizer.options", KINDS, "optimizer.kind"),
        ("schedule.options", DECAYS, "schedule.decay_type"),
        ("data.options", DATA_KINDS, "data.kind"),
        ("cluster.options", CLUSTERS, "cluster.kind"),
    ]
    chosen = [(field, table, OmegaConf.select(config, choice)) for field, table, choice in entries]
    views = OmegaConf.select(config, "metrics.views") or {}
    chosen += [(f"metrics.views.{name}", VIEWS, name) for name in views]
    for field, table, name in chosen:
        options = table[name].options if name in table else None
        if options is not None:
            yield field, options


def _with_rules(shown: str, rules: dict[str, str]) -> str:
    """Add every field's rule to its line of YAML, as a comment."""
    lines: list[str] = []
    path: list[str] = []
    for line in shown.splitlines():
        if match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            rule = rules.get(".".join(path))
            line += f"  # {rule}" if rule else ""
        lines.append(line)
    return "\n".join(lines)
