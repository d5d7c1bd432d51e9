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


@pytest.fixture
def opened_once(monkeypatch):
    """Loaders of the same data share a dataset, which has no position of its own."""
    from harness.data import documents

    opened = {}

    def open_once(data, split):
        key = repr(data), split
        if key not in opened:
            opened[key] = documents.open_dataset(data, split)
        return opened[key]

    monkeypatch.setattr("harness.data.streaming.open_dataset", open_once)
