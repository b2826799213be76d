"""One worker's process: started in a session of its own, watched through a pidfd, ended with its whole group.

It may be started before there is a worker to be, and wait for a launch (agent/runtime/warm_start.py)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from atoll import die_with_parent
from atoll.agent.supervisor.environment import SECRET
from atoll.agent.supervisor.leftovers import PidFile

_PIPE_BYTES: Final = 1024 * 1024
"""Room for a launch, so that nobody waits for a process to read it: as long as an argument list may be."""


class WorkerProcess:
    """A running process group. `on_exit` is called on the event loop once its leader is dead; then `reap` is due."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        pid_file: Path,
        on_exit: Callable[[], None],
        waits: bool = False,
    ) -> None:
        """Raises OSError if the process cannot be made. Its output is to be read from `output_fd`. waits: its input is
        the launch that `hand_over` gives it."""
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        output_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(write_fd, True)
            self._process = subprocess.Popen(
                die_with_parent.command(command, signal.SIGKILL),
                stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
                bufsize=0,
                stdout=write_fd,
                stderr=write_fd,
                cwd=folder,
                env=dict(env),
                start_new_session=True,
            )
        except BaseException:
            os.close(output_fd)
            raise
        finally:
            os.close(write_fd)
        self.output_fd: Final = output_fd
        self.pid: Final = self._process.pid
        self.secret: Final = env[SECRET]
        self._pid_file = PidFile(pid_file)
        self._pidfd = -1
        try:
            self._pid_file.write(self.pid, self.secret)
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._exited)
        except BaseException:
            os.close(output_fd)
            self.reap()
            raise

    def hand_over(self, launch: bytes, *, pid_file: Path, on_exit: Callable[[], None]) -> bool:
        """Make a process that waits a worker. False where it is gone, or the launch is too long for its pipe: it is
        to be reaped then. Raises OSError where the pid file cannot be written."""
        pipe = self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        with suppress(OSError):  # beyond the user's limit: the default takes any usual launch
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            whole = os.write(pipe.fileno(), launch) == len(launch)
        except OSError:
            whole = False
        if whole:
            waiting, self._pid_file = self._pid_file, PidFile(pid_file)
            self._pid_file.write(self.pid, self.secret)
            waiting.remove()
            self._on_exit = on_exit
            pipe.close()  # only now: at the end of its input it begins
        return whole

    def send_signal(self, number: int) -> None:
        """To every process of the group; gone ones are passed over."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        if number == signal.SIGTERM:  # a stopped process takes no signal but SIGKILL
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)

    def reap(self) -> int:
        """Kill what is left of the group and return the leader's exit code (negative: the signal)."""
        self.send_signal(signal.SIGKILL)  # before wait: until then nobody else gets this pid as its group's number
        code = self._process.wait()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._pid_file.remove()
        return code

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_exit()


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """How many processes the kernel has killed for want of memory since it started, in any container."""
    with vmstat.open() as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
