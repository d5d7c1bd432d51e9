"""What flags of a verb show about a job instead of running it: ``--help``, ``--cfg``, ``--info``, ``-sc``."""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import Any

from harness.arguments import CommandLine, Parser
from harness.compose import Composer, register_schema
from harness.compose_errors import to_user_error
from harness.config import leaf_fields, rules_of
from harness.errors import EXIT_OK, UserError
from harness.job import Job
from harness.overrides import check_overrides, groups, in_hydra_syntax, options_of
from harness.paths import conf_dir


def show(line: CommandLine, parser: Parser, *, config_name: str, schema: type) -> int:
    """Show what the flags of a command line ask for; return the exit code."""
    if not line.shell_completion:
        check_overrides(line.overrides, schema)
    overrides = in_hydra_syntax(line.overrides, schema)
    if line.help:
        sys.stdout.write(help_text(overrides, parser, config_name=config_name, schema=schema))
    elif line.cfg is not None:
        sys.stdout.write(
            shown_config(
                overrides,
                line.cfg,
                package=line.package,
                resolve=line.resolve,
                config_name=config_name,
                schema=schema,
            )
        )
    else:
        flag = "--shell-completion" if line.shell_completion else f"--info={line.info}"
        _show_by_hydra([flag, *overrides], config_name, schema)
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
        overrides: checked, and in Hydra's syntax.
        kind: ``job``, ``hydra`` (Hydra's own part) or ``all``.
        package: dotted name of the part to show.
        resolve: whether to replace ``${...}`` by values.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.

    Raises:
        UserError: the configuration cannot be composed, or has no such part.
    """
    from omegaconf import OmegaConf

    with Composer(config_name, schema) as composer:
        config = composer.config(overrides)
        hydra = None if kind == "job" else composer.config(overrides, with_hydra=True).hydra
    try:
        if resolve:
            OmegaConf.to_container(config, resolve=True)  # its errors name the field, those of resolve do not
        if hydra is not None:
            parts: dict[str, Any] = {} if kind == "hydra" else {str(name): config[name] for name in config}
            config = OmegaConf.create(parts | {"hydra": hydra})
        if resolve:
            OmegaConf.resolve(config)
        shown = config if package in (None, "_global_") else OmegaConf.select(config, package)
    except Exception as error:
        raise to_user_error(error, schema) from error
    if shown is None:
        raise UserError(f"--package={package}: no such part; would work: {', '.join(map(str, config))}")
    head = "" if package is None else f"# @package {package}\n"
    return f"{head}{OmegaConf.to_yaml(shown)}" if OmegaConf.is_config(shown) else f"{shown}\n"


def help_text(overrides: list[str], parser: Parser, *, config_name: str, schema: type) -> str:
    """Return the text of ``--help``: all groups, fields and flags.

    Hydra's own help searches the groups in 160 copies of its registry, which takes a second.
    """
    from omegaconf import OmegaConf

    with Composer(config_name, schema) as composer:
        fields = _with_rules(OmegaConf.to_yaml(composer.config(overrides)), schema)
    options = {name: ", ".join(options_of(folder)) for name, folder in sorted(groups().items())}
    parts = {
        "Groups and their options (group=option)": "\n".join(map(": ".join, options.items())),
        "Fields and their current values (field=value)": fields,
        "Flags": parser.format_help().partition("options:\n")[2],
    }
    if not issubclass(schema, Job):
        del parts["Groups and their options (group=option)"]
    return "\n\n".join([str(parser.description), *(f"{head}:\n\n{text}" for head, text in parts.items())])


def _with_rules(shown: str, schema: type) -> str:
    """Add every field's rule to its line of YAML, as a comment."""
    rules = {name: rules_of(field) for name, field, _ in leaf_fields(schema())}
    lines: list[str] = []
    path: list[str] = []
    for line in shown.splitlines():
        if match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            rule = rules.get(".".join(path))
            line += f"  # {rule}" if rule else ""
        lines.append(line)
    return "\n".join(lines)


def _show_by_hydra(arguments: list[str], config_name: str, schema: type) -> None:
    """Let Hydra show information or completions, but report its errors as ours."""
    import hydra

    # Hydra 1.4 warns about version_base, which 1.3 needs.
    warnings.filterwarnings("ignore", message=".*version_base.*")
    register_schema(schema)
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"], before = "1", os.environ.get("HYDRA_FULL_ERROR")
    try:
        hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(lambda _: None)()
    except Exception as error:
        raise to_user_error(error, schema) from error
    except SystemExit as done:  # Hydra's help ends this way
        if done.code:
            raise
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
