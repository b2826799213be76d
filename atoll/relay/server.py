"""The relay itself: admits nodes that prove who they are, tells them who dials them, and joins the two connections.

It keeps no state that a restart could lose: who was connected dials again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.errors import AtollError, BadInput, SettingError
from atoll.host.ports import host_and_port, listening
from atoll.network.rpc import split_address
from atoll.relay.handshake import NONCE_BYTES, Call, checked, read_frame, write_frame
from atoll.relay.splice import join
from atoll.telemetry.prometheus import Measured, Measurement

logger = logging.getLogger(__name__)

LINKS: Final = Measurement("atoll_relay_links", "Links that are open", ("from", "to"))
BYTES: Final = Measurement("atoll_relay_bytes_total", "Bytes passed on", ("from", "to"))
NODES: Final = Measurement("atoll_relay_nodes", "Nodes that stand by")
REFUSED: Final = Measurement("atoll_relay_refused_total", "Calls refused", ("why",))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    connections: int = 4096
    """Connections of all nodes together; a link takes two."""

    connections_of_node: int = 512
    unknown: int = 128
    """Connections that have not proven yet who they are."""

    handshake_s: float = 5.0
    answer_s: float = 30.0
    """Seconds that a dialling node waits for the other end to accept the link."""

    idle_s: float = 7200.0
    """A link on which nothing passes for so long is closed. Collectives may be silent for as long as a step takes."""

    keepalive_s: int = 30
    """An end that answers no probe of TCP for three times as long is gone."""


@dataclass(slots=True)
class _Standing:
    connection: socket.socket
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Relay:
    """Listen, then `run` until cancelled. All on one event loop."""

    def __init__(self, secret: bytes, limits: RelayLimits | None = None) -> None:
        """secret: from which every node's key is derived; empty lets everyone in."""
        self._secret = secret
        self._limits = limits or RelayLimits()
        self._standing: dict[str, _Standing] = {}
        self._dialled: dict[str, tuple[str, asyncio.Future[socket.socket]]] = {}  # by link: who is to answer
        self._of_node: Counter[str] = Counter()
        self._unknown = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> str:
        """Gives the address with the port that was taken. Raises SettingError."""
        host, port = split_address(address)
        try:
            listener = listening(host, port)
        except OSError as error:
            why = f"cannot be listened on: {error.strerror or error}"
            raise SettingError("listen", address, why, "Choose another with --listen") from error
        self._listener = listener
        port = listener.getsockname()[1]
        return host_and_port(host, port)

    async def run(self) -> None:
        """Serve until cancelled; then every link is closed."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # out of descriptors, say: who is connected goes on
                    logger.warning("a connection cannot be accepted: %s", error)
                    await asyncio.sleep(1)
                    continue
                if self._unknown >= self._limits.unknown or len(self._tasks) >= self._limits.connections:
                    self.refused["too many connections"] += 1
                    connection.close()
                    continue
                task = asyncio.create_task(self._serve(connection), name="relay connection")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def measures(self) -> Iterator[Measured]:
        """Yield the relay's metrics."""
        yield NODES, len(self._standing), ()
        for ends, count in sorted(self.bytes.items()):
            yield LINKS, self.links[ends], ends
            yield BYTES, count, ends
        for why, count in sorted(self.refused.items()):
            yield REFUSED, count, (why,)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        keep_alive(connection, self._limits.keepalive_s)
        call: Call | None = None
        try:
            self._unknown += 1
            try:
                async with asyncio.timeout(self._limits.handshake_s):
                    call = await self._admitted(connection)
            finally:
                self._unknown -= 1
            if call is None:
                return
            self._of_node[call.node] += 1
            try:
                await self._obey(call, connection)
            finally:
                self._of_node[call.node] -= 1
        except (AtollError, OSError, TimeoutError) as error:
            if call is None:
                self.refused["no call"] += 1
            logger.debug("%s: %s", call, error)
        finally:
            if call is None or call.want != "answer":  # an answer's is its dialler's to close
                connection.close()

    async def _admitted(self, connection: socket.socket) -> Call | None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await asyncio.get_running_loop().sock_sendall(connection, nonce)
        call = checked(await read_frame(connection), self._secret, nonce)
        if call is None:
            await self._refuse(connection, "a key that is not of this relay")
            return None
        if self._of_node[call.node] >= self._limits.connections_of_node:
            await self._refuse(connection, "too many connections of this node")
            return None
        return call

    async def _refuse(self, connection: socket.socket, why: str) -> None:
        self.refused[why] += 1
        await write_frame(connection, {"refused": why})

    async def _obey(self, call: Call, connection: socket.socket) -> None:
        match call.want:
            case "stand-by":
                await self._stand_by(call.node, connection)
            case "dial":
                await self._dial(call, connection)
            case "answer":
                node, waiting = self._dialled.get(call.link, ("", None))
                if waiting is None or node != call.node or waiting.done():
                    await self._refuse(connection, "nobody waits for this answer")
                    connection.close()
                    return
                waiting.set_result(connection)

    async def _stand_by(self, node: str, connection: socket.socket) -> None:
        """The newest of a node counts: the one before is of a connection that broke unnoticed."""
        standing = _Standing(connection)
        before, self._standing[node] = self._standing.get(node), standing
        if before is not None:
            with suppress(OSError):
                before.connection.shutdown(socket.SHUT_RDWR)
        logger.info("%s stands by", node)
        try:
            await self._tell(standing, {"welcome": node})
            with suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(connection, 64):
                    pass  # it has nothing to say; its end is what is waited for
        finally:
            if self._standing.get(node) is standing:
                del self._standing[node]
                logger.info("%s stands by no more", node)

    async def _tell(self, standing: _Standing, body: dict[str, Any]) -> None:
        async with standing.writing, asyncio.timeout(self._limits.handshake_s):
            await write_frame(standing.connection, body)

    async def _dial(self, call: Call, connection: socket.socket) -> None:
        standing = self._standing.get(call.to)
        if standing is None:
            await self._refuse(connection, "the other node is not here")
            return
        link = secrets.token_hex(16)
        waiting: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._dialled[link] = (call.to, waiting)
        try:
            await self._tell(standing, {"link": link, "by": call.node, "note": call.note})
            async with asyncio.timeout(self._limits.answer_s):
                other = await waiting
        except TimeoutError:
            await self._refuse(connection, "the other node does not answer")
            return
        finally:
            del self._dialled[link]
            waiting.cancel()
        await self._join(call, connection, other)

    async def _join(self, call: Call, dialled: socket.socket, answered: socket.socket) -> None:
        ends = (call.node, call.to)
        self.links[ends] += 1

        def moved(way: int, count: int) -> None:
            self.bytes[ends if way == 0 else ends[::-1]] += count

        try:
            for one in (dialled, answered):
                await write_frame(one, {"joined": call.to})
            await join(dialled, answered, idle_s=self._limits.idle_s, moved=moved)
        finally:
            answered.close()
            self.links[ends] -= 1


def keep_alive(connection: socket.socket, every_s: int) -> None:
    """Probes an end that is silent; without delay for small messages."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)


def read_secret(text: str) -> bytes:
    """Parse the file's text. Raises BadInput."""
    secret = text.strip()
    if not 32 <= len(secret) <= 4096:
        raise BadInput(f"the relay's secret has {len(secret)} characters; it needs 32 to 4096")
    return secret.encode()
