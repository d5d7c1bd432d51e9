"""The metrics group: rules, shipped files, and a light import."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.compose.hydra import with_types
from harness.config.fields import check_rules, from_dict, leaves
from harness.config.metrics import MetricsConfig

CONF = Path(__file__).parents[2] / "conf" / "metrics"


def shipped(name: str) -> MetricsConfig:
    content = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    config = from_dict(MetricsConfig, with_types(content, MetricsConfig))
    check_rules(config)
    return config


def test_default_file_spells_out_the_defaults() -> None:
    assert shipped("default") == MetricsConfig()
    assert set(OmegaConf.load(CONF / "default.yaml")) == {name for name, _, _ in leaves(MetricsConfig())}


@pytest.mark.parametrize(
    ("name", "wandb", "tensorboard"),
    [("wandb", True, False), ("tensorboard", False, True), ("all", True, True)],
)
def test_shipped_views(name: str, wandb: bool, tensorboard: bool) -> None:
    config = shipped(name)
    assert (config.wandb, config.tensorboard) == (wandb, tensorboard)
