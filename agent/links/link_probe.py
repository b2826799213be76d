"""Measures links to other agents on the controller's request, and lets those measure that it sent here.

The measuring agent dials the address at which workers are dialled, or goes through the relay. It proves who it is by
the relay's handshake: its key is derived from this agent's secret and its name, and only the controller has the secret.
A stranger gets 32 random bytes. Then it asks by single bytes: PING is returned, SEND begins a burst to it, TAKE a burst
from it. Nothing that is sent means anything, so nothing is encrypted, as gradients of collectives are not.

An agent takes part in one measurement at a time. Those that others make here take at most SERVED_SHARE of its time."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from atoll.agent.links.bursts import (
    MAX_BURST_S,
    SETTLE_S,
    burst_seconds,
    close_at_once,
    drain,
    ping,
    receive_burst,
    send_burst,
)
from atoll.errors import AtollError, BadInput, ControllerUnreachable, NotAllowed
from atoll.host.ports import candidate_ports, listening
from atoll.relay.client import connected
from atoll.relay.handshake import KEY_BYTES, NONCE_BYTES, Call, checked, exactly, proven, read_frame, write_frame
from atoll.v1.agents_pb2 import LinkMeasured, MeasureLink

logger = logging.getLogger(__name__)

PING: Final = b"p"
SEND: Final = b"s"
TAKE: Final = b"t"
SERVED_SHARE: Final = 0.25
"""Largest share of time in which others may measure here. A measurement that begins within it may end beyond it."""
SERVED_AHEAD_S: Final = 20.0
"""Seconds of measurements that others may make at once: an agent that joins is measured several times."""
HANDSHAKE_S: Final = 3.0
MEASUREMENT_S: Final = 15.0
"""Longest measurement, in seconds; also of one that is served here."""
TURN_S: Final = 2.0
"""Longest wait for the end of another measurement: that of the same agent in the other direction has just ended."""
MAX_STRANGERS: Final = 8
"""Connections that have not yet proven who they are."""
MAX_REPORTS: Final = 64
_TRIES: Final = 200
_MAX_TROUBLE: Final = 300

Dial = Callable[[str], Awaitable[socket.socket]]
"""Opens a connection through the relay to the probe of a node."""


class LinkProbe:
    """Measurements of one agent, on its event loop. `reported` is called when `next_report` has something."""

    def __init__(self, node: str, dial: Dial, reported: Callable[[], None]) -> None:
        self._node, self._dial, self._reported = node, dial, reported
        self.secret: Final = secrets.token_bytes(KEY_BYTES)
        self.port = 0
        """Listening port; 0: none."""
        self._address = ""
        self._listener: socket.socket | None = None
        self._alone = asyncio.Lock()
        self._strangers = 0
        self._allowance_s, self._allowed_s = SERVED_AHEAD_S, time.monotonic()
        self._reports: deque[LinkMeasured] = deque(maxlen=MAX_REPORTS)
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, address: str) -> None:
        """Listen at this address of the machine. If no port is free there, log it and listen nowhere."""
        if address == self._address:
            return
        self.close()
        self._address = address
        ports = candidate_ports()
        for host in (address, "0.0.0.0"):  # a gateway's address is none of this machine
            for port in random.sample(ports, min(_TRIES, len(ports))):
                try:
                    self._listener = listening(host, port)
                except OSError:
                    continue
                self.port = port
                self._own(self._accept(self._listener), "links: accept")
                return
        logger.warning("links to this node are not measured: no port of %s is free", address)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        self._listener, self._address, self.port = None, "", 0

    async def closed(self) -> None:
        """Close, and wait until all tasks have ended."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def measure(self, asked: MeasureLink) -> None:
        """Measure a link, checked before; `next_report` returns the answer later."""
        self._own(self._measure(asked), f"links: measure {asked.node}")

    def next_report(self) -> LinkMeasured | None:
        return self._reports.popleft() if self._reports else None

    def _own(self, work: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Exclude other measurements. Raises ControllerUnreachable while one lasts, TimeoutError after
        MEASUREMENT_S."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._alone.acquire()
        except TimeoutError as error:
            raise ControllerUnreachable(f"{self._node} measures another link") from error
        try:
            async with asyncio.timeout(MEASUREMENT_S):
                yield
        finally:
            self._alone.release()

    # This agent measures.

    async def _measure(self, asked: MeasureLink) -> None:
        report, began_s = LinkMeasured(node=asked.node), time.monotonic()
        try:
            async with self._turn():
                async with self._asking(asked) as connection:
                    report.rtt_s = await ping(connection, PING)
                    seconds = burst_seconds(asked.burst_s, report.rtt_s)
                    await asyncio.get_running_loop().sock_sendall(connection, SEND + _milliseconds(seconds))
                    report.from_bps = await receive_burst(connection, seconds)
                await asyncio.sleep(SETTLE_S)
                async with self._asking(asked) as connection:
                    await asyncio.get_running_loop().sock_sendall(connection, TAKE + _milliseconds(seconds))
                    sending = asyncio.create_task(send_burst(connection, seconds + HANDSHAKE_S), name="links: burst")
                    try:
                        report.to_bps = _bps_of(await read_frame(connection))
                    finally:
                        sending.cancel()
                        await asyncio.wait({sending})
        except (AtollError, OSError, TimeoutError) as error:
            report.trouble = (str(error) or type(error).__name__)[:_MAX_TROUBLE]
        report.busy_s = max(1e-6, time.monotonic() - began_s - SETTLE_S)
        self._reports.append(report)
        self._reported()

    @asynccontextmanager
    async def _asking(self, asked: MeasureLink) -> AsyncIterator[socket.socket]:
        """A connection to the probe of that node, which has admitted this one. Raises OSError, AtollError,
        TimeoutError."""
        connection = await (self._dial(asked.node) if asked.relayed else connected(asked.address, asked.port))
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonce = await exactly(connection, NONCE_BYTES)
                await write_frame(connection, proven(Call(self._node, "dial", to=asked.node), asked.key, nonce))
            async with asyncio.timeout(TURN_S + HANDSHAKE_S):
                said = await read_frame(connection)
            if "refused" in said:
                raise ControllerUnreachable(f"{asked.node} refused: {str(said['refused'])[:100]}")
            yield connection
        finally:
            close_at_once(connection)

    # Others measure.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, say
                logger.warning("a measurement cannot be accepted: %s", error)
                await asyncio.sleep(1)
                continue
            connection.setblocking(False)
            if self._strangers >= MAX_STRANGERS:
                connection.close()
                continue
            self._own(self._serve(connection), "links: serve")

    async def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._strangers += 1
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    await self._admit(connection)
            finally:
                self._strangers -= 1
            if not self._may_serve():
                await write_frame(connection, {"refused": "others measured there too often"})
                return
            async with self._turn():
                began_s = time.monotonic()
                try:
                    await write_frame(connection, {"welcome": self._node})
                    await self._obey(connection)
                finally:
                    self._allowance_s -= time.monotonic() - began_s
        except (AtollError, OSError, TimeoutError) as error:
            logger.debug("a measurement here ended: %s", error or type(error).__name__)
        finally:
            close_at_once(connection)

    async def _admit(self, connection: socket.socket) -> None:
        """Raises NotAllowed for a stranger."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await asyncio.get_running_loop().sock_sendall(connection, nonce)
        call = checked(await read_frame(connection), self.secret, nonce)
        if call is None or call.to != self._node:
            raise NotAllowed("a stranger dialled")

    def _may_serve(self) -> bool:
        now_s = time.monotonic()
        self._allowance_s += SERVED_SHARE * (now_s - self._allowed_s)
        self._allowance_s, self._allowed_s = min(self._allowance_s, SERVED_AHEAD_S), now_s
        return self._allowance_s > 0

    async def _obey(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            match await exactly(connection, 1):
                case b"p":
                    await loop.sock_sendall(connection, PING)
                case b"s":
                    await send_burst(connection, await _seconds(connection) + HANDSHAKE_S)
                    return
                case b"t":
                    bps = await receive_burst(connection, await _seconds(connection))
                    await write_frame(connection, {"bps": bps})
                    await drain(connection)
                    return
                case byte:
                    raise BadInput(f"a measurement cannot begin with {byte!r}")


def _milliseconds(seconds: float) -> bytes:
    return int(1e3 * seconds).to_bytes(2)


async def _seconds(connection: socket.socket) -> float:
    return min(int.from_bytes(await exactly(connection, 2)) / 1e3, MAX_BURST_S)


def _bps_of(said: dict[str, Any]) -> float:
    """Raises BadInput."""
    bps = said.get("bps")
    if not isinstance(bps, float | int) or not 0 < bps < 1e15:
        raise BadInput(f"the other end measured {json.dumps(bps)[:100]} bit/s")
    return float(bps)
