"""Chunks that come to a holder: taken whole and in order from who may send them, or dropped and counted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import FileChunk
from atoll.agent.runtime.checkpoints.memory.replication.sealing import Sealer
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import PAGE_BYTES
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import ShardFiles
from atoll.agent.runtime.transport.keys import KEY_BYTES, Keys, generate

RUN, TOTAL, DEADLINE_S = 3, PAGE_BYTES + 600, 30.0
BODY, HEAD = bytes(range(200)) * 3, b"\1" * PAGE_BYTES
NOT_SEALED_SO = "damaged, of another rank or seen before"


class Holder:
    """Rank 1, who keeps rank 0's copies; and ranks 0 and 2, who say to it whatever a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pairs = [generate() for _ in range(3)]
        public = dict(enumerate(one for _, one in pairs))
        own = [Keys(secret=secret, public=public[rank], of=public) for rank, (secret, _) in enumerate(pairs)]
        copies = ShardFiles(ShardFolders(folder).slots(0, 3, on_disk=False), None, lambda: False)
        self.sender = ReplicaSender(
            run=RUN, rank=1, keys=own[1], incoming={0: copies}, limit_bytes=1 << 20, notify=lambda text: None
        )
        told = self.sender.bind("127.0.0.1")
        sealers = {rank: Sealer(RUN, rank, own[rank]) for rank in (0, 2)}
        self.sender.start([sealers[0].ephemeral, told, sealers[2].ephemeral], ())
        self.seals = {rank: sealer.meet(1, told[:KEY_BYTES])[0] for rank, sealer in sealers.items()}
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(told[KEY_BYTES:].decode())

    def send(self, payload: bytes, position: int, *, by: int = 0, **changed: int) -> list[bytes]:
        """changed: of the chunk's head, before it is sealed. Returns what was sent."""
        number = self.seals[by].next_number()
        sound = FileChunk(run=RUN, step=9, owner=0, position=position, total=TOTAL, number=number)
        head = sound._replace(**changed).pack()
        message = [head, self.seals[by].seal(number, head, payload)]
        self.socket.send_multipart(message)
        return message

    def dropped(self, why: str) -> None:
        self.wait(lambda: self.sender.dropped[why] > 0)
        assert self.sender.dropped.total() == 1, self.sender.dropped
        assert (self.sender.done_step, ShardFolders(self.folder).paths()) == (0, [])

    def wait(self, what: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < ends_s, self.sender.dropped
            threading.Event().wait(0.005)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
        self.sender.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path)
    yield made
    made.close()


def test_a_whole_copy_is_taken(holder: Holder) -> None:
    holder.send(BODY, 0)
    holder.send(HEAD, 600)
    holder.wait(lambda: holder.sender.done_step == 9)
    (path,) = ShardFolders(holder.folder).paths()
    assert path.read_bytes() == HEAD + BODY


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"run": RUN - 1}, "not for this rank"),
        ({"run": RUN + 1}, "not for this rank"),
        ({"owner": 2}, "not for this rank"),
        ({"number": 0}, NOT_SEALED_SO),
        ({"number": 2**64 - 1}, NOT_SEALED_SO),
        ({"total": 1 << 30}, "makes no sense"),
        ({"total": PAGE_BYTES}, "makes no sense"),
        ({"total": 0}, "makes no sense"),
        ({"total": TOTAL - 1}, "makes no sense"),
        ({"position": TOTAL}, "makes no sense"),
        ({"position": 2**64 - 1}, "makes no sense"),
    ],
)
def test_a_chunk_of_another_run_or_rank_or_of_odd_size_is_dropped(
    holder: Holder, changed: dict[str, int], why: str
) -> None:
    holder.send(BODY, changed.pop("position", 0), **changed)
    holder.dropped(why)


