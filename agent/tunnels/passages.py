"""The agent's part in links through the relay: it opens ports here that lead to workers of other machines, and leads
what comes from there to its own workers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil

from atoll.agent.runtime.checkpoints.memory.replication.sealing import Sealer
from atoll.agent.runtime.transport.keys import Keys
from atoll.agent.tunnels.sealed import PURPOSE, join_sealed
from atoll.errors import AtollError, BadInput, ControllerUnreachable
from atoll.host.ports import listening
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import JOB_ID, MAX_RANK
from atoll.relay.client import call_relay, connected
from atoll.relay.handshake import Call, read_frame
from atoll.relay.splice import join
from atoll.v1.agents_pb2 import DataKeys, Launch, View
from atoll.v1.worker_pb2 import OpenPassage, Passage, Welcome

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Seconds for which a wanted link is retried: the relay may restart, or the other worker may not be there yet."""
IDLE_S: Final = 7200.0
MAX_LINKS: Final = 512
LINKS_NOTE: Final = "measure links"
"""Note of a connection to measure a link, in place of a LinkNote."""
LINKS_IDLE_S: Final = 10.0
_HERE: Final = "127.0.0.1"
_CALL_S: Final = 10.0
_DIAL_S: Final = 40.0  # longer than the relay waits for the other end
_AGAIN_S: Final = 0.5
_LONGEST_S: Final = 5.0
_LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class RankedMember:
    node: str
    public_key: bytes  # empty where the run has none


def member_of(welcome: Welcome, rank: int) -> RankedMember | None:
    """The worker with this number in the run. The newest view knows those who came later, the launch all others."""
    launch = welcome.launch
    for view in (welcome.view, launch.joins):
        if (found := _in_view(view, rank)) is not None:
            return found
    return _in_launch(launch, launch.keys, rank)


def _in_view(view: View, rank: int) -> RankedMember | None:
    for one in view.members:
        if one.member.rank == rank:
            return RankedMember(one.member.node, one.public_key)
    return None


def _in_launch(launch: Launch, keys: DataKeys, rank: int) -> RankedMember | None:
    for place, member in enumerate(launch.members):
        if member.rank == rank:
            return RankedMember(member.node, keys.public[place] if place < len(keys.public) else b"")
    return None


