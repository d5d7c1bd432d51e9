"""Fixtures of tests that start jobs."""

import os

import pytest
from launching import Launch


@pytest.fixture
def launch(tmp_path):
    """Starts jobs in the test's own folder, and kills them when the test ends."""
    started = []

    def start(*overrides, **options):
        started.append(Launch(tmp_path, *overrides, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts shell scripts first in PATH; returns their folder."""
    folder = tmp_path / "bin"

    def put(**scripts):
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for name, text in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        return folder

    return put
