"""The pipeline that benchmarks/volunteer_processes.py runs: real servers and volunteers, SIGKILL and a liar."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "volunteer_processes.py"


@pytest.mark.timeout(240)
def test_each_sample_counts_once_whoever_is_killed_or_lies() -> None:
    """1. Two servers, three volunteers, one of which lies from its first answer on. 2. The liar is shut out with the
    reason. 3. An honest one gets SIGKILL, another comes. 4. All are killed at once: the servers go on by themselves.
    5. Each step had each sample once in both stages, and its loss is that of the servers alone but for rounding."""
    ask = [sys.executable, str(SCRIPT), "--seconds", "1", "--parts", "drill"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found = re.search(r"drill: .* of any step at most (\S+) from alone; every sample once (\w+)", done.stdout)
    assert found is not None, done.stdout
    assert found[2] == "True"
    assert float(found[1]) < 1e-3
    assert "liar-0 is shut out: 2 of its 2 answers differ from the server's own" in done.stdout
