"""Transports of whole runs over real sockets: what is delivered to whom, in which order, and what is dropped."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire_rig import RUN, FakePeer, Out, Rank, Run, Source, two, wait_until

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import MAX_ORDER, Frame, Kind, encode
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.agent.runtime.transport.topology import members_of
from atoll.agent.runtime.transport.transport import Transport
from atoll.errors import BadInput, DeadlineExceeded, PeerLost

FOUR = [("a", "west"), ("b", "west"), ("c", "east"), ("d", "east")]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize("nodes", ["apart", "together"])
def test_parts_stay_in_the_island_and_sums_reach_everyone_else(secure: bool, nodes: str) -> None:
    places = FOUR if nodes == "apart" else [("n", island) for _, island in FOUR]
    with Run(places, secure=secure) as run:
        payloads = [os.urandom(20_000 + rank) for rank in range(4)]
        for rank, one in enumerate(run.ranks):
            one.source.put(Out(0, 3, 10 + rank, rank, 5, payloads[rank]))
        for rank in (0, 2):
            run.ranks[rank].source.put(Out(1, 3, 20, 0, 6, payloads[rank]))
        run.ranks[1].transport.broadcast(Kind.CONTROL, 9, b"from rank 1")
        wait_until(lambda: [len(one.heard) for one in run.ranks] == [3, 2, 3, 3])

        def heard(rank: int, kind: Kind) -> list[tuple[int, int, int, bytes]]:
            frames = [frame for frame in run.ranks[rank].heard if frame.kind is kind]
            return [(frame.origin, frame.step, frame.tensor, bytes(frame.payload)) for frame in frames]

        for rank, mate in ((0, 1), (1, 0), (2, 3), (3, 2)):
            assert heard(rank, Kind.PART) == [(mate, 3, 10 + mate, payloads[mate])]
        assert heard(0, Kind.SUM) == heard(1, Kind.SUM) == [(1, 3, 20, payloads[2])]
        assert heard(2, Kind.SUM) == heard(3, Kind.SUM) == [(0, 3, 20, payloads[0])]
        for rank in (0, 2, 3):
            assert heard(rank, Kind.CONTROL) == [(1, 9, 0, b"from rank 1")]
        assert all(one.lost == [] for one in run.ranks)


def test_what_is_sent_to_one_peer_reaches_nobody_else() -> None:
    """Mates and leaders of islands are peers; another island's mate is none, and is refused before anything leaves."""
    with Run(FOUR, secure=True) as run:
        payload = os.urandom(50_000)
        run.ranks[1].transport.send(0, 7, 3, 2, payload)
        run.ranks[0].transport.send(2, 8, 4, 1, memoryview(payload)[:10])
        with pytest.raises(BadInput, match=r"rank 2 is no direct peer of rank 1: \[0\] are"):
            run.ranks[1].transport.send(2, 7, 3, 2, payload)
        wait_until(lambda: [len(one.heard) for one in run.ranks] == [1, 0, 1, 0])
        (first,), (second,) = run.ranks[0].heard, run.ranks[2].heard
        assert (first.kind, first.origin, first.step, first.tensor, first.count) == (Kind.DIRECT, 1, 7, 3, 2)
        assert bytes(first.payload) == payload
        assert (second.origin, second.step, bytes(second.payload)) == (0, 8, payload[:10])


@pytest.mark.parametrize("node", ["apart", "together"])
def test_bytes_counted_at_both_ends_agree(node: str) -> None:
    """What one end says it sent is what the other says it received; 40 MB leave in frames of many sizes."""
    with Run([("a", "x"), ("a" if node == "together" else "b", "x")]) as run:
        sizes = [0, 1, 15, 100, 4095, 4097, 70_000, 500_000, 9_000_000, 30_000_000]
        payloads = [os.urandom(size) for size in sizes]
        run.ranks[0].source.put(*(Out(0, 1, at, at, 1, payload) for at, payload in enumerate(payloads)))
        wait_until(lambda: len(run.ranks[1].heard) == len(sizes), deadline_s=30)
        assert {frame.tensor: bytes(frame.payload) for frame in run.ranks[1].heard} == dict(enumerate(payloads))
        sent, received = run.ranks[0].link(1), run.ranks[1].link(0)
        assert sent.frames_sent == received.frames_received == len(sizes) + 1  # and a hello
        assert sent.bytes_sent == received.bytes_received
        shared = {p for p in sizes if 8192 <= p <= 8 * 1024 * 1024} if node == "together" else set()
        assert sent.bytes_shared == sum(shared)  # the two largest do not fit the arena, and went inline


