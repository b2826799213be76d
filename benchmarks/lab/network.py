"""A network of namespaces on this machine: one for each worker, joined by veth pairs to a hub in one more.

Each worker sees one device, `wan0`. Rates are token buckets (tbf) at both ends of every pair, so that a worker's
sending and receiving are limited alike. The hub is a bridge, or, where latency is wanted, the relay (relay.py).
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.errors import BadInput, DeadlineExceeded
from lab.options import Rate
from lab.trace import Trace

DEVICE: Final = "wan0"
PREFIX: Final = "atollwan"
BURST: Final = "64kb"
LATENCY: Final = "200ms"
COMMAND_S: Final = 10.0
SCRIPTS: Final = Path(__file__).resolve().parent.parent / "scripts"


def refuse_without_tools() -> None:
    """Raises BadInput where namespaces cannot be made here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise BadInput(f"the laboratory needs {' and '.join(missing)}: sudo apt-get install iproute2")
    if os.geteuid() != 0:
        raise BadInput("the laboratory makes network namespaces and needs root: sudo env PATH=$PATH python ...")


def command(*words: str) -> str:
    """Run one ip or tc command. Raises BadInput with what it said."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise BadInput(f"`{' '.join(words)}` failed: {said}. It must know network namespaces, veth and tbf")
    return done.stdout


def remove_leftovers() -> None:
    """Remove the namespaces of laboratories that were killed before they could."""
    for line in command("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        match = re.fullmatch(rf"{PREFIX}(\d+)-(\d+|hub)", name)
        if match and not Path("/proc", match[1]).exists():
            command("ip", "netns", "del", name)


class Network:
    """`workers` namespaces and their hub; gone when the `with` block ends.

    rtt_ms: round trip that the relay adds; 0 joins the workers by a bridge instead."""

    def __init__(self, workers: int, rtt_ms: float = 0.0) -> None:
        self.workers = workers
        self.rtt_ms = rtt_ms
        self._hub = f"{PREFIX}{os.getpid()}-hub"
        self._made: list[str] = []
        self._relay: subprocess.Popen[bytes] | None = None

    def namespace(self, worker: int) -> str:
        return f"{PREFIX}{os.getpid()}-{worker}"

    @staticmethod
    def address(worker: int) -> str:
        return f"10.77.0.{worker + 1}"

    def inside(self, worker: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in this worker's namespace; `ip` becomes it, so its pid is the pid of `argv`."""
        return ["ip", "netns", "exec", self.namespace(worker), *argv]

    def __enter__(self) -> Network:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything that was made. Idempotent."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(timeout=COMMAND_S)
            self._relay = None
        while self._made:
            command("ip", "netns", "del", self._made.pop())

    def _build(self) -> None:
        for name in (self._hub, *map(self.namespace, range(self.workers))):
            command("ip", "netns", "add", name)
            self._made.append(name)
        if not self.rtt_ms:
            command("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
            command("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for worker in range(self.workers):
            own, port = self.namespace(worker), f"port{worker}"
            pair = ("name", DEVICE, "netns", own, "type", "veth", "peer", "name", port, "netns", self._hub)
            command("ip", "link", "add", *pair)
            command("ip", "-n", own, "addr", "add", f"{self.address(worker)}/24", "dev", DEVICE)
            command("ip", "-n", own, "link", "set", "lo", "up")
            command("ip", "-n", own, "link", "set", DEVICE, "up")
            if not self.rtt_ms:
                command("ip", "-n", self._hub, "link", "set", port, "master", "bridge")
            command("ip", "-n", self._hub, "link", "set", port, "up")
        if self.rtt_ms:
            self._start_relay()

    def _start_relay(self) -> None:
        script, numbers = str(SCRIPTS / "wan_relay.py"), (self.workers, self.rtt_ms / 2, os.getpid())
        argv = ["ip", "netns", "exec", self._hub, sys.executable, script, *map(str, numbers)]
        self._relay = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        with self._relay.stdout as answers:
            started, _, _ = select.select([answers], [], [], COMMAND_S)
            if not started or answers.readline() != b"ready\n":
                raise BadInput("the relay did not start; what it said stands above")

    def _ends(self, workers: Iterable[int]) -> Iterator[tuple[str, str]]:
        for worker in workers:
            yield self.namespace(worker), DEVICE
            yield self._hub, f"port{worker}"

    def shape(self, mbit_s: float | None, burst: str = BURST, *, worker: int | None = None) -> None:
        """Limit every link, or this worker's, to this rate in both directions; None lifts the limit. burst: of the
        token bucket; at rates near 1 Gbit/s a small one is empty before a busy machine fills it again."""
        for namespace, device in self._ends(range(self.workers) if worker is None else [worker]):
            at, bucket = ("dev", device, "root"), ("burst", burst, "latency", LATENCY)
            if mbit_s is not None:
                command("tc", "-n", namespace, "qdisc", "replace", *at, "tbf", "rate", f"{mbit_s:.3f}mbit", *bucket)
            elif "tbf" in command("tc", "-n", namespace, "qdisc", "show", "dev", device):
                command("tc", "-n", namespace, "qdisc", "del", *at)

    @contextmanager
    def shaped(self, rate: Rate, trace: Trace) -> Iterator[None]:
        """While the block runs, every link has this rate. A trace begins at its first point."""
        self.shape(trace.at(0) if rate.traced else rate.mbit_s)
        try:
            if rate.traced:
                with self._following(trace):
                    yield
            else:
                yield
        finally:
            self.shape(None)

    @contextmanager
    def _following(self, trace: Trace) -> Iterator[None]:
        stop, failed = threading.Event(), list[Exception]()
        began = time.monotonic()

        def follow() -> None:
            now = 0.0
            try:
                while not stop.wait(max(0.0, began + (now := trace.next_change_s(now)) - time.monotonic())):
                    self.shape(trace.at(now))
            except (BadInput, subprocess.TimeoutExpired) as error:
                failed.append(error)

        thread = threading.Thread(target=follow, name="bandwidth-trace")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=2 * COMMAND_S * self.workers)
            if thread.is_alive():
                raise DeadlineExceeded("the thread that follows the bandwidth trace does not end: is tc hanging?")
        if failed:
            raise failed[0]
