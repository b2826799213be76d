"""`atoll run`, as a new user types it: on a machine with no cluster, at a terminal, with what goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import own_loopback
import pytest
from own_loopback import ATOLL, OwnLoopback

pytestmark = [
    pytest.mark.skipif(own_loopback.why_not() != "", reason=own_loopback.why_not()),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnLoopback]:
    """A machine that has a cluster from its first `atoll run` on."""
    home = tmp_path_factory.mktemp("run-home")
    (home / "hello.py").write_text("import sys\nprint('hello', *sys.argv[1:])\n")
    (home / "broken.py").write_text("import nothing_of_this_name\n")
    (home / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with OwnLoopback(home) as machine:
        yield machine


def phase(machine: OwnLoopback, job: str) -> str:
    return str(json.loads(machine.atoll("status", job, "--json").stdout)["phase"])


def test_run_starts_what_is_missing_and_ends_as_the_job_does(machine: OwnLoopback) -> None:
    """1. Nothing is there: a controller and an agent are started, the script runs, its output is shown. 2. The page is
    served at the printed address. 3. The next run starts nothing. Its script fails: exit code 1 and its last words."""
    first = machine.atoll("run", "hello.py", "--", "--loud")
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith("no controller at 127.0.0.1:7700: starting one here, with 1 agent.")
    assert "[0] hello --loud\n" in first.stderr
    (job,) = first.stdout.split()
    assert first.stderr.splitlines()[-1] == f"{job} done"
    address = re.search(r"^dashboard: (http://127\.0\.0\.1:8265/\?token=\S+)$", first.stderr, re.MULTILINE)
    assert address is not None
    code = "import sys\nfrom urllib.request import HTTPCookieProcessor, build_opener\n"
    code += "print(build_opener(HTTPCookieProcessor()).open(sys.argv[1]).status)"
    opened = machine.run(sys.executable, "-c", code, address[1])
    assert opened.stdout == "200\n", opened.stderr

    failed = machine.atoll("run", "broken.py")
    assert failed.returncode == 1
    assert "starting one here" not in failed.stderr
    assert "  | ModuleNotFoundError: No module named 'nothing_of_this_name'" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: broken-")


def test_run_asks_at_ctrl_c_whether_to_detach_or_to_cancel(machine: OwnLoopback) -> None:
    """1. Ctrl-C, then `c`: the job is cancelled, exit code 6. 2. Ctrl-C, an answer that is none, Ctrl-C: detached, and
    the job goes on. 3. It is in the way of the next one, which says so. Without a terminal, SIGINT detaches at once."""
    with machine.terminal("run", "long.py", "--name", "first") as terminal:
        terminal.wait_for("begun")
        terminal.wait_for("Ctrl-C: detach from the job, or cancel it")
        terminal.ctrl_c()
        terminal.wait_for(", which goes on, or [c]ancel it? ")
        terminal.type("c\n")
        assert terminal.exit_code() == 6
        assert "was cancelled" in terminal.said
    assert phase(machine, "first") == "cancelled"

    with machine.terminal("run", "long.py", "--name", "second") as terminal:
        terminal.wait_for("begun")
        terminal.ctrl_c()
        terminal.wait_for("[c]ancel it? ")
        terminal.type("what\n")
        terminal.wait_for("[c]ancel it? ")
        terminal.ctrl_c()
        assert terminal.exit_code() == 130
        assert "goes on. See it: atoll status second-" in terminal.said
    assert phase(machine, "second") == "running"
    behind = machine.atoll("submit", "hello.py", "--name", "behind")
    assert re.search(r"^behind-\w+ waits for the only device, on which second-", behind.stderr, re.MULTILINE)
    assert machine.atoll("cancel", "second").returncode == 0

    command = machine.inside(*ATOLL, "run", "long.py", "--name", "third")
    with subprocess.Popen(command, cwd=machine.home, env=machine.env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "begun" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "detached: third-" in said
    assert machine.atoll("cancel", "third").returncode == 0


def test_a_job_that_lacks_a_device_says_so_at_once(machine: OwnLoopback) -> None:
    waits = r" waits for a 2nd device: 1 is connected\. For more agents on this machine: `atoll down`, then `atoll up "
    waits += r"--agents 2 --detach`\. Or `atoll cancel \S+`, and ask for --workers 1$"
    submitted = machine.atoll("submit", "long.py", "--workers", "2", "--name", "two")
    assert re.search(f"^two-.*{waits}", submitted.stderr, re.MULTILINE), submitted.stderr
    with machine.terminal("run", "long.py", "--workers", "2", "--name", "other") as terminal:
        terminal.wait_for("waits for a 2nd device: 1 is connected.")
        terminal.ctrl_c()
        terminal.wait_for("[c]ancel it? ")
        terminal.type("c\n")
        assert terminal.exit_code() == 6
    assert machine.atoll("cancel", "two").returncode == 0


def test_what_the_user_named_is_not_replaced(machine: OwnLoopback, tmp_path: Path) -> None:
    """1. A script that is not there. 2. A named controller that does not answer, by option and by variable. 3. A
    cluster of this machine at another address. None of them starts a cluster."""
    elsewhere = {"HOME": str(tmp_path)}
    missing = machine.atoll("run", "nope.py", **elsewhere)
    assert (missing.returncode, missing.stderr.startswith("error: script nope.py is not there")) == (2, True)
    named = machine.atoll("run", "hello.py", "--controller", "127.0.0.1:7711", "--timeout", "1", **elsewhere)
    by_variable = machine.atoll("--timeout", "1", "run", "hello.py", ATOLL_CONTROLLER="127.0.0.1:7711", **elsewhere)
    for refused in (named, by_variable):
        assert (refused.returncode, refused.stdout) == (3, "")
        assert refused.stderr.startswith("error: list nodes: no leading controller at 127.0.0.1:7711 within 1 s")
        assert refused.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_another_program_at_the_port_is_named(machine: OwnLoopback) -> None:
    assert machine.atoll("down").returncode == 0
    code = "import socket; s = socket.create_server(('127.0.0.1', 7700)); print('up', flush=True); input()"
    command = machine.inside(sys.executable, "-I", "-S", "-c", code)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        taken = machine.atoll("--timeout", "1", "run", "hello.py")
        other.communicate(timeout=30)
    assert taken.returncode == 3
    assert taken.stderr.startswith("error: the program that listens on 127.0.0.1:7700 does not answer as a controller.")
    assert "atoll up --detach --listen 127.0.0.1:7701" in taken.stderr
