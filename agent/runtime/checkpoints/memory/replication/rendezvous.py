"""Tells one rank whose copies it holds and who holds its own, and connects the replica senders of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zmq

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.memory.replication.replica_placement import holders, on_node, owners
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import CopyFiles
from atoll.agent.runtime.transport.keys import KEY_BYTES
from atoll.agent.runtime.transport.topology import data_keys, host
from atoll.errors import AtollError
from atoll.v1.common_pb2 import LEVEL_WARNING

_MAX_TOLD: Final = 256  # bytes


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """The placement as one rank sees it."""

    any: bool  # of the run's shards is copied
    holders: tuple[int, ...]  # of this rank's copies
    owners: tuple[int, ...]  # whose copies this rank holds
    here: frozenset[int]  # shards that lie on this node

    @staticmethod
    def of(session: Session) -> ReplicaPlacement:
        memory, place = session.memory, session.place
        if memory is None or len(memory.nodes) != place.world_size:
            return ReplicaPlacement(False, (), (), frozenset(range(place.world_size)))
        held_by = holders(memory.nodes, memory.kept_by)
        return ReplicaPlacement(
            any=any(held_by),
            holders=held_by[place.rank],
            owners=owners(held_by, place.rank),
            here=on_node(memory.nodes, held_by, memory.nodes[place.rank]),
        )


def met(
    session: Session, placed: ReplicaPlacement, incoming: Mapping[int, CopyFiles], limit_bytes: int
) -> tuple[ReplicaSender | None, str]:
    """This rank's sender, connected; or why there is none, on every rank or, where another told a key that is none,
    here. Collective; raises PeerLost."""
    assert session.group is not None
    sender = ReplicaSender(
        run=session.run,
        rank=session.place.rank,
        keys=data_keys(session),
        incoming=incoming,
        limit_bytes=limit_bytes,
        tell=lambda text: session.notice(LEVEL_WARNING, text),
    )
    try:
        told, why = sender.bind(host(session)), ""
    except zmq.ZMQError as error:
        told, why = b"", str(error)
    said = [one[:_MAX_TOLD] for one in session.group.gather_bytes(told)]
    silent = [rank for rank, one in enumerate(said) if not one[KEY_BYTES:].startswith(b"tcp://")]
    if silent:
        sender.close()
        return None, f"rank {silent[0]} cannot listen for copies of others' state {why}".rstrip()
    try:
        sender.start(said, placed.holders)
    except AtollError as error:
        sender.close()
        return None, str(error)
    return sender, ""
