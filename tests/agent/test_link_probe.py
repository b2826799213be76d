"""Measurements between two agents: what they give, and what others get."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from atoll.agent.links import link_probe
from atoll.agent.links.bursts import burst_seconds, send_burst
from atoll.agent.links.link_probe import PING, LinkProbe
from atoll.errors import ControllerUnreachable
from atoll.relay.client import connected
from atoll.relay.handshake import NONCE_BYTES, Call, exactly, node_key, proven, read_frame, write_frame
from atoll.v1.agents_pb2 import LinkMeasured, MeasureLink


async def no_relay(node: str) -> socket.socket:
    raise ControllerUnreachable("the controller named no relay")


@asynccontextmanager
async def two() -> AsyncIterator[tuple[LinkProbe, LinkProbe, asyncio.Event]]:
    """Agent a, which measures, and agent b, which listens. The event is set at each report of a."""
    reported = asyncio.Event()
    a, b = LinkProbe("a", no_relay, reported.set), LinkProbe("b", no_relay, lambda: None)
    b.listen("127.0.0.1")
    try:
        yield a, b, reported
    finally:
        await a.closed()
        await b.closed()


def asked(of: LinkProbe, *, by: str = "a", burst_s: float = 0.05, relayed: bool = False) -> MeasureLink:
    key = node_key(of.secret, by)
    return MeasureLink(node="b", address="127.0.0.1", port=of.port, key=key, burst_s=burst_s, relayed=relayed)


async def answer(a: LinkProbe, reported: asyncio.Event) -> LinkMeasured:
    async with asyncio.timeout(20):
        await reported.wait()
    reported.clear()
    found = a.next_report()
    assert found is not None
    return found


async def test_both_directions_and_the_round_trip_are_measured() -> None:
    async with two() as (a, b, reported):
        a.measure(asked(b))
        found = await answer(a, reported)
        assert found.trouble == ""
        assert 0 < found.rtt_s < 0.5
        assert min(found.to_bps, found.from_bps) > 50e6
        assert 0 < found.busy_s < 10


async def test_a_key_of_another_agent_or_process_opens_nothing() -> None:
    async with two() as (a, b, reported):
        wrong = asked(b, by="c"), asked(b)
        wrong[1].key = node_key(bytes(32), "a")
        for one in wrong:
            a.measure(one)
            assert (await answer(a, reported)).trouble != ""


async def test_a_stranger_gets_a_nonce_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "HANDSHAKE_S", 0.3)
    async with two() as (_, b, _):
        stranger = await connected("127.0.0.1", b.port)
        with stranger:
            await exactly(stranger, NONCE_BYTES)
            with pytest.raises(ConnectionResetError):
                await exactly(stranger, 1)


async def test_many_strangers_hold_no_memory_and_keep_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "HANDSHAKE_S", 0.3)
    async with two() as (a, b, reported):
        strangers = [await connected("127.0.0.1", b.port) for _ in range(3 * link_probe.MAX_STRANGERS)]
        for one in strangers:
            with one, pytest.raises(ConnectionResetError):
                await exactly(one, NONCE_BYTES + 1)
        monkeypatch.setattr(link_probe, "HANDSHAKE_S", 3.0)
        a.measure(asked(b))
        assert (await answer(a, reported)).trouble == ""


async def test_one_measurement_at_a_time_and_a_share_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "TURN_S", 0.05)
    async with two() as (a, b, reported):
        with await _admitted(b):
            a.measure(asked(b))
            assert (await answer(a, reported)).trouble != ""
    monkeypatch.setattr(link_probe, "SERVED_AHEAD_S", 1e-9)
    monkeypatch.setattr(link_probe, "SERVED_SHARE", 0.0)
    async with two() as (a, b, reported):
        a.measure(asked(b))
        assert "too often" in (await answer(a, reported)).trouble  # one direction used it up


async def _admitted(b: LinkProbe) -> socket.socket:
    """A connection of agent c whose measurement has begun."""
    connection = await connected("127.0.0.1", b.port)
    nonce = await exactly(connection, NONCE_BYTES)
    await write_frame(connection, proven(Call("c", "dial", to="b"), node_key(b.secret, "c"), nonce))
    assert await read_frame(connection) == {"welcome": "b"}
    await asyncio.get_running_loop().sock_sendall(connection, PING)
    await exactly(connection, 1)
    return connection


async def test_without_a_relay_or_a_listener_the_trouble_is_reported() -> None:
    async with two() as (a, b, reported):
        a.measure(asked(b, relayed=True))
        assert "no relay" in (await answer(a, reported)).trouble
        gone = asked(b)
        await b.closed()
        a.measure(gone)
        assert (await answer(a, reported)).trouble != ""


async def test_a_burst_ends_with_its_time_though_nobody_reads() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, await connected("127.0.0.1", server.getsockname()[1]) as deaf:
        async with asyncio.timeout(10):
            await send_burst(deaf, 0.2)


def test_bursts_are_longer_over_links_with_long_round_trips() -> None:
    assert burst_seconds(0.3, 0.0002) == 0.3
    assert burst_seconds(0.3, 0.02) == pytest.approx(0.6)
    assert burst_seconds(0.3, 0.5) == 3.0
    assert burst_seconds(0.1, 0.5) == pytest.approx(1.0)
