"""`atoll up` after one that was killed, as by a restart of the machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import own_loopback
import pytest
from own_loopback import OwnLoopback

pytestmark = [
    pytest.mark.skipif(own_loopback.why_not() != "", reason=own_loopback.why_not()),
    pytest.mark.timeout(180),
]


def test_a_killed_cluster_is_replaced_and_its_jobs_go_on(tmp_path: Path) -> None:
    """1. The `atoll up` in the background is killed. 2. The next one says so, and starts another one. 3. A job of the
    killed one runs again."""
    (tmp_path / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with OwnLoopback(tmp_path) as machine:
        _kill_and_replace(machine)


def _kill_and_replace(machine: OwnLoopback) -> None:
    assert machine.atoll("up", "--detach").returncode == 0
    submitted = machine.atoll("submit", "long.py", "--name", "kept")
    assert submitted.returncode == 0, submitted.stderr
    os.kill(json.loads((machine.home / ".atoll" / "lock").read_text())["pid"], signal.SIGKILL)
    again = machine.atoll("up", "--agents", "2", "--detach")
    assert again.returncode == 0, again.stderr
    assert again.stderr.startswith(f"the cluster of {machine.home}/.atoll was killed, or the machine restarted")
    assert again.stdout == "ready: 2 agents, controller 127.0.0.1:7700\n"
    with machine.terminal("logs", "-f", "kept") as terminal:
        terminal.wait_for("begun")
    assert machine.atoll("cancel", "kept").returncode == 0
    assert machine.atoll("down").stdout == "stopped\n"
