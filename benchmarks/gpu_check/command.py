"""The command line of scripts/gpu-check."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_check import wheels
from gpu_check.runner import print_table, run_stages
from gpu_check.stages import STAGES, Stage

ROOT: Final = Path(__file__).resolve().parents[2]
IMPORTED: Final = ("benchmarks", "examples", "tests", "tests/conformance", "tests/runtime", "tests/kernels")
"""Folders of the tree whose modules the stages import. The root is not one: `atoll` there has no compiled kernels."""


def main() -> int:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description="Check what Atoll does on a GPU.")
    usual = [stage for stage in STAGES if not stage.by_name]
    parser.add_argument("--stages", type=listed_stages, default=usual, help="numbers with commas; all but 9 without it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "build/gpu-check")))
    parser.add_argument(
        "--prepare", action="store_true", help="fetch and build the wheels for a machine without network"
    )
    parser.add_argument("--python", help="with --prepare: the interpreter of that machine's version, which is here")
    options = parser.parse_args()
    if options.prepare:
        return wheels.prepare(ROOT, options.python, IMPORTED)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "output.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-packages-") as target:
        environment = stage_environment(options.device)
        if importlib.util.find_spec("atoll") is None:
            wheels.install(ROOT, Path(target))
            environment["PYTHONPATH"] += f"{os.pathsep}{target}"
        if options.device == "cuda" and not has_gpu(environment):
            parser.error("torch finds no CUDA device here; --device cpu checks the script itself")
        results = run_stages(options.stages, options.device, out, environment, began_s=began_s)
    print_table(results)
    print(f"written: {out / 'gpu-check.json'}")
    return int(any(one.outcome == "failed" for one in results))


def listed_stages(text: str) -> Sequence[Stage]:
    """Return the stages of these numbers, in the order in which stages run."""
    wanted = text.split(",")
    known = {str(stage.number): stage for stage in STAGES}
    if unknown := [number for number in wanted if number not in known]:
        raise argparse.ArgumentTypeError(f"no stage {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [stage for number, stage in known.items() if number in wanted]


def stage_environment(device: str) -> dict[str, str]:
    """Return the variables of a stage's process. On "cpu" it sees no GPU."""
    paths = [str(ROOT / folder) for folder in IMPORTED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    # By NVML torch sees whether there is a GPU without touching it, so that stages may fork afterwards.
    own = (
        {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        if device == "cuda"
        else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )
    return environment | own


def has_gpu(environment: dict[str, str]) -> bool:
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-P", "-c", asked], env=environment, check=False).returncode == 0
