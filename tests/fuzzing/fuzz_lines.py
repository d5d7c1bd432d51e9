"""Command lines for every verb, drawn from a seed: most have one or more mistakes, some are legal."""

import random
from dataclasses import dataclass, field

import fuzz_values as values
from declared import JOBS, VERBS

from harness.compose.overrides import groups, options_of
from harness.config.fields import leaves
from harness.config.job import Job

PARSED = tuple(name for name in VERBS if name not in JOBS)
NAMES = (*JOBS, *PARSED)
# Most of what is typed has to do with jobs.
WEIGHTS = [{"train": 8, "plan": 4}.get(verb, 2) for verb in NAMES]


@dataclass
class Line:
    """A command line, and what it meets.

    Attributes:
        seed: what draws it again.
        verb: its verb.
        arguments: what follows.
        environment: variables to set.
        files: files of a folder of configurations, by their paths in it; it is the --config-dir.
    """

    seed: str
    verb: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def written(self, folder):
        """Write the files; return the arguments that the line is run with."""
        for name, text in self.files.items():
            path = folder / "conf" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("latin-1"))
        return [*(["--config-dir", f"{folder}/conf"] if self.files else []), *self.arguments]


def line(seed):
    """The line of a seed."""
    draw = random.Random(seed)
    [verb] = draw.choices(NAMES, WEIGHTS)
    made = Line(seed, verb, _parsed(draw, verb) if verb in PARSED else _overrides(draw, verb))
    if verb in JOBS and draw.random() < 0.25:
        for flag in draw.choice(values.FLAGS).split(" "):
            end = len(made.arguments)
            made.arguments.insert(draw.randint(0, end) if draw.random() < 0.3 else end, flag)
    if verb in JOBS and draw.random() < 0.12:
        _add_file(draw, made)
    if draw.random() < 0.15:
        environment = draw.choice(draw.choice((values.LAUNCHERS, values.ENVIRONMENTS)))
        made.environment = dict(each.split("=") for each in environment.split())
    return made


def _overrides(draw, verb):
    typed = []
    for share, words in values.STARTS.get(verb, []):
        if draw.random() < share:
            drawn = {name: draw.choice(options) for name, options in values.PARTS.items()}
            typed += [word.format_map(drawn) for word in words.split(" ")]
    if verb not in ("convert", "download") and draw.random() < 0.3:
        typed.append(f"parallelism={draw.choice(options_of('parallelism'))}")
    count = draw.choices((0, 1, 2, 3, 6), (3, 5, 3, 2, 1))[0]
    return typed + [_override(draw, verb) for _ in range(count)]


def _override(draw, verb):
    schema = JOBS[verb]
    kind = draw.random()
    if kind < 0.18 and issubclass(schema, Job):
        group = draw.choice(sorted(groups()))
        option = draw.choice([*options_of(group), *values.ODD])
        return f"{draw.choice(('', '', '', '+', '++', '~'))}{_misspelt(draw, group, 0.15)}={option}"
    if kind < 0.30:
        return draw.choice(values.HYDRA if kind < 0.24 else values.NO_OVERRIDES)
    names = [name for name, _, _ in leaves(schema())]
    if verb != "train" and draw.random() < 0.4:
        names = sorted(set(names) - {name for name, _, _ in leaves(Job())}) or names
    name = draw.choice(names)
    if kind < 0.36:
        return draw.choice(values.STRUCTURES).format(
            part=name.split(".")[0], name=name.split(".")[-1]
        )
    value = draw.choice(draw.choice(values.KINDS))
    return f"{draw.choices(('', '+', '++', '~'), (20, 1, 1, 1))[0]}{_misspelt(draw, name, 0.1)}={value}"


def _misspelt(draw, name, share):
    if draw.random() > share:
        return name
    place = draw.randrange(len(name))
    return draw.choice(
        (
            name[:place] + name[place + 1 :],
            name[:place] + "x" + name[place:],
            name.upper(),
            f"{name}.",
        )
    )


def _add_file(draw, made):
    """Write a file with a mistake into a folder of configurations, and choose it."""
    group = draw.choice(("experiment", "model", "parallelism", "sweep"))
    made.files[f"{group}/mine.yaml"] = draw.choice(values.FILES)
    made.arguments.append(f"{group}=mine")
    if group == "sweep" and "-m" not in made.arguments:
        made.arguments.append("-m")


def _parsed(draw, verb):
    """Arguments of the verbs that take folders."""
    words = [
        *values.PATHS,
        *values.WEIGHTS * 3,
        *values.NO_OVERRIDES,
        *values.PARSED_FLAGS,
        "runs",
        "sweeps",
    ]
    drawn = [draw.choice(words) for _ in range(draw.randint(0, 3))]
    if verb != "sweep":
        return drawn
    return [
        draw.choice(("resume", "cancel", "stat", "", "-h")),
        *drawn[1:],
    ]
