"""Copies between two senders over real sockets."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from simulated_links import trained
from thin_link import LINK_BYTES_PER_S, ThinLink

from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.memory.replication import replica_sender
from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import PROFILE_STEPS, USABLE_SHARE
from atoll.agent.runtime.checkpoints.memory.replication.link_share import MIN_COPIES_SHARE
from atoll.agent.runtime.checkpoints.memory.replication.path_model import PathModel
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import FileChunk, ReplicaTransfer, place_of
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import PAGE_BYTES
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import ShardFiles
from atoll.agent.runtime.transport.keys import KEY_BYTES, Keys, generate
from atoll.agent.runtime.transport.meter import LinksInUse, kernel_counts

DEADLINE_S = 30.0
CHUNK_BYTES = 128 * 1024


def keys(count: int) -> list[Keys]:
    pairs = [generate() for _ in range(count)]
    public = dict(enumerate(own for _, own in pairs))
    return [Keys(secret=secret, public=public[rank], of=public) for rank, (secret, _) in enumerate(pairs)]


class Pair:
    """Rank 0 sends, rank 1 holds."""

    def __init__(
        self,
        folder: Path,
        own: list[Keys],
        limit_bytes: int = 1 << 30,
        wire: Callable[[str], Wire | ThinLink] | None = None,
        links_in_use: Callable[[], LinksInUse | None] = lambda: None,
    ) -> None:
        self.folder, self.said = folder, list[str]()
        files = ShardFiles(ShardFolders(folder).slots(0, 2, on_disk=False), None, lambda: False)
        self.holder = self._made(1, own, {0: files}, limit_bytes)
        self.sender = self._made(0, own, {}, limit_bytes, links_in_use)
        self.endpoints = [sender.bind("127.0.0.1") for sender in (self.sender, self.holder)]
        self.wire = wire(self.endpoints[1][KEY_BYTES:].decode()) if wire is not None else None
        if self.wire is not None:
            self.endpoints[1] = self.endpoints[1][:KEY_BYTES] + self.wire.endpoint.encode()
        self.holder.start(self.endpoints, ())
        self.sender.start(self.endpoints, (1,))

    def _made(
        self, rank: int, own: list[Keys], incoming: dict[int, ShardFiles], limit: int,
        links_in_use: Callable[[], LinksInUse | None] = lambda: None,
    ) -> ReplicaSender:  # fmt: skip
        return ReplicaSender(
            run=1, rank=rank, keys=own[rank], incoming=incoming, limit_bytes=limit,
            notify=self.said.append, links_in_use=links_in_use,
        )  # fmt: skip

    def wait(self, what: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < ends_s, (self.holder.dropped, self.sender.dropped, self.said)
            threading.Event().wait(0.005)

    def close(self) -> None:
        self.sender.close()
        if self.wire is not None:
            self.wire.close()
        self.holder.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "held"
    folder.mkdir()
    made = Pair(folder, keys(2))
    yield made
    made.close()


def transfer(folder: Path, step: int, size: int) -> ReplicaTransfer:
    path = folder / f"own-{step}"
    path.write_bytes(random.Random(step).randbytes(size) + b"older, longer content")
    return ReplicaTransfer(step, path, size)


@pytest.mark.parametrize("size", [PAGE_BYTES + 1, CHUNK_BYTES, PAGE_BYTES + CHUNK_BYTES, 5 * CHUNK_BYTES + 77])
def test_places_cover_a_file_once_and_the_first_page_is_last(size: int) -> None:
    position, seen = 0, []
    while position < size:
        place, length = place_of(position, CHUNK_BYTES, size)
        seen.append((place, length))
        position += length
    assert seen[-1] == (0, PAGE_BYTES)
    covered = sorted(byte for place, length in seen for byte in (place, place + length))
    assert covered[0] == 0
    assert covered[-1] == size
    assert covered[1:-1:2] == covered[2::2]


def test_two_generations_stay_and_the_third_takes_the_place_of_the_first(pair: Pair, tmp_path: Path) -> None:
    for step, size in ((1, 3_000_000), (2, 50_000), (3, 3_500_001)):
        sent = transfer(tmp_path, step, size)
        pair.sender.send(sent)
        pair.wait(lambda step=step: pair.holder.done_step == step)  # type: ignore[misc]
        newest = [
            path
            for path in ShardFolders(pair.folder).paths()
            if path.read_bytes()[:size] == sent.path.read_bytes()[:size]
        ]
        assert len(newest) == 1
        assert len(ShardFolders(pair.folder).paths()) == min(step, 2)
    before = (tmp_path / "own-2").read_bytes()[:50_000]
    assert sum(path.read_bytes()[:50_000] == before for path in ShardFolders(pair.folder).paths()) == 1


def test_nothing_leaves_while_training_sends(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most what was under way when it began arrives; the rest follows at once when the links are idle again."""
    pair.sender.send(transfer(tmp_path, 1, 200_000))
    pair.wait(lambda: pair.holder.done_step == 1)
    monkeypatch.setattr(replica_sender, "_STARVED_AFTER_S", 3600.0)
    pair.sender.pause()
    pair.sender.send(transfer(tmp_path, 2, 3_000_000))
    pair.wait(lambda: pair.sender._transfer is not None and pair.sender._transfer.step == 2)
    assert pair.holder._incoming[0].step == 1
    assert pair.sender._outgoing[1]._sent == 0
    pair.sender.resume()
    pair.wait(lambda: pair.holder.done_step == 2)


