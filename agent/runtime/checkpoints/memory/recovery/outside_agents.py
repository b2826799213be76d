"""Asks agents of other machines for the shards that they hold; `agent/supervisor/shard_server.py` answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq
from google.protobuf.message import DecodeError

from atoll.agent.runtime.checkpoints.disk.shard_folders import ALL_SLOTS, MAX_FILES
from atoll.agent.runtime.checkpoints.memory.replication.chunk import place_of
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation
from atoll.agent.runtime.transport.keys import Keys, secure_client
from atoll.errors import CheckpointError
from atoll.host.ports import host_and_port
from atoll.network.message_limits import MAX_SHARD_PIECE
from atoll.v1.agents_pb2 import ShardHolder
from atoll.v1.worker_pb2 import ShardReply, ShardRequest

ANSWER_S: Final = 5.0
"""An agent that says nothing for so long does not serve."""
_UNDER_WAY: Final = 8  # pieces


@dataclass(frozen=True, slots=True)
class OutsideShard:
    """Shard of a generation at an agent. agent: its number among those that the launch names."""

    holder: int
    generation: Generation
    shard: int
    slot: int
    bytes: int

    def to_json(self) -> list[Any]:
        g = self.generation
        return [self.holder, g.run, g.step, g.shards, g.layout, self.shard, self.slot, self.bytes]

    @staticmethod
    def of(row: Sequence[Any]) -> OutsideShard:
        """Raises ValueError, TypeError."""
        holder, run, step, shards, layout, shard, slot, size = row
        numbers = (holder, run, step, shards, shard, slot, size)
        if not all(type(one) is int and 0 <= one < 2**63 for one in numbers) or not isinstance(layout, str):
            raise ValueError(f"{row!r:.200} is no shard")
        if not shard < shards or slot >= ALL_SLOTS:
            raise ValueError(f"{row!r:.200} is no shard")
        return OutsideShard(holder, Generation(run, step, shards, layout), shard, slot, size)


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

    def listed(self) -> tuple[list[OutsideShard], list[str]]:
        """Return what all agents hold, and what is wrong with those that do not answer. All are asked at once."""
        found: list[OutsideShard] = []
        untold: dict[int, Exception] = {}
        for holder in range(len(self._holders)):
            try:
                self._ask(holder, ShardRequest())
            except CheckpointError as error:  # one that refuses our key may have done so by now
                untold[holder] = error
        ends_s = time.monotonic() + ANSWER_S
        for holder in [one for one in range(len(self._holders)) if one not in untold]:
            try:
                reply = self._reply(holder, ends_s)
                rows = [[holder, h.run, h.step, h.shards, h.layout, h.shard, h.slot, h.bytes] for h in reply.held]
                found += [OutsideShard.of(row) for row in rows[:MAX_FILES]]
            except (CheckpointError, ValueError) as error:
                untold[holder] = error
        return found, [
            f"what the agent of {self._holders[holder].node} holds in memory is not known: {error}"
            for holder, error in sorted(untold.items(), key=lambda one: one[0])
        ]

    def fetch(self, wanted: OutsideShard, file: SlotFile) -> Iterator[int]:
        """Fill the file, its head last; yields how much is there, after each answer. Raises CheckpointError."""
        file.receive(wanted.bytes)
        asked = reached = 0
        waiting: list[tuple[int, int]] = []
        while reached < wanted.bytes:
            while asked < wanted.bytes and len(waiting) < _UNDER_WAY:
                at, length = place_of(asked, MAX_SHARD_PIECE, wanted.bytes)
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
