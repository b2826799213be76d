"""Finds the island and the node of each rank, the run's data keys, and the address of this worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.keys import Keys, generate, keys_of
from atoll.agent.runtime.transport.meeting import own_address_towards
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.host.routes import interface_of

ISLAND_VARIABLE: Final = "ATOLL_ISLAND"


def members(session: Session) -> Sequence[Member]:
    """Every rank's island and node. Under an agent as the controller says; by hand each network namespace of each
    host is a node, and an island of its own unless ATOLL_ISLAND names one. Collective there; raises PeerLost."""
    if session.members:
        by_rank = [(member.island or member.node, member.node) for member in session.members]
    else:
        node = f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
        mine = (os.environ.get(ISLAND_VARIABLE, node), node)
        by_rank = _gathered(session, mine)
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
    if session.keys is not None:
        return keys_of(session.keys, session.place.rank)
    secret, own = generate()
    return Keys(secret=secret, public=own, of=dict(enumerate(session.group.gather_bytes(own))))


def host(session: Session) -> str:
    """The address at which the other workers reach this one. What its agent said at its start may be gone since."""
    told = session.link.welcome.address if session.link is not None else ""
    if told and interface_of(told) is not None:
        return told
    return own_address_towards(session.place.master_address) or "127.0.0.1"


def _gathered(session: Session, mine: tuple[str, str]) -> list[tuple[str, str]]:
    if session.group is None:
        return [mine]
    gathered = [one.decode(errors="replace") for one in session.group.gather_bytes("\0".join(mine).encode())]
    return [(island, node) for island, _, node in (one.partition("\0") for one in gathered)]
