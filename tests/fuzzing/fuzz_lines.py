"""Command lines for every verb, drawn from a seed: most have one or more mistakes, some are legal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fuzz_values as values
from declared import JOBS, VERBS

from harness.compose.overrides import fields_of, groups, options_of
from harness.config.job import Job

PARSED = tuple(name for name in VERBS if name not in JOBS)
VERBS = (*JOBS, *PARSED)
# Most of what is typed has to do with jobs.
WEIGHTS = [{"train": 8, "plan": 4}.get(verb, 2) for verb in VERBS]


@dataclass
class Line:
    """A command line, and what it meets."""

    seed: str
    """What draws it again."""
    verb: str
    arguments: list[str]
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables to set; None removes one."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of a folder of configurations, by their paths in it, to write before; it is the --config-dir."""
    closed: tuple[int, ...] = ()
    """Standard streams that are closed."""


def lines(seed: int, count: int) -> Iterator[Line]:
    """The lines of a seed; each can be drawn alone."""
    for number in range(count):
        yield line(f"{seed}.{number}")


def line(seed: str) -> Line:
    """One line."""
    draw = random.Random(seed)
    [verb] = draw.choices(VERBS, WEIGHTS)
    made = Line(seed, verb, [])
    if verb in PARSED:
        made.arguments = _parsed(draw, verb)
    else:
        made.arguments = _overrides(draw, verb)
        if draw.random() < 0.25:
            _add_flags(draw, made)
        if draw.random() < 0.12:
            _add_file(draw, made)
    if draw.random() < 0.15:
        _change_environment(draw, made)
    return made


def dotted_fields(schema: type, prefix: str = "") -> list[str]:
    """Names of all fields, as they are typed."""
    return [
        name
        for field_name, inner in fields_of(schema).items()
        for name in (
            [f"{prefix}{field_name}"] if inner is None else dotted_fields(inner, f"{prefix}{field_name}.")
        )
    ]


def _overrides(draw: random.Random, verb: str) -> list[str]:
    typed = list(_start(draw, verb))
    for _ in range(draw.choices((0, 1, 2, 3, 6), (3, 5, 3, 2, 1))[0]):
        typed.append(_override(draw, verb))
    return typed


def _start(draw: random.Random, verb: str) -> Iterator[str]:
    """Overrides that lead to the code that a verb is about."""
    if verb == "plan" and draw.random() < 0.4:
        yield from ("search=true", "cluster.ranks=8", "cluster.accelerator=H100 SXM", "sweep_file=found.yaml")
    if verb == "train" and draw.random() < 0.3:
        yield from ("cluster=slurm_cpu", "cluster.dry_run=true")
    if verb == "convert" and draw.random() < 0.7:
        yield f"convert.source={_weights(draw)}"
        yield f"convert.target={draw.choice((*values.PATHS, 'new'))}"
    if verb in ("generate", "evaluate") and draw.random() < 0.9:
        yield f"checkpoint={_weights(draw)}"
    if verb == "generate" and draw.random() < 0.7:
        yield draw.choice(("prompt=a", "prompt='a b'", "generate.prompts=[a,b]", "generate.prompt_file=file"))
    if verb == "evaluate" and draw.random() < 0.5:
        yield f"evaluate.tasks=[{draw.choice(('data', 'lm_eval:x', *values.PATHS))}]"
    if verb == "evaluate" and draw.random() < 0.7:
        yield from ("data=local_text", "data.paths=[file]", "evaluate.split=all")
    if verb == "encode" and draw.random() < 0.7:
        yield "encode.samples=2"
    if verb in ("tokenize", "encode") and draw.random() < 0.8:
        yield f"{verb}.target={draw.choice(('new', 'new', 'new', *values.PATHS))}"
    if verb == "tokenize" and draw.random() < 0.7:
        yield from (f"data={draw.choice(('local_text', 'local_jsonl'))}", "tokenizer=bytes")
        yield f"data.paths=[{draw.choice(('file', *values.PATHS))}]"
    if verb == "coordcheck":
        yield f"coordcheck.widths={draw.choice(('[64,128]', *values.LISTS))}"
    if verb == "download":
        yield f"repo={draw.choice(('Qwen/Qwen3-8B', 'a', 'https://huggingface.co/a/b', '../..', 'ü/ü'))}"
    if verb == "bench" and draw.random() < 0.5:
        yield f"bench.variants={{a: {draw.choice(values.VARIANTS)}}}"
    if verb == "parity":
        yield f"parity.layouts={draw.choice(values.LAYOUTS)}"
    if verb not in ("convert", "download") and draw.random() < 0.3:
        yield f"parallelism={draw.choice(options_of('parallelism'))}"