def test_goodput_is_measured_once_there_is_something_to_measure() -> None:
    with Run([("a", "x"), ("b", "x")]) as run:
        sender = run.ranks[0]
        sender.source.put(*(Out(0, 1, at, at, 1, bytes(1_000_000)) for at in range(60)))
        wait_until(lambda: len(run.ranks[1].heard) == 60, deadline_s=30)
        wait_until(lambda: sender.link(1).goodput_bps > 0)
        assert sender.link(1).busy_s > 0
        assert run.ranks[1].link(0).goodput_bps == 0  # it sent nothing


def test_who_asks_hears_for_how_long_links_to_other_islands_were_in_use() -> None:
    """1. The leader of another island takes nothing: 8 MB wait. 2. It reads them: nothing waits any more. Asked on
    another thread than the wire's; who leads no island has no such link."""
    peer = FakePeer(read_ahead=1)
    rank = Rank(0, members_of(["here", "there"], ["one", "two"]))
    peer.meet(rank)
    try:
        rank.source.put(*(Out(Kind.SUM, 1, at, at, 1, bytes(1_000_000)) for at in range(8)))
        wait_until(lambda: rank.transport.in_use().waits)
        before_s = rank.transport.in_use().busy_s[1]
        wait_until(lambda: rank.transport.in_use().busy_s[1] > before_s)
        came = 0
        while came < 9:  # and a hello
            came += len(peer.router.recv_multipart()[1:]) // 2
        wait_until(lambda: not rank.transport.in_use().waits)
    finally:
        rank.close(linger_s=0)
        peer.close()
    assert not rank.transport.in_use().waits
    with Run([("a", "x"), ("b", "x"), ("c", "y")]) as run:
        run.ranks[1].source.put(Out(0, 1, 0, 0, 1, bytes(1_000_000)))
        assert run.ranks[1].transport.in_use() == LinksInUse(False, {}, 0, frozenset({2}))
        assert run.ranks[2].transport.in_use().busy_s.keys() == {0}


def test_thousands_of_small_tensors_all_arrive() -> None:
    with Run(FOUR, secure=True) as run:
        outs = [
            Out(0, step, tensor, tensor, 1, b"%d %d" % (step, tensor)) for step in range(5) for tensor in range(300)
        ]
        for one in run.ranks:
            one.source.put(*outs)
        wait_until(lambda: all(len(one.heard) == len(outs) for one in run.ranks), deadline_s=30)
        for one in run.ranks:
            assert Counter(bytes(frame.payload) for frame in one.heard) == Counter(out.payload for out in outs)


def test_what_is_urgent_overtakes_what_waits() -> None:
    """The peer does not read while 20 MB are sent: what waits meanwhile leaves by urgency."""
    rank, peer = two(read_ahead=1)
    try:
        blocking = [Out(0, 1, 100 + at, 0, 1, bytes(1_000_000)) for at in range(20)]
        rank.source.put(*blocking)
        wait_until(lambda: len(rank.source) == 0 and rank.link(1).frames_sent > 2)
        rank.source.put(*(Out(0, 1, order, 1 + order, 1, b"x") for order in (3, 2, 1, 0)))
        rank.transport.broadcast(Kind.CONTROL, 5, b"now")
        wait_until(lambda: len(rank.source) == 0)
        tensors: list[int] = []
        kinds: list[int] = []
        while len(tensors) < 26:
            message = peer.router.recv_multipart()[1:]
            for header in message[::2]:
                kinds.append(header[5])
                tensors.append(int.from_bytes(header[22:26], "little"))
        assert [tensor for at, tensor in enumerate(tensors) if kinds[at] == 0 and tensor < 100] == [0, 1, 2, 3]
        assert kinds.index(Kind.CONTROL) < 20  # ahead of what was queued long before
    finally:
        rank.close(linger_s=0)
        peer.close()


@pytest.fixture
def pair() -> Iterator[tuple[Rank, FakePeer]]:
    rank, peer = two()
    yield rank, peer
    rank.close(linger_s=0)
    peer.close()


