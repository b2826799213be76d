"""The CUDA kernels compiled for the processor, so that a machine without a GPU runs every line of them.

tests/kernels/native/cuda_on_cpu stands in for the CUDA runtime: a block's threads are fibers that take turns.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "kernels" / "cuda"
STAND_IN = Path(__file__).parent / "native" / "cuda_on_cpu"
COMPILE_TIMEOUT_S = 800

FLAGS = (
    "-std=c++20 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Wno-psabi -Wno-unknown-pragmas "
    "-Wno-attributes -DATOLL_CUDA_ON_CPU -DATOLL_CUDA_ARCHITECTURES=75,80 -DNDEBUG"
)


class NoCompiler(Exception):
    """Something that building the stand-in takes is not here; the text says what."""


def load() -> ModuleType:
    """Build the module if its sources changed since it was built last, and import it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or importlib.util.find_spec("nanobind") is None:
        raise NoCompiler("no C++ compiler, or no nanobind")
    import nanobind

    nanobind_root = Path(nanobind.source_dir()).parent
    sources = [*sorted(CUDA.glob("*.c*")), *sorted(STAND_IN.glob("*.cpp"))]
    sources = [source for source in sources if source.suffix in {".cpp", ".cu"}]
    robin_map = nanobind_root / "ext" / "robin_map" / "include"
    includes = [STAND_IN, nanobind.include_dir(), robin_map, sysconfig.get_path("include")]
    command = [compiler, *shlex.split(FLAGS), *(f"-I{include}" for include in includes)]
    path = ROOT / "build" / "cuda_on_cpu" / _digest(command) / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        _build(command, [*sources, nanobind_root / "src" / "nb_combined.cpp"], path)
    spec = importlib.util.spec_from_file_location("_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(command: list[str]) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    for folder in (ROOT / "kernels", STAND_IN):
        for file in sorted(folder.rglob("*")):
            compiled = file.suffix == ".cpp" and file.parent in {CUDA, STAND_IN}
            if compiled or file.suffix in {".hpp", ".cuh", ".h", ".cu"}:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _build(command: list[str], sources: list[Path], path: Path) -> None:
    """Whoever else builds it at the same time has a folder of its own for that."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path, target: Path) -> None:
        _run([*command, "-c", "-x", "c++", str(source), "-o", str(target)])

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.name}.o" for source in sources]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compile_one, sources, objects))
        unfinished = Path(folder) / path.name
        _run([command[0], "-shared", *map(str, objects), "-o", str(unfinished)])
        unfinished.rename(path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
