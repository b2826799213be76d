"""The wrapper of commands that must not outlive who started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atoll.host import die_with_parent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_the_process_that_started_it(number: signal.Signals) -> None:
    code = f"""
import signal, subprocess
from atoll.host import die_with_parent
subprocess.run(die_with_parent.command(["sh", "-c", "echo here; exec sleep 60"], signal.{number.name}), stdout=2)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline() == b"here\n"
        (process,) = psutil.Process(parent.pid).children()
        parent.kill()
        gone, _ = psutil.wait_procs([process], timeout=30)
    assert gone == [process]


def test_a_command_whose_parent_is_gone_already_is_not_started(tmp_path: Path) -> None:
    wrapped = die_with_parent.command(["touch", str(tmp_path / "started")])
    wrapped[5] = "1"
    done = subprocess.run(wrapped, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"parent 1 ended before touch was started" in done.stderr
    assert not (tmp_path / "started").exists()
