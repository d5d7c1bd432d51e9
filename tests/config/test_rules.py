"""Rules declared beside fields: words, errors, and defaults that obey them."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
from cases import rows
from declared import JOBS

from harness.config.fields import check_rules, execution, label, numerics
from harness.config.types import rule_in_words
from harness.util.errors import ConfigError, divisors


@dataclass
class Fields:
    count: int = numerics(1, least=1)
    rest: int = execution(-1, least=1, also=-1)
    limit: float | None = label(None, above=0)
    share: float = numerics(0.5, least=0, below=1)
    most: float = numerics(0.5, most=1)
    mode: str | None = execution(None, choices=("fast", "slow"))
    parts: list[str] = execution(factory=list, choices=("a", "b"))
    folder: str = label("runs", nonempty=True)
    report: str | None = label(None, nonempty=True)
    out: str | None = label(None, written="file")
    target: str = label("new", written="folder", works="a folder")
    number: float = label(0.0)
    lists: list[list[float]] = label(factory=list)


def test_rules_in_words():
    assert {field.name: rule_in_words(field) for field in dataclasses.fields(Fields)} == {
        "count": "at least 1",
        "rest": "at least 1, or -1",
        "limit": "above 0, or null",
        "share": "in [0, 1)",
        "most": "at most 1",
        "mode": "one of fast, slow, or null",
        "parts": "each one of a, b",
        "folder": "non-empty",
        "report": "non-empty, or null",
        "out": "a local file, or null",
        "target": "a local folder",
        "number": "",
        "lists": "",
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    rows("""
        count   0                         "count=0: must be at least 1"
        rest    0                         "rest=0: must be at least 1, or -1"
        limit   0.0                       "limit=0.0: must be above 0, or null"
        share   1.0                       "share=1.0: must be in [0, 1)"
        share   -0.1                      "share=-0.1: must be in [0, 1)"
        share   .nan                      "share=nan: must be a finite number of float32, at most 3.4e+38"
        most    2                         "most=2: must be at most 1"
        mode    ''                        "mode='': no such choice; would work: fast, slow, null"
        parts   [a, c]                    "parts=c: no such choice; would work: a, b"
        folder  ''                        "folder='': must be non-empty; would work: runs"
        report  ''                        "report='': must be non-empty, or null; would work: null"
        out     ''                        "out='': must be non-empty; would work: null"
        out     's3://a/x.jsonl'          "out=s3://a/x.jsonl: is not a local path; would work: null"
        out     tests                     "out=tests: is a folder"
        out     pyproject.toml/x          "out=pyproject.toml/x: pyproject.toml is not a folder"
        target  'file:///x'               "target=file:///x: is not a local path; would work: a folder"
        target  pyproject.toml            "target=pyproject.toml: is a file; would work: a folder"
        number  -1.0e+39                  "number=-1e+39: must be a finite number"
        lists   [[9223372036854775808]]   "lists=[[9223372036854775808]]: must be an integer of 64 bits"
    """),
)
def test_broken_rules(field, value, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(f'test.{message}')}"):
        check_rules(dataclasses.replace(Fields(), **{field: value}), "test.")


@pytest.mark.parametrize("schema", [Fields, *JOBS.values()])
def test_defaults_obey_the_rules(schema):
    check_rules(schema())


@pytest.mark.parametrize(
    ("numbers", "common"),
    [
        ((1,), [1]),
        ((12, 18), [1, 2, 3, 6]),
        ((7, 0), []),
        ((2 * 100_003,), [1, 2, 100_003, 200_006]),
    ],
)
def test_divisors(numbers, common):
    assert divisors(*numbers) == common
