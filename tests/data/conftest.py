"""Every test of data runs in a folder of its own."""

import sys

import pytest


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "datasets" in sys.modules:
        config = sys.modules["datasets"].config
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
