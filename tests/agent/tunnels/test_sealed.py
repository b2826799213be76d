"""Links that agents seal: what passes, and what happens to who has not the keys, or changes a byte on the way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from atoll.agent.runtime.checkpoints.memory.replication.sealing import Sealer
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.tunnels.passages import LinkNote, member_of
from atoll.agent.tunnels.sealed import PURPOSE, join_sealed
from atoll.errors import BadInput
from atoll.relay.handshake import exactly
from atoll.v1.agents_pb2 import DataKeys, Launch, Member, View, ViewMember
from atoll.v1.worker_pb2 import Welcome

PAIRS = [generate() for _ in range(3)]
PUBLIC = {rank: public for rank, (_, public) in enumerate(PAIRS)}


def sealer(rank: int, run: int = 1, of: dict[int, bytes] | None = None) -> Sealer:
    secret, public = PAIRS[rank]
    return Sealer(run, rank, Keys(secret=secret, public=public, of=of or PUBLIC), PURPOSE)


def ends() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for one in pair:
        one.setblocking(False)
    return pair


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story()

    asyncio.run(bounded())


def test_bytes_pass_both_ways_nothing_of_them_is_seen_between_and_the_end_is_told() -> None:
    async def story() -> None:
        (zero, zero_in), (one, one_in) = ends(), ends()
        (zero_out, seen_a), (seen_b, one_out) = ends(), ends()
        loop, seen = asyncio.get_running_loop(), bytearray()

        async def carry(source: socket.socket, sink: socket.socket) -> None:
            while data := await loop.sock_recv(source, 65536):
                seen.extend(data)
                await loop.sock_sendall(sink, data)
            sink.shutdown(socket.SHUT_WR)

        joined = [
            asyncio.create_task(work)
            for work in (
                join_sealed(zero_in, zero_out, sealer(0), 1),
                join_sealed(one_in, one_out, sealer(1), 0),
                carry(seen_a, seen_b),
                carry(seen_b, seen_a),
            )
        ]
        secret = b"plain as day " * 40_000
        with zero, one, seen_a, seen_b:
            for sender, receiver in ((zero, one), (one, zero)):
                sending = asyncio.create_task(loop.sock_sendall(sender, secret))
                assert await exactly(receiver, len(secret)) == secret
                await sending
            zero.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(one, 1) == b""
            one.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(zero, 1) == b""
            await asyncio.gather(*joined)
        assert b"plain as day" not in seen
        assert len(seen) > 2 * len(secret)

    run(story)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: sealer(1, run=2), id="of another run"),
        pytest.param(lambda: sealer(2), id="another rank"),
        pytest.param(lambda: sealer(1, of={1: PUBLIC[1], 0: PUBLIC[2]}), id="that takes us for another"),
    ],
)
def test_who_has_not_the_keys_of_the_rank_is_found_out_before_a_byte_passes(other: Callable[[], Sealer]) -> None:
    async def story() -> None:
        (zero, zero_in), (one, one_in), (zero_out, one_out) = ends(), ends(), ends()
        loop = asyncio.get_running_loop()
        with zero, one:
            await loop.sock_sendall(zero, b"secret")
            found = await asyncio.gather(
                join_sealed(zero_in, zero_out, sealer(0), 1),
                join_sealed(one_in, one_out, other(), 0),
                return_exceptions=True,
            )
            assert all(isinstance(error, Exception) for error in found)
            assert await loop.sock_recv(one, 16) == b""

    run(story)


def test_notes_are_read_back_and_nonsense_is_refused() -> None:
    note = LinkNote("vit-12ab", 3, 1, 0, 4711, True)
    assert LinkNote.parse(str(note)) == note
    for text in ("", "{}", "[]", str(note).replace("4711", "70000"), str(note).replace("true", "1"), '{"job": 1}'):
        with pytest.raises(BadInput):
            LinkNote.parse(text)


def test_members_are_those_of_the_newest_view_then_of_the_launch() -> None:
    launch = Launch(
        members=[Member(rank=0, node="a"), Member(rank=1, node="b")], keys=DataKeys(public=[b"0" * 32, b"1" * 32])
    )
    view = View(members=[ViewMember(member=Member(rank=2, node="c"), public_key=b"2" * 32)])
    found = [member_of(Welcome(launch=launch, view=view), rank) for rank in range(4)]
    assert [(one.node, one.public_key[:1]) if one else None for one in found] == [
        ("a", b"0"),
        ("b", b"1"),
        ("c", b"2"),
        None,
    ]
