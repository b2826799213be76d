"""A network namespace with a loopback device of a test's own, in which the default ports are free, and terminals."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from shared_processes import PIDS

ATOLL: Final = (sys.executable, "-m", "atoll.cli.main")
_LOOPBACK_UP: Final = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1 | 0x40))
print("up", flush=True)
sys.stdin.read()
"""
"""Sets the loopback device's flags, IFF_UP and IFF_RUNNING, by SIOCSIFFLAGS, and keeps the namespace until it is
closed."""
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def why_not() -> str:
    """Return why no such namespace can be made here; empty where it can."""
    for program in ("unshare", "nsenter", "setsid"):
        if shutil.which(program) is None:
            return f"{program} of util-linux is not installed"
    done = subprocess.run(("unshare", "-rn", "true"), capture_output=True, text=True, timeout=10, check=False)
    return f"no user namespace with a network can be made: {done.stderr.strip()}" if done.returncode else ""


class OwnLoopback:
    """A machine of its own, as far as `atoll` can tell: an empty home, and a loopback device with all ports free."""

    def __init__(self, home: Path) -> None:
        self.home = home
        command = ("unshare", "-rn", sys.executable, "-I", "-S", "-c", _LOOPBACK_UP)
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        PIDS.add(self._keeper.pid)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**kept, "HOME": str(home), "PATH": programs, "TERM": "xterm", "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Self:
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "up\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.atoll("down")
        finally:
            left = self._left()
            for process in left:
                process.terminate()
            _, alive = psutil.wait_procs(left, timeout=10)
            for process in alive:
                process.kill()
            self._keeper.communicate(timeout=10)  # its input ends, and so does it
            PIDS.discard(self._keeper.pid)

    def _left(self) -> list[psutil.Process]:
        """Return the processes that are in the namespace, but for the one that keeps it."""
        own, found = os.stat(f"/proc/{self._keeper.pid}/ns/net").st_ino, []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if process.pid != self._keeper.pid and os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:
                    found.append(process)
        return found

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` in the namespace."""
        return ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self._keeper.pid), *command]

    def run(self, *command: str, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside(*command),
            cwd=self.home,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def atoll(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(*ATOLL, *arguments, **env)

    def terminal(self, *arguments: str) -> Terminal:
        """Start `atoll` at a terminal of its own."""
        return Terminal(self.inside(*ATOLL, *arguments), self.home, self.env)


class Terminal:
    """A process at a pseudo-terminal, which turns Ctrl-C into a signal as a real one does."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        self.said = ""
        self._process = subprocess.Popen(
            ("setsid", "--ctty", *command), cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ctrl_c(self) -> None:
        self.type("\x03")

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """Return what was said up to and with `text` since the last wait."""
        ends_s = time.monotonic() + timeout_s
        while text not in self.said:
            if not self._read(ends_s - time.monotonic()):
                raise AssertionError(f"{text!r} did not come within {timeout_s:g} s. The terminal has: {self.said}")
        at = self.said.index(text) + len(text)
        said, self.said = self.said[:at], self.said[at:]
        return said

    def exit_code(self, timeout_s: float = 60.0) -> int:
        """Return the process's exit code; what it still says is in `said`."""
        ends_s = time.monotonic() + timeout_s
        while self._read(ends_s - time.monotonic()):
            pass
        return self._process.wait(max(0.1, ends_s - time.monotonic()))

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, timeout_s))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # every process at the terminal has ended
            return False
        self.said += _CONTROL.sub("", data.decode(errors="replace"))
        return bool(data)
