"""Measures what the transport between two workers carries: over TCP in the clear, over TCP with CURVE, and on one node.

    python benchmarks/wire.py [--seconds 2] [--busy]

Two processes on this machine. Rank 0 sends payloads of 1 MB (a large tensor's part), 64 KB and 256 bytes (small
tensors); the time is from the first one until rank 1 has said that the last one came. Microseconds of processor time
are those of both processes together for each frame, ZeroMQ's own threads included. --busy: rank 0's main thread runs
Python meanwhile, as a training loop would, and the wire's thread has to wait for the interpreter's lock.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing as mp
import os
import platform
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from lab.machine import processor

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame, Kind
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.topology import members_of
from atoll.agent.runtime.transport.transport import Transport

PAYLOADS = (1_000_000, 64_000, 256)
IN_FLIGHT_BYTES = 16_000_000  # what the sender lets wait, as an engine that works on two sync rounds would
IN_FLIGHT = 512


@dataclass(frozen=True)
class Way:
    name: str
    secure: bool
    node: str  # of rank 1; rank 0 is on "a"
    shared: bool = True


WAYS = (
    Way("TCP", False, "b"),
    Way("TCP, CURVE", True, "b"),
    Way("Unix socket", False, "a", shared=False),
    Way("shared memory", False, "a"),
    Way("shared memory, CURVE", True, "a"),
)


@dataclass(frozen=True)
class Outgoing:
    payload: bytes
    tensor: int
    kind: int = 0
    sync_round: int = 0
    order: int = 0
    count: int = 1
    to: int = -1


class Source:
    """Gives the same payload again and again, while few are on their way."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._waiting: deque[Outgoing] = deque()

    def put(self, out: Outgoing) -> None:
        self._waiting.append(out)
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def take_outgoing(self, limit: int) -> list[Outgoing]:
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if not taken:
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        return taken


@dataclass
class Result:
    frames: int
    wall_s: float
    cpu_s: float


class Rank:
    """One process's end. Rank 1 tells rank 0 what came by broadcasts every 64 frames."""

    def __init__(self, me: int, way: Way, keys: Keys | None, pipe: Connection) -> None:
        self.came = 0
        self.acknowledged = threading.Semaphore(0)
        self.source = Source()
        self.me = me
        limits = Limits() if way.shared else replace(Limits(), shared_bytes=0)
        members = members_of(["a", way.node], ["x", "x"])
        self.transport = Transport(me, members, run=1, keys=keys, host="127.0.0.1", limits=limits)
        pipe.send(str(self.transport.bind()))
        endpoints = [Endpoint.parse(text) for text in pipe.recv()]
        self.transport.connect(endpoints, self.source, self._deliver, print)

    def _deliver(self, frame: Frame) -> None:
        if self.me == 0:
            self.acknowledged.release(frame.count)
        else:
            self.came += 1
            if self.came % 8 == 0:
                self.transport.broadcast(Kind.CONTROL, 0, b"", count=8)

    def send(self, payload_bytes: int, seconds: float) -> Result:
        payload = os.urandom(payload_bytes)
        room = min(IN_FLIGHT, max(IN_FLIGHT_BYTES // payload_bytes, 16))
        begun_s, frames, pending = time.perf_counter(), 0, 0
        while time.perf_counter() - begun_s < seconds or frames % 8:
            if pending >= room:
                assert self.acknowledged.acquire(timeout=30)
                pending -= 1
            self.source.put(Outgoing(payload, frames % 1000))
            frames, pending = frames + 1, pending + 1
        for _ in range(pending):
            assert self.acknowledged.acquire(timeout=30)
        return Result(frames, time.perf_counter() - begun_s, 0.0)


def work(me: int, way: Way, keys: Keys | None, pipe: Connection, seconds: float, busy: bool) -> None:
    rank = Rank(me, way, keys, pipe)
    ended = threading.Event()
    if busy and me == 0:
        threading.Thread(target=spin, args=(ended,), daemon=True).start()
    while (payload_bytes := pipe.recv()) is not None:
        cpu_s = time.process_time()
        result = rank.send(payload_bytes, seconds) if me == 0 else None
        pipe.send(result)
        if me == 1:
            pipe.recv()
        pipe.send(time.process_time() - cpu_s)
    ended.set()
    rank.transport.goodbye()
    rank.transport.close()


def spin(ended: threading.Event) -> None:
    """Python alone: the lock is given away only when another thread asks for it, after 5 ms."""
    while not ended.is_set():
        sum(range(1000))


def measure(way: Way, seconds: float, busy: bool) -> list[Result]:
    pairs = [generate() for _ in range(2)]
    public = {rank: pair[1] for rank, pair in enumerate(pairs)}
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for me, (secret, own) in enumerate(pairs):
        ours, theirs = context.Pipe()
        keys = Keys(secret, own, public) if way.secure else None
        processes.append(context.Process(target=work, args=(me, way, keys, theirs, seconds, busy)))
        processes[-1].start()
        pipes.append(ours)
    endpoints = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(endpoints)
    results = []
    for payload_bytes in PAYLOADS:
        for pipe in pipes:
            pipe.send(payload_bytes)
        result, _ = [pipe.recv() for pipe in pipes]
        pipes[1].send("stop the clock")
        results.append(replace(result, cpu_s=sum(pipe.recv() for pipe in pipes)))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(timeout=10)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    heads = "".join(f"{payload_bytes:>13,d} B".replace(",", " ") for payload_bytes in PAYLOADS)
    print(f"{'MB/s | frames/s | us of CPU a frame':<36}{heads}")
    for way in WAYS:
        results = measure(way, arguments.seconds, arguments.busy)
        speeds = [r.frames * size / r.wall_s / 1e6 for r, size in zip(results, PAYLOADS, strict=True)]
        print(f"{way.name:<24}{'MB/s':<12}" + "".join(f"{speed:>15,.0f}" for speed in speeds))
        print(f"{'':<24}{'frames/s':<12}" + "".join(f"{r.frames / r.wall_s:>15,.0f}" for r in results))
        print(f"{'':<24}{'us/frame':<12}" + "".join(f"{1e6 * r.cpu_s / r.frames:>15,.0f}" for r in results))


if __name__ == "__main__":
    main()
