"""Builds the stand-in library for the installed torch, once (torch is not imported).

Functions that torch calls and the sources do not implement are generated: each reports its name and
fails.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from harness.util.errors import UserError

SOURCES = Path(__file__).parent / "library"
GPU_LIBRARY = "libvirtual_gpu.so"
# Empty libraries that are loaded by name; they depend on the one with the functions.
SHELLS = {"libcuda.so.1": "libcuda.so", "libnvidia-ml.so.1": "libnvidia-ml.so"}
HEADERS = {
    "cuda.h": "nvidia-cuda-runtime",
    "cuda_runtime_api.h": "nvidia-cuda-runtime",
    "crt/host_config.h": "nvidia-cuda-crt",
    "cublas_v2.h": "nvidia-cublas",
    "nccl.h": "nvidia-nccl",
}
"""Headers that the sources include, and the packages that provide them."""

# Prefixes of CUDA's libraries, and the error code of each for "not supported".
FAILURES = {
    "cuda": 801,
    "cu": 801,
    "cublas": 15,
    "cudnn": 3000,
    "cusparse": 10,
    "cusolver": 9,
    "cufft": 16,
    "curand": 999,
    "nccl": 3,
}
_CALLED = re.compile(rf"({'|'.join(sorted(FAILURES, key=len, reverse=True))})[A-Z]\w*")
_VERSION = re.compile(r"_v\d+$")
# These work without a device, so cuDNN's own are used.
_KEPT = re.compile(
    r"cudnnGet(Version|CudartVersion|Property|ErrorString|LastErrorString)|cuFile\w*"
)


def cuda_version() -> str | None:
    """Return the CUDA version of the installed torch; None for a build without CUDA."""
    found = re.search(
        r"^cuda: .*= '([\d.]+)'", (_torch_folder() / "version.py").read_text(), re.MULTILINE
    )
    return found[1] if found else None


def library() -> Path:
    """Return the folder of the stand-in libraries for the installed torch; build them if needed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    require_build()
    folder = caches / "harness" / "rehearse" / _digest()
    if not (folder / GPU_LIBRARY).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _build(Path(scratch) / "library")
            # Another process may have built the same meanwhile.
            if not folder.exists():
                os.replace(Path(scratch) / "library", folder)
    return folder


def require_build() -> None:
    """Raise UserError if the library cannot be built."""
    if cuda_version() is None:
        raise UserError(
            "rehearsals need a build of torch for CUDA, and this one has none; "
            "would work: make rehearsal, then the same command by .venv-rehearsal/bin/python"
        )
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise UserError(
                f"rehearsals need {tool}; would work: the system's package of GCC (g++, binutils)"
            )
    for header, package in HEADERS.items():
        if not any((folder / header).exists() for folder in _include_folders()):
            raise UserError(
                f"rehearsals need {header}; would work: pip install {package}, of torch's version"
            )


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("rehearsals need torch; would work: make rehearsal")
    return Path(spec.submodule_search_locations[0])


@lru_cache
def _include_folders() -> list[Path]:
    return sorted((_torch_folder().parent / "nvidia").glob("*/include"))


def _digest() -> str:
    paths = [Path(__file__), *sorted(SOURCES.iterdir()), _torch_folder() / "version.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _build(folder: Path) -> None:
    folder.mkdir()
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    options = [
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        *(f"-I{path}" for path in _include_folders()),
    ]
    target = folder / GPU_LIBRARY
    _run("g++", *options, *sources, "-ldl", "-o", str(target))
    unknown = folder / "unknown.cpp"
    known = _symbols(target, "--defined-only")
    plain = {_VERSION.sub("", name) for name in known}
    by_name = {name for name in _declared() if _VERSION.sub("", name) not in plain}
    unknown.write_text(_failing((_called() | by_name) - known))
    _run("g++", *options, *sources, str(unknown), "-ldl", "-o", str(target))
    empty = folder / "empty.cpp"
    empty.touch()
    for name, also in SHELLS.items():
        _run("g++", "-shared", "-Wl,--no-as-needed,-rpath,$ORIGIN", f"-Wl,-soname,{name}", str(empty),
             f"-L{folder}", f"-l:{GPU_LIBRARY}", "-o", str(folder / name))  # fmt: skip
        (folder / also).symlink_to(name)


def _failing(names: set[str]) -> str:
    lines = ['extern "C" void virtual_gpu_unknown(const char*);']
    for name in sorted(names):
        found = _CALLED.fullmatch(name)
        assert found is not None, name
        lines.append(
            f'extern "C" int {name}() {{ virtual_gpu_unknown("{name}"); return {FAILURES[found[1]]}; }}'
        )
    return "\n".join(lines) + "\n"


def _called() -> set[str]:
    torch = _torch_folder()
    called: set[str] = set()
    for path in [*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")]:
        called |= _symbols(path, "--undefined-only")
    return {name for name in called if _CALLED.fullmatch(name) and not _KEPT.fullmatch(name)}


def _declared() -> set[str]:
    """Return the driver's functions, which are looked up by name."""
    header = next(
        folder / "cuda.h" for folder in _include_folders() if (folder / "cuda.h").exists()
    )
    return set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w*)\(", header.read_text()))


def _symbols(path: Path, which: str) -> set[str]:
    listed = _run("nm", "--dynamic", which, "--format=posix", str(path))
    return {line.split()[0].partition("@")[0] for line in listed.splitlines() if line}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line]
        said = [*errors, *lines, f"exit code {done.returncode}"][0]
        raise UserError(f"the stand-in for CUDA's libraries cannot be built: {said}")
    return done.stdout
