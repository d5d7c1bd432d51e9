"""Write docs/reference and tables of docs/coming_from.md from the code: ``docs/reference.py [FOLDER]``.

Fields and their documentation are read from the dataclasses, options from conf/ and from the package of
Flux, which is installed too, flags from the declared verbs, columns (``harness/metrics/columns.py``), failure
classes from ``harness/config/failures.py``, names of other tools from ``harness/config/elsewhere.txt``.
Imports no torch.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.compose.arguments import JOB_FLAGS, JSON, Argument, CommandLine, shown_config
from harness.compose.composer import Composer
from harness.compose.generator import GENERATORS
from harness.compose.help import field_helps, leading_comment
from harness.compose.verb import VERBS, Verb
from harness.config import elsewhere, failures
from harness.config.data_kinds import DATA_KINDS
from harness.config.job import Job
from harness.config.model import ARCHITECTURES
from harness.config.training import OBSERVERS
from harness.metrics.columns import Metric
from harness.train.objective import OBJECTIVES
from harness.train.rows import metrics_of_ranks, metrics_of_result, metrics_of_rows
from harness.util import errors
from harness.util.errors import as_typed

ROOT = Path(__file__).resolve().parent.parent
FLUX = ROOT / "experiments" / "extensions" / "flux" / "harness_flux" / "conf"
OF_FLUX = "Models, data and the verb `encode` of [Flux](../howto/flux.md) are here; they need its package."
WRITTEN = "<!-- Written by docs/reference.py. Change the code, then run make reference. -->\n"
EXIT_CODES = {
    "EXIT_OK": "Done.",
    "EXIT_BUG": "A bug of the harness; a traceback is printed.",
    "EXIT_USER": "A mistake in the job or its data; one line says what would work.",
    "EXIT_MACHINE": "The machine failed: memory, a collective, a node, a disk.",
    "EXIT_NON_FINITE": "Loss or gradients are not finite.",
    "EXIT_RESUMABLE": "Stopped with a checkpoint; the same command continues.",
    "EXIT_INTERRUPTED": "Stopped without a checkpoint.",
    "EXIT_DRIFTS": "An activation follows a power of the width (coordcheck).",
    "EXIT_DIFFERS": "A layout differs from one process (parity), or a technique is not equal (converge).",
    "EXIT_FAILED": "At least one rank (rehearse) failed.",
}


def main(folder: Path) -> None:
    """Write all pages into a folder, and the page with names of other tools beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "fields": fields_page,
        "options": options_page,
        "verbs": verbs_page,
        "columns": columns_page,
        "failures": failures_page,
    }
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(f"{WRITTEN}\n{page().rstrip()}\n")
    page_of_tools = ROOT / "docs" / "coming_from.md"
    (folder.parent / page_of_tools.name).write_text(with_names(page_of_tools.read_text()))


def with_names(page: str) -> str:
    """A page in which the tables of names are those of the code."""
    return re.sub(
        r"(<!-- names of ([^,]+), [^>]*-->\n\n).*?\n\n(?=<!-- end -->)",
        lambda marks: f"{marks[1]}{names_of(marks[2])}\n",
        page,
        flags=re.DOTALL,
    )