@dataclass(frozen=True, slots=True)
class LinkNote:
    """Note that goes with a link through the relay: between which workers it is, and to which port."""

    job: str
    run: int
    dialler: int
    """The rank that dials."""
    rank: int
    """The rank that is dialled."""
    port: int
    """Port at which the other worker listens on its machine."""
    seal: bool

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> LinkNote:
        """The reverse of str(). Raises BadInput."""
        try:
            note = LinkNote(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{text[:200]!r} is no note of a link: {error}") from error
        numbers = (note.run, note.dialler, note.rank, note.port)
        sound = all(type(number) is int for number in numbers) and type(note.seal) is bool and type(note.job) is str
        if not (sound and JOB_ID.fullmatch(note.job) and 0 < note.port < 2**16 and 0 < note.run < 2**40):
            raise BadInput(f"{text[:200]!r} is no note of a link")
        if not (0 <= note.dialler <= MAX_RANK and 0 <= note.rank <= MAX_RANK):
            raise BadInput(f"{text[:200]!r} names a rank beyond {MAX_RANK}")
        return note


@dataclass(frozen=True, slots=True)
class RelayAccess:
    """Address of the relay, and the key of this node."""

    address: str
    key: bytes

    def __repr__(self) -> str:
        return f"RelayAccess({self.address!r})"


@dataclass(frozen=True, slots=True)
class OwnWorkers:
    """Queries of passages about the workers of this node."""

    welcome: Callable[[WorkerKey], Welcome | None]
    pid: Callable[[WorkerKey], int | None]
    address: Callable[[], str]
    """Address at which this node's workers listen."""
    links_port: Callable[[], int] = lambda: 0
    """Port at which this node's links are measured; 0: none."""


class Passages:
    """Tunnels of this node, on the agent's event loop. All are closed when `run` is cancelled."""

    def __init__(self, node: str, workers: OwnWorkers) -> None:
        self._node, self._workers = node, workers
        self._access: RelayAccess | None = None
        self._changed = asyncio.Event()
        self._ports: dict[WorkerKey, dict[tuple[int, int, bool], tuple[int, asyncio.Task[None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.stands_by = False
        """Whether the relay would tell us of who dials."""

    def use(self, access: RelayAccess) -> None:
        """Use this relay for new links; open ones stay."""
        if access != self._access:
            self._access = access
            self._changed.set()

    def open(self, key: WorkerKey, asked: OpenPassage) -> Passage:
        """A port of this machine that leads this worker of ours to another one; the same for the same question."""
        where = (asked.rank, asked.port, asked.seal)
        ports = self._ports.setdefault(key, {})
        if where in ports:
            return Passage(asked=asked, port=ports[where][0])
        welcome = self._workers.welcome(key)
        there = member_of(welcome, asked.rank) if welcome is not None else None
        if there is None or not 0 < asked.port < 2**16 or len(ports) >= MAX_LINKS:
            return Passage(asked=asked, trouble=f"rank {asked.rank} is no member of the run, or has no port there")
        if self._access is None:
            return Passage(asked=asked, trouble="the controller named no relay")
        try:
            listener = listening(_HERE, 0)
        except OSError as error:
            return Passage(asked=asked, trouble=f"no port is free: {error}")
        port = int(listener.getsockname()[1])
        note = LinkNote(key.job, key.run, key.rank, asked.rank, asked.port, asked.seal)
        ports[where] = port, self._own(self._listen(listener, there.node, note))
        return Passage(asked=asked, port=port)

    async def dial_links(self, node: str) -> socket.socket:
        """A connection through the relay to where that node's links are measured. Raises OSError, AtollError,
        TimeoutError."""
        if (access := self._access) is None:
            raise ControllerUnreachable("the controller named no relay")
        return await call_relay(access.address, Call(self._node, "dial", to=node, note=LINKS_NOTE), access.key, _DIAL_S)

    def close(self, key: WorkerKey) -> None:
        """The worker is gone. What is under way ends with its connections."""
        for _, task in self._ports.pop(key, {}).values():
            task.cancel()

    async def run(self) -> None:
        try:
            while True:
                standing = asyncio.create_task(self._stand_by(), name="relay: stand by")
                try:
                    await self._changed.wait()
                    self._changed.clear()
                finally:
                    standing.cancel()
                    await asyncio.wait({standing})
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="passage")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Who is dialled stands by.

    async def _stand_by(self) -> None:
        pause_s, said = _AGAIN_S, ""
        while (access := self._access) is not None:
            connection: socket.socket | None = None
            try:
                connection = await call_relay(access.address, Call(self._node, "stand-by"), access.key, _CALL_S)
                self.stands_by, pause_s, said = True, _AGAIN_S, ""
                logger.info("standing by at the relay %s", access.address)
                while True:
                    self._own(self._answer(access, await read_frame(connection)))
            except (AtollError, OSError, TimeoutError) as error:
                text = f"no relay at {access.address}: {error or type(error).__name__}. Trying again for ever"
                logger.log(logging.DEBUG if text == said else logging.WARNING, "%s", text)
                said = text
            finally:
                self.stands_by = False
                if connection is not None:
                    connection.close()
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    async def _answer(self, access: RelayAccess, frame: dict[str, Any]) -> None:
        """Answer a link that another node dials to a worker here, or to measure it."""
        inner: socket.socket | None = None
        try:
            if frame.get("note") == LINKS_NOTE:
                inner = await connected(self._workers.address(), self._workers.links_port())
                await join(
                    inner, await self._answered(access, frame), idle_s=LINKS_IDLE_S, moved=lambda way, count: None
                )
                return
            note = LinkNote.parse(str(frame.get("note", "")))
            key = WorkerKey(note.job, note.run, note.rank)
            welcome = await self._listener(key, note, str(frame.get("by", "")))
            inner = await connected(self._workers.address(), note.port)
            await self._pass(inner, await self._answered(access, frame), note, welcome)
        except (AtollError, OSError, TimeoutError, ExceptionGroup) as error:
            logger.debug("%s: %s", frame, error)
            if inner is not None:
                inner.close()

    async def _answered(self, access: RelayAccess, frame: dict[str, Any]) -> socket.socket:
        """This end of a link that another node dials."""
        link = str(frame.get("link", ""))
        return await call_relay(access.address, Call(self._node, "answer", link=link), access.key, _CALL_S)

    async def _listener(self, key: WorkerKey, note: LinkNote, by: str) -> Welcome:
        """Wait until this node's worker listens there. Raises BadInput if it is unknown or the dialler is not in its
        run, TimeoutError."""
        async with asyncio.timeout(_DIAL_S):
            while True:
                welcome, pid = self._workers.welcome(key), self._workers.pid(key)
                if welcome is not None and pid is not None:
                    there = member_of(welcome, note.dialler)
                    if there is None or there.node != by:
                        raise BadInput(f"{by} dials in the name of rank {note.dialler}, which is not there")
                    if await asyncio.to_thread(listens, pid, note.port):
                        return welcome
                await asyncio.sleep(_LOOK_S)

    # Who dials.

    async def _listen(self, listener: socket.socket, node: str, note: LinkNote) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                connection, _ = await loop.sock_accept(listener)
                connection.setblocking(False)
                if len(self._tasks) > MAX_LINKS:
                    connection.close()
                    continue
                self._own(self._lead(connection, node, note))

    async def _lead(self, inner: socket.socket, node: str, note: LinkNote) -> None:
        welcome = self._workers.welcome(WorkerKey(note.job, note.run, note.dialler))
        try:
            if welcome is not None:
                async with asyncio.timeout(PATIENCE_S):
                    outer = await self._dialled(node, note)
                await self._pass(inner, outer, note, welcome)
        except (AtollError, OSError, TimeoutError, ExceptionGroup) as error:
            logger.info("no link of %s rank %d to rank %d on %s: %s", note.job, note.dialler, note.rank, node, error)
        finally:
            inner.close()

    async def _dialled(self, node: str, note: LinkNote) -> socket.socket:
        while True:
            access = self._access
            assert access is not None
            with suppress(ControllerUnreachable, OSError, TimeoutError):
                return await call_relay(
                    access.address, Call(self._node, "dial", to=node, note=str(note)), access.key, _DIAL_S
                )
            await asyncio.sleep(_AGAIN_S)

    async def _pass(self, inner: socket.socket, outer: socket.socket, note: LinkNote, welcome: Welcome) -> None:
        """welcome: of our worker at one of the ends."""
        if not note.seal:
            await join(inner, outer, idle_s=IDLE_S, moved=lambda way, count: None)
            return
        own, other = welcome.launch.id.rank, note.dialler
        if own == note.dialler:
            other = note.rank
        await join_sealed(inner, outer, _sealer(welcome, note.run, own, other), other)


def _sealer(welcome: Welcome, run: int, own: int, other: int) -> Sealer:
    ends = {rank: member_of(welcome, rank) for rank in (own, other)}
    public = {rank: one.public_key for rank, one in ends.items() if one is not None}
    keys = Keys(secret=welcome.launch.keys.secret, public=public.get(own, b""), of=public)
    return Sealer(run, own, keys, PURPOSE)


def listens(pid: int, port: int) -> bool:
    """Return True if this process listens on that port: no link leads to anything else on this machine."""
    with suppress(psutil.Error, OSError):
        found = psutil.Process(pid).net_connections(kind="tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)
    return False
