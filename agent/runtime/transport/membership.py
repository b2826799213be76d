"""Finds the island and the node of each rank, the run's data keys, and the address of this worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.runtime.transport.process_groups import own_address_towards
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.errors import BadInput

ISLAND_VARIABLE: Final = "ATOLL_ISLAND"


def members(session: Session) -> Sequence[Member]:
    """Every rank's island and node. Under an agent as the controller says; by hand each network namespace of each
    host is a node, and an island of its own unless ATOLL_ISLAND names one. Collective there; raises PeerLost."""
    launch = session.link.welcome.launch if session.link is not None else None
    if launch is not None and launch.members:
        found = {member.rank: (member.island or member.node, member.node) for member in launch.members}
    else:
        node = f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
        mine = (os.environ.get(ISLAND_VARIABLE, node), node)
        found = dict(enumerate(_gathered(session, mine)))
    if sorted(found) != list(range(session.place.world_size)):
        raise BadInput(f"the launch names ranks {sorted(found)[:8]} of a run of {session.place.world_size}; each once")
    by_rank = [found[rank] for rank in range(len(found))]
    return members_of([node for _, node in by_rank], [island for island, _ in by_rank])


def islands(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each island, ascending."""
    found: list[list[int]] = [[] for _ in range(1 + max(member.island for member in members))]
    for member in members:
        found[member.island].append(member.rank)
    return found


def data_keys(session: Session) -> Keys:
    """The run's keys: the controller's where it handed some out; by hand each rank makes its own, exchanged by all.

    Keys made by hand keep others from reading along; they cannot keep out who takes part in the rendezvous."""
    assert session.group is not None
    launch = session.link.welcome.launch if session.link is not None else None
    if launch is not None and launch.HasField("keys"):
        public = dict(enumerate(launch.keys.public))
        return Keys(secret=launch.keys.secret, public=public[session.place.rank], of=public)
    secret, own = generate()
    return Keys(secret=secret, public=own, of=dict(enumerate(session.group.gather_bytes(own))))


def host(session: Session) -> str:
    """The address at which the other workers reach this one."""
    return own_address_towards(session.place.master_address) or "127.0.0.1"


def _gathered(session: Session, mine: tuple[str, str]) -> list[tuple[str, str]]:
    if session.group is None:
        return [mine]
    gathered = [one.decode(errors="replace") for one in session.group.gather_bytes("\0".join(mine).encode())]
    return [(island, node) for island, _, node in (one.partition("\0") for one in gathered)]