class Queued(PathModel):
    """A path on which 300 ms of copies are queued."""

    @property
    def queued_s(self) -> float:
        return 0.3


def test_an_exchange_that_finds_copies_on_its_link_is_late_and_that_counts_once(pair: Pair, tmp_path: Path) -> None:
    """1. Training begins to send while the link has nothing of a copy left: no delay. 2. It does while 300 ms of a copy
    are queued: that much, asked for once."""
    sent = transfer(tmp_path, 1, 2_000_000)
    pair.sender.send(sent)
    pair.wait(lambda: pair.holder.done_step == 1)
    path = pair.sender._outgoing[1].path
    pair.wait(lambda: not path._under_way)
    pair.sender.pause()
    pair.sender.resume()
    pair.wait(lambda: not pair.sender._events)
    assert pair.sender.delay_s() == 0.0
    pair.sender._outgoing[1].path = Queued()
    pair.sender.pause()
    pair.sender.resume()
    pair.wait(lambda: not pair.sender._events)
    assert pair.sender.delay_s() == pytest.approx(0.3)
    assert pair.sender.delay_s() == 0.0


def test_a_copy_goes_on_where_it_broke_off(pair: Pair, tmp_path: Path) -> None:
    """Chunks that were lost on the way are sent again after a while, from the place that the holder has reached."""
    take, lost = pair.holder._take, []

    def deaf(message: list[object]) -> str | None:
        if len(lost) < 3 and pair.holder._incoming[0].reached >= 2 * CHUNK_BYTES:
            lost.append(message)
            return "lost by the test"
        return take(message)  # type: ignore[arg-type]

    pair.holder._take = deaf  # type: ignore[method-assign, assignment]
    sent = transfer(tmp_path, 1, 2_000_000)
    pair.sender.send(sent)
    pair.wait(lambda: pair.holder.done_step == 1)
    assert len(lost) == 3
    assert ShardFolders(pair.folder).paths()[0].read_bytes()[:2_000_000] == sent.path.read_bytes()[:2_000_000]


def test_who_has_no_key_of_the_run_brings_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    ours, theirs = keys(2), keys(2)
    stranger = [Keys(secret=theirs[0].secret, public=theirs[0].public, of=ours[1].of), ours[1]]
    pair = Pair(folder, stranger)
    try:
        pair.sender.send(transfer(tmp_path, 1, 200_000))
        pair.wait(lambda: pair.holder.dropped["damaged, of another rank or seen before"] > 0)
        assert ShardFolders(folder).paths() == []
    finally:
        pair.close()


