"""A finished run, of which tests change copies."""

import shutil

import pytest
from local_runs import Run, start

from harness.run.folder import RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Copy a finished run into a folder; runs of the same overrides are made once."""
    made = {}

    def copy(tmp_path, *overrides):
        if overrides not in made:
            runs_dir = tmp_path_factory.mktemp("finished")
            made[overrides] = runs_dir, start(runs_dir, *overrides).path
        runs_dir, path = made[overrides]
        shutil.copytree(runs_dir, tmp_path, symlinks=True, dirs_exist_ok=True)
        return Run(RunFolder(tmp_path / path.relative_to(runs_dir)))

    return copy