def names_of(tool: str) -> str:
    """The names of a tool, with what to type here; one row for those with the same answer."""
    answers: dict[tuple[str, str], list[str]] = {}
    for row in elsewhere.rows():
        if row.tool == tool:
            answers.setdefault((row.here, row.note), []).append(code(row.typed))
    rows = []
    for (here, note), names in answers.items():
        shown = "no counterpart" if here == "-" else code(here)
        rows.append([", ".join(names), f"{shown}; {plain(note)}" if note else shown])
    return table((tool, "here"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def code(text: str) -> str:
    """Text as code in a cell of a table, where a pipe would end the cell."""
    return (
        f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"
    )


def plain(text: str | None) -> str:
    """A docstring as one line of Markdown; only its code is markup."""
    text = " ".join(inspect.cleandoc(text or "").split()).replace("``", "`")
    parts = text.split("`")
    for place, part in enumerate(parts):
        if place % 2 == 0:
            parts[place] = re.sub(r"([*|<~\[\]{}])", r"\\\1", part)
        else:
            parts[place] = code(part)
    return "".join(parts)


def shown(value: Any) -> str:
    """A value as the user types it."""
    text = as_typed(value) or "''"
    if isinstance(value, list | dict) and len(text) > 60:
        return f"{len(value)} entries"
    return code(text)


def field_rows(cls: type, composed: Any, prefix: str = "") -> dict[str, list[list[str]]]:
    """Rows of every field of a dataclass by its part; ``composed`` has the composed values."""
    rows: dict[str, list[list[str]]] = {}
    for each in field_helps(cls, composed, prefix):
        cells = [f"`{each.name}`", plain(each.type), plain(each.rule), shown(each.value), each.role]
        rows.setdefault(each.name.rpartition(".")[0], []).append([*cells, plain(each.meaning)])
    return rows


def composed_values(verb: str, schema: type) -> dict[str, Any]:
    """The values of a verb's job when nothing is typed."""
    line = CommandLine(overrides=[], cfg="job", package=None, resolve=False)
    return yaml.safe_load(shown_config(line, Composer(verb, schema)))  # type: ignore[no-any-return]


FIELD_HEADER = ("field", "type", "rule", "default", "role", "meaning")


def fields_page() -> str:
    """Every field of a training job."""
    text = (
        "# Fields of a job\n\n"
        "Set a field as `field=value` on the command line. *Default* is the value when nothing is typed\n"
        "(`conf/train.yaml`). *Role* says what a change does: `numerics` fields change the numbers that are\n"
        "computed, `execution` fields only how, `label` fields neither ([concepts](../concepts.md)).\n"
        f"{OF_FLUX}\n"
    )
    for group, rows in field_rows(Job, composed_values("train", Job)).items():
        text += f"\n## {group or 'Top level'}\n\n{table(FIELD_HEADER, rows)}"
    for (field, schema), choices in added_options().items():
        [rows] = field_rows(schema, {}, f"{field}.").values()
        text += f"\n## {field} with {', '.join(choices)}\n\n{table(FIELD_HEADER, rows)}"
    return text


def added_options() -> dict[tuple[str, type], list[str]]:
    """Dataclasses of options that belong to a choice, each with its field and the choices that have it."""
    found: dict[tuple[str, type], list[str]] = {}
    for field, registry, attribute in (
        ("model.options", ARCHITECTURES, "options"),
        ("training.objective_options", OBJECTIVES, "options"),
        ("validation.options", OBJECTIVES, "validation_options"),
        ("data.options", DATA_KINDS, "options"),
        ("generate.options", GENERATORS, "options"),
    ):
        for name in registry:
            schema = getattr(registry[name], attribute)
            if schema is not None:
                found.setdefault((field, schema), []).append(f"{registry.field}={name}")
    return found


def options_page() -> str:
    """Every option of every group."""
    text = (
        "# Options of groups\n\nChoose an option as `group=option`; it sets the fields listed here,\n"
        "which are named without their group. Fields typed on the command line win over options.\n"
        f"{OF_FLUX}\n"
    )
    conf = ROOT / "conf"
    for group in sorted(path.name for path in conf.iterdir() if path.is_dir()):
        if group in ("experiment", "sweep"):
            continue
        rows = []
        files = [file for folder in (conf, FLUX) for file in (folder / group).glob("*.yaml")]
        for file in sorted(files, key=lambda file: file.stem):
            content = yaml.safe_load(file.read_text()) or {}
            bases = [each for each in content.pop("defaults", []) if each != "_self_"]
            sets = " ".join([*(f"(as {each})" for each in bases), *flat(content)])
            rows.append([f"`{file.stem}`", plain(leading_comment(file.read_text())), sets])
        text += f"\n## {group}\n\n{table(('option', 'meaning', 'sets'), rows)}"
    return text


def flat(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield ``name=value`` of the leaves of a YAML file, as code."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            text = as_typed(value) or "''"
            yield code(f"{prefix}{name}={text}")


def verbs() -> Iterator[tuple[Verb, Any]]:
    """Yield every verb and its module."""
    for verb in VERBS.values():
        yield verb, sys.modules[verb.run.__module__]


def verbs_page() -> str:
    """Every verb: purpose, flags, fields of its own, exit codes."""
    general = [code for code in vars(errors) if code.startswith("EXIT_")]
    text = (
        "# Verbs\n\nA verb is `harness NAME`; `python -m harness NAME` is the same. Verbs that take a\n"
        "job take all of its [fields](fields.md) and [options](options.md). Every verb has `--help` and\n"
        "`--version`. With `--json`, standard output is one JSON object; progress goes to standard error.\n"
        f"{OF_FLUX}\n\n"
        "## Exit codes\n\n"
        + table(
            ("code", "meaning"),
            [[str(getattr(errors, code)), EXIT_CODES[code]] for code in general],
        )
        + "\nThe class of a failure is `error.kind` of [result.json](columns.md#resultjson);\n"
        "[failures](failures.md) lists them.\n\n## Flags of verbs that take a job\n\n"
        + table(("flag", "meaning"), argument_rows(JOB_FLAGS))
    )
    for verb, module in verbs():
        text += f"\n## {verb.name}\n\n{purpose(verb)}\n"
        text += own_exit_codes(module) + arguments_of(verb) + own_fields(verb)
    return text


def purpose(verb: Verb) -> str:
    """The documentation of a verb, with commands as code."""
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(paragraph)}\n```"
        if paragraph.startswith("    ")
        else plain(paragraph)
        for paragraph in verb.help.strip().split("\n\n")
    )


def own_exit_codes(module: Any) -> str:
    """Exit codes that only this verb has."""
    names = [
        name for name in vars(module) if name.startswith("EXIT_") and not hasattr(errors, name)
    ]
    return "".join(f"\nExit code {getattr(module, name)}: {EXIT_CODES[name]}\n" for name in names)


def arguments_of(verb: Verb) -> str:
    """The arguments and flags of a verb that not all verbs take."""
    own = [*verb.arguments, *([JSON] if verb.has_json else [])]
    return "\n" + table(("argument", "meaning"), argument_rows(own)) if own else ""


def argument_rows(listed: Sequence[Argument]) -> list[list[str]]:
    """Names and meaning of arguments, as rows of a table."""
    return [[shown_argument(each), plain(each.options["help"])] for each in listed]


def shown_argument(each: Argument) -> str:
    """The names of a flag, or a positional argument in capitals."""
    if each.names[0].startswith("-"):
        return ", ".join(map(code, each.names))
    named = str(each.options.get("metavar", each.name.upper()))
    return code(f"{named}..." if "nargs" in each.options else named)


def own_fields(verb: Verb) -> str:
    """Fields that only this verb's job has."""
    if verb.job in (None, Job):
        return ""
    of_all = {row[0] for rows in field_rows(Job, {}).values() for row in rows}
    composed = composed_values(verb.name, verb.job)
    rows = [
        row
        for rows in field_rows(verb.job, composed).values()
        for row in rows
        if row[0] not in of_all
    ]
    return "\n" + table(FIELD_HEADER, rows)


def columns() -> tuple[list[Metric], list[Metric], list[Metric]]:
    """The columns of metrics.jsonl, of the rows of ranks, and of result.json."""
    observers = list(OBSERVERS.values())
    return metrics_of_rows(observers), metrics_of_ranks(observers), metrics_of_result()


def columns_page() -> str:
    """Every column of metrics.jsonl, of the rows of ranks, and of result.json."""
    header = ("column", "unit", "meaning", "present")
    tables = [
        table(header, [[f"`{c.name}`", c.unit, c.text, c.when or "always"] for c in found])
        for found in columns()
    ]
    return (
        "# Columns of metrics.jsonl and result.json\n\nAll are in the run folder. A value that is not\n"
        "known is null; a number that is not finite is the text `nan`, `inf` or `-inf`. Columns of memory\n"
        "are those of a rank, or the maximum over all ranks.\n\n"
        f"## metrics.jsonl\n\nOne row for every `metrics.log_interval` steps.\n\n{tables[0]}\n"
        "## metrics/rank&lt;r&gt;.jsonl\n\nWith `metrics.all_ranks=true`: one row of each rank's own\n"
        f"values for every row of metrics.jsonl.\n\n{tables[1]}\n"
        f"## result.json\n\nOne flat row for each attempt, on success and on failure.\n\n{tables[2]}"
    )


def failures_page() -> str:
    """Every failure class, from the docstring that defines them."""
    rows = [
        [plain(cell) for cell in line.strip("| ").split(" | ")]
        for line in (failures.__doc__ or "").splitlines()
        if line.startswith("| `")
    ]
    return (
        "# Failure classes\n\n`error.kind` of a failed run.\n"
        "[Troubleshooting](../troubleshooting.md) says what to do.\n\n"
        + table(("class", "exit code", "meaning"), rows)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference")
