"""The wheel holds all that the checkout has: modules, the configuration tree, the shipped tokenizer."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from harness.compose.verb import guarded
from harness.util.errors import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
# Names on the package index, where they differ from the import.
DISTRIBUTIONS = {"PIL": "pillow", "lm_eval": "lm-eval"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of what git would ship: building in place would leave build/ behind.
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in files:
        path = ROOT / name
        if name and (path.is_symlink() or path.is_file()):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                target.symlink_to(path.readlink())
            else:
                target.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
    ]
    subprocess.run([*command, str(folder), str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(unpacked, cwd, code, *arguments):
    """Runs Python where only the unpacked wheel is to be found, not the checkout."""
    finder = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'harness_lm' not in repr(f)]; "
    )
    return subprocess.run(
        [sys.executable, "-c", finder + code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )


def test_every_module_and_file_is_in_the_wheel(unpacked):
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "harness").rglob("*.py")}
    assert {m for m in modules if not (unpacked / m).is_file()} == set()
    for option in (ROOT / "conf").rglob("*.yaml"):
        assert (unpacked / "harness" / "_conf" / option.relative_to(ROOT / "conf")).is_file()
    shipped = unpacked / "harness" / "_conf" / "experiment"
    for experiment in (ROOT / "experiments").rglob("*.yaml"):
        name = experiment.relative_to(ROOT / "experiments")
        # Packages in experiments/extensions bring their own configurations.
        assert (shipped / name).is_file() == (name.parts[0] != "extensions"), name
    assert list((unpacked / "harness" / "data" / "assets").glob("*.model"))


def test_own_configurations_beside_the_wheel(unpacked, tmp_path):
    """A folder and an installed package, which is not imported."""
    package = tmp_path / "site" / "own_models"
    for folder, name in ((tmp_path / "own", "in_folder"), (package / "conf", "in_package")):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / f"{name}.yaml").write_text(
            "defaults: [llama3_tiny, _self_]\nn_layers: 6\n"
        )
    (package / "__init__.py").write_text("raise RuntimeError\n")
    typed = [
        f"hydra.searchpath=[{tmp_path}/own,pkg://own_models.conf]",
        "model=in_folder,in_package",
    ]
    typed += ["tokenizer=none", "data=synthetic"]
    code = (
        f"sys.path.append({str(package.parent)!r}); from harness.compose.composer import compose_points; "
        f"print([point.job.model.n_layers for point in compose_points({typed!r})])"
    )
    done = run(unpacked, tmp_path, code)
    assert (done.stdout, done.stderr) == ("[6, 6]\n", "")


WITHOUT_FLUX = """
import sys
from importlib import metadata
found = metadata.entry_points
metadata.entry_points = lambda **kind: [e for e in found(**kind) if e.dist.name != "harness-flux"]
from harness.compose.composer import compose_points, compose_job
from harness.util.errors import UserError
points = compose_points([f"model={sys.argv[1]}", "tokenizer=none", "data=synthetic"])
print(len(points), *{point.job.model.architecture for point in points})
for typed in sys.argv[2:]:
    try:
        compose_job([typed])
    except UserError as error:
        print(error)
sys.argv = ["harness", "encode"]
from harness.__main__ import main
main()
"""


def test_without_flux_all_decoders_compose_and_its_names_say_what_to_install(unpacked, tmp_path):
    models = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
    typed = ["model=flux_dev", "data=pictures", "experiment=flux_debug"]
    done = run(unpacked, tmp_path, WITHOUT_FLUX, ",".join(models), *typed)
    assert len(models) > 35
    install = "pip install ./experiments/extensions/flux"
    rule = "no such name here; would work:"
    line = 'experiment/flux_debug.yaml, "- override /data: drawn_shapes"'
    assert done.stdout.splitlines() == [
        f"{len(models)} decoder",
        *(f"{name}: {rule} {name} (after {install})" for name in typed[:2]),
        f"{line}: {rule} data=drawn_shapes (after {install})",
    ]
    assert done.stderr == f"error: encode: no such verb; would work: {install}\n"


def test_console_script_composes_from_anywhere(unpacked, tmp_path):
    entries = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text().splitlines()
    assert "harness = harness.__main__:main" in entries
    code = "sys.argv = ['harness', 'train', '--cfg', 'job', 'model=llama3_8b', 'experiment=quickstart']; "
    code += "import harness.__main__; print(harness.__file__); harness.__main__.main()"
    done = run(unpacked, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert str(unpacked) in done.stdout
    assert "name: quickstart" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_install_is_small():
    """Beside torch. A package that has a marker may not be installed here."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len([line for line in lines if "==" in line and ";" not in line]) <= 60


@pytest.mark.parametrize("package", EXTRAS)
def test_an_optional_package_that_is_missing_names_its_extra(monkeypatch, package, capsys):
    folder, _, extra = EXTRAS[package].partition("[")
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    declared = extras[extra.rstrip("]")] if extra else project["dependencies"]
    assert any(re.match(rf"{DISTRIBUTIONS.get(package, package)}\b", each) for each in declared)
    monkeypatch.setitem(sys.modules, package, None)
    assert guarded(lambda: bool(importlib.import_module(package))) == 2
    assert capsys.readouterr().err == (
        f"error: the package {package} is not installed; would work: pip install -e '{EXTRAS[package]}'\n"
    )
