"""Whole runs of transports: in threads of this process, or one in a process of its own beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame, Kind, encode
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.runtime.transport.meter import LinkCounts
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.agent.runtime.transport.transport import Transport

RUN = 7
SCRIPT = Path(__file__).parent / "scripts" / "wire_worker.py"


class Out(NamedTuple):
    kind: int
    sync_round: int
    tensor: int
    order: int
    count: int
    payload: bytes
    to: int = -1


class Source:
    """Plays the exchange engine: a queue behind an eventfd, as they come."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[Out] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, *outs: Out) -> None:
        with self._lock:
            self._waiting.extend(outs)
            os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def take_outgoing(self, limit: int) -> list[Out]:
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            if not self._waiting:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
        return taken

    def close(self) -> None:
        os.close(self._fd)


def keys_of(count: int) -> list[Keys]:
    pairs = [generate() for _ in range(count)]
    public = {rank: pair[1] for rank, pair in enumerate(pairs)}
    return [Keys(secret, own, public) for secret, own in pairs]


class Rank:
    """One transport in this process with what it heard. `deliver` may be replaced before it connects."""

    def __init__(self, me: int, members: Sequence[Member], keys: Keys | None = None, run: int = RUN, **kw: Any) -> None:
        self.transport = Transport(me, members, run=run, keys=keys, host="127.0.0.1", **kw)
        self.source = Source()
        self.heard: list[Frame] = []
        self.lost: list[str] = []
        self.deliver: Callable[[Frame], str | None] = self._keep
        self.endpoint = self.transport.bind()

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self.transport.connect(endpoints, self.source, self.deliver, self.lost.append)

    def link(self, rank: int) -> LinkCounts:
        return next(link for link in self.transport.links() if link.rank == rank)

    def close(self, linger_s: float = 2.0) -> None:
        self.transport.close(linger_s)
        self.source.close()

    def _keep(self, frame: Frame) -> str | None:
        self.heard.append(frame)
        return None


class Run:
    """All ranks of a run, connected. `places`: (node, island) of each."""

    def __init__(self, places: Sequence[tuple[str, str]], secure: bool = False, **kw: Any) -> None:
        self.members = members_of([node for node, _ in places], [island for _, island in places])
        keys = keys_of(len(places)) if secure else [None] * len(places)
        self.ranks = [Rank(rank, self.members, keys[rank], **kw) for rank in range(len(places))]

    def connect(self) -> None:
        connect_all(self.ranks)

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close(linger_s=0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(linger_s=0)

    def close(self, linger_s: float = 2.0) -> None:
        for rank in self.ranks:
            rank.close(linger_s)


class FakePeer:
    """Rank 1 of two, played by bare sockets: says hello, then whatever a test wants, and reads nothing unless asked."""

    def __init__(self, read_ahead: int = 1000) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVHWM, read_ahead)
        self.router.setsockopt(zmq.RCVBUF, 64 * 1024)
        self.router.setsockopt(zmq.RCVTIMEO, 30_000)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = Endpoint(f"tcp://127.0.0.1:{port}", "ipc://@atoll-nobody")
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.ROUTING_ID, b"r1")

    def meet(self, rank: Rank) -> None:
        self.dealer.connect(rank.endpoint.tcp)
        self.send(Frame(Kind.HELLO, RUN, 0, 0, 0, 1, 0, b""))
        rank.connect([rank.endpoint, self.endpoint])

    def send(self, frame: Frame) -> None:
        self.raw(encode(frame), bytes(frame.payload))

    def raw(self, *parts: bytes) -> None:
        self.dealer.send_multipart(parts)

    def close(self) -> None:
        self._context.destroy(linger=0)


def two(**kw: Any) -> tuple[Rank, FakePeer]:
    """Rank 0 and, on another node of its island, a played rank 1."""
    peer = FakePeer(kw.pop("read_ahead", 1000))
    rank = Rank(0, members_of(["here", "there"], ["one", "one"]), **kw)
    peer.meet(rank)
    return rank, peer


def connect_all(ranks: Sequence[Rank]) -> None:
    endpoints = [rank.endpoint for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for done in [pool.submit(rank.connect, endpoints) for rank in ranks]:
            done.result(timeout=30)


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    ends_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not come true in time"
        time.sleep(0.005)


class Process:
    """A rank in a process of its own (scripts/wire_worker.py), told line by line what to do."""

    def __init__(self, me: int, members: Sequence[Member], keys: Keys | None = None, **settings: Any) -> None:
        told = {
            "me": me,
            "nodes": [member.node for member in members],
            "islands": [str(member.island) for member in members],
            "run": RUN,
            "secret": keys.secret.hex() if keys else "",
            "public": [keys.of[rank].hex() for rank in sorted(keys.of)] if keys else [],
            **settings,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.endpoint = Endpoint.parse(self.line())

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self.tell("connect", *(str(endpoint).replace(" ", "|") for endpoint in endpoints))

    def exit_code(self) -> int:
        return self._process.wait(timeout=30)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def beside(rank: Rank, process: Process) -> None:
    """Connect rank 0 here with rank 1 in its process."""
    endpoints = [rank.endpoint, process.endpoint]
    process.connect(endpoints)
    rank.connect(endpoints)
    assert process.line() == "connected"
