"""Two local networks joined by a shaped link: namespaces of machines, and one more with both bridges."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from behind_nat import ip, why_not

PREFIX: Final = "atollisl"
_NUMBERS: Final = itertools.count()


def why_no_lans() -> str:
    """Why no shaped networks can be made here; empty where they can."""
    return why_not() or ("iproute2 has no tc" if shutil.which("tc") is None else "")


class TwoLans:
    """Machines by name; the first letter is their LAN, a or b. The test's own namespace is on LAN a, as `here`."""

    def __init__(self, *machines: str) -> None:
        number = next(_NUMBERS)
        self._mark, self.machines = f"{os.getpid()}x{number}", machines
        self._net = f"10.{192 + (os.getpid() + 29 * number) % 60}.7"
        self._hub = f"{PREFIX}{self._mark}-hub"

    @property
    def here(self) -> str:
        return f"{self._net}.1"

    def address(self, machine: str) -> str:
        return f"{self._net}.{self.machines.index(machine) + 2}"

    def inside(self, machine: str) -> tuple[str, ...]:
        """Before a command that is to run there; `ip` becomes it."""
        return ("ip", "netns", "exec", self._namespace(machine))

    def _namespace(self, machine: str) -> str:
        return f"{PREFIX}{self._mark}-{machine}"

    def shape(self, mbit_s: int) -> None:
        """Limit the link between the LANs in both directions."""
        bucket = ("tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "100ms")
        for lan in "ab":
            words = ("tc", "-n", self._hub, "qdisc", "replace", "dev", f"wan-{lan}", "root", *bucket)
            subprocess.run(words, capture_output=True, timeout=10, check=True)

    def __enter__(self) -> Self:
        for name in os.listdir("/run/netns") if Path("/run/netns").is_dir() else ():  # of tests that were killed
            pid = name.removeprefix(PREFIX).partition("x")[0]
            if name.startswith(PREFIX) and not Path("/proc", pid).exists():
                ip("netns", "del", name)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def _build(self) -> None:
        hub = self._hub
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "wan-a", "type", "veth", "peer", "name", "wan-b")
        for lan in "ab":
            ip("-n", hub, "link", "add", f"lan-{lan}", "type", "bridge")
            ip("-n", hub, "link", "set", f"lan-{lan}", "up")
            self._plug(f"wan-{lan}", lan)
        here = f"isl{self._mark}"
        ip("link", "add", here, "type", "veth", "peer", "name", "here", "netns", hub)
        ip("addr", "add", f"{self.here}/24", "dev", here)
        ip("link", "set", here, "up")
        self._plug("here", "a")
        for machine in self.machines:
            own = self._namespace(machine)
            ip("netns", "add", own)
            ip("-n", own, "link", "add", "lan0", "type", "veth", "peer", "name", f"to-{machine}", "netns", hub)
            ip("-n", own, "addr", "add", f"{self.address(machine)}/24", "dev", "lan0")
            ip("-n", own, "link", "set", "lo", "up")
            ip("-n", own, "link", "set", "lan0", "up")
            self._plug(f"to-{machine}", machine[0])

    def _plug(self, device: str, lan: str) -> None:
        ip("-n", self._hub, "link", "set", device, "master", f"lan-{lan}")
        ip("-n", self._hub, "link", "set", device, "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (self._hub, *map(self._namespace, self.machines)):
            if Path("/run/netns", name).exists():
                ip("netns", "del", name)
