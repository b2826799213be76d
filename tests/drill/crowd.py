"""A crowd of agents that come, and whose streams then all end at once: a controller keeps each of them until its lease
ends, and takes none for silent any sooner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import grpc.aio

from atoll.client.client import AsyncClient
from atoll.errors import AtollError
from atoll.network.message_limits import PROTOCOL
from atoll.network.rpc import open_channel
from atoll.v1 import agents_pb2, agents_pb2_grpc, common_pb2, jobs_pb2

SIZE: Final = 300
"""More than a controller remembers of those whose leases have ended."""
_BEAT_S: Final = 1.0
_COME_S: Final = 20.0
_LOOK_S: Final = 0.05
_MARGIN_S: Final = 0.3
"""A look this close to the first lease's end may rightly miss one of them."""


@dataclass(frozen=True, slots=True)
class CrowdLeft:
    """at_s: wall clock of its leaving. wrong: in words, who was not kept as it should have been."""

    at_s: float
    wrong: tuple[str, ...]


@dataclass(slots=True)
class _CrowdAgent:
    name: str
    spoke_s: float = 0.0
    lease_s: float = 0.0
    """As the controller said when it had registered it; 0 before."""


async def come_and_go(address: str) -> CrowdLeft | None:
    """At the controller that leads. None where nothing can be said: they did not come in time, the controller fell
    meanwhile, or it was asked too late."""
    channel = open_channel(address, None)
    crowd = [_CrowdAgent(f"crowd-{number:03d}") for number in range(SIZE)]
    came = asyncio.Semaphore(0)
    streams = [asyncio.create_task(_stream(channel, member, came), name=member.name) for member in crowd]
    try:
        async with AsyncClient([address], timeout_s=_COME_S) as client:
            with suppress(AtollError, TimeoutError):
                async with asyncio.timeout(_COME_S):
                    for _ in crowd:
                        await came.acquire()
                at_s = time.time()
                await channel.close()
                return await _looked_for(client, crowd, at_s)
        return None
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        await channel.close()


async def _stream(channel: grpc.aio.Channel, member: _CrowdAgent, came: asyncio.Semaphore) -> None:
    """Until it ends. It has a device, as all have: so slow a one that jobs do not want it."""
    device = common_pb2.Device(index=0, kind="cpu", model="crowd", memory_bytes=1, speed=1e-6, work_per_s=1e-6)
    register = agents_pb2.Register(
        name=member.name, session=member.name, island="default", address="127.0.0.1", memory_bytes=1, devices=[device],
        protocol=PROTOCOL, unix_s=time.time(), version=version("atoll"),
    )  # fmt: skip

    async def say() -> AsyncIterator[agents_pb2.AgentMessage]:
        yield agents_pb2.AgentMessage(register=register)
        while True:
            await asyncio.sleep(_BEAT_S)
            member.spoke_s = time.monotonic()
            yield agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat())

    with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
        member.spoke_s = time.monotonic()
        async for message in agents_pb2_grpc.AgentServiceStub(channel).Connect(say()):
            if message.HasField("registered"):
                member.lease_s = message.registered.lease_s
                came.release()


async def _looked_for(client: AsyncClient, crowd: Sequence[_CrowdAgent], at_s: float) -> CrowdLeft | None:
    """As soon as the controller knows that all are gone, while all leases last."""
    until_s = min(member.spoke_s + member.lease_s for member in crowd) - _MARGIN_S
    while time.monotonic() < until_s:
        nodes = {node.name: node for node in (await client.nodes()).nodes}
        there = {member.name: nodes.get(member.name) for member in crowd}
        if time.monotonic() >= until_s:
            break
        if not any(node is not None and node.connected for node in there.values()):
            return CrowdLeft(at_s, tuple(not_kept(there, crowd[0].lease_s)))
        await asyncio.sleep(_LOOK_S)
    return None


def not_kept(there: Mapping[str, jobs_pb2.Node | None], lease_s: float) -> list[str]:
    """In words, of nodes whose leases last: who is forgotten, or counts as silent for longer. Pure."""
    wrong = [f"{name} is forgotten" for name, node in there.items() if node is None]
    silent = (node for node in there.values() if node is not None and node.seen_s_ago > lease_s)
    return wrong + [f"{node.name} counts as silent for {node.seen_s_ago:.1f} s" for node in silent]
