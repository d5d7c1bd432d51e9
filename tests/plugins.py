"""Installed packages with entry points, made of their metadata and a module."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from harness.config.metrics import VIEWS
from harness.config.registry import TOKEN_FORMATS


def install(folder, name, entry_points, module=""):
    """Write the distribution ``name`` 1.0 and its module, which has the same name, into a folder of sys.path.

    Args:
        folder: the folder.
        name: name of the distribution and the module.
        entry_points: ``module:attribute`` by name, by group.
        module: code of the module.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, names in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.py").write_text(module)


EXTENSIONS = Path(__file__).parents[1] / "experiments" / "extensions"
FLUX = EXTENSIONS / "flux"
"""The package harness-flux, which make dev installs."""
CONFS = (Path(__file__).parents[1] / "conf", FLUX / "harness_flux" / "conf")
"""The folders of configurations that ship: the harness's, and those of packages that make dev installs."""


def add_extensions(patch):
    """Add the names of experiments/extensions, as if it were installed; ``patch``: pytest's MonkeyPatch."""
    patch.syspath_prepend(EXTENSIONS)
    project = tomllib.loads((EXTENSIONS / "pyproject.toml").read_text())["project"]
    for registry in (TOKEN_FORMATS, VIEWS):
        group = f"harness.{registry.kind}"
        names = dict(registry.plugins)
        for name, place in project["entry-points"][group].items():
            names[name] = EntryPoint(name, place, group)
        patch.setitem(vars(registry), "plugins", dict(sorted(names.items())))