def _weights(draw: random.Random) -> str:
    """A folder of weights, or another path."""
    return draw.choice((*values.WEIGHTS * 30, *values.PATHS))


def _override(draw: random.Random, verb: str) -> str:
    schema = JOBS[verb]
    kind = draw.random()
    if kind < 0.18 and issubclass(schema, Job):
        group = draw.choice(sorted(groups()))
        option = draw.choice([*options_of(group), *values.ODD])
        return f"{draw.choice(('', '', '', '+', '++', '~'))}{_misspelt(draw, group, 0.15)}={option}"
    if kind < 0.24:
        return draw.choice(values.HYDRA)
    if kind < 0.30:
        return draw.choice(values.NO_OVERRIDES)
    names = dotted_fields(schema)
    if verb != "train" and draw.random() < 0.4:
        names = sorted(set(names) - set(dotted_fields(Job))) or names
    name = draw.choice(names)
    if kind < 0.36:
        return draw.choice(values.STRUCTURES).format(part=name.split(".")[0], name=name.split(".")[-1])
    value = draw.choice(draw.choice(values.KINDS))
    return f"{draw.choices(('', '+', '++', '~'), (20, 1, 1, 1))[0]}{_misspelt(draw, name, 0.1)}={value}"


def _misspelt(draw: random.Random, name: str, share: float) -> str:
    if draw.random() > share:
        return name
    place = draw.randrange(len(name))
    return draw.choice(
        (name[:place] + name[place + 1 :], name[:place] + "x" + name[place:], name.upper(), f"{name}.")
    )


def _add_flags(draw: random.Random, made: Line) -> None:
    for flag in draw.choice(values.FLAGS).split(" "):
        made.arguments.insert(
            draw.randint(0, len(made.arguments)) if draw.random() < 0.3 else len(made.arguments), flag
        )


def _add_file(draw: random.Random, made: Line) -> None:
    """Writes a file with a mistake into a folder of configurations, and chooses it."""
    name = draw.choice(("experiment/mine", "model/mine", "parallelism/mine", "sweep/mine"))
    made.files[f"{name}.yaml"] = draw.choice(values.FILES)
    made.arguments.append("=".join(name.split("/")))
    if name.startswith("sweep") and "-m" not in made.arguments:
        made.arguments.append("-m")


def _change_environment(draw: random.Random, made: Line) -> None:
    if draw.random() < 0.4:
        made.environment.update(draw.choice(values.LAUNCHERS))
    else:
        name, value = draw.choice(values.ENVIRONMENTS)
        made.environment[name] = value
    if draw.random() < 0.3:
        made.closed = draw.choice(((1,), (2,), (1, 2), (0,), (0, 1, 2)))


def _parsed(draw: random.Random, verb: str) -> list[str]:
    """Arguments of the verbs that take folders."""
    words = [*values.PATHS, *values.WEIGHTS * 3, *values.NO_OVERRIDES, *values.PARSED_FLAGS, "runs", "sweeps"]
    if verb != "sweep":
        return [draw.choice(words) for _ in range(draw.randint(0, 3))]
    action = draw.choice(("status", "resume", "collect", "cancel", "stat", "", "nope", "-h"))
    return [action, *(draw.choice(words) for _ in range(draw.randint(0, 2)))]


def with_files(made: Line, folder: Path) -> list[str]:
    """Writes the files of a line; returns the arguments that the line is run with."""
    if not made.files:
        return made.arguments
    for name, text in made.files.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    return ["--config-dir", str(folder / "conf"), *made.arguments]
