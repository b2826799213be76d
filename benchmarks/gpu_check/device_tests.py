"""Stage 1: the tests that are marked `gpu`, and the kernels under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_check.rows import Rows

ROOT: Final = Path(__file__).resolve().parents[2]
PROCESSES: Final = 8
TESTS_LIMIT_S: Final = {"cuda": 60.0, "cpu": 240.0}
"""Of a run of pytest, and of each tool."""
PLUGINS: Final = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
"""Others that a machine has may warn, and warnings are errors."""
MARKED: Final = "mark.gpu"
NVCC_HOMES: Final = ("/usr/local/cuda/bin",)
TOOLS: Final = ("memcheck", "racecheck")
FOUND_SOMETHING: Final = 9


def run(device: str, rows: Rows) -> None:
    """All at once: what they find does not depend on how long they take."""
    tests = _started(_pytest(device))
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=":".join(NVCC_HOMES))
    missing = "the check runs without a GPU" if device == "cpu" else "" if tool else "compute-sanitizer is not here"
    checks = {} if missing else {name: _started(_sanitized(str(tool), name)) for name in TOOLS}
    for name in TOOLS if missing else ():
        rows.skip(name, missing)
    code, said = _ended(tests, TESTS_LIMIT_S[device])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", said)}
    summary = next((line for line in reversed(said.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+", line)), said)
    if code in {0, 5} and not counts.get("passed"):
        rows.skip("pytest -m gpu", summary.strip("= "))
    else:
        failures = "\n".join(line for line in said.splitlines() if line.startswith(("FAILED", "ERROR")))
        rows.check("pytest -m gpu", code == 0, f"{failures}\n{summary.strip('= ')}".strip())
    for name, process in checks.items():
        code, said = _ended(process, TESTS_LIMIT_S[device])
        rows.check(name, code == 0, "\n".join(said.strip().splitlines()[-30:]))


def _pytest(device: str) -> Sequence[str]:
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if MARKED in path.read_text()]
    named = dict.fromkeys(path.parent if path.name == "conftest.py" else path for path in files)
    chosen = [str(path) for path in named if not any(parent in named for parent in path.parents)]
    spread = ["-p", "xdist.plugin", "-n", str(PROCESSES)] if device == "cuda" and _importable("xdist") else []
    return [sys.executable, "-P", "-m", "pytest", *PLUGINS, *spread, "-m", "gpu", "-q", "-ra", *chosen]


def _sanitized(tool: str, name: str) -> Sequence[str]:
    checked = [sys.executable, "-P", "-m", "gpu_check.kernels"]
    return [tool, f"--tool={name}", f"--error-exitcode={FOUND_SOMETHING}", *checked]


def _importable(name: str) -> bool:
    return (
        subprocess.run([sys.executable, "-P", "-c", f"import {name}"], capture_output=True, check=False).returncode == 0
    )


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _ended(process: subprocess.Popen[str], limit_s: float) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        return -1, f"{said}\ntook more than {limit_s:g} s"
    print(said)
    return process.returncode, said