def test_damaged_frames_are_dropped_and_counted_and_the_next_is_delivered(pair: tuple[Rank, FakePeer]) -> None:
    rank, peer = pair
    good = Frame(Kind.PART, RUN, 1, 2, 3, 1, 4, os.urandom(64))
    whole = encode(good) + bytes(good.payload)
    for at in range(len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 0x41
        peer.raw(bytes(bad[:-64]), bytes(bad[-64:]))
    peer.raw(b"")
    peer.raw(b"", b"", b"")
    peer.raw(encode(good)[:-1], bytes(good.payload))
    peer.send(good)
    wait_until(lambda: bool(rank.heard))
    assert [(frame.tensor, bytes(frame.payload)) for frame in rank.heard] == [(2, good.payload)]
    dropped = rank.link(1).dropped
    assert dropped == {"damaged": len(whole) - 1 + 4, "other version": 1}
    assert rank.lost == []


def test_old_runs_false_origins_and_refusals_are_counted_by_reason() -> None:
    peer = FakePeer()
    rank = Rank(0, members_of(["here", "there"], ["one", "one"]))
    rank.deliver = lambda frame: "old step" if frame.step < 5 else rank.heard.append(frame)
    peer.meet(rank)
    try:
        peer.send(Frame(Kind.PART, RUN - 1, 7, 0, 0, 1, 0, b"late"))
        peer.send(Frame(Kind.PART, RUN, 7, 0, 0, 0, 0, b"I am rank 0"))
        peer.send(Frame(Kind.SUM, RUN, 7, 0, 0, 0, 0, b"I lead"))
        peer.send(Frame(Kind.PART, RUN, 4, 0, 0, 1, 0, b"applied already"))
        peer.send(Frame(Kind.PART, RUN, 7, 0, 0, 1, 0, b"right"))
        wait_until(lambda: bool(rank.heard))
        assert [bytes(frame.payload) for frame in rank.heard] == [b"right"]
        assert rank.link(1).dropped == {"old run": 1, "false origin": 2, "old step": 1}
    finally:
        rank.close(linger_s=0)
        peer.close()


def test_what_waits_for_a_slow_peer_stays_in_the_engine() -> None:
    """Backpressure: with more than send_buffer_bytes waiting, nothing more is taken; it goes on when the peer reads."""
    rank, peer = two(limits=Limits(send_buffer_bytes=2_000_000), read_ahead=1)
    try:
        rank.source.put(*(Out(0, 1, at, at, 1, bytes(1_000_000)) for at in range(200)))
        wait_until(lambda: rank.link(1).frames_sent > 2)
        settled = threading.Event()
        settled.wait(0.4)  # four looks at the queue
        assert len(rank.source) > 180  # the kernel's buffers swallowed a few
        came = 0
        while came < 201:
            came += len(peer.router.recv_multipart()[1:]) // 2
        assert len(rank.source) == 0
    finally:
        rank.close(linger_s=0)
        peer.close()


def test_a_run_of_one_rank_needs_nobody() -> None:
    with Run([("a", "x")], secure=True) as run:
        run.ranks[0].source.put(Out(0, 1, 0, 0, 1, b"x"))
        run.ranks[0].transport.broadcast(Kind.CONTROL, 1, b"alone")
        wait_until(lambda: len(run.ranks[0].source) == 0)
        assert run.ranks[0].transport.links() == []


def test_closing_flushes_what_waits_and_goodbye_is_no_loss() -> None:
    """50 MB are still on their way when the sender leaves: all arrive, and nobody thinks that it was lost."""
    run = Run([("a", "x"), ("b", "x"), ("c", "y")])
    run.connect()
    try:
        run.ranks[0].source.put(*(Out(0, 1, at, at, 1, bytes(1_000_000)) for at in range(50)))
        wait_until(lambda: len(run.ranks[0].source) == 0)
        run.ranks[0].transport.goodbye()
        run.ranks[0].close(linger_s=30)
        wait_until(lambda: len(run.ranks[1].heard) == 50)

        def nobody_is_there() -> bool:
            run.ranks[1].source.put(Out(0, 2, 0, 0, 1, b"to nobody"))
            return "left" in run.ranks[1].link(0).dropped

        wait_until(nobody_is_there)
        settled = threading.Event()
        settled.wait(0.5)
        assert run.ranks[1].lost == run.ranks[2].lost == []
        run.ranks[0].transport.close()  # again is harmless
    finally:
        for rank in run.ranks[1:]:
            rank.close(linger_s=0)


def test_closed_transports_leave_no_descriptor_behind() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Run(FOUR, secure=True):  # ZeroMQ's own helpers start with the first
        pass
    before = open_files()
    for places in (FOUR, [("n", "x")] * 3):
        with Run(places, secure=True) as run:
            run.ranks[0].source.put(Out(0, 1, 0, 0, 1, bytes(2_000_000)))
            heard = run.ranks[1].heard
            wait_until(lambda heard=heard: bool(heard))
            assert open_files() > before
    assert open_files() == before


def test_closing_does_not_wait_for_a_peer_that_does_not_read() -> None:
    rank, peer = two(read_ahead=1)
    try:
        rank.source.put(*(Out(0, 1, at, at, 1, bytes(1_000_000)) for at in range(50)))
        wait_until(lambda: len(rank.source) == 0)
        rank.close(linger_s=0.2)
    finally:
        peer.close()


def test_nobody_there_is_named_at_the_deadline() -> None:
    members = members_of(["here", "there"], ["one", "two"])
    rank = Rank(0, members, deadline_s=2.0)
    other = Rank(1, members)
    other.close()
    try:
        with pytest.raises(DeadlineExceeded, match=r"within 2 s to rank 1 on node there \(nothing listens there\)"):
            rank.connect([rank.endpoint, other.endpoint])
    finally:
        rank.close()


def test_a_peer_of_another_run_never_says_hello() -> None:
    members = members_of(["here", "there"], ["one", "two"])
    rank, other = Rank(0, members, deadline_s=3.0), Rank(1, members, run=RUN + 1, deadline_s=3.0)
    endpoints = [rank.endpoint, other.endpoint]
    try:
        with ThreadPoolExecutor() as pool:
            late = pool.submit(other.connect, endpoints)
            with pytest.raises(DeadlineExceeded, match="it has not said hello"):
                rank.connect(endpoints)
            with pytest.raises(DeadlineExceeded, match="it has not said hello"):
                late.result(timeout=30)
        assert rank.link(1).dropped == {"old run": 1}
    finally:
        rank.close()
        other.close()


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    members = members_of(["a"], ["x"])
    with pytest.raises(BadInput, match="no address that peers can connect to"):
        Transport(0, members, run=1, keys=None, host="0.0.0.0")
    elsewhere = Transport(0, members, run=1, keys=None, host="203.0.113.7")
    with pytest.raises(BadInput, match=r"cannot listen on 203\.0\.113\.7"):
        elsewhere.bind()
    elsewhere.close()
    rank = Rank(0, members)
    with pytest.raises(BadInput, match="2 endpoints for 1 members"):
        rank.connect([rank.endpoint] * 2)
    with pytest.raises(BadInput, match="broadcast and send come after connect"):
        rank.transport.broadcast(Kind.CONTROL, 1, b"")
    rank.connect([rank.endpoint])
    with pytest.raises(BadInput, match="connect comes once"):
        rank.connect([rank.endpoint])
    with pytest.raises(BadInput, match="PART of 0 bytes cannot be broadcast"):
        rank.transport.broadcast(Kind.PART, 1, b"")
    with pytest.raises(BadInput, match="CONTROL of 1048577 bytes"):
        rank.transport.broadcast(Kind.CONTROL, 1, bytes(1024 * 1024 + 1))
    rank.close()


def test_endpoints_travel_as_short_strings() -> None:
    endpoint = Endpoint("tcp://[::1]:4711", "ipc://@atoll-7-0-abc")
    assert Endpoint.parse(str(endpoint)) == endpoint
    for wrong in (
        "",
        "tcp://h:1",
        "tcp://h:1 ipc:///tmp/x",
        "tcp://h:70000 ipc://@a",
        "http://h:1 ipc://@a",
        "tcp://h:1 ipc://@a\n",
        "x" * 9999,
    ):
        with pytest.raises(BadInput, match="is no endpoint of a worker"):
            Endpoint.parse(wrong)


def test_a_bug_in_deliver_is_a_loss_and_not_silence() -> None:
    peer = FakePeer()
    rank = Rank(0, members_of(["here", "there"], ["one", "one"]))

    def refuse(frame: Frame) -> None:
        raise PeerLost(f"the pipeline failed at step {frame.step}")

    rank.deliver = refuse
    peer.meet(rank)
    try:
        peer.send(Frame(Kind.PART, RUN, 4, 0, MAX_ORDER, 1, 0, b"x"))
        wait_until(lambda: bool(rank.lost))
        assert rank.lost == ["the pipeline failed at step 4"]
        with pytest.raises(PeerLost, match="the pipeline failed at step 4"):
            rank.transport.broadcast(Kind.CONTROL, 1, b"")
        rank.transport.goodbye()  # there is nobody to tell, and nothing to complain about
    finally:
        rank.close()
        peer.close()


def test_an_unconnected_source_is_left_alone() -> None:
    rank = Rank(0, members_of(["a"], ["x"]))
    source = Source()
    source.put(Out(0, 1, 0, 0, 1, b"x"))
    rank.close()
    assert len(source) == 1
    source.close()