def test_a_copy_over_the_limit_is_not_begun(tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    pair = Pair(folder, keys(2), limit_bytes=100_000)
    try:
        pair.sender.send(transfer(tmp_path, 1, 200_000))
        pair.wait(lambda: pair.holder.dropped["makes no sense"] > 0)
        assert (ShardFolders(folder).paths(), pair.holder.done_step) == ([], 0)
    finally:
        pair.close()


def test_a_holder_without_room_says_so(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    pair = Pair(small_disk(64 * 1024), keys(2))
    try:
        pair.sender.send(transfer(tmp_path, 1, 200_000))
        pair.wait(lambda: pair.holder.failed is not None)
        assert "No space left" in str(pair.holder.failed)
    finally:
        pair.close()


class Wire:
    """Between a sender and its holder; breaks the connection once, after so many bytes, and not again."""

    def __init__(self, target: str, cut_after: int) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target, self._left = (host, int(port)), cut_after
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.uploaded: list[int] = []  # bytes of each connection, towards the holder
        self._ends = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="wire")
        self._thread.start()

    def _serve(self) -> None:
        while select.select([self._server, self._ends], [], [])[0] == [self._server]:
            sender, _ = self._server.accept()
            with sender, socket.create_connection(self._target) as holder:
                self.uploaded.append(0)
                self._carry(sender, holder)

    def _carry(self, sender: socket.socket, holder: socket.socket) -> None:
        while True:
            ready = select.select([sender, holder, self._ends], [], [])[0]
            if self._ends in ready:
                return
            for source, to in ((sender, holder), (holder, sender)):
                if source not in ready:
                    continue
                data = source.recv(65536)
                if not data:
                    return
                if source is sender:
                    self.uploaded[-1] += len(data)
                    if len(self.uploaded) == 1 and self.uploaded[0] > self._left:
                        return  # with what the holder was to get and what it answered
                to.sendall(data)

    def close(self) -> None:
        os.eventfd_write(self._ends, 1)
        self._thread.join(30)
        self._server.close()
        os.close(self._ends)


def test_a_connection_that_breaks_costs_what_was_under_way(tmp_path: Path) -> None:
    """1. 16 MB are on their way. 2. After 5 MB the connection breaks, with data in all buffers. 3. The sender connects
    again; the holder says where it stands, and stores no byte twice. 4. The copy is the same to the byte."""
    folder = tmp_path / "held"
    folder.mkdir()
    total, cut_after = 16_000_000, 5_000_000
    pair = Pair(folder, keys(2), wire=lambda endpoint: Wire(endpoint, cut_after))
    assert pair.wire is not None
    try:
        file = pair.holder._files[0].next()
        put, stored = file.put, list[int]()

        def seen(part: bytes | memoryview, place: int) -> None:
            stored.append(len(part))
            put(part, place)

        file.put = seen  # type: ignore[method-assign]
        sent = transfer(tmp_path, 1, total)
        pair.sender.send(sent)
        pair.wait(lambda: pair.holder.done_step == 1)
        assert ShardFolders(folder).paths()[0].read_bytes()[:total] == sent.path.read_bytes()[:total]
        assert len(pair.wire.uploaded) == 2
        assert sum(stored) == total  # what was there was not begun again
        assert pair.sender.sent_bytes > total
    finally:
        pair.close()


def test_what_does_not_fit_into_a_span_comes_in_the_next_one(pair: Pair, tmp_path: Path) -> None:
    """1. Spans last 30 s, and this one is over in 10 ms: 40 MB do not fit. 2. Some leaves all the same. 3. The rest
    leaves in the next span."""
    for step in (1, 2):
        pair.sender.send(transfer(tmp_path, step, 2_000_000))
        pair.wait(lambda step=step: pair.holder.done_step == step)  # type: ignore[misc]
    third = transfer(tmp_path, 3, 40_000_000)
    span_s, exchange_s = 30.0, 0.01
    begin_s = time.monotonic() - PROFILE_STEPS * (span_s + exchange_s) - USABLE_SHARE * span_s + 0.01
    pair.sender._spans.busy(begin_s)
    trained(pair.sender._spans, PROFILE_STEPS, span_s, begin_s=begin_s, exchange_s=exchange_s)
    pair.sender.send(third)
    outgoing = pair.sender._outgoing[1]
    pair.wait(lambda: outgoing._transfer is not None and outgoing._transfer.step == 3 and outgoing._reached > 0)
    assert 0 < outgoing._sent < third.total
    pair.sender.pause()
    pair.sender.boundary()
    pair.sender.resume()
    pair.wait(lambda: pair.holder.done_step == 3)


def test_junk_of_strangers_is_dropped_and_counted(pair: Pair, tmp_path: Path) -> None:
    """Who can reach the port can send, but nothing of it is used, and copies go on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(pair.endpoints[1][KEY_BYTES:].decode())
    head = FileChunk(run=1, step=9, owner=0, position=0, total=200_000, number=1).pack()
    for message in ([b""], [b"", b""], [head], [head, bytes(1000)], [head[:-1], bytes(1000)], [head, b"", b""]):
        stranger.send_multipart(message)
    stranger.send_multipart([FileChunk(run=2, step=9, owner=0, position=0, total=200_000, number=1).pack(), bytes(100)])
    pair.wait(lambda: sum(pair.holder.dropped.values()) == 7)
    assert pair.holder.dropped["damaged, of another rank or seen before"] == 1
    pair.sender.send(transfer(tmp_path, 1, 200_000))
    pair.wait(lambda: pair.holder.done_step == 1)
    context.destroy(linger=0)


def test_links_that_are_never_idle_carry_a_chunk_now_and_then(pair: Pair, tmp_path: Path) -> None:
    pair.sender.pause()
    pair.sender.send(transfer(tmp_path, 1, 100_000))
    pair.wait(lambda: pair.holder.done_step == 1)
    assert pair.sender._paused


STEP_S, BUSY = 0.3, 0.7
EXCHANGED_BYTES = int(BUSY * STEP_S * LINK_BYTES_PER_S)


def test_beside_an_exchange_that_needs_a_thin_link_copies_have_a_bounded_part(tmp_path: Path) -> None:
    """1. An exchange fills 70 % of a link's time. 2. A generation begins that would take minutes. 3. Half of what the
    exchange leaves is copied in the long run, in place of all of it, and of what they carried while it was under way is
    known how much that was."""
    folder, links = tmp_path / "held", list[ThinLink]()
    folder.mkdir()
    exchange = socket.socket()

    def thin(target: str) -> ThinLink:
        links.append(ThinLink(target))
        exchange.connect(links[0].exchange)
        return links[0]

    def in_use() -> LinksInUse:
        counts = kernel_counts(exchange)
        return LinksInUse(counts.waiting_bytes > 0, {1: counts.busy_s}, counts.acked_bytes or 0, beyond=frozenset({1}))

    pair = Pair(folder, keys(2), wire=thin, links_in_use=in_use)
    try:
        pair.sender.send(transfer(tmp_path, 1, 200 << 20))
        exchange.sendall(bytes(EXCHANGED_BYTES))
        pair.wait(lambda: pair.sender._outgoing[1].path.bandwidth is not None)
        begun_s, before = time.monotonic(), links[0].carried["copies"]
        for step in range(15):
            pair.wait(lambda step=step: time.monotonic() >= begun_s + step * STEP_S)
            exchange.sendall(bytes(EXCHANGED_BYTES))
        could_bytes = LINK_BYTES_PER_S * (time.monotonic() - begun_s)
        assert 0.03 < (links[0].carried["copies"] - before) / could_bytes < MIN_COPIES_SHARE + 0.07
        assert 0 <= pair.sender.copied_beside[1] <= pair.sender._outgoing[1].arrived_bytes
        assert pair.sender._share.share is not None
    finally:
        pair.close()
        exchange.close()
