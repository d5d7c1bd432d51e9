"""Every setting of Hydra is honoured, or refused by name with what to use instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra.conf
import pytest
from hydra.conf import HydraConf

from harness.compose.overrides import HONOURED, INSTEAD, check_overrides, check_setting, is_honoured
from harness.util.errors import UserError


def settings(config: Any, prefix: str = "hydra.") -> Iterator[str]:
    """Dotted names of all leaf fields of Hydra's own dataclass."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


GROUPS = sorted(
    path.name for path in (Path(hydra.conf.__path__[0]) / "hydra").iterdir() if not path.name.startswith("_")
)


@pytest.mark.parametrize("key", [*settings(HydraConf()), *(f"hydra/{group}" for group in GROUPS)])
def test_every_setting_is_honoured_or_refused_by_name(key: str) -> None:
    if is_honoured(key):
        check_setting(f"{key}=x", key)
        return
    with pytest.raises(UserError) as caught:
        check_overrides([f"{key}=x"])
    assert str(caught.value).startswith(
        f"{key}=x: has no effect, because Hydra only composes here; would work: "
    )


def test_the_tables_name_settings_of_hydra_only() -> None:
    known = {key.removeprefix("hydra.") for key in settings(HydraConf())}
    below = {name.rsplit(".", depth)[0] for name in known for depth in range(3)}
    assert {name for name in INSTEAD if name not in below | set(GROUPS)} == set()
    assert {name.partition(".")[0] for name in HONOURED} <= known
    assert not set(HONOURED) & set(INSTEAD)


@pytest.mark.parametrize("override", ["hydra.nope=1", "+hydra.x.y=1", "hydra=3", "hydra={}"])
def test_an_unknown_setting_names_those_that_exist(override: str) -> None:
    with pytest.raises(UserError) as caught:
        check_overrides([override])
    assert str(caught.value).startswith(f"{override}: no such setting of Hydra; Hydra has: callbacks, ")
