"""Client of a process that has imported the workers' modules and forks one for each launch
(agent/runtime/api/warm_start.py).

From the agent: the length of the order (4 bytes, little endian) and the order, with the descriptor of the new process's
output.
From the server: b"1" once all is imported; then the pid of each forked process (4 bytes, little endian)."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from atoll.agent.runtime.api import warm_start
from atoll.agent.runtime.api.warm_start import LaunchOrder
from atoll.agent.supervisor.processes.environment import SECRET, Interpreter
from atoll.agent.supervisor.processes.process import BegunProcess, WorkerProcess, executed

PROGRAM: Final = warm_start.__file__
FORK_S: Final = 2.0
"""Deadline of a fork, in seconds; the agent waits for it. Median of 30 forks: 70 ms, 360 ms at most (two cores at load
17)."""
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


class ForkServer:
    """A child process of the agent and no parent of workers: it may end while they live."""

    def __init__(self, made: Interpreter, *, pids: Path, device: int, on_exit: Callable[[], None]) -> None:
        """Raises OSError if it cannot be made. pids: the folder of pid files."""
        secret = secrets.token_hex(16)
        self.made: Final = made
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command, env = [*made.command, PROGRAM], {**made.env, SECRET: secret}
            try:
                self.process: Final = WorkerProcess(
                    executed(command, folder=Path("/"), env=env, stdin=theirs.fileno()),
                    secret=secret,
                    pid_file=pids / f"spare-{device}-{secret[:8]}.pid",  # its predecessor may still be dying
                    on_exit=on_exit,
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def ready(self) -> bool:
        """Return True if the server has imported all and can fork."""
        if not self._ready:
            with suppress(BlockingIOError):
                self._ready = bool(self._socket.recv(1, socket.MSG_DONTWAIT))
        return self._ready

    def fork(self, order: LaunchOrder, *, secret: str, pid_file: Path, on_exit: Callable[[], None]) -> WorkerProcess:
        """Fork a worker. Raises OSError if that fails; then the server is unusable."""
        text = order.to_json()
        return WorkerProcess(
            lambda output_fd: forked(self._socket, text, output_fd), secret=secret, pid_file=pid_file, on_exit=on_exit
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def reap(self) -> int:
        """Reap the server as a worker's process."""
        self._socket.close()
        code = self.process.reap()
        os.close(self.process.output_fd)
        return code


def forked(server: socket.socket, order: bytes, *descriptors: int) -> BegunProcess:
    """Return a child of this process, forked by the server at the other end, which gets these descriptors. Raises
    OSError."""
    server.settimeout(FORK_S)
    with _adopting():
        sent = socket.send_fds(server, [_head(order)], descriptors)
        server.sendall(_head(order)[sent:] + order)
        told = b""
        while len(told) < warm_start.NUMBER_BYTES:
            more = server.recv(warm_start.NUMBER_BYTES - len(told))
            if not more:
                raise OSError("the process that forks workers is gone")
            told += more
    pid = int.from_bytes(told, "little")
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:  # it ends itself: the agent could not wait for it
        raise OSError(f"process {pid}, which was forked, is no child of the agent") from error
    return BegunProcess(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _head(order: bytes) -> bytes:
    return len(order).to_bytes(warm_start.NUMBER_BYTES, "little")


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt grandchildren whose parent ends, meanwhile: a server forks twice. Else init adopts them."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
