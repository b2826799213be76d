"""Fetches shards from machines that hold them and have no part in the run. Their agents serve them
(`agent/supervisor/shard_server.py`).

What comes lies in a file of this machine's memory then, as if it had been there: it is verified and used like all that
was. A rank keeps no more of it than the pieces that are under way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import zmq
from google.protobuf.message import DecodeError
from humanize import naturalsize

from atoll.agent.runtime.checkpoints.disk.shard_folders import place_of
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import place_of as place_in_file
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import (
    Generation,
    HeldShard,
    Resumable,
    decode,
    encode,
    listed,
)
from atoll.agent.runtime.session.session import MemorySettings, Session
from atoll.agent.runtime.transport.keys import Keys, keys_of, secure_client
from atoll.errors import CheckpointError
from atoll.host.ports import host_and_port
from atoll.network.message_limits import MAX_SHARD_PIECE
from atoll.v1.agents_pb2 import ShardHolder
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING
from atoll.v1.worker_pb2 import ShardReply, ShardRequest

_ROUND_S: Final = 20.0
"""After which all ranks meet: however large a shard is, no collective waits for longer than that."""
ANSWER_S: Final = 5.0
"""An agent that says nothing for so long does not serve."""
_UNDER_WAY: Final = 8  # pieces
Sources = Mapping[Generation, Mapping[int, int]]


class OutsideAgents:
    """The agents that a launch names, to be asked by this rank. Use with `with`."""

    def __init__(self, holders: Sequence[ShardHolder], keys: Keys) -> None:
        self._holders, self._keys = holders, keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def __enter__(self) -> OutsideAgents:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def listed(self) -> tuple[list[HeldShard], list[str]]:
        """Return what all agents hold, and what is wrong with those that do not answer. All are asked at once."""
        found: list[HeldShard] = []
        untold: dict[int, Exception] = {}
        for holder in range(len(self._holders)):
            try:
                self._ask(holder, ShardRequest())
            except CheckpointError as error:  # one that refuses our key may have done so by now
                untold[holder] = error
        ends_s = time.monotonic() + ANSWER_S
        for holder in [one for one in range(len(self._holders)) if one not in untold]:
            try:
                found += listed(self._reply(holder, ends_s), holder)
            except CheckpointError as error:
                untold[holder] = error
        return found, [
            f"what the agent of {self._holders[holder].node} holds in memory is not known: {error}"
            for holder, error in sorted(untold.items(), key=lambda one: one[0])
        ]

    def fetch(self, wanted: HeldShard, file: SlotFile) -> Iterator[int]:
        """Fill the file, its head last; yields how much is there, after each answer. Raises CheckpointError."""
        file.receive(wanted.bytes)
        asked = reached = 0
        waiting: list[tuple[int, int]] = []
        while reached < wanted.bytes:
            while asked < wanted.bytes and len(waiting) < _UNDER_WAY:
                at, length = place_in_file(asked, MAX_SHARD_PIECE, wanted.bytes)
                g = wanted.generation
                self._ask(
                    wanted.holder,
                    ShardRequest(shard=wanted.shard, shards=g.shards, slot=wanted.slot, offset=at, bytes=length),
                )
                waiting.append((at, length))
                asked += length
            at, length = waiting.pop(0)
            data = self._reply(wanted.holder, time.monotonic() + ANSWER_S).data
            if len(data) != length:
                raise CheckpointError(f"it sent {len(data)} bytes in place of {length}")
            file.put(data, at)
            reached += length
            yield reached

    def _socket(self, holder: int) -> zmq.Socket[bytes]:
        if holder not in self._sockets:
            named = self._holders[holder]
            socket = self._sockets[holder] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_SHARD_PIECE)
            secure_client(socket, Keys(self._keys.secret, self._keys.public, {0: named.public_key}), 0)
            socket.setsockopt(zmq.IPV6, ":" in named.address)
            socket.connect(f"tcp://{host_and_port(named.address, named.port)}")
        return self._sockets[holder]

    def _ask(self, holder: int, request: ShardRequest) -> None:
        try:
            self._socket(holder).send(request.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again as error:
            raise CheckpointError("nothing can be sent to it") from error

    def _reply(self, holder: int, ends_s: float) -> ShardReply:
        socket = self._socket(holder)
        if not socket.poll(max(0, int(1000 * (ends_s - time.monotonic())))):
            raise CheckpointError(f"it did not answer within {ANSWER_S:g} s")
        try:
            reply = ShardReply.FromString(socket.recv(zmq.NOBLOCK))
        except DecodeError as error:
            raise CheckpointError(f"its answer cannot be read: {error}") from error
        if reply.trouble:
            raise CheckpointError(reply.trouble[:300])
        return reply


def fetch_outside(
    session: Session, memory: MemorySettings, wanted: Resumable, held: Sources, newer_than: tuple[int, int]
) -> list[HeldShard]:
    """Fetch shards of the newest generation that is complete with them; return those that this rank has fetched. held:
    by generation and shard, a rank that holds it. Collective; raises PeerLost."""
    rank, ranks = session.place.rank, session.place.world_size
    told = _told(session, memory) if rank == 0 else b""
    try:  # one launch counts: another controller may have made the other ranks'
        holders, outside = _decoded(told if session.group is None else session.group.gather_bytes(told)[0])
    except CheckpointError as error:
        _passed_over(session, str(error))
        return []
    wants = missing(held, outside, newer_than)
    if not wants or session.keys is None:
        return []
    if rank == 0:
        nodes = ", ".join(sorted({holders[one.holder].node for one in wants}))
        what = f"{len(wants)} shards of step {wants[0].generation.step}"
        session.notice(LEVEL_INFO, f"{what} come from the memory of {nodes}, which has no part in this run")
    found: list[HeldShard] = []
    with OutsideAgents(holders, keys_of(session.keys, rank)) as agents:
        steps = _steps(session, memory, wanted, agents, wants[rank::ranks], found=found)
        while _goes_on(session, steps):
            pass
    return found


def missing(
    held: Mapping[Generation, Mapping[int, int]], outside: Sequence[HeldShard], newer_than: tuple[int, int]
) -> list[HeldShard]:
    """Return the shards that the run lacks of the newest generation that is complete with them, each once. Empty unless
    that generation is newer than `newer_than`, (run, step), and than any that is complete without them. held: holders
    by shard. Pure."""
    there = {g: dict.fromkeys(by_shard) for g, by_shard in held.items()}
    whole = [g for g, by_shard in there.items() if len(by_shard) == g.shards]
    for one in outside:
        there.setdefault(one.generation, {})[one.shard] = None
    newest = max((g for g, by_shard in there.items() if len(by_shard) == g.shards), default=None)
    if newest is None or (newest.run, newest.step) <= newer_than or (whole and newest <= max(whole)):
        return []
    lacks = {one.shard: one for one in outside if one.generation == newest and one.shard not in held.get(newest, {})}
    return [lacks[shard] for shard in sorted(lacks)]


def _told(session: Session, memory: MemorySettings) -> bytes:
    """List for all ranks the agents that the launch names, each with what it holds."""
    if not memory.outside or session.keys is None:
        return b""
    with OutsideAgents(memory.outside, keys_of(session.keys, session.place.rank)) as agents:
        found, troubles = agents.listed()
    for text in troubles:
        session.notice(LEVEL_WARNING, text)
    rows = [
        (agent.SerializeToString().hex(), encode(one for one in found if one.holder == holder).hex())
        for holder, agent in enumerate(memory.outside)
    ]
    return json.dumps(rows).encode()


def _decoded(raw: bytes) -> tuple[list[ShardHolder], list[HeldShard]]:
    """Decode the list that rank 0 sent. Raises CheckpointError."""
    try:
        rows = [(bytes.fromhex(agent), bytes.fromhex(held)) for agent, held in json.loads(raw or b"[]")]
        agents = [ShardHolder.FromString(agent) for agent, _ in rows]
    except (ValueError, TypeError, RecursionError, DecodeError) as error:
        raise CheckpointError(f"{len(raw)} bytes of shards elsewhere cannot be read: {error}") from error
    return agents, [one for holder, (_, held) in enumerate(rows) for one in decode(held, holder)]


def _goes_on(session: Session, steps: Iterator[None]) -> bool:
    """A round of fetching; whether a rank has more to fetch. Raises PeerLost."""
    ends_s, left = time.monotonic() + _ROUND_S, False
    for _ in steps:
        if time.monotonic() > ends_s:
            left = True
            break
    return left if session.group is None else any(more for (more,) in session.group.gather_rows([left]))


def _steps(
    session: Session, memory: MemorySettings, wanted: Resumable, agents: OutsideAgents, wants: Sequence[HeldShard],
    *, found: list[HeldShard],
) -> Iterator[None]:  # fmt: skip
    """Fetch them one after the other, into `found` what is sound."""
    taken = 0
    for one in wants:
        taken += one.bytes
        path = None
        try:
            path = _path(memory, one, taken)
            file = SlotFile(path)
            try:
                for _ in agents.fetch(one, file):
                    yield
            finally:
                file.close()
            shard = shard_file.parse(shard_file.sealed_part(shard_file.content_of(path)))
            wanted.check(shard.header)
            if (Generation.of(shard), shard.tail.shard) != (one.generation, one.shard):
                raise CheckpointError("it is another one than was named")
            found.append(replace(one, slot=place_of(path)[2]))
        except CheckpointError as error:
            _passed_over(session, f"shard {one.shard} of step {one.generation.step}, elsewhere: {error}")
            if path is not None:
                path.unlink(missing_ok=True)


def _path(memory: MemorySettings, one: HeldShard, taken: int) -> Path:
    """Return where the shard is to lie here: over the older of the two slots. Raises CheckpointError."""
    in_memory = memory.folder is not None and taken <= memory.room_bytes
    if not in_memory and (memory.disk_folder is None or taken > memory.disk_room_bytes):
        raise CheckpointError(f"there is no room for {naturalsize(taken)}")
    slots = memory.folders.slots(one.shard, one.generation.shards, on_disk=not in_memory)
    return min(slots, key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)


def _passed_over(session: Session, why: str) -> None:
    session.notice(LEVEL_WARNING, f"rank {session.place.rank} skips a checkpoint in memory: {why}")
