"""One worker's process: started in a session of its own, watched through a pidfd, ended with its whole group."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from atoll.agent.supervisor.processes.leftover_processes import PidFile
from atoll.host import die_with_parent


class BegunProcess(NamedTuple):
    """Child process that leads a session of its own."""

    pid: int
    wait: Callable[[], int]
    """Waits for its end and returns its exit code (negative: the signal)."""


def executed(
    command: Sequence[str], *, folder: Path, env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> Callable[[int], BegunProcess]:
    """Return a `begin` for WorkerProcess that executes this command; the kernel ends it with this process."""

    def begin(output_fd: int) -> BegunProcess:
        process = subprocess.Popen(
            die_with_parent.command(command, signal.SIGKILL),
            stdin=stdin,
            stdout=output_fd,
            stderr=output_fd,
            cwd=folder,
            env=dict(env),
            start_new_session=True,
        )
        return BegunProcess(process.pid, process.wait)

    return begin


class WorkerProcess:
    """A running process group. `on_exit` is called on the event loop once its leader has died; then call `reap`."""

    def __init__(
        self, begin: Callable[[int], BegunProcess], *, secret: str, pid_file: Path, on_exit: Callable[[], None]
    ) -> None:
        """Raises OSError if the process cannot be made. begin: makes it, given the descriptor of its output, which is
        read from `output_fd`. secret: the value of SECRET in its environment."""
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        output_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(write_fd, True)
            self.pid, self._wait = begin(write_fd)
        except BaseException:
            os.close(output_fd)
            raise
        finally:
            os.close(write_fd)
        self.output_fd: Final = output_fd
        self.secret = secret
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

    def send_signal(self, number: int) -> None:
        """Signal every process of the group that is still there."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        if number == signal.SIGTERM:  # a stopped process takes no signal but SIGKILL
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)

    def reap(self) -> int:
        """Kill what is left of the group and return the leader's exit code (negative: the signal)."""
        self.send_signal(signal.SIGKILL)  # before wait: until then no other group gets this number
        code = self._wait()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pid_file.remove()
        return code

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_exit()


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Count the processes that the kernel has killed for lack of memory since boot, in any container."""
    with vmstat.open() as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
