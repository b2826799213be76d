"""The relay on real sockets: who is let in, what passes, and what it holds at most."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from atoll.errors import BadInput, ControllerUnreachable, NotAllowed
from atoll.relay.client import call_relay, connected
from atoll.relay.handshake import NONCE_BYTES, Call, checked, exactly, node_key, proven, read_frame, write_frame
from atoll.relay.server import Relay, RelayLimits, read_secret
from atoll.relay.splice import PIPE_BYTES

SECRET = b"of this cluster alone, 32 bytes!"
DEADLINE_S = 30.0


@asynccontextmanager
async def relaying(limits: RelayLimits | None = None) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(SECRET, limits)
    address = relay.listen("127.0.0.1:0")
    running = asyncio.create_task(relay.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield relay, address
    finally:
        running.cancel()
        await asyncio.wait({running})


async def called(address: str, call: Call, secret: bytes = SECRET) -> socket.socket:
    return await call_relay(address, call, node_key(secret, call.node), DEADLINE_S)


async def linked(address: str, note: str = "") -> tuple[socket.socket, socket.socket, dict[str, Any]]:
    """The ends of a link from a to b, and what b was told of it."""
    with closing(await called(address, Call("b", "stand-by"))) as standing:
        dialling = asyncio.create_task(called(address, Call("a", "dial", to="b", note=note)))
        told = await read_frame(standing)
        answered = await called(address, Call("b", "answer", link=told["link"]))
        return await dialling, answered, told


async def taken(connection: socket.socket, data: bytes) -> bool:
    """Whether all of it was, within a second."""
    try:
        async with asyncio.timeout(1.0):
            await asyncio.get_running_loop().sock_sendall(connection, data)
    except TimeoutError:
        return False
    return True


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def test_what_one_end_sends_comes_out_of_the_other_and_both_learn_of_the_end() -> None:
    async def story() -> None:
        async with relaying() as (relay, address):
            one, other, told = await linked(address, note="for b alone")
            assert (told["by"], told["note"]) == ("a", "for b alone")
            loop, data = asyncio.get_running_loop(), bytes(range(256)) * 8192
            with one, other:
                for sender, receiver in ((one, other), (other, one)):
                    sending = asyncio.create_task(loop.sock_sendall(sender, data))
                    assert await exactly(receiver, len(data)) == data
                    await sending
                one.shutdown(socket.SHUT_WR)
                assert await loop.sock_recv(other, 1) == b""
                await loop.sock_sendall(other, b"still open")
                assert await exactly(one, 10) == b"still open"
            assert relay.bytes == {("a", "b"): len(data), ("b", "a"): len(data) + 10}

    run(story)


def test_strangers_are_refused_and_so_is_a_node_in_anothers_name() -> None:
    async def story() -> None:
        async with relaying() as (relay, address):
            for want in ("stand-by", "dial", "answer"):
                with pytest.raises(NotAllowed):
                    await called(address, Call("b", want, to="a", link="x"), secret=b"x" * 32)  # type: ignore[arg-type]
            with pytest.raises(NotAllowed):  # its own key does not make it another node
                await call_relay(address, Call("b", "stand-by"), node_key(SECRET, "a"), DEADLINE_S)
            assert relay.refused == {"a key that is not of this relay": 4}

    run(story)


def test_what_was_overheard_opens_no_door_twice() -> None:
    call = Call("a", "dial", to="b")
    said = proven(call, node_key(SECRET, "a"), b"1" * NONCE_BYTES)
    assert checked(said, SECRET, b"1" * NONCE_BYTES) == call
    assert checked(said, SECRET, b"2" * NONCE_BYTES) is None
    assert checked({**said, "to": "c"}, SECRET, b"1" * NONCE_BYTES) is None
    for nonsense in ({**said, "want": "all"}, {**said, "node": 3}, {**said, "to": "../c"}, {**said, "note": "n" * 600}):
        with pytest.raises(BadInput):
            checked(nonsense, SECRET, b"1" * NONCE_BYTES)
    with pytest.raises(BadInput):
        read_secret("short")


def test_only_who_was_dialled_can_answer_and_who_is_not_here_is_told_of() -> None:
    async def story() -> None:
        async with relaying() as (_, address):
            with pytest.raises(ControllerUnreachable, match="not here"):
                await called(address, Call("a", "dial", to="b"))
            with closing(await called(address, Call("b", "stand-by"))) as standing:
                dialling = asyncio.create_task(called(address, Call("a", "dial", to="b")))
                link = (await read_frame(standing))["link"]
                with pytest.raises(ControllerUnreachable, match="nobody waits"):
                    await called(address, Call("c", "answer", link=link))
                with closing(await called(address, Call("b", "answer", link=link))), closing(await dialling):
                    pass

    run(story)


def test_who_takes_nothing_makes_the_sender_wait_and_costs_the_relay_a_pipe() -> None:
    """Back-pressure: with small buffers at both ends, no more than these and a pipe can be under way."""

    async def story() -> None:
        async with relaying() as (relay, address):
            one, other, _ = await linked(address)
            with one, other:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
                sent = 0
                while await taken(one, b"x" * 65536):
                    sent += 65536
                assert 0 < sent < 64 * 1024 * 1024  # what the kernel gives a socket, and no more
                passed = relay.bytes["a", "b"]
                assert sent - passed <= 16 * 1024 * 1024 + PIPE_BYTES
                for _ in range(sent // 65536):
                    assert await exactly(other, 65536) == b"x" * 65536

    run(story)


def test_idle_links_silent_callers_and_too_many_of_one_node_are_ended() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with relaying(RelayLimits(handshake_s=0.3)) as (relay, address):  # none has to be in time for it
            host, _, port = address.rpartition(":")
            with closing(await connected(host, int(port))) as silent:
                assert len(await exactly(silent, NONCE_BYTES)) == NONCE_BYTES
                assert await loop.sock_recv(silent, 1) == b""  # it never said who it is
            assert relay.refused["no call"] == 1
        async with relaying(RelayLimits(idle_s=0.3, connections_of_node=2)) as (relay, address):
            host, _, port = address.rpartition(":")
            with closing(await connected(host, int(port))) as rambling:
                await exactly(rambling, NONCE_BYTES)
                await loop.sock_sendall(rambling, b"\xff" * 4)  # announces four gigabytes
                assert await loop.sock_recv(rambling, 1) == b""
            one, other, _ = await linked(address)
            with one, other:
                assert await loop.sock_recv(one, 1) == b""
            with closing(await called(address, Call("b", "stand-by"))) as standing:
                dialling = [asyncio.create_task(called(address, Call("c", "dial", to="b"))) for _ in range(2)]
                for _ in dialling:
                    await read_frame(standing)
                with pytest.raises(ControllerUnreachable, match="too many"):
                    await called(address, Call("c", "dial", to="b"))
                for task in dialling:
                    task.cancel()
                await asyncio.gather(*dialling, return_exceptions=True)
            assert relay.refused["no call"] == 1

    run(story)


def test_a_node_that_stands_by_again_takes_the_place_of_its_old_connection() -> None:
    async def story() -> None:
        async with relaying() as (_, address):
            old, new = [await called(address, Call("b", "stand-by")) for _ in range(2)]
            with old, new:
                assert await asyncio.get_running_loop().sock_recv(old, 1) == b""
                dialling = asyncio.create_task(called(address, Call("a", "dial", to="b")))
                link = (await read_frame(new))["link"]
                with closing(await called(address, Call("b", "answer", link=link))), closing(await dialling):
                    pass

    run(story)


def test_measures_name_each_link_and_what_it_carried() -> None:
    async def story() -> None:
        async with relaying() as (relay, address):
            one, other, _ = await linked(address)
            with one, other:
                await asyncio.get_running_loop().sock_sendall(one, b"12345")
                assert await exactly(other, 5) == b"12345"
                told = {(m.name, labels): value for m, value, labels in relay.measures()}
                assert told["atoll_relay_bytes_total", ("a", "b")] == 5
                assert told["atoll_relay_links", ("a", "b")] == 1

    run(story)


def test_frames_have_a_limit() -> None:
    async def story() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)
            await write_frame(one, {"note": "n"})
            assert await read_frame(other) == {"note": "n"}
            with pytest.raises(BadInput):
                await write_frame(one, {"note": "n" * 4096})

    run(story)
