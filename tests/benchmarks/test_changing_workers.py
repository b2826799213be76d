"""Stage 8 of the check of a GPU, with agents of CPUs: real daemons, a SIGKILL, a worker that joins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_a_worker_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--stages", "8", "--out", str(tmp_path))
    command = [sys.executable, str(ROOT / "scripts/gpu-check"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "output.txt").read_text()
    (stage,) = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    rows = {row["name"]: row for row in stage["rows"]}
    assert list(rows) == ["atoll up", "dense", "local-steps", "memory of the GPU", "dense against plain torch"]
    for strategy in ("dense", "local-steps"):
        figures = rows[strategy]["figures"]
        assert 0 < figures["next_step_s"] < figures["joined_s"]
    assert rows["dense against plain torch"]["figures"]["deviation"] < 1e-4
