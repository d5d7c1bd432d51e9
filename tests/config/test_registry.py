"""Names that installed packages add to a table: found, listed, and refused in one line."""

import fractions
import re
import sys
from dataclasses import dataclass, make_dataclass

import pytest
from one_line import one_line
from plugins import install

from harness.compose.composer import Composer
from harness.compose.help import help_text
from harness.config.data_kinds import DATA_KINDS, DataKind
from harness.config.fields import check_rules, label, numerics
from harness.config.metrics import VIEWS, ViewKind
from harness.config.registry import Registry, resolve_options
from harness.launch.train import VERB as TRAIN
from harness.util.errors import ConfigError, UserError


def table(expects=None):
    builtins = {"red": "fractions:Fraction.limit_denominator", "one": 1}
    return Registry("colour", builtins, field="paint.colour", expects=expects)


@dataclass
class Paint:
    colour: str = label("one", choices=table())


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def provide_blue(packages, name, module=""):
    """Install a package that adds the colour blue."""
    sys.modules.pop(name, None)
    install(packages, name, {"harness.colour": {"blue": f"{name}:BLUE"}}, module)


def test_built_in_names_do_not_read_entry_points(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    colours = table()
    assert "red" in colours and "one" in colours
    assert colours["red"] is fractions.Fraction.limit_denominator
    assert colours["one"] == 1


def test_plugins_are_found_listed_and_imported_when_used(packages):
    entries = {"blue": "many_colours:BLUE", "azure": "none:None"}
    install(packages, "many_colours", {"harness.colour": entries}, "BLUE = 450")
    colours = table(expects="builtins:int")
    assert list(colours) == ["red", "one", "azure", "blue"]
    assert "blue" in colours and "green" not in colours and ["blue"] not in colours
    assert "many_colours" not in sys.modules
    assert colours["blue"] == 450
    check_rules(Paint("blue"))


def test_a_name_that_no_package_has_is_refused_in_one_line(packages):
    provide_blue(packages, "few_colours")
    works = "red, one, blue, or install the package that adds it"
    group = "(entry points of group harness.colour)"
    message = (
        f"paint.colour=green: no installed package adds this name {group}; would work: {works}"
    )
    with one_line(ConfigError, f"^{re.escape(message)}$"):
        table()["green"]
    NewPaint = make_dataclass("NewPaint", [("colour", str, label("one", choices=table()))])
    message = f"colour=green: no such choice; would work: {works} {group}"
    with one_line(ConfigError, f"^{re.escape(message)}$"):
        check_rules(NewPaint("green"))


@dataclass
class Brush:
    width: int = numerics(3, least=1, most=9)
    """Millimetres of
    ``paint``."""
    hair: str | None = label(None)


@pytest.mark.parametrize("width", [3, 4])
def test_help_shows_the_options_of_an_entry(monkeypatch, width):
    monkeypatch.setitem(DATA_KINDS._builtins, "brush", DataKind("x:y", options=Brush))
    monkeypatch.setitem(VIEWS._builtins, "brush", ViewKind("x:y", options=Brush))
    typed = ["data.kind=brush", "++metrics.views={brush: {}}"]
    typed += [] if width == 3 else ["++data.options.width=4"]
    shown = help_text("data.options", typed, TRAIN.parser(), Composer())
    assert (
        f"data.options.width={width}\n    Millimetres of `paint`.\n    an integer; in [1, 9]; n"
        in shown
    )
    assert "data.options.hair=null\n    text, or null; label: " in shown
    views = help_text("metrics.views", typed, TRAIN.parser(), Composer())
    assert "metrics.views.brush.hair=null\n    text, or null; label: " in views


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"red": "x:y"},
            "paint.colour=red: the packages harness and paint_a 1.0 both have this name",
        ),
        (
            {"blue": "x:y"},
            "paint.colour=blue: the packages paint_a 1.0 and paint_b 1.0 both have this name",
        ),
    ],
)
def test_two_packages_with_one_name_are_named(packages, names, message):
    install(packages, "paint_a", {"harness.colour": names})
    install(packages, "paint_b", {"harness.colour": {"blue": "x:y"}})
    with one_line(UserError, f"^{message} in group harness.colour; would work: uninstall paint_"):
        list(table())


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import nope", "cannot be imported: ModuleNotFoundError: No module named 'nope'"),
        ("", "cannot be imported: AttributeError: module 'broken_paint' has no attribute 'BLUE'"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("BLUE = 'blue'", "has broken_paint:BLUE, which is no builtins.int"),
    ],
)
def test_a_package_that_does_not_work_is_named(packages, module, problem):
    provide_blue(packages, "broken_paint", module)
    message = f"paint.colour=blue: the package broken_paint 1.0 {problem}"
    with one_line(UserError, f"^{re.escape(message)}$"):
        table(expects="builtins:int")["blue"]


def test_an_error_inside_of_the_harness_stays_a_bug():
    with pytest.raises(ModuleNotFoundError):
        Registry("colour", {"red": "harness.does_not_exist:RED"}, field="paint.colour")["red"]


@dataclass
class Options:
    momentum: float = numerics(0.9, least=0, below=1)
    added: int = numerics(1, id_omits_default=True)


def resolved(options, schema=Options):
    return resolve_options(options, schema, "paint.options", "paint.colour=blue")


def test_options_get_their_defaults():
    assert resolved({}) == {"momentum": 0.9}
    assert resolved({"momentum": 0.5, "added": 2}) == {"momentum": 0.5, "added": 2}


@pytest.mark.parametrize(
    ("options", "schema", "message"),
    [
        ({"momentun": 0.5}, Options, "paint.options.momentun=0.5: no such field; did you mean "),
        ({"momentum": "much"}, Options, "paint.options.momentum=much: must be a number"),
        ({"momentum": 1}, Options, "paint.options.momentum=1: must be in [0, 1)"),
        (
            {"a": 1},
            None,
            "paint.options.a=1: paint.colour=blue has no options; would work: leave it out",
        ),
    ],
)
def test_options_are_checked_like_fields(options, schema, message):
    with one_line(ConfigError, f"^{re.escape(message)}"):
        resolved(options, schema)
