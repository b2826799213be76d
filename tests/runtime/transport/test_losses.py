"""A peer in a process of its own that dies, stops, or does not read: a loss with its reason, in time."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from wire_rig import Out, Process, Rank, beside, keys_of, two, wait_until

from atoll.agent.runtime.transport import peer as peers
from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Kind
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.errors import PeerLost

APART = members_of(["a", "b"], ["x", "y"])
TOGETHER = members_of(["a", "a"], ["x", "x"])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is gone is told from who is silent by what connecting again finds, however late a busy machine does that."""
    monkeypatch.setattr(peers, "_UNANSWERED_S", 30.0)


@contextmanager
def connected(
    members: tuple[Member, ...], secure: bool = False, silence_s: float = 10.0
) -> Iterator[tuple[Rank, Process]]:
    keys = keys_of(2) if secure else [None, None]
    process = Process(1, members, keys[1], limits={"silence_s": silence_s})
    rank = Rank(0, members, keys[0], limits=Limits(silence_s=silence_s))
    try:
        beside(rank, process)
        yield rank, process
    finally:
        rank.close(linger_s=0)
        process.close()


@pytest.mark.parametrize("members", [APART, TOGETHER], ids=["tcp", "ipc"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
def test_a_killed_peer_is_lost_when_its_connection_closes(members: tuple[Member, ...], secure: bool) -> None:
    with connected(members, secure) as (rank, process):
        process.signal(signal.SIGKILL)
        wait_until(lambda: bool(rank.lost))
        assert rank.lost == [f"rank 1 on node {members[1].node}: connection closed"]
        with pytest.raises(PeerLost, match="connection closed"):
            rank.transport.broadcast(Kind.CONTROL, 1, b"")


@pytest.mark.parametrize("members", [APART, TOGETHER], ids=["tcp", "ipc"])
def test_a_stopped_peer_is_lost_within_the_silence_limit(members: tuple[Member, ...]) -> None:
    with connected(members, silence_s=3.0) as (rank, process):
        begun_s = time.monotonic()
        process.signal(signal.SIGSTOP)
        wait_until(lambda: bool(rank.lost))
        assert time.monotonic() - begun_s > 1.5
        assert rank.lost == [f"rank 1 on node {members[1].node}: silent for 3 s"]


@pytest.mark.parametrize("members", [APART, TOGETHER], ids=["tcp", "ipc"])
def test_a_peer_stopped_in_the_middle_of_a_message_is_lost_too(members: tuple[Member, ...]) -> None:
    """No heartbeat leaves behind a message that is stuck: that nothing moves is seen at the kernel's counts."""
    with connected(members, silence_s=1.0) as (rank, process):
        process.signal(signal.SIGSTOP)
        rank.source.put(*(Out(0 if members is TOGETHER else 1, 1, at, 0, 1, bytes(60_000_000)) for at in range(2)))
        wait_until(lambda: bool(rank.lost))
        assert "takes no data; nothing has left for 1 s" in rank.lost[0] or "silent for 1 s" in rank.lost[0]


@contextmanager
def thin(to: Endpoint, bytes_per_s: int) -> Iterator[Endpoint]:
    """`to` behind a link that carries so much towards it, and all that comes back."""

    def carry(source: socket.socket, sink: socket.socket, at_once: int, pause_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(at_once):
                sink.sendall(data)
                time.sleep(pause_s)

    with socket.socket() as listener, socket.socket() as onward:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        host, _, port = to.tcp.removeprefix("tcp://").rpartition(":")
        onward.connect((host, int(port)))

        def serve() -> None:
            with suppress(OSError), listener.accept()[0] as incoming:
                back = threading.Thread(target=carry, args=(onward, incoming, 65536, 0.0))
                back.start()
                carry(incoming, onward, 4096, 4096 / bytes_per_s)
                back.join(30)

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield Endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}", to.local)
        finally:
            with suppress(OSError):
                onward.shutdown(socket.SHUT_RDWR)
            server.join(30)


def test_a_peer_behind_a_link_that_is_full_for_longer_than_silence_is_not_lost() -> None:
    """Its heartbeats stand behind 300 kB that a thin link takes 5 s for, and it may be silent for 2 s. When it is
    stopped then, it is lost."""
    process = Process(1, APART)
    rank = Rank(0, APART, limits=Limits(silence_s=2.0))
    try:
        with thin(process.endpoint, 60_000) as endpoint:
            endpoints = [rank.endpoint, process.endpoint]
            process.connect(endpoints)
            rank.connect([rank.endpoint, endpoint])
            assert process.line() == "connected"
            begun_s = time.monotonic()
            rank.source.put(Out(1, 1, 0, 0, 1, bytes(300_000)))
            assert process.line() == "heard SUM 0 300000"
            assert time.monotonic() - begun_s > 3
            assert rank.lost == []
            process.signal(signal.SIGSTOP)
            wait_until(lambda: bool(rank.lost))
            assert rank.lost == ["rank 1 on node b: silent for 2 s"]
    finally:
        rank.close(linger_s=0)
        process.close()


def test_a_peer_that_answers_but_does_not_read_is_lost_at_the_deadline() -> None:
    rank, peer = two(limits=Limits(silence_s=60.0, leave_s=0.8), read_ahead=1)
    try:
        rank.source.put(*(Out(0, 1, at, at, 1, bytes(1_000_000)) for at in range(40)))
        wait_until(lambda: bool(rank.lost))
        assert rank.lost[0].startswith("rank 1 on node there: does not take data: ")
        assert re.search(r"MB waited [1-9]\d* s\. Where its link is that thin, a larger stall_timeout_s", rank.lost[0])
    finally:
        rank.close(linger_s=0)
        peer.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
def test_a_script_that_ends_without_closing_ends_and_is_lost(secure: bool) -> None:
    with connected(TOGETHER, secure) as (rank, process):
        process.tell("send", "0", "1000000", "5")
        wait_until(lambda: len(rank.heard) == 5)
        process.tell("leave")
        assert process.exit_code() == 0
        wait_until(lambda: bool(rank.lost))
        assert rank.lost == ["rank 1 on node a: connection closed"]


def test_a_peer_that_says_goodbye_and_ends_is_not_lost() -> None:
    with connected(APART) as (rank, process):
        process.tell("send", "1", "300000", "5")
        process.tell("goodbye")
        process.tell("close")
        assert process.line() == "closed"
        process.close()
        wait_until(lambda: len(rank.heard) == 5)

        def nobody_is_there() -> bool:
            rank.transport.broadcast(Kind.CONTROL, 1, b"to nobody")
            return "left" in rank.link(1).dropped

        wait_until(nobody_is_there)
        assert rank.lost == []


def test_kill_nine_of_either_side_leaves_no_shared_memory() -> None:
    """A payload lies in the arena when its sender, and then its receiver, is killed."""
    members = members_of(["a", "a", "a"], ["x", "x", "x"])
    rank = Rank(0, members)
    processes = [Process(at, members) for at in (1, 2)]
    endpoints = [rank.endpoint, *(process.endpoint for process in processes)]
    try:
        for process in processes:
            process.connect(endpoints)
        rank.connect(endpoints)
        assert [process.line() for process in processes] == ["connected"] * 2
        processes[0].tell("send", "0", "1000000", "3")
        wait_until(lambda: len(rank.heard) == 3)
        assert [processes[1].line() for _ in range(3)] == ["heard PART 1 1000000"] * 3
        rank.source.put(Out(0, 1, 0, 0, 1, bytes(1_000_000)))
        wait_until(lambda: rank.link(1).bytes_shared == rank.link(2).bytes_shared == 1_000_000)
        for process in processes:
            process.signal(signal.SIGKILL)
        wait_until(lambda: bool(rank.lost))
    finally:
        rank.close(linger_s=0)
        for process in processes:
            process.close()
    assert "memfd:atoll-wire" not in Path("/proc/self/maps").read_text()
