"""Connects the replica senders of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import zmq

from atoll.agent.runtime.channel.membership import data_keys, host
from atoll.agent.runtime.checkpoints.memory.replication.replica_placement import ReplicaPlacement
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import CopyFiles
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.keys import KEY_BYTES
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.errors import AtollError
from atoll.v1.common_pb2 import LEVEL_WARNING

_MAX_HELLO_BYTES: Final = 256


def connected_sender(
    session: Session,
    placement: ReplicaPlacement,
    incoming: Mapping[int, CopyFiles],
    limit_bytes: int,
    links_in_use: Callable[[], LinksInUse | None],
) -> tuple[ReplicaSender | None, str]:
    """This rank's sender, connected; or why there is none, on every rank or, where another sent a key that is none,
    here. Collective; raises PeerLost."""
    assert session.group is not None
    sender = ReplicaSender(
        run=session.incarnation,
        rank=session.place.rank,
        keys=data_keys(session),
        incoming=incoming,
        limit_bytes=limit_bytes,
        notify=lambda text: session.notice(LEVEL_WARNING, text),
        links_in_use=links_in_use,
    )
    try:
        hello, why = sender.bind(host(session)), ""
    except zmq.ZMQError as error:
        hello, why = b"", str(error)
    hellos = [one[:_MAX_HELLO_BYTES] for one in session.group.gather_bytes(hello)]
    silent = [rank for rank, one in enumerate(hellos) if not one[KEY_BYTES:].startswith(b"tcp://")]
    if silent:
        sender.close()
        return None, f"rank {silent[0]} cannot listen for copies of others' state {why}".rstrip()
    links = session.links
    if links is not None:
        for holder in placement.holders:
            key, endpoint = hellos[holder][:KEY_BYTES], hellos[holder][KEY_BYTES:].decode(errors="replace")
            hellos[holder] = key + links.endpoint(holder, endpoint).encode()
    try:
        sender.start(hellos, placement.holders)
    except AtollError as error:
        sender.close()
        return None, str(error)
    return sender, ""
