"""Two sites that do not reach each other: network namespaces, each with a road to the controller's and none between."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

PREFIX: Final = "atollnat"
_NUMBERS: Final = itertools.count()
"""Of this process's sites: what the kernel removes may be there for a while."""


def why_not() -> str:
    """Why no namespaces can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"{PREFIX}{os.getpid()}try"
    done = subprocess.run(("ip", "netns", "add", name), capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), capture_output=True, timeout=10, check=True)


class Sites:
    """`count` namespaces; in each `wan0` with the address 10.N.K.2, at its other end, here, 10.N.K.1."""

    def __init__(self, count: int) -> None:
        number = next(_NUMBERS)
        self._net = 64 + (os.getpid() + 37 * number) % 128
        self._last = [2] * count
        self._names = [f"{PREFIX}{os.getpid()}-{number}-{site}" for site in range(count)]
        self._ports = [f"an{os.getpid()}x{number}-{site}" for site in range(count)]

    def here(self, site: int) -> str:
        return f"10.{self._net}.{site + 1}.1"

    def address(self, site: int) -> str:
        return f"10.{self._net}.{site + 1}.{self._last[site]}"

    def move(self, site: int) -> None:
        """To another address; the old one is gone."""
        before = self.address(site)
        self._last[site] += 1
        ip("-n", self._names[site], "addr", "del", f"{before}/24", "dev", "wan0")
        ip("-n", self._names[site], "addr", "add", f"{self.address(site)}/24", "dev", "wan0")

    def inside(self, site: int) -> tuple[str, ...]:
        """Before a command that is to run there; `ip` becomes it."""
        return ("ip", "netns", "exec", self._names[site])

    def __enter__(self) -> Self:
        for name in os.listdir("/run/netns") if Path("/run/netns").is_dir() else ():  # of tests that were killed
            pid = name.removeprefix(PREFIX).partition("-")[0]
            if name.startswith(PREFIX) and not Path("/proc", pid).exists():
                ip("netns", "del", name)
        try:
            for site, (name, port) in enumerate(zip(self._names, self._ports, strict=True)):
                ip("netns", "add", name)
                ip("link", "add", port, "type", "veth", "peer", "name", "wan0", "netns", name)
                ip("addr", "add", f"{self.here(site)}/24", "dev", port)
                ip("link", "set", port, "up")
                ip("-n", name, "addr", "add", f"{self.address(site)}/24", "dev", "wan0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "wan0", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            if Path("/run/netns", name).exists():
                ip("netns", "del", name)
