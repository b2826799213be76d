"""What comes to a courier from others: taken whole and in order from who may send it, or dropped and counted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
import zmq

from atoll.agent.runtime.memory.courier import _CHUNK, _MAGIC, Courier
from atoll.agent.runtime.memory.slot import PAGE_BYTES
from atoll.agent.runtime.memory.store import CopyFiles, ShardFiles, paths
from atoll.agent.runtime.wire.keys import Keys, generate, secure_client

RUN, TOTAL, DEADLINE_S = 3, PAGE_BYTES + 600, 20.0
BODY, HEAD = bytes(range(200)) * 3, b"\1" * PAGE_BYTES
FIRST = (BODY, 0)


class Holder:
    """Rank 1, who keeps rank 0's copies; and a socket that says to it whatever a test wants."""

    def __init__(self, folder: Path, own: list[Keys] | None = None, as_rank: int = 0) -> None:
        self.folder = folder
        copies = CopyFiles(ShardFiles(folder, 0, 3, None, lambda: False))
        keys = own[1] if own else None
        self.courier = Courier(
            run=RUN, rank=1, keys=keys, incoming={0: copies}, limit_bytes=1 << 20, tell=lambda text: None
        )
        endpoint = self.courier.bind("127.0.0.1")
        self.courier.start(["", endpoint, ""], ())
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if own:
            secure_client(self.socket, own[as_rank], 1)
        self.socket.connect(endpoint)

    def send(self, payload: bytes, position: int, *, damaged: bytes | None = None, **changed: int) -> None:
        said = {"run": RUN, "step": 9, "owner": 0, "total": TOTAL} | changed
        digest = xxhash.xxh3_64_intdigest(payload)
        head = _CHUNK.pack(
            _MAGIC, said["run"], said["step"], said["owner"], position, said["total"], changed.get("digest", digest)
        )
        self.socket.send_multipart([head, payload if damaged is None else damaged])

    def dropped(self, why: str) -> None:
        self.wait(lambda: self.courier.dropped[why] > 0)
        assert self.courier.dropped.total() == 1, self.courier.dropped
        assert (self.courier.done_step, paths(self.folder)) == (0, [])

    def wait(self, what: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < ends_s, self.courier.dropped
            threading.Event().wait(0.005)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
        self.courier.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path)
    yield made
    made.close()


def test_a_whole_copy_is_taken(holder: Holder) -> None:
    holder.send(BODY, 0)
    holder.send(HEAD, 600)
    holder.wait(lambda: holder.courier.done_step == 9)
    (path,) = paths(holder.folder)
    assert path.read_bytes() == HEAD + BODY


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"run": RUN - 1}, "not for this rank"),
        ({"run": RUN + 1}, "not for this rank"),
        ({"owner": 2}, "not for this rank"),
        ({"digest": 0}, "damaged"),
        ({"total": 1 << 30}, "makes no sense"),
        ({"total": PAGE_BYTES}, "makes no sense"),
        ({"total": TOTAL + 1}, "damaged"),
    ],
)
def test_a_chunk_of_another_run_or_rank_or_of_odd_size_is_dropped(
    holder: Holder, changed: dict[str, int], why: str
) -> None:
    holder.send(BODY, 0, **changed)
    holder.dropped(why)


@pytest.mark.parametrize("damaged", [BODY[:-1], BODY + b"x", BODY[:50] + b"!" + BODY[51:], b""])
def test_a_chunk_that_was_damaged_on_the_way_is_dropped(holder: Holder, damaged: bytes) -> None:
    holder.send(BODY, 0, damaged=damaged)
    holder.dropped("damaged")


def test_an_older_step_never_takes_the_place_of_a_newer(holder: Holder) -> None:
    """1. Step 9 is whole. 2. Chunks of step 8 come, late; and step 9 again with another length. 3. Nothing changed."""
    holder.send(BODY, 0)
    holder.send(HEAD, 600)
    holder.send(bytes(600), 0, step=8)
    holder.send(bytes(601), 0, total=TOTAL + 1)
    holder.wait(lambda: holder.courier.dropped["makes no sense"] == 2)
    assert holder.courier.done_step == 9
    (path,) = paths(holder.folder)
    assert path.read_bytes() == HEAD + BODY


def test_chunks_out_of_order_and_twice_make_no_copy_of_holes(holder: Holder) -> None:
    """The first page, which makes the copy count, is taken only when all before it is there."""
    holder.send(HEAD, 600)
    holder.send(BODY, 0)
    holder.send(BODY, 0)
    holder.send(bytes(600), 0, step=10)  # so that all before it was looked at
    holder.wait(lambda: holder.courier._incoming[0].step == 10)
    assert holder.courier.done_step == 0
    assert all(path.read_bytes()[:PAGE_BYTES] == bytes(PAGE_BYTES) for path in paths(holder.folder))


def test_a_rank_of_the_run_cannot_send_in_anothers_name(tmp_path: Path) -> None:
    pairs = [generate() for _ in range(3)]
    public = dict(enumerate(own for _, own in pairs))
    own = [Keys(secret=secret, public=public[rank], of=public) for rank, (secret, _) in enumerate(pairs)]
    holder = Holder(tmp_path, own, as_rank=2)
    try:
        holder.send(BODY, 0)
        holder.dropped("in another rank's name")
    finally:
        holder.close()


def test_noise_is_dropped_and_what_follows_it_is_taken(holder: Holder) -> None:
    """Frames of any number and length, among them chunks with flipped bytes; then a whole copy."""
    rng = random.Random(5)
    sound = _CHUNK.pack(_MAGIC, RUN, 4, 0, 0, TOTAL, xxhash.xxh3_64_intdigest(BODY))
    for number in range(400):
        head = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
        frames = [rng.randbytes(rng.randrange(80)) for _ in range(rng.randrange(1, 5))]
        holder.socket.send_multipart([bytes(head), BODY] if number % 2 else frames)
    step = 2**64 - 1  # noise may have begun any other
    holder.send(BODY, 0, step=step)
    holder.send(HEAD, 600, step=step)
    holder.wait(lambda: holder.courier.done_step == step)
    newest = max(paths(holder.folder), key=lambda path: path.stat().st_mtime_ns)
    assert newest.read_bytes()[:TOTAL] == HEAD + BODY
    assert holder.courier.failed is None
