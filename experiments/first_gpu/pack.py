"""Builds the folder of a first measurement: the checkout's files, and packages that need no installation.

    python experiments/first_gpu/pack.py build/first_gpu

``make first-gpu`` calls it. Packages have the versions and hashes of requirements.lock, for Linux on
x86-64 and the Python of ``--python``. They are unpacked into ``packages/``, where paths.py finds them;
numpy, which most machines have and which is large, stays a wheel, and is unpacked where it is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.run.result import git_commit

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "harness",
    "conf",
    "LICENSE",
    "experiments/README.md",
    "experiments/cpu_baseline",
    "experiments/first_gpu",
    "experiments/gpu_single",
    "experiments/measure",
)
PACKAGES = (
    "hydra-core",
    "markdown-it-py",
    "mdurl",
    "numpy",
    "omegaconf",
    "packaging",
    "pygments",
    "pyyaml",
    "rich",
    "safetensors",
    "torchao",
    "xxhash",
)
SOURCES = ("antlr4-python3-runtime",)
"""Packages that have no wheel of their version."""
KEPT_ZIPPED = "numpy-"
LEFT_OUT = r"^torchao/.*\.so$"
"""Kernels for formats and devices that are not measured; torchao says that it has none, and goes on."""
MOST_MB = 60


def locked(names: tuple[str, ...]) -> str:
    """The lines of requirements.lock about some packages, with their hashes."""
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    found = {re.split(r"[=\[ ]", entry)[0]: entry for entry in entries}
    return "".join(found[name] for name in names)


def copy_files(target: Path) -> None:
    """Copy what git tracks, and what it would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FILES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if not (ROOT / name).is_symlink():  # to folders of experiments, which are not needed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "commit.json").write_text(json.dumps(git_commit(ROOT)) + "\n")


def add_packages(target: Path, python: str) -> None:
    """Download the packages for a version of Python, and unpack them."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    exactly = ["--no-deps", "--require-hashes", "--requirement"]
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        requirements = wheels / "requirements.txt"
        requirements.write_text(locked(PACKAGES))
        machines = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
        others = ["--only-binary", ":all:", "--python-version", python, *machines]
        subprocess.run(
            [*pip, "download", *others, *exactly, requirements, "--dest", wheels], check=True
        )
        requirements.write_text(locked(SOURCES))
        built = ["--no-build-isolation", "--wheel-dir", str(wheels)]
        subprocess.run([*pip, "wheel", *built, *exactly, requirements], check=True)
        packages = target / "packages"
        packages.mkdir()
        for wheel in wheels.glob("*.whl"):
            if wheel.name.startswith(KEPT_ZIPPED):
                shutil.copy(wheel, packages)
                continue
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if not re.search(LEFT_OUT, name)]
                archive.extractall(packages, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the Python that will run it")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    copy_files(folder)
    add_packages(folder, arguments.python)
    size = sum(path.stat().st_size for path in folder.rglob("*")) / 1e6
    print(f"{folder}: {size:.1f} MB, for Python {arguments.python}")
    if size > MOST_MB:
        raise SystemExit(f"it may have {MOST_MB} MB")


if __name__ == "__main__":
    main()
