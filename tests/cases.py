"""Tables of cases as texts, with aligned columns."""

import re

import yaml


def texts(table):
    """Rows of a table of texts, a line each: columns are two spaces or more apart, and ``""`` is empty."""
    lines = (re.split(" {2,}", line.strip()) for line in table.strip().splitlines())
    return [["" if cell == '""' else cell for cell in line] for line in lines]


def rows(table):
    """The same with values in YAML."""
    return [[yaml.safe_load(cell or '""') for cell in line] for line in texts(table)]


def words(line):
    """Overrides as they are typed on a command line."""
    return line.split()
