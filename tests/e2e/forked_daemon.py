"""A controller, or an agent and its workers, without the time that imports take: this script runs in a fork of a
process that has imported Atoll and torch (tests/runtime/warm.py).

An agent's process forks a nursery first. Where the agent would execute a new interpreter, for a worker or for the
process that waits for launches, the nursery forks one: it has the same environment, folder, session and parent, and
runs the same program from its first line. tests/e2e/test_command_line.py and the drills execute theirs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atoll.agent.runtime.api import warm_start
from atoll.agent.supervisor import worker_starter
from atoll.agent.supervisor.processes import fork_server, process
from atoll.agent.supervisor.processes.environment import SECRET
from atoll.agent.supervisor.processes.process import BegunProcess
from atoll.cli.main import main as command_line

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import warm

del sys.path[0]
IMPORTED_WITH: Final = {**os.environ, **warm.ENVIRONMENT}


def serve(agent: socket.socket) -> None:
    """Fork what the agent asks for. Returns in the fork, which is to run sys.argv."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, descriptors, _, _ = socket.recv_fds(agent, warm_start.NUMBER_BYTES, 2)
        if not head:
            os._exit(0)
        asked = json.loads(warm_start._exactly(agent, int.from_bytes(head, "little")))
        stdin, output = descriptors
        if warm_start._is_fork(agent, parent, output):
            agent.close()
            _become(asked, stdin)
            return
        os.close(stdin)


def _become(asked: Mapping[str, Any], stdin: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    warm_start._show(f"{SECRET}=", asked["env"][SECRET])
    sys.argv = asked["command"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    sys.path[1:1] = [path for path in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if path]


class Nursery:
    """The agent's side: makes what `executed` does."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours

    def executed(
        self, command: Sequence[str], *, folder: Path, env: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> Callable[[int], BegunProcess]:
        if command[0] != sys.executable or not command[1].endswith(".py") or not _can_fork(env):
            return process.executed(command, folder=folder, env=env, stdin=stdin)
        asked = json.dumps({"command": [*command[1:]], "folder": str(folder), "env": dict(env)}).encode()

        def begin(output_fd: int) -> BegunProcess:
            source = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)
            try:
                return fork_server.forked(self._socket, asked, source, output_fd)
            finally:
                os.close(source)

        return begin


def _can_fork(env: Mapping[str, str]) -> bool:
    """Whether nothing that is read at import differs, but for where modules are."""
    names = {name for name in (*env, *IMPORTED_WITH) if warm_start._READ_AT_IMPORT.match(name.encode())}
    return all(env.get(name) == IMPORTED_WITH.get(name) for name in names - {"PYTHONPATH"})


def fork_workers() -> None:
    """Fork the nursery, and let the agent of this process ask it for workers."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
        warm.end(warm.run())
    theirs.close()
    nursery = Nursery(ours)
    for module in (fork_server, worker_starter):
        vars(module)["executed"] = nursery.executed
    # An agent drops a fork server that misses this deadline. It has one nursery, whose answers would be off by one.
    vars(fork_server)["FORK_S"] = 60.0


if sys.argv[1] == "agent":
    fork_workers()
command_line()
