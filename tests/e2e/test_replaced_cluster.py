"""Clusters that are started in the background while another one was killed, is interrupted, or is just starting."""

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


def test_two_that_start_it_at_once_share_one_cluster(tmp_path: Path) -> None:
    """1. The first `atoll run` is interrupted while it starts the cluster: nothing of it is left. 2. Two at once: one
    starts the cluster, both jobs are done."""
    (tmp_path / "hello.py").write_text("print('hello')\n")
    with OwnLoopback(tmp_path) as machine:
        with machine.terminal("run", "hello.py") as terminal:
            terminal.wait_for("starting one here, with 1 agent")
            terminal.ctrl_c()
            assert terminal.exit_code() == 130
        assert "no `atoll up` runs" in machine.atoll("down").stderr
        with machine.terminal("run", "hello.py") as first, machine.terminal("run", "hello.py") as second:
            codes = (first.exit_code(120), second.exit_code(120))
        assert codes == (0, 0), (first.said, second.said)
        assert machine.atoll("down").stdout == "stopped\n"
