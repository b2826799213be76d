"""Islands joined by links of any rate: a network namespace each, on a bridge in one more, with token buckets."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from behind_nat import ip
from cluster import Cluster
from held_ports import free_port

PREFIX: Final = "atollauto"
_NUMBERS: Final = itertools.count()


class ShapedIslands:
    """`count` namespaces, each with `wan0`; rates are of both directions of each island's link."""

    def __init__(self, count: int) -> None:
        number = next(_NUMBERS)
        self._net = f"10.{192 + (os.getpid() + 41 * number) % 60}.{number % 250}"
        self._names = [f"{PREFIX}{os.getpid()}-{number}-{island}" for island in range(count)]
        self._hub = f"{PREFIX}{os.getpid()}-{number}-hub"  # apart: this machine may filter what crosses its bridges
        self._own = f"aa{os.getpid()}x{number}"
        self._made: list[str] = []

    @property
    def here(self) -> str:
        return f"{self._net}.254"

    def inside(self, island: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._names[island])

    def shape(self, mbit_s: float) -> None:
        """Limit every island's link to this rate from now on. Buckets are small, so that they are no second link."""
        burst = f"{max(16, int(mbit_s * 1000 / 8 / 250))}kb"  # 4 ms of the link
        for island, name in enumerate(self._names):
            bucket = ("tbf", "rate", f"{mbit_s:.3f}mbit", "burst", burst, "latency", "200ms")
            for namespace, device in ((name, "wan0"), (self._hub, f"port{island}")):
                _tc("-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)

    def start(self, cluster: Cluster, *, named: bool) -> None:
        """Start a controller here and an agent in each island, ready when this returns. named: the agents name their
        island, in place of being measured."""
        port = free_port()
        cluster.addresses.append(f"127.0.0.1:{port}")
        data = ("--data-dir", str(cluster.folder / "controller"))
        cluster.atoll("controller", "controller", "--listen", f"0.0.0.0:{port}", "--insecure", *data)
        for island in range(len(self._names)):
            name = f"site-{island}"
            cluster.start(
                name,
                (
                    *self.inside(island), sys.executable, "-m", "atoll.cli.main", "agent", "--controller",
                    f"{self.here}:{port}", "--name", name, "--threads", "1", "--state-dir", str(cluster.folder / name),
                    "--jobs-dir", str(cluster.folder / "jobs"), *(("--island", name) if named else ()),
                ),
            )  # fmt: skip
        cluster.wait_for_nodes(len(self._names))

    def __enter__(self) -> Self:
        try:
            self._add(self._hub)
            ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._hub, "link", "set", "bridge", "up")
            ip("link", "add", self._own, "type", "veth", "peer", "name", "here", "netns", self._hub)
            self._join("here")
            ip("addr", "add", f"{self.here}/24", "dev", self._own)
            ip("link", "set", self._own, "up")
            for island, name in enumerate(self._names):
                self._add(name)
                pair = ("name", "wan0", "netns", name, "type", "veth", "peer", "name", f"port{island}")
                ip("link", "add", *pair, "netns", self._hub)
                self._join(f"port{island}")
                ip("-n", name, "addr", "add", f"{self._net}.{island + 1}/24", "dev", "wan0")
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

    def _add(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._made.append(namespace)

    def _join(self, port: str) -> None:
        ip("-n", self._hub, "link", "set", port, "master", "bridge")
        ip("-n", self._hub, "link", "set", port, "up")

    def _remove(self) -> None:
        while self._made:
            ip("netns", "del", self._made.pop())


def _tc(*words: str) -> None:
    subprocess.run(("tc", *words), capture_output=True, timeout=10, check=True)