@pytest.mark.parametrize("place", [0, 30, -1])
@pytest.mark.parametrize("frame", [0, 1])
def test_a_chunk_that_was_changed_on_the_way_is_dropped(holder: Holder, frame: int, place: int) -> None:
    """Its head or its payload; then the same sender's next chunk is taken as ever."""
    number = holder.seals[0].next_number()
    head = FileChunk(run=RUN, step=9, owner=0, position=0, total=TOTAL, number=number).pack()
    message = [bytearray(head), bytearray(holder.seals[0].seal(number, head, BODY))]
    message[frame][place] ^= 1
    holder.socket.send_multipart(message)
    holder.wait(lambda: holder.sender.dropped.total() == 1)
    assert ShardFolders(holder.folder).paths() == []
    holder.send(BODY, 0)
    holder.send(HEAD, 600)
    holder.wait(lambda: holder.sender.done_step == 9)


def test_an_older_step_never_takes_the_place_of_a_newer(holder: Holder) -> None:
    """1. Step 9 is whole. 2. Chunks of step 8 come, late; and step 9 again with another length. 3. Nothing changed."""
    holder.send(BODY, 0)
    holder.send(HEAD, 600)
    holder.send(bytes(600), 0, step=8)
    holder.send(bytes(601), 0, total=TOTAL + 1)
    holder.wait(lambda: holder.sender.dropped["makes no sense"] == 2)
    assert holder.sender.done_step == 9
    (path,) = ShardFolders(holder.folder).paths()
    assert path.read_bytes() == HEAD + BODY


def test_chunks_out_of_order_and_twice_make_no_copy_of_holes(holder: Holder) -> None:
    """The first page, which makes the copy count, is taken only when all before it is there."""
    holder.send(HEAD, 600)
    holder.send(BODY, 0)
    holder.send(BODY, 0)
    holder.send(bytes(600), 0, step=10)  # so that all before it was looked at
    holder.wait(lambda: holder.sender._incoming[0].step == 10)
    assert holder.sender.done_step == 0
    assert all(path.read_bytes()[:PAGE_BYTES] == bytes(PAGE_BYTES) for path in ShardFolders(holder.folder).paths())


def test_what_was_recorded_and_is_sent_again_is_dropped(holder: Holder) -> None:
    recorded = [holder.send(BODY, 0), holder.send(HEAD, 600)]
    holder.wait(lambda: holder.sender.done_step == 9)
    for message in recorded:
        holder.socket.send_multipart(message)
    holder.wait(lambda: holder.sender.dropped[NOT_SEALED_SO] == 2)


def test_a_rank_of_the_run_cannot_send_in_anothers_name(holder: Holder) -> None:
    holder.send(BODY, 0, by=2)
    holder.dropped(NOT_SEALED_SO)


def test_noise_is_dropped_and_what_follows_it_is_taken(holder: Holder) -> None:
    """Frames of any number and length, heads with flipped bytes, sealed chunks that say odd numbers; then a copy."""
    rng = random.Random(5)
    sound = FileChunk(run=RUN, step=4, owner=0, position=0, total=TOTAL, number=1).pack()
    for _ in range(100):
        head = bytearray(sound)
        head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
        holder.socket.send_multipart([bytes(head), BODY])
        holder.socket.send_multipart([rng.randbytes(rng.randrange(80)) for _ in range(rng.randrange(1, 5))])
        field = rng.choice(["run", "step", "owner", "position", "total"])
        odd = {field: rng.choice([0, 1, 2**31, 2**32 - 1, rng.randrange(TOTAL)])}
        holder.send(rng.randbytes(rng.choice([0, 1, 600, PAGE_BYTES])), odd.pop("position", 0), **odd)
    step = 2**64 - 1  # noise may have begun any other
    holder.send(BODY, 0, step=step)
    holder.send(HEAD, 600, step=step)
    holder.wait(lambda: holder.sender.done_step == step)
    assert HEAD + BODY in [path.read_bytes()[:TOTAL] for path in ShardFolders(holder.folder).paths()]
    assert holder.sender.failed is None
